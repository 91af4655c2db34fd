"""Score matching objectives F(s, ε, v).

An objective sees a score function s and not where it came from: the score of a tractable model gives classic score
matching, the surrogate score of a latent-variable model gives its bi-level form. Every loss has the factor ½ and is a
sum over dimensions; the library averages over the batch.
"""

from abc import abstractmethod
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from .energy import Scalar, Score, Visible, trace_of_jacobian

Batch = Float[Array, "batch ..."]


class Objective(eqx.Module):
    @abstractmethod
    def perturb(self, batch: Batch, key: PRNGKeyArray) -> tuple[Batch, Any]:
        """The points at which the score is taken, and the noise that `loss` needs with each of them."""

    @abstractmethod
    def loss(self, score: Score, v: Visible, noise: Any) -> Scalar: ...

    def lower_weight(self, noise: Any) -> Scalar | float:
        """The weight of this example in the lower level's divergence."""
        return 1.0


class SM(Objective):
    """Exact score matching, ½‖s‖² + tr ∇s. One Jacobian-vector product a dimension: for low dimensions."""  # Eqn (2)

    def perturb(self, batch, key):
        return batch, None

    def loss(self, score, v, noise):
        return 0.5 * jnp.sum(score(v) ** 2) + trace_of_jacobian(score, v)


class SSM(Objective):
    """Sliced score matching, ½‖s‖² + E[uᵀ(∇s)u], with E[uuᵀ] = I for every kind of direction."""  # Eqn (3)

    directions: Literal["rademacher", "gaussian", "sphere"] = eqx.field(static=True, default="rademacher")
    projections: int = eqx.field(static=True, default=1)

    def __check_init__(self):
        if self.directions not in ("rademacher", "gaussian", "sphere"):
            raise ValueError(
                f"SSM: unknown directions {self.directions!r}; choose 'rademacher', 'gaussian' or 'sphere'."
            )
        if self.projections < 1:
            raise ValueError(f"SSM: projections must be at least 1, got {self.projections}.")

    def perturb(self, batch, key):
        shape = (batch.shape[0], self.projections, *batch.shape[1:])
        if self.directions == "rademacher":
            return batch, jax.random.rademacher(key, shape, batch.dtype)
        u = jax.random.normal(key, shape, batch.dtype)
        if self.directions == "sphere":
            axes = tuple(range(2, u.ndim))
            u = u * jnp.sqrt(batch[0].size / jnp.sum(u**2, axes, keepdims=True))
        return batch, u

    def loss(self, score, v, noise):
        def curvature(u):
            return jnp.sum(u * jax.jvp(score, (v,), (u,))[1])

        if self.projections == 1:
            s, along = jax.jvp(score, (v,), (noise[0],))
            return 0.5 * jnp.sum(s**2) + jnp.sum(noise[0] * along)
        return 0.5 * jnp.sum(score(v) ** 2) + jax.vmap(curvature)(noise).mean()


class DSM(Objective):
    """Denoising score matching, ½‖s(v + σε) + ε/σ‖²."""  # Eqn (4)

    sigma: float = eqx.field(static=True)

    def __check_init__(self):
        if not self.sigma > 0:
            raise ValueError(f"DSM: sigma must be positive, got {self.sigma}.")

    def perturb(self, batch, key):
        eps = jax.random.normal(key, batch.shape, batch.dtype)
        return batch + self.sigma * eps, eps

    def loss(self, score, v, noise):
        return 0.5 * jnp.sum((score(v) + noise / self.sigma) ** 2)


class MDSM(Objective):
    """Multiscale denoising score matching, ½‖s(v + σᵢε)/σᵢ + ε/σ₀²‖² with a fixed grid of levels over the batch."""

    # Eqn (5) draws σ at random and lacks the factor 1/σ. Li et al.'s objective, as the paper ran it, has both the
    # factor and the grid: the i-th of a shuffled batch gets the i-th level, which is the same prior with less variance.
    sigma_min: float = eqx.field(static=True, default=0.05)
    sigma_max: float = eqx.field(static=True, default=1.2)
    sigma0: float = eqx.field(static=True, default=0.1)
    spacing: Literal["linear", "geometric"] = eqx.field(static=True, default="linear")

    def __check_init__(self):
        if not (0 < self.sigma_min <= self.sigma_max and self.sigma0 > 0):
            raise ValueError("MDSM: needs 0 < sigma_min <= sigma_max and sigma0 > 0.")
        if self.spacing not in ("linear", "geometric"):
            raise ValueError(f"MDSM: unknown spacing {self.spacing!r}; choose 'linear' or 'geometric'.")

    def levels(self, count: int) -> Float[Array, "count"]:
        space = jnp.linspace if self.spacing == "linear" else jnp.geomspace
        return space(self.sigma_min, self.sigma_max, count)

    def perturb(self, batch, key):
        eps = jax.random.normal(key, batch.shape, batch.dtype)
        levels = self.levels(batch.shape[0])
        if len(batch) == 1:  # no grid: at random, as in the equation
            levels = self.levels(1000)[jax.random.randint(jax.random.fold_in(key, 1), (1,), 0, 1000)]
        sigma = levels.astype(batch.dtype)
        return batch + sigma.reshape(-1, *[1] * (batch.ndim - 1)) * eps, (eps, sigma)

    def loss(self, score, v, noise):
        eps, sigma = noise
        return 0.5 * jnp.sum((score(v) / sigma + eps / self.sigma0**2) ** 2)

    def lower_weight(self, noise):
        return 1 / noise[1]
