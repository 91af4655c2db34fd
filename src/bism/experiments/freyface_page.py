"""The report of the Frey faces: every table and figure beside the paper's numbers."""

import math
from pathlib import Path

import jax
import numpy as np

from ..diagnosis import Diagnosis
from ..report import Page, curves, galleries
from .freyface import (
    BATCH,
    OURS,
    PAPER,
    PAPER_H,
    PAPER_K,
    PAPER_TIME,
    Faces,
    Results,
    Settings,
    name_of,
    samples,
    spread,
)


def write(folder: Path, settings: Settings, faces: Faces, results: Results, timed: dict[str, float]) -> Path:
    page = Page(
        "Frey faces",
        f"Gaussian RBMs of {faces.test.shape[1]} visible and {settings.h_dim} hidden units, {settings.steps:,} "
        f"iterations of {BATCH} of {len(faces.training):,} frames, {settings.seeds} seed(s), on "
        f"{jax.devices()[0].device_kind}. All figures are of the {len(faces.test)} test frames, mean ± deviation over "
        "the seeds, at the least validation loss of ten. The paper's figures stand beside them.",
    )
    if "table" in settings.parts:
        likelihoods(page, settings, faces, results)
    fisher = lambda name, h: spread(results.measured[name, h]["Fisher best"])
    if "K" in settings.parts:
        page.heading("Lower steps K, at N=5")
        rows = [[f"K={k}", fisher(name_of(k), settings.h_dim), f"{paper:.2f}"] for k, paper in PAPER_K.items()]
        page.table(["", "Fisher", "paper"], rows)
    if "h" in settings.parts:
        page.heading("Hidden units")
        names = (*PAPER_H, OURS)
        paper = lambda name, h: f"{PAPER_H[name][h]:.2f}" if name in PAPER_H else "—"
        rows = [[h, *(x for name in names for x in (fisher(name, h), paper(name, h)))] for h in PAPER_H["DSM"]]
        page.table(["h", *(x for name in names for x in (f"{name}, Fisher", "paper"))], rows)
    if timed:
        page.heading("Time of 100 iterations")
        rows = [[n, f"{t / 10:.3f}", PAPER_TIME.get(n, math.nan)] for n, t in timed.items()]
        page.table(["method", "seconds here", "paper, GTX 1080 Ti"], rows)
    if results.diagnosis:
        gradient_bias(page, results.diagnosis)
    return page.write(folder)


def likelihoods(page: Page, settings: Settings, faces: Faces, results: Results) -> None:
    page.heading("Test log-likelihood and Fisher number (the paper's table 1)")
    rows, names = [], [name for name in (*PAPER, OURS) if name in settings.methods]
    for name in names:
        found = results.measured[name, settings.h_dim]
        ll, fisher, *others = (
            spread(found[k]) for k in ("LL best", "Fisher best", "paper's AIS best", "LL last", "Fisher last")
        )
        papers = [f"{x:.2f}" for x in PAPER[name]] if name in PAPER else ["—", "—"]
        interval = f"± {np.max(found['LL best, 95 %']):.2f}"
        worth = f"{np.mean(found['LL best, chains worth']):.0f}"
        rows.append([name, ll, papers[0], fisher, papers[1], interval, worth, *others])
    as_paper = f"LL, {settings.chains} chains, {settings.temperatures} temperatures"
    page.table(
        ["method", "LL", "paper", "Fisher", "paper", "95 %", "chains worth", as_paper, "LL, last", "Fisher, last"],
        rows,
        f"LL by AIS, {settings.long_chains} chains and {settings.long} adaptive temperatures, with the 95 % interval "
        "that the weights give it (the widest of the seeds) and how many independent chains they amount to; then as "
        f"the paper has it. 'Last': after the last iteration, {settings.temperatures} temperatures. Fisher is exact.",
    )
    runs = {name: results.runs[name, settings.h_dim] for name in names}
    low = min(float(np.min(run.curve("test Fisher")[1])) for run in runs.values())
    page.figure(
        "fisher",
        lambda: curves(
            {name: run.curve("test Fisher") for name, run in runs.items()},
            y="test Fisher",
            limits=(low - 0.02 * abs(low), low + 0.15 * abs(low)),
        ),
        "Fisher number of the test frames while training.",
    )
    grids = {name: samples(run, name).reshape(-1, *faces.shape) for name, run in runs.items()}
    page.figure(
        "samples", lambda: galleries(grids, 6, 3), "Means of v after 1,000 Gibbs steps from noise, as the paper's."
    )


def gradient_bias(page: Page, found: Diagnosis) -> None:
    """What `diagnose` found, as a part of a page."""
    page.heading("Gradient bias (the paper's figure 1)")
    if not found.has_reference:
        page.text(found.verdict())
        return
    lines = {f"K={k}": found.bias(k) for k in found.distance}
    page.figure(
        "bias",
        lambda: curves(lines, x="N", y="gradient bias, relative", log=True),
        "Distance from the gradient at φ* after N unrolled steps of the live Adam.",
    )
    rows = [[c.name, c.lower_steps, f"{c.bias:.3%}", f"{c.milliseconds:.1f}"] for c in found.candidates]
    rows.append(["ConjugateGradient, undamped, at φ*", "∞", f"{found.floor:.1e}", "—"])
    page.table(["response", "K", "bias", "ms"], rows, "Relative to the norm of the gradient at φ*, on one minibatch.")
    rates = {"plain, of size 1/λ": found.plain, "conditioned by the curvature at φ*": found.conditioned}
    page.figure(
        "theorem-2",
        lambda: curves(
            {name: (rate.steps, rate.bias) for name, rate in rates.items()},
            x="N",
            y="gradient bias, relative",
            log=True,
            levels={"conjugate gradients at φ*": found.conditioned.floor},
        ),
        "Theorem 2: the bias after N gradient steps. Plain ones have a rate for each curvature of the minibatch, of "
        "which the least are near zero; in coordinates of φ in which all are about one, there is one rate.",
    )
    far = ", ".join(f"{d:.3g} at K={k}" for k, d in found.distance.items())
    fits = [(name, *rate.fit) for name, rate in rates.items()]
    straight = "; ".join(f"{name}: κ = {kappa:.4f}, R² = {r_squared:.4f}" for name, kappa, r_squared in fits)
    page.text(f"‖φ⁰ − φ*‖: {far}. Straight lines through the logarithm of the bias: {straight}. {found.verdict()}")
