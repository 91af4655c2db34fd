"""log Z, and with it log-likelihoods: by enumeration, by quadrature in the plane, by importance sampling over h."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from .energy import EBLVM, EBM
from .models.grbm import GaussianRBM
from .posterior import Posterior

ENUMERABLE = 20


def states(units: int) -> Float[Array, "states units"]:
    """All binary vectors of a length."""
    if units > ENUMERABLE:
        raise ValueError(f"{units} hidden units have 2^{units} states; enumeration stops at {ENUMERABLE}. Use AIS.")
    return ((jnp.arange(2**units)[:, None] >> jnp.arange(units)[None]) & 1).astype(float)


def log_partition(model: GaussianRBM) -> Float[Array, ""]:
    """log Z of a Gaussian RBM, exactly: v is integrated in closed form for each of the 2^h states of h."""
    return jax.nn.logsumexp(jax.vmap(model.log_weight)(states(model.c.size)))


def log_likelihood(model: GaussianRBM, v: Float[Array, "batch v"]) -> Float[Array, " batch"]:
    return -jax.vmap(model.free_energy)(v) - log_partition(model)


class Grid(eqx.Module):
    """A rectangle of the plane in cells, for quadrature by the midpoint rule and for pictures of densities."""

    low: tuple[float, float] = eqx.field(static=True, default=(-1.0, -1.0))
    high: tuple[float, float] = eqx.field(static=True, default=(2.0, 2.0))
    cells: int = eqx.field(static=True, default=200)

    @property
    def points(self) -> Float[Array, "cells*cells 2"]:
        """Midpoints of the cells, x fastest."""
        width = (jnp.asarray(self.high) - jnp.asarray(self.low)) / self.cells
        x, y = (self.low[i] + width[i] * (jnp.arange(self.cells) + 0.5) for i in range(2))
        return jnp.stack(jnp.meshgrid(x, y), -1).reshape(-1, 2)

    @property
    def log_area(self) -> Float[Array, ""]:
        """of one cell"""
        return jnp.sum(jnp.log((jnp.asarray(self.high) - jnp.asarray(self.low)) / self.cells))

    def log_integral(self, log_values: Float[Array, " points"]) -> Float[Array, ""]:
        return jax.nn.logsumexp(log_values) + self.log_area

    def log_density(self, free_energy: Callable[[Array], Array]) -> Float[Array, "cells cells"]:
        """−F(v) − log Z on the grid, with Z the integral over the rectangle: it must hold nearly all of the mass."""
        values = -jax.lax.map(free_energy, self.points, batch_size=4096)
        return (values - self.log_integral(values)).reshape(self.cells, self.cells)


def marginal(model: EBLVM, posterior: Posterior, key: PRNGKeyArray, particles: int = 256) -> Callable[[Array], Array]:
    """F̂(v) = −log 1/S Σ exp(−E(v, hₛ) − log q(hₛ|v)), hₛ ~ q: an upper bound of F(v) that is tight as S grows."""

    def free_energy(v: Float[Array, "..."]) -> Float[Array, ""]:
        q, energy = posterior(v), model.given(v)
        h = jax.vmap(q.sample)(q.noise(key, (particles,)))
        if posterior.discrete:
            h = jnp.round(h)  # the relaxed bit is over one half exactly as often as the bit is one
        weights = jax.vmap(lambda h: -energy(h) - q.log_prob(h))(h)
        return jnp.log(particles) - jax.nn.logsumexp(weights)

    return free_energy


def free_energy_of(model: EBM | EBLVM, posterior: Posterior | None, key: PRNGKeyArray) -> Callable[[Array], Array]:
    """The model's own F(v), or the estimate of it that q gives."""
    if isinstance(model, EBM):
        return model.free_energy
    if posterior is None:
        raise ValueError(f"{type(model).__name__} has no free energy of its own; give a posterior to estimate it with.")
    return marginal(model, posterior, key)
