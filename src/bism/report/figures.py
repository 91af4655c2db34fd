"""The pictures that reports are made of. Each returns a matplotlib figure in the colours of the page around it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by most eyes, on white and on near-black; the last are added for eleven lines.
COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#B8A600",
    "#8C6BB1",
    "#7F7F7F",
    "#A65628",
    "#00A6A6",
)


def densities(panels: Mapping[str, np.ndarray], extent: Sequence[float], top: float, columns: int = 4) -> Figure:
    """Densities in the plane on one colour scale from 0 to `top`."""
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(2.3 * columns, 2.45 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    image = None
    for axis, (name, density) in zip(axes, panels.items(), strict=False):
        image = axis.imshow(density, origin="lower", extent=tuple(extent), vmin=0, vmax=top, cmap="magma")
        axis.set_title(name, fontsize=11)
        axis.set(xticks=[], yticks=[])
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    if image is not None:
        figure.colorbar(image, ax=axes.tolist(), shrink=0.6, label="density")
    return figure


def curves(
    lines: Mapping[str, tuple[np.ndarray, np.ndarray]],
    *,
    x: str = "iterations",
    y: str,
    levels: Mapping[str, float] | None = None,
    dashed: Sequence[str] = (),
    limits: tuple[float, float] | None = None,
    log: bool = False,
) -> Figure:
    """Lines over iterations; where the values have a second axis, its mean within a band of one standard deviation."""
    figure = Figure(figsize=(8.5, 5), layout="constrained")
    axis = figure.subplots()
    for i, (name, (steps, values)) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        values = np.asarray(values, float)
        mean = values if values.ndim == 1 else values.mean(1)
        axis.plot(steps, mean, color=colour, lw=1.8, ls="--" if name in dashed else "-", label=name)
        if values.ndim == 2 and values.shape[1] > 1:
            axis.fill_between(steps, mean - values.std(1), mean + values.std(1), color=colour, alpha=0.15, lw=0)
    for name, level in (levels or {}).items():
        axis.axhline(level, color="#888888", lw=1, ls=":")
        axis.annotate(name, (0.01, level), xycoords=("axes fraction", "data"), va="bottom", fontsize=9, color="#888888")
    axis.set(xlabel=x, ylabel=y, yscale="log" if log else "linear")
    if limits:
        axis.set_ylim(*limits)
    axis.grid(alpha=0.2)
    if len(lines) > 1:
        axis.legend(fontsize=9, ncols=2 if len(lines) > 6 else 1)
    return figure


def scatter(panels: Mapping[str, Any], size: float = 3.5, colours: str = "turbo") -> Figure:
    """Point clouds in the plane side by side. A panel is points, or (points, a value of each for its colour)."""
    figure = Figure(figsize=(size * len(panels), size), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False).ravel()
    for axis, (name, panel) in zip(axes, panels.items(), strict=True):
        points, look = panel, {"color": COLOURS[0]}
        if isinstance(panel, tuple):
            points, look = panel[0], {"c": panel[1], "cmap": colours}
        axis.scatter(*np.asarray(points).T[:2], s=4, alpha=0.6, lw=0, **look)
        axis.set_title(name, fontsize=11)
        axis.set_aspect("equal", adjustable="datalim")
    return figure


def galleries(panels: Mapping[str, np.ndarray], across: int, columns: int | None = None) -> Figure:
    """Images in [0, 1], of shape (count, height, width) or with a last axis of 3, so many in a row; panel by panel."""
    columns = columns or len(panels)
    wide, lines = len(panels) > 1, -(-len(panels) // columns)
    figure = Figure(layout="constrained")
    rows = max(-(-len(images) // across) for images in panels.values())
    height, width = next(iter(panels.values())).shape[1:3]
    side = 4.0 if wide else 8.5
    figure.set_size_inches(side * columns, lines * (side * rows * height / (across * width) + 0.4 * wide))
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for axis in axes:
        axis.set_axis_off()
    for axis, (name, images) in zip(axes, panels.items(), strict=False):
        blank = np.ones((-len(images) % across, *images.shape[1:]), images.dtype)
        gap = [(0, 0), (0, max(height // 16, 1)), (0, max(width // 16, 1)), *[(0, 0)] * (images.ndim - 3)]
        tiles = np.pad(np.concatenate([images, blank]), gap, constant_values=1)
        tiles = tiles.reshape(-1, across, *tiles.shape[1:])
        sheet = np.concatenate([np.concatenate(list(row), 1) for row in tiles])
        axis.imshow(sheet, vmin=0, vmax=1, cmap="gray", interpolation="nearest")
        if name:
            axis.set_title(name, fontsize=11)
    return figure


def histograms(values: Mapping[str, np.ndarray], *, x: str) -> Figure:
    """Densities of several sets of numbers on one axis, which leaves out the extreme hundredth of all."""
    figure = Figure(figsize=(8.5, 4), layout="constrained")
    axis = figure.subplots()
    together = np.concatenate(list(values.values()))
    low, high = np.quantile(together, [0.005, 0.995])
    bins = np.linspace(low, high, 60)
    for i, (name, numbers) in enumerate(values.items()):
        axis.hist(numbers, bins, density=True, histtype="step", lw=1.8, color=COLOURS[i % len(COLOURS)], label=name)
    axis.set(xlabel=x, ylabel="density")
    axis.legend(fontsize=9)
    return figure
