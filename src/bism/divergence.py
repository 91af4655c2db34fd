"""Divergences D(q(h|v) ‖ p(h|v)) of the lower level, computable from E(v, ·) and q alone."""

from abc import abstractmethod
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from .energy import EBLVM, Latent, Scalar, Visible
from .posterior import Distribution, Posterior


class Divergence(eqx.Module):
    particles: eqx.AbstractVar[int]  # samples of h for each v

    def __check_init__(self):
        if self.particles < 1:
            raise ValueError(f"{type(self).__name__}: particles must be at least 1, got {self.particles}.")

    def loss(self, model: EBLVM, v: Visible, q: Distribution, noise: Latent) -> Scalar:
        """An estimate of D(q ‖ p(·|v)), up to a constant of φ, from the noise of `particles` samples."""
        energy = model.given(v)
        return jnp.mean(jax.vmap(lambda one: self.at(energy, q, q.sample(one)))(noise))

    @abstractmethod
    def at(self, energy: Callable[[Latent], Scalar], q: Distribution, h: Latent) -> Scalar:
        """The integrand at one sample, given E(v, ·)."""


class KL(Divergence):
    """KL(q‖p) less log p(v) + log Z, which do not depend on φ: E_q[E(v, h) + log q(h|v)]."""  # Eqn (10)

    # Where the energy is linear in h the expectation is E(v, E_q[h]) − H(q), without sample or relaxation: the default.
    # One relaxed sample, as in the paper, has variance and, its mean not being that of q, a bias that moves φ*
    # away from the true posterior. `exact=False` is the paper's.
    particles: int = eqx.field(static=True, default=1)
    exact: bool = eqx.field(static=True, default=True)

    def loss(self, model, v, q, noise):
        if self.exact and model.linear_in_h:
            return model.given(v)(q.mean) - q.entropy()
        return super().loss(model, v, q, noise)

    def at(self, energy, q, h):
        return energy(h) + q.log_prob(h)


class Fisher(Divergence):
    """½ E_q‖∇ₕ log q(h|v) + ∇ₕE(v, h)‖². Its value is the divergence itself, so that it also measures q."""  # Eqn (11)

    particles: int = eqx.field(static=True, default=1)

    def at(self, energy, q, h):
        return 0.5 * jnp.sum(jax.grad(lambda h: -energy(h) - q.log_prob(h))(h) ** 2)


def fisher_of_posterior(
    model: EBLVM, posterior: Posterior, v: Float[Array, "batch ..."], key: PRNGKeyArray, particles: int = 8
) -> Scalar:
    """The mean over v of D_F(q(h|v) ‖ p(h|v)), a hundred at a time: for continuous latents."""
    noise = eqx.filter_eval_shape(posterior, v[0]).noise(key, (len(v), particles))
    one = lambda at: Fisher(particles).loss(model, at[0], posterior(at[0]), at[1])
    return jnp.mean(jax.lax.map(one, (v, noise), batch_size=100))
