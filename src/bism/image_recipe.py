"""The training of an energy of images described by names and numbers: what `bism train cifar10` takes."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from .baselines import ScoreMatching
from .bilevel import BiSM
from .checkpoint import holds_run
from .cost import operations, peak
from .data import load_file
from .divergence import Fisher, fisher_of_posterior
from .images import NAMED, Bytes, Images, load_images
from .method import Method, State, parameters
from .models import ResNetEnergy, ResNetFreeEnergy, conv_posterior
from .objective import MDSM
from .optimizer import adam
from .recipe import changes, read_config, setting
from .response import FirstOrder, Unroll
from .training import Prepare, Run, fit, load as load_run

METHODS = ("bimdsm", "mdsm")
PRESETS = ("fast", "paper")
HELD_OUT = 500  # images at most that watch the training
GREY = {"width": 64, "blocks": 2, "sigma_min": 0.1, "sigma_max": 3.0, "spacing": "geometric"}
COLOUR = {"width": 128, "blocks": 3, "sigma_min": 0.05, "sigma_max": 1.2, "spacing": "linear"}
PAPER = {"batch_size": 100, "ema": 0.0, "precision": "float32"}
FAST = {"ema": 0.9995, "precision": "bfloat16"}
# What the kind of the images and the preset decide together.
DECIDED: dict[tuple[str, str], dict[str, Any]] = {
    ("grey", "paper"): GREY | PAPER | {"learning_rate": 1e-4, "steps": 100_000},
    ("colour", "paper"): COLOUR | PAPER | {"learning_rate": 5e-5, "steps": 300_000},
    ("grey", "fast"): GREY | FAST | {"learning_rate": 2e-4, "steps": 100_000, "batch_size": 100},
    ("colour", "fast"): COLOUR | FAST | {"learning_rate": 1e-4, "steps": 70_000, "batch_size": 200},
}
TINY_SIDE = 16  # images up to which a laptop will do
TINY = {"width": 16, "blocks": 1, "h_dim": 32, "precision": "float32", "ema": 0.99, "steps": 1500, "batch_size": 100}
TINY |= {"learning_rate": 2e-3, "sigma_min": 0.1, "sigma_max": 1.0}


@dataclass(frozen=True)
class ImageRecipe:
    """Made by `ImageRecipe.of`, which fills in what the preset decides."""

    data: str
    preset: str = setting(
        "fast", "'paper': its settings. 'fast': 16 bits, an average of the weights, fewer iterations."
    )
    method: str = setting("bimdsm", "bimdsm, or mdsm for an energy without latents.")
    h_dim: int = setting(50, "Latent variables.")
    width: int = setting(128, "Channels of the first stage.")
    blocks: int = setting(3, "Residual blocks in each of three stages: 12 layers in all with 2, 18 with 3")
    sigma_min: float = setting(0.05, "Least noise of the training levels.")
    sigma_max: float = setting(1.2, "Most noise of the training levels.")
    spacing: str = setting("linear", "Of the levels: linear or geometric.")
    sigma0: float = setting(0.1, "σ₀ of multiscale denoising score matching.")
    lower_steps: int = setting(5, "K: steps of the posterior for each of the model.", "--lower-steps", "-K")
    unroll: int = setting(
        0, "N: steps of the posterior that the model's gradient sees through, 0 for none.", "--unroll", "-N"
    )
    learning_rate: float = setting(1e-4, "Of Adam, at both levels; it falls to 1e-6 along a cosine.")
    batch_size: int = setting(100, "Images in an iteration.")
    steps: int = setting(100_000, "Iterations.")
    ema: float = setting(0.0, "Decay of the average of the weights that samples are drawn with; 0 for none.")
    precision: str = setting("float32", "Of the convolutions: float32 or bfloat16.")
    flip: bool = setting(False, "Mirror half of the images of each batch.")
    side: int = setting(0, "Cut images to a square of this side first; 0 to leave them.")
    seed: int = setting(0, "The same seed gives the same run.")

    @classmethod
    def of(cls, data: str, images: Images, preset: str = "fast", **given: Any) -> "ImageRecipe":
        if preset not in PRESETS:
            raise ValueError(f"unknown preset {preset!r}; choose from {', '.join(PRESETS)}.")
        channels, height, width = images.train.shape[1:]
        decided = DECIDED["grey" if channels == 1 else "colour", preset]
        if max(height, width) > 48:
            decided = decided | {"blocks": 4}
        if max(height, width) <= TINY_SIDE and preset == "fast":
            decided = decided | TINY
        count = len(images.train) - _held_out(images)
        decided = decided | {"batch_size": min(decided["batch_size"], count)}
        settings: dict[str, Any] = decided | {"flip": images.flip} | given
        return cls(data, preset, **settings)

    def __post_init__(self):
        choices = {"preset": PRESETS, "method": METHODS, "precision": ("float32", "bfloat16")}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; choose from {', '.join(known)}.")
        for name in ("h_dim", "width", "blocks", "batch_size", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not self.learning_rate > 0 or self.unroll < 0:
            raise ValueError("learning_rate must be positive and unroll not negative.")

    @property
    def bilevel(self) -> bool:
        return self.method == "bimdsm"

    @property
    def objective(self) -> MDSM:
        return MDSM(self.sigma_min, self.sigma_max, self.sigma0, self.spacing)  # pyright: ignore[reportArgumentType]

    def images(self) -> Images:
        return load_images(self.data, side=self.side or None)

    def build(self, shape: tuple[int, int, int]) -> tuple[Method, Any, Any]:
        """The method, and makers of the model and of the posterior."""

        def optimizer(ticks):  # a tick an iteration: the lower level's Adam makes K steps in each
            return adam(optax.cosine_decay_schedule(self.learning_rate, ticks, min(1e-6 / self.learning_rate, 1.0)))

        settings = {"optimizer": optimizer(self.steps), "ema": self.ema or None}
        dtype: Any = "bfloat16" if self.precision == "bfloat16" else None
        size: Any = {"width": self.width, "blocks": self.blocks, "dtype": dtype}
        if not self.bilevel:
            return ScoreMatching(self.objective, **settings), lambda key: ResNetFreeEnergy(shape, **size, key=key), None
        response = Unroll(self.unroll) if self.unroll else FirstOrder()
        lower = optimizer(self.steps * max(self.lower_steps, 1))
        method = BiSM(self.objective, Fisher(), response, self.lower_steps, lower, **settings)
        model = lambda key: ResNetEnergy(shape, self.h_dim, **size, key=key)
        widths = (32, 64) if max(shape[1:]) <= TINY_SIDE else (64, 128, 256)
        posterior = lambda key: conv_posterior(shape, self.h_dim, widths=widths, dtype=dtype, key=key)
        return method, model, posterior

    def operations(self, shape: tuple[int, int, int]) -> float:
        """Of one iteration."""
        method, model, posterior = self.build(shape)

        def iteration(key, batch):
            q = None if posterior is None else posterior(key)
            return parameters(method.step(method.init(model(key), q, batch=batch, key=key), batch, key))

        batch = jax.ShapeDtypeStruct((self.batch_size, *shape), jnp.result_type(float))
        return operations(iteration, jax.random.key(0), batch)


def are_images(source: str) -> bool:
    """Whether the source is a named set of images, a folder, or an array of three axes or more."""
    path = Path(source)
    if source in NAMED or path.is_dir():
        return True
    return path.suffix in (".npy", ".npz") and path.exists() and load_file(path).ndim > 2


class Parts(NamedTuple):
    train: Bytes
    held_out: Bytes  # watches the training
    train_labels: np.ndarray | None
    held_out_labels: np.ndarray | None
    tested: bool  # the held-out images are the data set's own test images


def split(images: Images, seed: int) -> Parts:
    """All training images and the test images; where there are none of those, one in twenty is held out."""
    if images.test is not None:
        return Parts(images.train, images.test, images.train_labels, images.test_labels, True)
    count = len(images.train)
    held = np.zeros(count, bool)
    held[np.random.default_rng(seed).permutation(count)[: _held_out(images)]] = True
    labels = images.train_labels
    both = (None, None) if labels is None else (labels[~held], labels[held])
    return Parts(images.train[~held], images.train[held], *both, False)


def _held_out(images: Images) -> int:
    """How many of the training images are: none where there are test images."""
    return 0 if images.test is not None else max(1, min(len(images.train) // 20, HELD_OUT))


def to_unit(flip: bool) -> Prepare:
    """Bytes to [0, 1], half of the batch mirrored where asked for."""

    def prepare(batch: Array, key: PRNGKeyArray) -> Float[Array, "batch channels height width"]:
        if flip:
            mirrored = jax.random.bernoulli(key, shape=(len(batch), 1, 1, 1))
            batch = jnp.where(mirrored, batch[..., ::-1], batch)
        return batch / jnp.asarray(255, jnp.result_type(float))

    return prepare


def train(
    recipe: ImageRecipe,
    folder: Path,
    *,
    images: Images | None = None,
    resume: bool = False,
    keep: int = 1,
    checkpoint_every: int | None = None,
    progress: bool | str = True,
    callbacks: tuple[Callable[[Run], object], ...] = (),
) -> Run:
    """Train by a recipe, into a folder from which `restore` brings it back. `images`: the recipe's, if at hand."""
    folder = Path(folder)
    parts = split(images or recipe.images(), recipe.seed)
    if resume and holds_run(folder):
        changed = changes(recipe_of(folder), recipe)
        if changed:  # the learning rate's schedule depends on the number of iterations, too
            raise ValueError(f"{folder} was trained with other settings: {', '.join(changed)}. Give the same ones.")
    method, model, posterior = recipe.build(shape_of(parts))
    watched = to_unit(False)(jnp.asarray(parts.held_out[:HELD_OUT]), jax.random.key(0))

    size = min(recipe.batch_size, len(watched))  # as much at a time as in training
    batches = watched[: len(watched) // size * size].reshape(-1, size, *watched.shape[1:])

    def held_out_loss(model, posterior):
        one = lambda at: method.validate(State(model, posterior, None), *at)
        return jax.lax.map(one, (batches, jax.random.split(jax.random.key(1), len(batches)))).mean()

    evaluations = {"held-out loss": held_out_loss}
    if recipe.bilevel:  # on clean images
        evaluations["posterior Fisher"] = partial(fisher_of_posterior, v=watched, key=jax.random.key(2), particles=1)
    return fit(
        method,
        model,
        posterior,
        data=parts.train,
        steps=recipe.steps,
        batch_size=recipe.batch_size,
        key=recipe.seed,
        folder=folder,
        resume=resume,
        keep=keep,
        checkpoint_every=checkpoint_every,
        evaluate=evaluations,
        config={"kind": "images"} | asdict(recipe),
        callbacks=callbacks,
        progress=progress,
        prepare=to_unit(recipe.flip),
        rate=_rate(recipe, shape_of(parts)),
    )


def _rate(recipe: ImageRecipe, shape: tuple[int, int, int]) -> Callable[[float], str]:
    """Says a rate in iterations a second as images and operations a second."""
    each, top = recipe.operations(shape), peak()

    def told(rate: float) -> str:
        share = f" ({each * rate / top:.0%} of the chip's)" if top else ""
        return f"{rate * recipe.batch_size:,.0f} images/s, {each * rate / 1e12:.2g} TFLOP/s{share}"

    return told


def restore(
    folder: Path, step: int | None = None, images: Images | None = None
) -> tuple[ImageRecipe, Run, Images, Parts]:
    """The recipe, the trained run, the data set (`images`, if at hand) and its parts."""
    recipe = recipe_of(folder)
    images = images or recipe.images()
    parts = split(images, recipe.seed)
    run = load_run(folder, *recipe.build(shape_of(parts)), step=step)
    return recipe, run, images, parts


def recipe_of(folder: Path) -> ImageRecipe:
    settings = dict(read_config(folder))
    if settings.pop("kind", None) != "images":
        raise ValueError(f"{folder} is not a run on images.")
    return ImageRecipe(**settings)


def shape_of(parts: Parts) -> tuple[int, int, int]:
    channels, height, width = parts.train.shape[1:]
    return channels, height, width
