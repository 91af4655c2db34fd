"""The paper's first experiment: a small Gaussian RBM on the checkerboard, by every method (its figures 2 and 3)."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ..baselines import NCE, VNCE, ContrastiveDivergence, MaximumLikelihood, ScoreMatching
from ..bilevel import BiSM
from ..data import checkerboard
from ..divergence import KL
from ..likelihood import Grid, log_likelihood
from ..method import Method
from ..models import GaussianRBM
from ..objective import DSM, SSM
from ..posterior import BernoulliPosterior
from ..response import Unroll
from ..training import Run, fit
from .claim import claim

H_DIM, SIGMA = 4, 0.05
CEILING = math.log(2)  # the density is 2 on half of the unit square
METHODS: dict[str, Method] = {
    "PCD-1": ContrastiveDivergence(1, persistent=True),
    "CD-1": ContrastiveDivergence(1),
    "CD-5": ContrastiveDivergence(5),
    "SSM": ScoreMatching(SSM()),
    "BiSSM": BiSM(SSM()),
    "BiSSM-5": BiSM(SSM(), KL(exact=False), Unroll(5)),  # as the paper ran it: sampled h, N = K = 5
    "DSM": ScoreMatching(DSM(SIGMA)),
    "BiDSM": BiSM(DSM(SIGMA)),
    "BiDSM-5": BiSM(DSM(SIGMA), KL(exact=False), Unroll(5)),
    "NCE": NCE(),
    "VNCE": VNCE(),
    "exact ML": MaximumLikelihood(),
}
GRID = Grid((-0.25, -0.25), (1.25, 1.25), 150)


@dataclass
class Settings:
    steps: int = 100_000  # as the paper
    runs: int = 10
    batch_size: int = 100
    seed: int = 0
    methods: Sequence[str] = tuple(METHODS)


def train(name: str, settings: Settings, folder: Path, progress: bool = True) -> Run:
    """All runs of one method at once; a finished one is read back, an interrupted one goes on."""
    train_set, test_set = checkerboard(60_000, seed=0), jnp.asarray(checkerboard(10_000, seed=1))
    return fit(
        METHODS[name],
        lambda key: GaussianRBM(2, H_DIM, key=key),
        lambda key: BernoulliPosterior.linear(2, H_DIM, key=key),
        data=train_set,
        steps=settings.steps,
        batch_size=settings.batch_size,
        key=settings.seed,
        seeds=settings.runs,
        evaluate={"test LL": lambda model, posterior: log_likelihood(model, test_set).mean()},
        evaluate_every=max(settings.steps // 50, 1),
        folder=folder / name.replace(" ", "-").lower(),
        resume=True,
        keep=1,
        progress=f"{name:9s}" if progress else False,
    )


def density(run: Run, seed: int = 0) -> np.ndarray:
    model = run[seed].model
    grid = jax.vmap(lambda v: jnp.exp(log_likelihood(model, v[None])[0]))
    return np.asarray(jax.jit(grid)(GRID.points)).reshape(GRID.cells, GRID.cells)


def data_density() -> np.ndarray:
    x, y = np.asarray(GRID.points).T
    inside = ((x > 0) & (x < 0.5) & (y > 0) & (y < 0.5)) | ((x > 0.5) & (x < 1) & (y > 0.5) & (y < 1))
    return 2.0 * inside.reshape(GRID.cells, GRID.cells)


def summary(runs: dict[str, Run]) -> dict[str, dict[str, float]]:
    """Final test LL over the runs, its distance from exact ML, and the time an iteration of one run takes."""
    table = {}
    for name, run in runs.items():
        final = run.curve("test LL")[1][-1]
        first, last = run.history[0], run.history[-1]
        # The first record is of one iteration and the compilation.
        seconds = (last["seconds"] - first["seconds"]) / max(last["step"] - first["step"], 1) / len(final)
        table[name] = {"mean": final.mean(), "sd": final.std(ddof=min(1, len(final) - 1)), "ms": 1e3 * seconds}
        table[name] |= {"best": final.max(), "worst": final.min()}
    return table


def still_rising(run: Run) -> float:
    """How much the mean test LL rose over the last fifth of the iterations."""
    steps, values = run.curve("test LL")
    mean = values.mean(1)
    return float(mean[-1] - mean[np.searchsorted(steps, 0.8 * steps[-1])])


def reproduce(folder: Path, settings: Settings, progress: bool = True) -> Path:
    """Train what is missing, and write the report. Its path."""
    from ..report import Page, curves, densities

    folder = Path(folder)
    unknown = set(settings.methods) - set(METHODS)
    if unknown:
        raise ValueError(f"checkerboard: unknown method {sorted(unknown)[0]!r}; choose from {', '.join(METHODS)}.")
    claim(folder, "checkerboard", settings, free=("methods",))
    runs = {name: train(name, settings, folder, progress) for name in settings.methods}
    table = summary(runs)
    (folder / "results.json").write_text(json.dumps(table, indent=2) + "\n")

    spread = "mean ± standard deviation" if settings.runs > 1 else "one run"
    page = Page(
        "Checkerboard",
        f"A Gaussian RBM with two visible and {H_DIM} hidden units learns a two-square checkerboard by twelve methods "
        f"from the same starts: {settings.steps:,} iterations of {settings.batch_size} points, {settings.runs} run(s) "
        "a method. No density can have a mean log-likelihood above log 2 = 0.693; exact maximum likelihood shows "
        "where the likelihood's own gradient leads from those starts.",
    )
    page.heading("Learned densities")
    panels = {"data": data_density()} | {name: density(run) for name, run in runs.items()}
    low, high = GRID.low, GRID.high
    extent = (low[0], high[0], low[1], high[1])
    page.figure("densities", lambda: densities(panels, extent, 3.0), "The data's density and what each method learned.")
    page.heading("Test log-likelihood")
    lines = {name: run.curve("test LL") for name, run in runs.items() if name != "exact ML"}
    levels = {"log 2, the ceiling of any model": CEILING}
    if "exact ML" in runs:
        far = ", not yet converged" if still_rising(runs["exact ML"]) > 0.01 else ""
        levels[f"exact maximum likelihood{far}"] = table["exact ML"]["mean"]
    page.figure(
        "log-likelihood",
        lambda: curves(
            lines,
            y="test log-likelihood (nats)",
            levels=levels,
            dashed=[name for name in lines if not name.startswith("Bi")],
            limits=(-1.0, 0.8),
        ),
        f"By exact enumeration of the hidden states, {spread}. Solid: bi-level score matching.",
    )
    ceiling = table.get("exact ML", {}).get("mean", math.nan)
    page.table(
        ["method", "test LL", "sd", "best", "worst", "below exact ML", "ms an iteration"],
        [
            [name, *(f"{x:.3f}" for x in (r["mean"], r["sd"], r["best"], r["worst"], ceiling - r["mean"], r["ms"]))]
            for name, r in table.items()
        ],
        f"After {settings.steps:,} iterations, {settings.runs} run(s). Time: of one run, when a method's runs train "
        f"together on {jax.devices()[0].device_kind}, evaluation included.",
    )
    rising = {name: rise for name, run in runs.items() if (rise := still_rising(run)) > 0.01}
    if rising:
        told = ", ".join(f"{name} by {rise:.2f}" for name, rise in rising.items())
        page.text(f"Not converged: over the last fifth of the iterations the test LL still rose, {told} nats.")
    page.text(
        "The paper reports this experiment as figures only, after 100,000 iterations and over 10 runs: the methods end "
        "alike, BiSSM converges as fast as SSM, BiDSM somewhat slower than DSM.",
        soft=True,
    )
    return page.write(folder)
