"""A whole training described by names and numbers: what `bism train` takes, and reads back from a run's folder."""

import json
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .baselines import NCE, VNCE, ContrastiveDivergence, MaximumLikelihood, ScoreMatching
from .bilevel import BiSM
from .checkpoint import holds_run
from .data import as_data, load
from .divergence import KL, Fisher
from .method import Method
from .models import GaussianRBM, MLPEnergy, MLPFreeEnergy
from .objective import DSM, MDSM, SM, SSM
from .optimizer import adam
from .posterior import BernoulliPosterior, GaussianPosterior
from .response import ConjugateGradient, FirstOrder, Unroll
from .sampling import sample
from .training import Run, fit, load as load_run

MODELS = ("mlp", "grbm", "visible")
OBJECTIVES = ("sm", "ssm", "dsm", "mdsm")
METHODS = (*(f"bi{name}" for name in OBJECTIVES), *OBJECTIVES, "cd", "pcd", "nce", "vnce", "ml")


def setting(default: Any, text: str, *flags: str) -> Any:
    """A field of the recipe, and an option of the command line."""
    return field(default=default, metadata={"help": text, "flags": flags})


@dataclass(frozen=True)
class Recipe:
    data: str
    model: str = setting("mlp", f"The energy: {', '.join(MODELS)}. 'visible' has no latents.")
    method: str = setting("bidsm", f"One of {', '.join(METHODS)}.")
    h_dim: int = setting(2, "Latent variables.")
    width: int = setting(64, "Units in a layer of the networks.")
    depth: int = setting(2, "Hidden layers of the networks.")
    sigma: float = setting(0.1, "Noise of denoising score matching, in deviations of the data.")
    lower_steps: int = setting(5, "K: steps of the posterior for each of the model.", "--lower-steps", "-K")
    unroll: int | None = setting(
        None,
        "N: steps of the posterior that the model's gradient sees through, 0 for none. Not given: the best measured.",
        "--unroll",
        "-N",
    )
    implicit: bool = setting(False, "Implicit hypergradient by conjugate gradients, instead of unrolling.")
    divergence: str = setting("kl", "Of the lower level: kl, or fisher for continuous latents.")
    chain_steps: int = setting(1, "k of cd and pcd.")
    learning_rate: float = setting(1e-3, "Of Adam, at both levels.")
    batch_size: int = setting(100, "Examples in an iteration.")
    steps: int = setting(20_000, "Iterations.")
    seed: int = setting(0, "The same seed gives the same run.")
    standardise: bool = setting(True, "Bring columns to mean 0, deviation 1; samples come back in their own units.")
    held_out: float = setting(0.1, "Fraction of the data kept for validation.")

    def __post_init__(self):
        for name, choices in {"model": MODELS, "method": METHODS, "divergence": ("kl", "fisher")}.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; choose from {', '.join(choices)}.")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out is the fraction of the data kept for validation, 0 to 1; got {self.held_out}.")

    def build(self, v_dim: int) -> tuple[Method, Any, Any]:
        """The method, and makers of the model and of the posterior."""
        optimizer = adam(self.learning_rate)
        if self.model == "grbm":
            model = lambda key: GaussianRBM(v_dim, self.h_dim, key=key)
            posterior = lambda key: BernoulliPosterior.linear(v_dim, self.h_dim, key=key)
        else:
            size = {"width": self.width, "depth": self.depth}
            model = {
                "mlp": lambda key: MLPEnergy(v_dim, self.h_dim, **size, key=key),
                "visible": lambda key: MLPFreeEnergy(v_dim, **size, key=key),
            }[self.model]
            posterior = lambda key: GaussianPosterior.mlp(v_dim, self.h_dim, **size, key=key)
        objectives = {
            "sm": SM,
            "ssm": SSM,
            "dsm": partial(DSM, self.sigma),
            "mdsm": partial(MDSM, self.sigma, 10 * self.sigma, self.sigma),
        }
        if self.method in objectives:
            return ScoreMatching(objectives[self.method](), optimizer=optimizer), model, None
        if self.method.removeprefix("bi") in objectives:
            response = None
            if self.implicit:
                response = ConjugateGradient()
            elif self.unroll is not None:
                response = Unroll(self.unroll) if self.unroll else FirstOrder()
            divergence = KL() if self.divergence == "kl" else Fisher()
            objective = objectives[self.method.removeprefix("bi")]()
            return BiSM(objective, divergence, response, self.lower_steps, optimizer=optimizer), model, posterior
        methods = {
            "cd": ContrastiveDivergence(self.chain_steps, optimizer=optimizer),
            "pcd": ContrastiveDivergence(self.chain_steps, persistent=True, optimizer=optimizer),
            "nce": NCE(optimizer=optimizer),
            "vnce": VNCE(lower_steps=self.lower_steps, optimizer=optimizer),
            "ml": MaximumLikelihood(optimizer=optimizer),
        }
        return methods[self.method], model, posterior if self.method == "vnce" else None

    def split(self) -> tuple[np.ndarray, np.ndarray | None]:
        """The data, shuffled by the seed, in training and held-out parts, one flat vector an example."""
        x = np.asarray(as_data(load(self.data), self.data))
        x = x.reshape(len(x), -1)[np.random.default_rng(self.seed).permutation(len(x))]
        held = int(self.held_out * len(x))
        return x[held:], x[:held] if held else None


