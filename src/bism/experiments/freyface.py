"""The paper's second experiment: Gaussian RBMs of the Frey faces (its tables 1 and 3, figures 1, 8, 9 and 10)."""

import json
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..ais import ais
from ..baselines import VNCE, ContrastiveDivergence, ScoreMatching
from ..bilevel import BiSM
from ..data import freyface, load_file
from ..diagnosis import Diagnosis, diagnose
from ..divergence import KL
from ..energy import fisher
from ..method import Method
from ..models import GaussianRBM
from ..objective import DSM, SSM
from ..optimizer import adam
from ..posterior import BernoulliPosterior
from ..response import FirstOrder, Unroll
from ..sampling import Gibbs, chain
from ..training import Run, fit
from .claim import claim
from .timing import milliseconds

SIGMA, RATE, BATCH = 0.3, 2e-4, 100
OURS = "BiDSM (default)"
PARTS = ("table", "K", "h", "time", "bias")
# The paper's figures: log-likelihood and Fisher divergence, seconds for 100 iterations on a GTX 1080 Ti.
PAPER = {
    "DSM": (129.23, -5885.09),
    "BiDSM N=0": (107.59, -5474.52),
    "BiDSM N=1": (110.65, -5516.07),
    "BiDSM N=5": (124.00, -5780.18),
    "BiDSM N=10": (125.72, -5800.17),
}
PAPER_K = {0: -3775.31, 1: -5684.97, 5: -5780.18, 10: -5795.52}
PAPER_H = {
    "DSM": {50: -5703.89, 100: -5728.65, 200: -5798.64, 400: -5885.09, 500: -5895.96},
    "BiDSM N=10": {50: -5609.25, 100: -5670.93, 200: -5736.73, 400: -5800.17, 500: -5814.74},
}
PAPER_TIME = {"CD-5": 1.59, "SSM": 1.51, "DSM": 1.33, "VNCE": 4.36, "BiDSM N=0 K=5": 4.35, "BiDSM N=1 K=5": 5.07}
PAPER_TIME |= {"BiDSM N=5 K=5": 8.61, "BiDSM N=10 K=5": 13.78, "BiDSM N=5 K=1": 7.30, "BiDSM N=5 K=2": 7.75}
PAPER_TIME |= {"BiDSM N=5 K=10": 10.82}


@dataclass
class Settings:
    steps: int = 20_000
    seeds: int = 5  # of the runs of table 1
    other_seeds: int = 2  # of all others
    h_dim: int = 400
    chains: int = 2000  # of AIS, and its temperatures: the paper's, and those of the figures to trust
    temperatures: int = 2000
    long: int = 10_000
    seed: int = 0
    data: str = "freyface"
    training: int = 1400
    validation: int = 300
    parts: Sequence[str] = field(default=PARTS)

    @classmethod
    def quick(cls, **settings: Any) -> "Settings":
        small = cls(3000, 1, 1, h_dim=100, chains=200, temperatures=500, long=1000, parts=("table", "bias"))
        return replace(small, **settings)

    def __post_init__(self):
        if unknown := set(self.parts) - set(PARTS):
            raise ValueError(f"freyface: unknown part {sorted(unknown)[0]!r}; choose from {', '.join(PARTS)}.")


class Faces(NamedTuple):
    training: jax.Array
    validation: jax.Array
    test: jax.Array
    shape: tuple[int, int]


def split(settings: Settings = Settings()) -> Faces:
    """The first frames to train on, the next to validate, the others to test: the paper's 1400, 300 and 265."""
    images = freyface() if settings.data == "freyface" else load_file(Path(settings.data))
    if images.ndim != 3 or not np.issubdtype(images.dtype, np.floating) or images.min() < 0 or images.max() > 1:
        raise ValueError(
            f"{settings.data} must be grey images with values in [0, 1], of shape (count, height, width); it is "
            f"{images.dtype} of shape {images.shape}, from {images.min():g} to {images.max():g}."
        )
    rows = jnp.asarray(images.reshape(len(images), -1), jnp.result_type(float))
    ends = settings.training, settings.training + settings.validation
    if min(settings.training, settings.validation) < 1 or ends[1] >= len(rows):
        raise ValueError(
            f"{settings.training} images to train on and {settings.validation} to validate leave none of "
            f"{len(rows)} to test: give smaller --training and --validation."
        )
    return Faces(rows[: ends[0]], rows[ends[0] : ends[1]], rows[ends[1] :], images.shape[1:])


