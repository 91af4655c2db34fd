"""The report of one run of `bism train`."""

import json
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np

from ..evaluation import Trained, evaluate, plane
from ..likelihood import free_energy_of
from .figures import curves, densities, scatter
from .page import Page


def write(folder: Path, data: str = "") -> Path:
    """`folder`/report.html. `data`: where they are, if not where they were."""
    folder = Path(folder)
    trained = Trained.of(folder, data)
    recipe, run, scale = trained.recipe, trained.run, trained.scale
    train_set, held_out = trained.split()
    last = run.history[-1]["step"]
    page = Page(
        f"{Path(recipe.data).name} by {recipe.method}",
        f"A {type(run.model).__name__} trained for {last:,} iterations of {recipe.batch_size} of "
        f"{len(train_set):,} examples with {train_set.shape[1]} values each"
        + (f", shown as it was at iteration {run.step:,}, of least validation loss." if run.step < last else "."),
    )
    figures = evaluate(trained, train_set, held_out)
    page.table(["on held-out data" if held_out is not None else "on the data", ""], list(figures.items()))
    page.heading("Learning")
    for name, label in {"loss": "loss", "validation": "validation loss", "lower": "lower loss"}.items():
        if any(name in row for row in run.history):
            page.figure(name, lambda name=name, label=label: curves({label: run.curve(name)}, y=label), f"The {label}.")
    shown = 2000
    samples = trained.draw(shown)
    if train_set.shape[1] == 2 and scale.scale.all():
        page.heading("In the plane")
        grid = plane(scale.apply(train_set))
        free_energy = free_energy_of(run.model, run.posterior, jax.random.key(0))
        density = np.exp(np.asarray(grid.log_density(free_energy)) - scale.log_volume)  # in the data's own units
        low, high = (scale.undo(np.array(corner)) for corner in (grid.low, grid.high))
        extent = [low[0], high[0], low[1], high[1]]
        top = float(np.quantile(density, 0.999))
        page.figure("samples", lambda: scatter({"data": train_set[:shown], "samples": samples}), "Data and samples.")
        page.figure("density", lambda: densities({"density": density}, extent, top, 1), "The learned density.")
        if run.posterior is not None:
            means = trained.latents(train_set[:shown])
            panels = {f"h{i + 1}": (train_set[:shown], means[:, i]) for i in range(min(3, means.shape[1]))}
            page.figure("latents", lambda: scatter(panels), "The data, coloured by the posterior mean of each latent.")
    else:
        page.heading("Samples")
        rows = zip(train_set.mean(0), samples.mean(0), train_set.std(0), samples.std(0), strict=True)
        names = scale.names or [f"column {i + 1}" for i in range(train_set.shape[1])]
        table = [[name, *map(float, row)] for name, row in zip(names, rows, strict=True)][:20]
        page.table(["", "mean of data", "of samples", "deviation of data", "of samples"], table)
    page.heading("Settings")
    page.code(json.dumps(asdict(recipe), indent=2))
    return page.write(folder)
