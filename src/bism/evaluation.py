"""What can be drawn from and measured of a run of `bism train` on a table, whatever its model."""

import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from .ais import ais, exact_samples, reverse_ais
from .baselines import ContrastiveDivergence
from .bilevel import BiSM
from .data import digest
from .diagnosis import Diagnosis, diagnose
from .divergence import KL, fisher_of_posterior
from .energy import EBLVM, EBM, fisher
from .likelihood import ENUMERABLE, Grid, free_energy_of, log_partition
from .models import GaussianRBM
from .progress import Progress
from .recipe import Recipe, Scale, read_config, recipe_of, refuse_other_data
from .response import ConjugateGradient, NaturalGradient
from .training import Run, load

CHAINS = 10_000  # at once


class Trained(NamedTuple):
    """A run of a recipe, brought back: the data are needed only for what is measured on them."""

    folder: Path
    recipe: Recipe
    run: Run  # as it was when its validation loss was least
    scale: Scale

    @classmethod
    def of(cls, folder: Path, data: str = "") -> "Trained":
        """`data`: where they are, if not where they were."""
        recipe, scale = recipe_of(folder), Scale.kept(read_config(folder)["table"])
        recipe = replace(recipe, data=data or recipe.data)
        run = load(folder, *recipe.build(scale.shift.size))
        # The losses of contrastive divergence are of its own chains, and say nothing of the model.
        return cls(folder, recipe, run if isinstance(run.method, ContrastiveDivergence) else run.at_best(), scale)

    def split(self) -> tuple[np.ndarray, np.ndarray | None]:
        """The two parts of the data, in their own units, if they are still what the run was trained on."""
        if Path(self.recipe.data).suffix and not Path(self.recipe.data).exists():
            raise FileNotFoundError(f"{self.folder} was trained on {self.recipe.data}, which is gone: give --data.")
        parts = self.recipe.split()
        refuse_other_data(self.folder, self.recipe, digest(parts[0]))
        return parts

    def draw(self, count: int, seed: int = 0, steps: int = 2000, progress: bool = False) -> np.ndarray:
        """Samples in the data's own units, so many chains at once as memory is sure to have."""
        found = np.empty((count, self.scale.shift.size))
        bar = Progress(count, "sampling" if progress else False, rate=lambda rate: f"{rate:,.0f} samples/s")
        begun, key = time.perf_counter(), jax.random.key(seed)
        try:
            for at in range(0, count, CHAINS):
                v = self.run.sample(jax.random.fold_in(key, at), min(count, CHAINS), steps=steps)
                found[at : at + CHAINS] = self.scale.undo(np.asarray(v))[: count - at]
                done = min(at + CHAINS, count)
                bar.update(done, done / (time.perf_counter() - begun), {})
        finally:
            bar.close()
        return found

    def latents(self, v: np.ndarray) -> np.ndarray:
        """Posterior means."""
        return np.asarray(jax.vmap(lambda v: self.run.posterior(v).mean)(jnp.asarray(self.scale.apply(v))))


def evaluate(trained: Trained, train_set: np.ndarray, held_out: np.ndarray | None) -> dict[str, float]:
    """Named figures of a run on its held-out data (on the training data if none were held out)."""
    recipe, run, scale = trained.recipe, trained.run, trained.scale
    v = jnp.asarray(scale.apply(train_set[:2048] if held_out is None else held_out[:2048]))
    keys = jax.random.split(jax.random.key(recipe.seed), 3)
    model, posterior = run.model, run.posterior
    found = {"own loss": eqx.filter_jit(run.method.validate)(run.state, v, keys[0])}
    if isinstance(model, EBM) and v.shape[1] <= 64:
        found["Fisher divergence, less a constant"] = jax.vmap(lambda v: fisher(model, v))(v).mean()
    if posterior is not None and not posterior.discrete and isinstance(model, EBLVM):
        found["Fisher divergence of q from the posterior"] = fisher_of_posterior(model, posterior, v, keys[1])
    log_likelihood = held_out_log_likelihood(run, scale, v)
    if log_likelihood is not None:
        found["log-likelihood"] = jnp.asarray(log_likelihood)
    if isinstance(model, GaussianRBM):
        found |= annealed(model, scale, v, keys[2])
    return {name: float(value) for name, value in found.items()}


def diagnose_run(folder: Path, data: str = "") -> Diagnosis:
    """The gradient bias of a bi-level run, on one batch of its training data."""
    trained = Trained.of(folder, data)
    recipe, run = trained.recipe, trained.run
    if not isinstance(run.method, BiSM):
        raise ValueError(f"{folder} was trained by {recipe.method}, which has no lower level to diagnose.")
    batch = jnp.asarray(trained.scale.apply(trained.split()[0][: recipe.batch_size]))
    exact = isinstance(run.method.divergence, KL)
    implicit = (NaturalGradient(), ConjugateGradient()) if exact else (ConjugateGradient(),)
    return diagnose(run.method, run.state, batch, jax.random.key(recipe.seed), implicit=implicit)


def held_out_log_likelihood(run: Run, scale: Scale, v: jax.Array) -> float | None:
    """The mean of log p(v) in the data's own units, where Z can be had: few binary latents, or the plane."""
    model = run.model
    if isinstance(model, GaussianRBM) and model.c.size <= ENUMERABLE:
        values = -jax.vmap(model.free_energy)(v) - log_partition(model)
    elif v.shape[1] == 2 and scale.scale.all():
        free_energy = free_energy_of(model, run.posterior, jax.random.key(0))
        grid = plane(v)
        log_z = grid.log_integral(-jax.lax.map(free_energy, grid.points, batch_size=1024))
        values = -jax.vmap(free_energy)(v) - log_z
    else:
        return None
    return float(values.mean()) - scale.log_volume


def annealed(model: GaussianRBM, scale: Scale, v: jax.Array, key: PRNGKeyArray, chains: int = 500) -> dict[str, Any]:
    """The log-likelihood by AIS and what tells whether to trust it; where the model can be sampled exactly, a bound.

    AIS tends to find too small a Z and too large a likelihood, its reversal the opposite.
    """
    unnormalised = float(-jax.vmap(model.free_energy)(v).mean()) - scale.log_volume
    try:
        z = ais(model, key, chains=chains)
    except FloatingPointError as error:
        warnings.warn(f"No log-likelihood by AIS. {error}", stacklevel=3)
        return {}
    found = {
        "log-likelihood by AIS": unnormalised - z.log_z,
        "log-likelihood by AIS, at least (95 %)": unnormalised - z.high,
        "log-likelihood by AIS, at most (95 %)": unnormalised - z.low,
        f"AIS: chains worth, of {chains}": z.effective,
    }
    if model.c.size <= ENUMERABLE:
        back_key, exact_key = jax.random.split(jax.random.fold_in(key, 1))
        back = reverse_ais(model, back_key, exact_samples(model, exact_key, chains))
        found["log-likelihood by reverse AIS"] = unnormalised - back.log_z
    if not z.trusted:
        warnings.warn(
            f"AIS cannot be trusted here: its {chains} chains are worth {z.effective:.1f}, and the log-likelihood is "
            "likely too high. Use bism.ais(run.model, key, chains=..., temperatures=...) with more of both.",
            stacklevel=3,
        )
    return found


def plane(v: jax.Array | np.ndarray, cells: int = 160) -> Grid:
    """A rectangle twice as wide as the data."""
    low, high = np.asarray(v.min(0)), np.asarray(v.max(0))
    margin = 0.5 * (high - low)
    return Grid(tuple((low - margin).tolist()), tuple((high + margin).tolist()), cells)
