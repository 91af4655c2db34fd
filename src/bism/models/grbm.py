"""The Gaussian restricted Boltzmann machine: real v, binary h, and everything about it but Z in closed form."""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ..energy import EBLVM, EBM


class GaussianRBM(EBLVM, EBM):
    """E(v, h) = ½ Σ (vᵢ − bᵢ)² e^{−2sᵢ} − cᵀh − vᵀWh.

    Each visible unit has its own log-scale s and the coupling is not divided by σ: this is what the paper's experiments
    ran. `coupling="scaled"` with `shared_scale=True` is the paper's text, a scalar σ and (1/σ) vᵀWh.
    """

    W: Float[Array, "v h"]
    b: Float[Array, " v"]
    c: Float[Array, " h"]
    log_sigma: Float[Array, " v"] | Float[Array, ""]
    coupling: Literal["plain", "scaled"] = eqx.field(static=True)
    linear_in_h = True

    def __init__(
        self,
        v_dim: int,
        h_dim: int,
        *,
        coupling: Literal["plain", "scaled"] = "plain",
        shared_scale: bool = False,
        key: PRNGKeyArray,
    ):
        if v_dim < 1 or h_dim < 1:
            raise ValueError(f"GaussianRBM: v_dim and h_dim must be at least 1, got {v_dim} and {h_dim}.")
        if coupling not in ("plain", "scaled"):
            raise ValueError(f"GaussianRBM: coupling must be 'plain' or 'scaled', got {coupling!r}.")
        bound = h_dim**-0.5
        keys = jax.random.split(key, 3)
        uniform = lambda key, shape: jax.random.uniform(key, shape, minval=-bound, maxval=bound)
        self.W, self.b, self.c = (
            uniform(keys[0], (v_dim, h_dim)),
            uniform(keys[1], (v_dim,)),
            uniform(keys[2], (h_dim,)),
        )
        self.log_sigma = jnp.zeros(() if shared_scale else (v_dim,))
        self.coupling = coupling

    @property
    def weights(self) -> Float[Array, "v h"]:
        """The coupling of v and h: W, or W/σ."""
        if self.coupling == "plain":
            return self.W
        return self.W * jnp.exp(-jnp.broadcast_to(self.log_sigma, self.b.shape))[:, None]

    def quadratic(self, v: Float[Array, " v"]) -> Float[Array, ""]:
        return 0.5 * jnp.sum((v - self.b) ** 2 * jnp.exp(-2 * self.log_sigma))

    def field(self, v: Float[Array, " v"]) -> Float[Array, " h"]:
        """The logits of p(h = 1 | v)."""
        return self.c + v @ self.weights

    def energy(self, v, h):
        return self.given(v)(h)

    def given(self, v):
        quadratic, field = self.quadratic(v), self.field(v)
        return lambda h: quadratic - jnp.vdot(field, h)

    def free_energy(self, v):
        return self.quadratic(v) - jnp.sum(jax.nn.softplus(self.field(v)))

    def laplacian(self, v):
        p = jax.nn.sigmoid(self.field(v))
        precision = jnp.broadcast_to(jnp.exp(-2 * self.log_sigma), self.b.shape)
        return jnp.sum(precision) - jnp.sum(jnp.sum(self.weights**2, 0) * p * (1 - p))

    def mean_v(self, h: Float[Array, " h"]) -> Float[Array, " v"]:
        return self.b + jnp.exp(2 * self.log_sigma) * (self.weights @ h)

    def sample_h(self, v: Float[Array, " v"], key: PRNGKeyArray) -> Float[Array, " h"]:
        return jax.random.bernoulli(key, jax.nn.sigmoid(self.field(v))).astype(v.dtype)

    def sample_v(self, h: Float[Array, " h"], key: PRNGKeyArray) -> Float[Array, " v"]:
        return self.mean_v(h) + jnp.exp(self.log_sigma) * jax.random.normal(key, self.b.shape, self.b.dtype)

    def log_weight(self, h: Float[Array, " h"]) -> Float[Array, ""]:
        """log ∫ exp(−E(v, h)) dv, up to Z the log-probability of h."""
        log_sigma, weights = jnp.broadcast_to(self.log_sigma, self.b.shape), self.weights
        volume = jnp.sum(log_sigma) + 0.5 * self.b.size * jnp.log(2 * jnp.pi)
        # By products of units, which of many h are computed once, and never a vector as long as v for each.
        products = weights.T @ (jnp.exp(2 * log_sigma)[:, None] * weights)
        return volume + jnp.vdot(self.c + self.b @ weights, h) + 0.5 * jnp.vdot(h, products @ h)
