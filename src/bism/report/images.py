"""The report of one run of `bism train` on images."""

import json
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..image_evaluation import Trained, evaluate
from ..image_recipe import ImageRecipe, split
from ..images import Images, as_bytes, show
from ..metrics import features
from ..synthesis import denoise_images, encode, inpaint, interpolate
from ..training import Run
from .figures import curves, galleries, histograms, scatter
from .page import Page

CURVES = {
    "loss": "Ĵ, the upper loss, on training batches and on held-out images.",
    "posterior Fisher": "Fisher divergence of q from the posterior, of clean held-out images; in training, over σ.",
}
PAIRS = {"loss": ("loss", "held-out loss"), "posterior Fisher": ("posterior Fisher", "lower")}


def write(folder: Path, fid_samples: int = 0, images: Images | None = None) -> Path:
    """`folder`/report.html. `images`: those it was trained on, if at hand."""
    trained = Trained.of(Path(folder), images=images)
    recipe, run, parts = trained.recipe, trained.run, trained.parts
    channels, height, width = parts.train.shape[1:]
    latent = f" with {recipe.h_dim} latents" if recipe.bilevel else ""
    page = Page(
        f"{recipe.data} by {recipe.method}",
        f"A {type(run.model).__name__}{latent}, trained for {run.step:,} iterations of {recipe.batch_size} of "
        f"{len(parts.train):,} images of {channels} × {height} × {width}. {trained.images.note}",
    )
    page.table(["on held-out images", ""], list(evaluate(trained, fid_samples).items()))
    page.heading("Learning")
    learning(page, {"": run})
    pictures(page, trained)
    if parts.held_out_labels is not None and recipe.bilevel:
        map_of_latents(page, trained)
    page.heading("Settings")
    page.code(json.dumps(asdict(recipe), indent=2))
    return page.write(folder)