@dataclass
class Scale:
    """The shift and scale of each column that training saw as 0 and 1."""

    shift: np.ndarray
    scale: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray, standardise: bool) -> "Scale":
        if not standardise:
            return cls(np.zeros(x.shape[1], x.dtype), np.ones(x.shape[1], x.dtype))
        spread = x.std(0)
        return cls(x.mean(0), np.where(spread > 0, spread, 1))

    def apply(self, x):
        return (x - self.shift) / self.scale

    def undo(self, x):
        return x * self.scale + self.shift


def train(recipe: Recipe, folder: Path, *, resume: bool = False, progress: bool = True) -> Run:
    """Train by a recipe, into a folder from which `restore` brings it back."""
    train_set, held_out = recipe.split()
    scale = Scale.of(train_set, recipe.standardise)
    method, model, posterior = recipe.build(train_set.shape[1])
    if resume and holds_run(folder):
        changed = changes(recipe_of(folder), recipe)
        if changed not in ([], ["steps"]):
            raise ValueError(f"{folder} was trained with other settings: {', '.join(changed)}. Give the same ones.")
    return fit(
        method,
        model,
        posterior,
        data=scale.apply(train_set),
        validation=None if held_out is None else scale.apply(held_out)[:2048],
        steps=recipe.steps,
        batch_size=recipe.batch_size,
        key=recipe.seed,
        folder=folder,
        resume=resume,
        config=asdict(recipe),
        progress=progress,
    )


def read_config(folder: Path) -> dict[str, Any]:
    """What `bism train` was given for the run in the folder."""
    path = Path(folder) / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"{folder} is not a run: it has no config.json. `bism train DATA` makes one.")
    config = json.loads(path.read_text()).get("config", {})
    if not config:
        raise ValueError(
            f"{folder} was not made by `bism train`; bring it back with bism.load(folder, method, model, q)."
        )
    return config


def recipe_of(folder: Path) -> Recipe:
    return Recipe(**read_config(folder))


def changes(found: Any, wanted: Any) -> list[str]:
    """The names of the fields in which two recipes differ."""
    return [f.name for f in fields(wanted) if getattr(found, f.name, None) != getattr(wanted, f.name)]


def restore(folder: Path) -> tuple[Recipe, Run, Scale, tuple[np.ndarray, np.ndarray | None]]:
    """The recipe, the trained run, the scale and the two parts of the data, in their own units."""
    recipe = recipe_of(folder)
    parts = recipe.split()
    method, model, posterior = recipe.build(parts[0].shape[1])
    return recipe, load_run(folder, method, model, posterior), Scale.of(parts[0], recipe.standardise), parts


def draw(recipe: Recipe, run: Run, scale: Scale, count: int, seed: int = 0, steps: int = 2000) -> np.ndarray:
    """Samples in the data's own units."""
    size = scale.shift.size
    v = sample(run.model, jax.random.key(seed), count, shape=(size,), h_shape=(recipe.h_dim,), steps=steps)
    v = np.asarray(v)
    lost = ~np.isfinite(v).all(1)
    if lost.any():
        raise FloatingPointError(
            f"{lost.sum()} of {count} chains left the finite numbers: the model is not normalisable."
        )
    return scale.undo(v)


def latents(run: Run, v: np.ndarray) -> np.ndarray:
    """Posterior means."""
    return np.asarray(jax.vmap(lambda v: run.posterior(v).mean)(jnp.asarray(v)))