def papers(unroll: int, lower_steps: int = 5) -> Method:
    """BiDSM as the paper ran it: one relaxed sample of h, differentiable Adam."""
    response = Unroll(unroll) if unroll else FirstOrder()
    return BiSM(DSM(SIGMA), KL(exact=False), response, lower_steps, optimizer=adam(RATE))


METHODS: dict[str, Method] = {
    "DSM": ScoreMatching(DSM(SIGMA), optimizer=adam(RATE)),
    **{f"BiDSM N={n}": papers(n) for n in (0, 1, 5, 10)},
    **{f"BiDSM N=5 K={k}": papers(5, k) for k in PAPER_K if k != 5},
    OURS: BiSM(DSM(SIGMA), optimizer=adam(RATE)),
}


def needed(settings: Settings) -> dict[tuple[str, int], int]:
    """The runs of the parts, (method, hidden units), and how many seeds each has."""
    found = {}
    if "h" in settings.parts:
        found |= {(name, h): settings.other_seeds for name in (*PAPER_H, OURS) for h in PAPER_H["DSM"]}
    if "K" in settings.parts:
        found |= {(f"BiDSM N=5 K={k}", settings.h_dim): settings.other_seeds for k in PAPER_K if k != 5}
        found[("BiDSM N=5", settings.h_dim)] = settings.other_seeds
    if "bias" in settings.parts:
        found[(OURS, settings.h_dim)] = settings.other_seeds
    if "table" in settings.parts:
        found |= {(name, settings.h_dim): settings.seeds for name in (*PAPER, OURS)}
    return found


def train(name: str, h_dim: int, seeds: int, settings: Settings, folder: Path, progress: bool) -> Run:
    """All seeds of one method at once; a finished run is read back, an interrupted one goes on."""
    faces = split(settings)
    v_dim = faces.test.shape[1]
    return fit(
        METHODS[name],
        lambda key: GaussianRBM(v_dim, h_dim, key=key),
        lambda key: BernoulliPosterior.linear(v_dim, h_dim, key=key),
        data=faces.training,
        validation=faces.validation,
        steps=settings.steps,
        batch_size=BATCH,
        key=settings.seed,
        seeds=seeds,
        evaluate={"test Fisher": lambda model, q: fisher_number(model, faces.test)},
        folder=folder / f"{name} h={h_dim}",
        resume=True,
        keep=1,
        progress=f"{name:14s} h={h_dim}" if progress else False,
    )


@eqx.filter_jit
def fisher_number(model: GaussianRBM, v: jax.Array) -> jax.Array:
    return jax.vmap(lambda v: fisher(model, v))(v).mean()


def measure(run: Run, settings: Settings) -> dict[str, list[float]]:
    """Of each seed, at the best validation and at the last iterate: the Fisher number and log-likelihoods by AIS."""
    assert run.folder is not None
    path = run.folder / f"measured-{run.step}.json"
    if path.exists():
        return json.loads(path.read_text())
    test = split(settings).test
    found: dict[str, list[float]] = {}

    def note(name, value):
        found.setdefault(name, []).append(float(value))

    for seed in range(run.seeds or 1):
        for at, model in {"best": run[seed].best.best, "last": run[seed].model}.items():
            note(f"Fisher {at}", fisher_number(model, test))
            unnormalised = -jax.vmap(model.free_energy)(test).mean()
            for kind, temperatures in {"paper's AIS": settings.temperatures, "LL": settings.long}.items():
                z = ais(model, jax.random.key(seed), chains=settings.chains, temperatures=temperatures)
                note(f"{kind} {at}", unnormalised - z.log_z)
                note(f"{kind} {at}, chains worth", z.effective)
    path.write_text(json.dumps(found, indent=2) + "\n")
    return found