def grids(recipe: ImageRecipe, images: Images, folder: Path, times: int = 10) -> Callable[[Run], None]:
    """A callback for `train` that draws `folder`/figures/samples-STEP.png so many times on the way."""
    parts = split(images, recipe.seed)
    every = max(recipe.steps // times, 1)
    drawn = 0

    def draw(run: Run) -> None:
        nonlocal drawn
        if run.step // every == drawn:
            return
        drawn = run.step // every
        try:
            samples = Trained(recipe, run, images, parts).samples(100, steps=50)
            (folder / "figures").mkdir(exist_ok=True)
            figure = galleries({"": show(samples, images.size)}, 10)
            figure.savefig(folder / "figures" / f"samples-{run.step}.png", dpi=130)
        except (FloatingPointError, OSError) as error:  # a picture is not worth a training
            warnings.warn(f"No picture of samples at iteration {run.step}: {error}", stacklevel=2)

    return draw


def save_samples(trained: Trained, samples: np.ndarray, path: Path) -> Path:
    """The samples as bytes, and up to 100 of them as a picture beside, whose path is returned."""
    images = as_bytes(show(samples, trained.images.size))
    np.save(path, images)
    picture = path.with_suffix(".png")
    galleries({"": images[:100] / 255}, 10).savefig(picture, dpi=130)
    return picture


def learning(page: Page, runs: dict[str, Any]) -> None:
    """The curves of one run or several."""
    for name, caption in CURVES.items():
        found = {}
        for label, run in runs.items():
            known = {key for row in run.history for key in row}
            found |= {f"{label} {of}".strip(): run.curve(of) for of in PAIRS[name] if of in known}
        if found:
            page.figure(name.replace(" ", "-"), lambda found=found, name=name: curves(found, y=name, log=True), caption)


def pictures(page: Page, trained: Trained, across: int = 10) -> None:
    """Samples beside data, and what an energy can do with images: copies looked for, latents held, parts made anew."""
    run, parts = trained.run, trained.parts
    model, q = run.model, run.posterior
    unit = lambda x: np.asarray(x) / np.float32(255)
    shown = lambda x: show(x, trained.images.size)
    rng = np.random.default_rng(0)
    some = unit(parts.held_out[rng.permutation(len(parts.held_out))[:across]])
    schedule, key = trained.schedule(), jax.random.key(2)

    page.heading("Samples")
    data = unit(parts.train[rng.permutation(len(parts.train))[: across**2]])
    panels = {"training images": data, "samples": trained.samples(across**2)}
    if trained.recipe.bilevel:
        panels["samples of (v, h) together"] = trained.samples(across**2, joint=True)
    page.figure(
        "samples",
        lambda: galleries({name: shown(x) for name, x in panels.items()}, across),
        "Training images, and samples from noise down a ladder of 100 noise levels"
        + (", at the h of random training images, or of v and h together." if trained.recipe.bilevel else "."),
    )
    close = parts.train[features.nearest(as_bytes(panels["samples"][:across]), parts.train).indices[:, 0]]
    page.figure(
        "nearest",
        lambda: galleries({"": shown(np.concatenate([panels["samples"][:across], unit(close)]))}, across),
        "Samples, and below each the training image nearest to it: a model that memorises would show here.",
    )
    if trained.recipe.bilevel:
        page.heading("Latents")
        h = np.repeat(encode(q, some), across, 0)
        held = trained.samples(len(h), h=h).reshape(len(some), across, *some.shape[1:])
        rows = np.concatenate([some[:, None], held], 1)[:5].reshape(-1, *some.shape[1:])
        page.figure(
            "conditional",
            lambda: galleries({"": shown(rows)}, across + 1),
            "Left, held-out images; beside each, samples of p(v|h) at its posterior mean.",
        )
        ends = some[: 2 * min(len(some) // 2, 3)]
        lines = [interpolate(model, q, a, b, across, key, schedule) for a, b in zip(ends[::2], ends[1::2], strict=True)]
        if lines:
            page.figure(
                "interpolation",
                lambda: galleries({"": shown(np.concatenate(lines))}, across),
                "Samples of p(v|h), all from the same noise, while h goes from one held-out image to another.",
            )
    page.heading("Restoration")
    known = np.ones(some.shape, bool)
    known[:, :, some.shape[2] // 2 :] = False
    noise = 0.3 * trained.recipe.sigma_max * rng.normal(size=some.shape).astype(np.float32)
    restored = [some, np.where(known, some, 0.5), inpaint(model, q, key, some, known, schedule)]
    restored += [np.clip(some + noise, 0, 1), denoise_images(model, q, some + noise, trained.recipe.sigma0)]
    page.figure(
        "restoration",
        lambda: galleries({"": shown(np.concatenate(restored))}, across),
        "From above: held-out images, their upper halves, the lower ones made anew; noisy, and denoised in one step.",
    )
    kinds = {"training images": unit(parts.train[:500]), "held-out images": unit(parts.held_out[:500])}
    kinds |= {"samples": panels["samples"], "noise": rng.uniform(size=(100, *some.shape[1:])).astype(np.float32)}
    ends = np.cumsum([len(v) for v in kinds.values()])[:-1]
    values = np.split(trained.energy(np.concatenate(list(kinds.values()))), ends)
    page.figure(
        "energies",
        lambda: histograms(dict(zip(kinds, values, strict=True)), x="energy"),
        "Energies, at the posterior mean where there is h.",
    )


def map_of_latents(page: Page, trained: Trained, most: int = 2000) -> None:
    """t-SNE of the held-out images' posterior means, in the colours of their classes."""
    assert trained.parts.held_out_labels is not None
    place = features.tsne(encode(trained.run.posterior, trained.parts.held_out[:most]))
    labels = trained.parts.held_out_labels[:most]
    page.figure(
        "t-sne",
        lambda: scatter({"": (place, labels)}, size=8.0, colours="tab10"),
        "t-SNE of the posterior means of held-out images; the colours are their classes, which training never saw.",
    )
