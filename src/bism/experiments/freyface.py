"""The paper's second experiment: Gaussian RBMs of the Frey faces (its tables 1 and 3, figures 1, 8, 9 and 10)."""

import json
import sys
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..ais import adaptive_schedule, estimate, forward_weights, linear_schedule
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
TABLE = ("DSM", OURS, "BiDSM N=5", "BiDSM N=0", "BiDSM N=10", "BiDSM N=1")  # the order in which they are run
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
    chains: int = 2000  # of AIS, and its temperatures, as the paper's
    temperatures: int = 2000
    long_chains: int = 500  # of the log-likelihoods to trust
    long: int = 10_000
    seed: int = 0
    data: str = "freyface"
    training: int = 1400
    validation: int = 300
    parts: Sequence[str] = PARTS
    methods: Sequence[str] = TABLE  # of table 1

    @classmethod
    def quick(cls, **settings: Any) -> "Settings":
        small = cls(3000, 1, 1, 100, chains=200, temperatures=500, long_chains=200, long=1000, parts=("table", "bias"))
        return replace(small, **settings)

    def __post_init__(self):
        if unknown := set(self.parts) - set(PARTS):
            raise ValueError(f"freyface: unknown part {sorted(unknown)[0]!r}; choose from {', '.join(PARTS)}.")
        if unknown := set(self.methods) - set(TABLE):
            raise ValueError(f"freyface: unknown method {sorted(unknown)[0]!r}; choose from {', '.join(TABLE)}.")


class Faces(NamedTuple):
    training: jax.Array
    validation: jax.Array
    test: jax.Array
    shape: tuple[int, int]


def split(settings: Settings = Settings()) -> Faces:
    """The first frames to train on, the next to validate, the others to test: the paper's 1400, 300 and 265."""
    images = freyface() if settings.data == "freyface" else load_file(Path(settings.data))
    if images.ndim != 3 or not np.issubdtype(images.dtype, np.floating) or not 0 <= images.min() <= images.max() <= 1:
        raise ValueError(
            f"{settings.data} must be grey images of shape (count, height, width) with real values in [0, 1]; it is "
            f"{images.dtype} of shape {images.shape}, from {images.min():g} to {images.max():g}. Divide pixels by 255, "
            "average colours."
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
    """The runs of the parts, (method, hidden units), and how many seeds each has, whatever the parts."""
    names = list(settings.methods) if "table" in settings.parts else []
    names += [OURS] if "bias" in settings.parts else []
    names += [name_of(k) for k in PAPER_K] if "K" in settings.parts else []
    found = dict.fromkeys((name, settings.h_dim) for name in names)
    if "h" in settings.parts:
        found |= dict.fromkeys((name, h) for name in (*PAPER_H, OURS) for h in PAPER_H["DSM"])
    in_table = lambda name, h: name in TABLE and h == settings.h_dim
    return {run: settings.seeds if in_table(*run) else settings.other_seeds for run in found}


def name_of(lower_steps: int) -> str:
    """The run of the table over K."""
    return "BiDSM N=5" if lower_steps == 5 else f"BiDSM N=5 K={lower_steps}"


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


@eqx.filter_jit
def anneal(models: GaussianRBM, keys: jax.Array, schedule: jax.Array, chains: int) -> jax.Array:
    """The weights of AIS of models along a leading axis, all at once."""
    return eqx.filter_vmap(lambda model, key: forward_weights(model, key, schedule, chains))(models, keys)


def measure(run: Run, settings: Settings, likelihood: bool) -> dict[str, list[float]]:
    """Of each seed, at the best validation and at the last iterate: the Fisher number and log-likelihoods by AIS.

    What the run's folder has is read, what is missing is measured and written at once.
    """
    assert run.folder is not None
    path = run.folder / f"measured-{run.step}.json"
    found: dict[str, list[float]] = json.loads(path.read_text()) if path.exists() else {}
    test, models = split(settings).test, {"best": run.best.best, "last": run.model}
    wanted = {}
    if likelihood:
        few, long = settings.long_chains, settings.long
        wanted = {"LL best": (few, long), "LL last": (few, settings.temperatures)}
        wanted["paper's AIS best"] = settings.chains, settings.temperatures
    for kind in ("Fisher best", "Fisher last", *wanted):
        if kind in found:
            continue
        model = models[kind.split()[-1]]
        if kind not in wanted:
            found[kind] = eqx.filter_vmap(lambda model: fisher_number(model, test))(model).tolist()
        else:
            chains, temperatures = wanted[kind]
            schedule_key, key = jax.random.split(jax.random.key(settings.seed))
            keys = jax.random.split(key, run.seeds or 1)
            as_paper = kind.startswith("paper's")
            first = jax.tree.map(lambda x: x[0], model)
            even = linear_schedule(temperatures)
            schedule = even if as_paper else adaptive_schedule(first, schedule_key, temperatures)
            weights = anneal(model, keys, schedule, chains)
            z = [estimate(of_one) for of_one in weights]
            unnormalised = eqx.filter_vmap(lambda model: -jax.vmap(model.free_energy)(test).mean())(model)
            found[kind] = [float(x) - one.log_z for x, one in zip(unnormalised, z, strict=True)]
            found[f"{kind}, 95 %"] = [0.5 * (one.high - one.low) for one in z]
            found[f"{kind}, chains worth"] = [one.effective for one in z]
        path.write_text(json.dumps(found, indent=2) + "\n")
    return found


@dataclass
class Results:
    runs: dict[tuple[str, int], Run]
    measured: dict[tuple[str, int], dict[str, list[float]]]
    diagnosis: Diagnosis | None = None


def gather(settings: Settings, folder: Path, progress: bool) -> Results:
    """Every run that is needed, and what was measured of it."""
    wanted, results = needed(settings), Results({}, {})
    # On a GPU one run compiles while others train.
    workers = 3 if jax.devices()[0].platform == "gpu" else 1

    def one(item):
        (name, h_dim), seeds = item
        begun = time.perf_counter()
        run = train(name, h_dim, seeds, settings, folder, progress and workers == 1)
        trained = time.perf_counter()
        in_table = "table" in settings.parts and name in settings.methods and h_dim == settings.h_dim
        found = measure(run, settings, in_table)
        results.runs[item[0]], results.measured[item[0]] = run, found
        if progress:
            told = {kind: spread(found[kind]) for kind in ("LL best", "Fisher best") if kind in found}
            told |= {"training, s": f"{trained - begun:.0f}", "measuring, s": f"{time.perf_counter() - trained:.0f}"}
            line = ", ".join(f"{kind} {value}" for kind, value in told.items())
            print(f"{name} h={h_dim}: {line}", file=sys.stderr, flush=True)
        if "bias" in settings.parts and item[0] == (OURS, settings.h_dim):
            results.diagnosis = bias(run, settings)

    if workers == 1:
        for item in wanted.items():
            one(item)
    else:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(one, wanted.items()))
    return results