def gather(settings: Settings, folder: Path, progress: bool) -> dict[tuple[str, int], tuple[Run, dict]]:
    """Every run that is needed, and what was measured of it."""
    wanted = needed(settings)

    def one(item):
        (name, h_dim), seeds = item
        begun = time.perf_counter()
        run = train(name, h_dim, seeds, settings, folder, progress and workers == 1)
        found = measure(run, settings)
        if progress and workers > 1:
            seconds = time.perf_counter() - begun
            print(f"{name} h={h_dim}: LL {np.mean(found['LL best']):.2f}, {seconds:.0f} s", file=sys.stderr, flush=True)
        return item[0], (run, found)

    # On a GPU one run compiles while others train.
    workers = 3 if jax.devices()[0].platform == "gpu" else 1
    if workers == 1:
        return dict(map(one, wanted.items()))
    with ThreadPoolExecutor(workers) as pool:
        return dict(pool.map(one, wanted.items()))


def samples(run: Run, count: int = 36) -> np.ndarray:
    """Means of v after 1,000 Gibbs steps from noise, of the first seed."""
    start = jax.random.uniform(jax.random.key(1), (count, run[0].model.b.size))
    return np.asarray(chain(Gibbs(run[0].best.best), jax.random.key(2), start, 1000)[1]["mean_v"])


def bias(run: Run, settings: Settings) -> Diagnosis:
    """Figure 1: on one minibatch, for the model that the run ended with."""
    method = run.method
    assert isinstance(method, BiSM)
    return diagnose(
        method,
        run[0].state,
        split(settings).training[:BATCH],
        jax.random.key(3),
        theorem=(0, 1, 3, 10, 30, 100, 300, 1000, 3000),
    )


def times(v_dim: int, h_dim: int) -> dict[str, float]:
    """Milliseconds an iteration on the machine at hand."""
    timed: dict[str, Method] = {"CD-5": ContrastiveDivergence(5), "SSM": ScoreMatching(SSM()), "VNCE": VNCE()}
    timed |= {"DSM": METHODS["DSM"], OURS: METHODS[OURS]}
    timed |= {f"BiDSM N={n} K=5": papers(n) for n in (0, 1, 5, 10)}
    timed |= {f"BiDSM N=5 K={k}": papers(5, k) for k in (1, 2, 10)}
    return {name: milliseconds(m, v_dim, h_dim, 1400, repeats=3, seconds=0.3) for name, m in timed.items()}


def reproduce(folder: Path, settings: Settings, progress: bool = True) -> Path:
    """Train and measure what is missing, and write the report. Its path."""
    from ..report import Page

    folder = Path(folder)
    faces = split(settings)
    claim(folder, "freyface", settings, free=("parts",))
    timed = times(faces.test.shape[1], settings.h_dim) if "time" in settings.parts else {}  # before there is other work
    runs = gather(settings, folder, progress)
    page = Page(
        "Frey faces",
        f"Gaussian RBMs of {faces.test.shape[1]} visible and {settings.h_dim} hidden units, {settings.steps:,} "
        f"iterations of {BATCH} of {len(faces.training):,} frames, {settings.seeds} seed(s), on "
        f"{jax.devices()[0].device_kind}. All figures are of the {len(faces.test)} test frames, mean ± deviation over "
        "the seeds, at the least validation loss of ten. The paper's figures stand beside them.",
    )
    if "table" in settings.parts:
        table_section(page, {name: runs[name, settings.h_dim] for name in (*PAPER, OURS)}, settings, faces.shape)
    of = lambda name, h: spread(runs[name, h][1]["Fisher best"])
    if "K" in settings.parts:
        page.heading("Lower steps K, at N=5")
        name = lambda k: "BiDSM N=5" if k == 5 else f"BiDSM N=5 K={k}"
        rows = [[f"K={k}", of(name(k), settings.h_dim), paper] for k, paper in PAPER_K.items()]
        page.table(["", "Fisher", "paper"], rows)
    if "h" in settings.parts:
        page.heading("Hidden units")
        names = (*PAPER_H, OURS)
        rows = [
            [h, *(x for name in names for x in (of(name, h), PAPER_H.get(name, {}).get(h, math.nan)))]
            for h in PAPER_H["DSM"]
        ]
        page.table(["h", *(x for name in names for x in (f"{name}, Fisher", "paper"))], rows)
    if timed:
        page.heading("Time of 100 iterations")
        rows = [[n, f"{t / 10:.3f}", PAPER_TIME.get(n, math.nan)] for n, t in timed.items()]
        page.table(["method", "seconds here", "paper, GTX 1080 Ti"], rows)
    if "bias" in settings.parts:
        diagnosis_section(page, bias(runs[OURS, settings.h_dim][0], settings))
    measured = {f"{name} h={h}": found for (name, h), (_, found) in runs.items()}
    (folder / "results.json").write_text(json.dumps({"measured": measured, "milliseconds": timed}, indent=2) + "\n")
    return page.write(folder)


