"""The paper's second experiment: Gaussian RBMs of the Frey faces (its tables 1 and 3, figures 1, 8, 9 and 10)."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ais import ais
from ..baselines import VNCE, ContrastiveDivergence, ScoreMatching
from ..bilevel import BiSM
from ..data import freyface
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
    seeds: int = 5
    h_dim: int = 400
    chains: int = 2000
    temperatures: int = 2000
    seed: int = 0
    parts: Sequence[str] = field(default=PARTS)

    @classmethod
    def quick(cls) -> "Settings":
        return cls(steps=3000, seeds=1, h_dim=100, chains=200, temperatures=500, parts=("table", "bias"))

    def __post_init__(self):
        if unknown := set(self.parts) - set(PARTS):
            raise ValueError(f"freyface: unknown part {sorted(unknown)[0]!r}; choose from {', '.join(PARTS)}.")


def split() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """1,400 frames to train on, the next 300 to validate, the last 265 to test."""
    images = freyface()
    return images[:1400], images[1400:1700], images[1700:]


def papers(unroll: int, lower_steps: int = 5) -> Method:
    """BiDSM as the paper ran it: one relaxed sample of h, differentiable Adam."""
    response = Unroll(unroll) if unroll else FirstOrder()
    return BiSM(DSM(SIGMA), KL(exact=False), response, lower_steps, optimizer=adam(RATE))


def methods() -> dict[str, Method]:
    found: dict[str, Method] = {"DSM": ScoreMatching(DSM(SIGMA), optimizer=adam(RATE))}
    found |= {f"BiDSM N={n}": papers(n) for n in (0, 1, 5, 10)}
    return found | {"BiDSM (default)": BiSM(DSM(SIGMA), optimizer=adam(RATE))}


def train(name: str, method: Method, h_dim: int, settings: Settings, folder: Path, progress: bool) -> Run:
    training, validation, test = (jnp.asarray(x) for x in split())
    return fit(
        method,
        lambda key: GaussianRBM(training.shape[1], h_dim, key=key),
        lambda key: BernoulliPosterior.linear(training.shape[1], h_dim, key=key),
        data=training,
        validation=validation,
        steps=settings.steps,
        batch_size=BATCH,
        key=settings.seed,
        seeds=settings.seeds,
        evaluate={"test Fisher": lambda model, q: jax.vmap(lambda v: fisher(model, v))(test).mean()},
        folder=folder / name,
        resume=True,
        keep=1,
        progress=f"{name:24s}" if progress else False,
    )


def measure(run: Run, settings: Settings, likelihood: bool = True) -> dict[str, list[float]]:
    """Fisher number and AIS log-likelihood of each seed, at the best validation and at the last iterate."""
    assert run.folder is not None
    path = run.folder / f"measured-{run.step}.json"
    if path.exists():
        return json.loads(path.read_text())
    test = jnp.asarray(split()[2])
    found: dict[str, list[float]] = {}
    for seed in range(settings.seeds):
        for at, model in {"best": run[seed].best.best, "last": run[seed].model}.items():
            found.setdefault(f"Fisher {at}", []).append(float(jax.vmap(lambda v, m=model: fisher(m, v))(test).mean()))
            if likelihood:
                key = jax.random.key(seed)
                z = ais(model, key, chains=settings.chains, temperatures=settings.temperatures)
                value = float(-jax.vmap(model.free_energy)(test).mean()) - z.log_z
                found.setdefault(f"LL {at}", []).append(value)
                found.setdefault(f"effective {at}", []).append(z.effective)
                found.setdefault(f"interval {at}", []).append(z.high - z.low)
    path.write_text(json.dumps(found, indent=2) + "\n")
    return found


def faces(run: Run, count: int = 36) -> np.ndarray:
    """Means of v after 1,000 Gibbs steps from noise, of the first seed."""
    start = jax.random.uniform(jax.random.key(1), (count, run[0].model.b.size))
    return np.asarray(chain(Gibbs(run[0].best.best), jax.random.key(2), start, 1000)[1]["mean_v"])


def bias(run: Run) -> Diagnosis:
    """Figure 1: on one minibatch, for the model that the run ended with."""
    method = run.method
    assert isinstance(method, BiSM)
    batch = jnp.asarray(split()[0][:BATCH])
    return diagnose(
        method, run[0].state, batch, jax.random.key(3), unrolls=(0, 1, 2, 5, 10, 20), lower_steps=(0, 5, 20)
    )


def times(h_dim: int) -> dict[str, float]:
    """Milliseconds an iteration on the machine at hand."""
    timed: dict[str, Method] = {"CD-5": ContrastiveDivergence(5), "SSM": ScoreMatching(SSM()), "VNCE": VNCE()}
    timed |= {"DSM": methods()["DSM"], "BiDSM (default)": methods()["BiDSM (default)"]}
    timed |= {f"BiDSM N={n} K=5": papers(n) for n in (0, 1, 5, 10)}
    timed |= {f"BiDSM N=5 K={k}": papers(5, k) for k in (1, 2, 10)}
    return {name: milliseconds(method, 560, h_dim, 1400, repeats=3, seconds=0.5) for name, method in timed.items()}


def reproduce(folder: Path, settings: Settings, progress: bool = True) -> Path:
    """Train and measure what is missing, and write the report. Its path."""
    from ..report import Page, curves, mosaics

    folder = Path(folder)
    claim(folder, "freyface", settings, free=("parts",))
    page = Page(
        "Frey faces",
        f"Gaussian RBMs of 560 visible and {settings.h_dim} hidden units, {settings.steps:,} iterations of {BATCH} of "
        f"1,400 frames, {settings.seeds} seed(s), on {jax.devices()[0].device_kind}. Log-likelihood by AIS with "
        f"{settings.chains} chains and {settings.temperatures} temperatures, Fisher exactly, on the 265 test frames.",
    )
    runs: dict[str, Run] = {}
    if "table" in settings.parts:
        runs = {
            name: train(name, method, settings.h_dim, settings, folder, progress) for name, method in methods().items()
        }
        measured = {name: measure(run, settings) for name, run in runs.items()}
        (folder / "results.json").write_text(json.dumps(measured, indent=2) + "\n")
        page.heading("Test log-likelihood and Fisher divergence (the paper's table 1)")
        header = ["method", "LL", "paper", "Fisher", "paper", "LL, last", "Fisher, last", "AIS chains worth", "ms"]
        page.table(
            header, [_row(name, measured[name], runs[name]) for name in runs], "At the best validation, and last."
        )
        page.figure(
            "fisher",
            lambda: curves(
                {n: r.curve("test Fisher") for n, r in runs.items()}, y="test Fisher", limits=(-5950, -5000)
            ),
            "Fisher number of the test frames while training.",
        )
        page.figure(
            "samples",
            lambda: mosaics({n: faces(r) for n, r in runs.items()}, (28, 20)),
            "Means of v after 1,000 Gibbs steps.",
        )
    if "K" in settings.parts:
        rows = []
        for k, papers_value in PAPER_K.items():
            run = train(f"N=5 K={k}", papers(5, k), settings.h_dim, settings, folder, progress)
            rows.append([f"K={k}", _spread(measure(run, settings, False)["Fisher best"]), papers_value])
        page.heading("Lower steps K, at N=5")
        page.table(["", "Fisher", "paper"], rows)
    if "h" in settings.parts:
        rows = []
        for name in ("DSM", "BiDSM N=10", "BiDSM (default)"):
            for h_dim in (50, 100, 200, 400, 500):
                run = train(f"{name} h={h_dim}", methods()[name], h_dim, settings, folder, progress)
                value = _spread(measure(run, settings, False)["Fisher best"])
                rows.append([name, h_dim, value, PAPER_H.get(name, {}).get(h_dim, math.nan)])
        page.heading("Hidden units")
        page.table(["method", "h", "Fisher", "paper"], rows)
    if "time" in settings.parts:
        page.heading("Time of 100 iterations")
        rows = [[n, f"{t / 10:.3f}", PAPER_TIME.get(n, math.nan)] for n, t in times(settings.h_dim).items()]
        page.table(["method", "seconds here", "paper, GTX 1080 Ti"], rows)
    if "bias" in settings.parts:
        run = runs.get("BiDSM (default)") or train(
            "BiDSM (default)", methods()["BiDSM (default)"], settings.h_dim, settings, folder, progress
        )
        diagnosis_section(page, bias(run))
    return page.write(folder)


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
    far = ", ".join(f"{d:.3g} at K={k}" for k, d in found.distance.items())
    page.text(f"‖φ⁰ − φ*‖: {far}. {found.verdict()}")


def _row(name, measured, run):
    paper = PAPER.get(name, (math.nan, math.nan))
    first, last = run.history[0], run.history[-1]
    per_step = (last["seconds"] - first["seconds"]) / max(last["step"] - first["step"], 1) / (run.seeds or 1)
    return [
        name,
        _spread(measured["LL best"]),
        paper[0],
        _spread(measured["Fisher best"]),
        f"{paper[1]:.1f}",
        _spread(measured["LL last"]),
        _spread(measured["Fisher last"]),
        f"{np.mean(measured['effective best']):.0f}",
        f"{1e3 * per_step:.2f}",
    ]


def _spread(values):
    mean = np.mean(values)
    return f"{mean:.2f} ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else f"{mean:.2f}"