def samples(run: Run, name: str, count: int = 36) -> np.ndarray:
    """Means of v after 1,000 Gibbs steps from noise, of the first seed."""
    start = jax.random.uniform(jax.random.key(1), (count, run[0].model.b.size))
    v = np.asarray(chain(Gibbs(run[0].best.best), jax.random.key(2), start, 1000)[1]["mean_v"])
    if not (np.abs(v - 0.5) < 3).all():
        warnings.warn(
            f"Gibbs chains of {name} left the range of the data, [0, 1], for {v.min():.3g} to {v.max():.3g}: the "
            "training was too short, or its noise too small for these images. Give more steps, or scale the images.",
            stacklevel=2,
        )
    return v


def bias(run: Run, settings: Settings) -> Diagnosis:
    """Figure 1: on one minibatch, for the model that the run ended with."""
    method = run.method
    assert isinstance(method, BiSM)
    return diagnose(method, run[0].state, split(settings).training[:BATCH], jax.random.key(3))


def times(v_dim: int, h_dim: int) -> dict[str, float]:
    """Milliseconds an iteration on the machine at hand."""
    timed: dict[str, Method] = {"CD-5": ContrastiveDivergence(5), "SSM": ScoreMatching(SSM()), "VNCE": VNCE()}
    timed |= {"DSM": METHODS["DSM"], OURS: METHODS[OURS]}
    timed |= {f"BiDSM N={n} K=5": papers(n) for n in (0, 1, 5, 10)}
    timed |= {f"BiDSM N=5 K={k}": papers(5, k) for k in (1, 2, 10)}
    return {name: milliseconds(m, v_dim, h_dim, 1400, repeats=3, seconds=0.3) for name, m in timed.items()}


def reproduce(folder: Path, settings: Settings, progress: bool = True) -> Path:
    """Train and measure what is missing, and write the report. Its path."""
    from .freyface_page import write

    folder = Path(folder)
    faces = split(settings)
    claim(folder, "freyface", settings, free=("parts", "methods"))
    timed = times(faces.test.shape[1], settings.h_dim) if "time" in settings.parts else {}  # before there is other work
    results = gather(settings, folder, progress)
    measured = {f"{name} h={h}": found for (name, h), found in results.measured.items()}
    (folder / "results.json").write_text(json.dumps({"measured": measured, "milliseconds": timed}, indent=2) + "\n")
    return write(folder, settings, faces, results, timed)


def spread(values: Sequence[float]) -> str:
    mean = np.mean(values)
    return f"{mean:.2f} ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else f"{mean:.2f}"