def table_section(page: Any, runs: dict[str, tuple[Run, dict]], settings: Settings, shape: tuple[int, int]) -> None:
    from ..report import curves, mosaics

    page.heading("Test log-likelihood and Fisher divergence (the paper's table 1)")
    kinds = ("LL best", "Fisher best", "paper's AIS best", "LL last", "Fisher last")
    rows = []
    for name, (_, found) in runs.items():
        ours, paper = [spread(found[kind]) for kind in kinds], PAPER.get(name, (math.nan, math.nan))
        worth = f"{np.mean(found['LL best, chains worth']):.0f}"
        rows.append([name, ours[0], paper[0], ours[1], f"{paper[1]:.2f}", *ours[2:], worth])
    header = ["method", "LL", "paper", "Fisher", "paper", f"LL, {settings.temperatures} temperatures"]
    page.table(
        [*header, "LL, last", "Fisher, last", "chains worth"],
        rows,
        f"LL by AIS, {settings.chains} chains and {settings.long} temperatures, and as the paper's with fewer; 'chains "
        "worth' is how many independent ones they amount to. Fisher is exact. 'Last': after the last iteration.",
    )
    page.figure(
        "fisher",
        lambda: curves(
            {n: r.curve("test Fisher") for n, (r, _) in runs.items()}, y="test Fisher", limits=(-5950, -5000)
        ),
        "Fisher number of the test frames while training.",
    )
    page.figure(
        "samples",
        lambda: mosaics({n: samples(r) for n, (r, _) in runs.items()}, shape),
        "Means of v after 1,000 Gibbs steps from noise.",
    )


def diagnosis_section(page: Any, found: Diagnosis) -> None:
    """What `diagnose` found, as a part of a page."""
    from ..report import curves

    page.heading("Gradient bias (the paper's figure 1)")
    lines = {f"K={k}": found.bias(k) for k in found.distance}
    page.figure(
        "bias", lambda: curves(lines, x="N", y="gradient bias, relative", log=True), "Distance from the gradient at φ*."
    )
    rows = [[c.name, c.lower_steps, f"{c.bias:.3%}", f"{c.milliseconds:.1f}"] for c in found.candidates]
    page.table(["response", "K", "bias", "ms"], rows, "Relative to the norm of the gradient at φ*, on one minibatch.")
    kappa, r_squared = found.rate.fit
    page.figure(
        "theorem-2",
        lambda: curves({"": (found.rate.steps, found.rate.bias)}, x="N", y="gradient bias, relative", log=True),
        "The bias after N plain gradient steps of size 1/λ, λ the largest curvature: Theorem 2's setting.",
    )
    far = ", ".join(f"{d:.3g} at K={k}" for k, d in found.distance.items())
    page.text(
        f"‖φ⁰ − φ*‖: {far}. The straight line through the logarithm of the last figure has κ = {kappa:.5f}, R² = "
        f"{r_squared:.2f}. {found.verdict()}"
    )


def spread(values: Sequence[float]) -> str:
    mean = np.mean(values)
    return f"{mean:.2f} ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else f"{mean:.2f}"
