"""A whole training described by names and numbers: what `bism train` takes, and reads back from a run's folder."""

import json
import warnings
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .baselines import NCE, VNCE, ContrastiveDivergence, MaximumLikelihood, ScoreMatching
from .bilevel import BiSM
from .checkpoint import holds_run
from .data import checked, column_names, digest, load
from .divergence import KL, Fisher
from .method import Method
from .models import GaussianRBM, MLPEnergy, MLPFreeEnergy
from .objective import DSM, MDSM, SM, SSM
from .optimizer import adam
from .posterior import BernoulliPosterior, GaussianPosterior
from .response import ConjugateGradient, FirstOrder, Unroll
from .training import Run, fit

MODELS = ("mlp", "grbm", "visible")
OBJECTIVES = ("sm", "ssm", "dsm", "mdsm")
METHODS = (*(f"bi{name}" for name in OBJECTIVES), *OBJECTIVES, "cd", "pcd", "nce", "vnce", "ml")

METHODS_OF_LATENTS = (*(f"bi{name}" for name in OBJECTIVES), "vnce")


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
        for name in ("h_dim", "width", "depth", "chain_steps", "batch_size", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("sigma", "learning_rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}.")
        if (self.unroll or 0) < 0:
            raise ValueError(f"unroll must not be negative, got {self.unroll}; 0 is for none.")
        if self.implicit and self.unroll is not None:
            raise ValueError("--implicit and --unroll are two ways to the same hypergradient: give one of them.")
        visible, latents = self.model == "visible", self.method in METHODS_OF_LATENTS
        if visible and latents:
            raise ValueError(f"--method {self.method} learns latents and --model visible has none: give --method dsm.")
        if self.model == "mlp" and not latents:
            raise ValueError(
                f"--method {self.method} needs p(v), which --model mlp does not have: give --model visible, or grbm."
            )
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
        x = checked(load(self.data), self.data)
        x = x.reshape(len(x), -1)[np.random.default_rng(self.seed).permutation(len(x))]
        held = int(self.held_out * len(x))
        return x[held:], x[:held] if held else None


@dataclass(frozen=True)
class Scale:
    """The shift and scale of each column that training saw as 0 and 1, and the columns' names where there are any.

    The scale of a column that never changes is 0: its samples do not change either.
    """

    shift: np.ndarray
    scale: np.ndarray
    names: list[str] | None = None

    @classmethod
    def of(cls, x: np.ndarray, standardise: bool, names: list[str] | None = None) -> "Scale":
        if not standardise:
            return cls(np.zeros(x.shape[1]), np.ones(x.shape[1]), names)
        # In double precision: a column's deviation may be far below its mean.
        shift, spread = x.mean(0, dtype=float), x.std(0, dtype=float)
        constant = spread <= 1e-14 * np.abs(shift)  # the mean of equal values differs from them by rounding
        return cls(shift, np.where(constant, 0, spread), names)

    @classmethod
    def kept(cls, facts: dict[str, Any]) -> "Scale":
        return cls(np.array(facts["shift"]), np.array(facts["scale"]), facts["names"])

    @property
    def log_volume(self) -> float:
        """What the log-density in the data's own units is less by."""
        return float(np.log(self.scale[self.scale > 0]).sum())

    def apply(self, x: np.ndarray) -> np.ndarray:
        return ((x - self.shift) / np.where(self.scale > 0, self.scale, 1)).astype(np.float32)

    def undo(self, x: np.ndarray) -> np.ndarray:
        return x * self.scale + self.shift


def train(recipe: Recipe, folder: Path, *, resume: bool = False, progress: bool = True) -> Run:
    """Train by a recipe, into a folder from which `Trained.of` brings it back."""
    train_set, held_out = recipe.split()
    names = column_names(recipe.data)
    scale = Scale.of(train_set, recipe.standardise, names)
    tell_of_constant_columns(train_set, names)
    method, model, posterior = recipe.build(train_set.shape[1])
    facts = {name: None if x is None else np.asarray(x).tolist() for name, x in vars(scale).items()}
    facts["data"] = digest(train_set)
    if resume and holds_run(folder):
        changed = changes(recipe_of(folder), recipe)
        if set(changed) - {"steps", "data"}:  # where the data are may change, but not what they are
            raise ValueError(f"{folder} was trained with other settings: {', '.join(changed)}. Give the same ones.")
        refuse_other_data(folder, recipe, facts["data"])
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
        config=asdict(recipe) | {"table": facts},
        progress=progress,
    )


def tell_of_constant_columns(x: np.ndarray, names: list[str] | None) -> None:
    constant = np.flatnonzero((x == x[0]).all(0))
    if len(constant) == x.shape[1]:
        raise ValueError("all examples are the same: there is nothing to learn.")
    if len(constant):
        which = ", ".join(names[i] if names else str(i + 1) for i in constant[:5])
        told = f"{len(constant)} of {x.shape[1]} columns never change ({which}{', …' if len(constant) > 5 else ''})"
        warnings.warn(f"{told}: they are better left out.", stacklevel=3)


def refuse_other_data(folder, recipe, found):
    if found != read_config(folder)["table"]["data"]:
        raise ValueError(f"{recipe.data} has changed since {folder} was trained on it: put it back, or train anew.")


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
    config = read_config(folder)
    return Recipe(**{f.name: config[f.name] for f in fields(Recipe)})


def changes(found: Any, wanted: Any) -> list[str]:
    """The names of the fields in which two recipes differ."""
    return [f.name for f in fields(wanted) if getattr(found, f.name, None) != getattr(wanted, f.name)]
