"""What a model is: an energy, and the score that follows from it.

A fully visible model (`EBM`) gives its free energy F(v), with p(v) ∝ exp(−F(v)). A latent-variable model (`EBLVM`)
gives E(v, h), with p(v, h) ∝ exp(−E(v, h)). A model may be both, as the Gaussian RBM is. All speak of one example.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .posterior import Posterior

Visible = Float[Array, "..."]
Latent = Float[Array, "..."]
Scalar = Float[Array, ""]
Score = Callable[[Visible], Visible]


class EBM(eqx.Module):
    """p(v) ∝ exp(−F(v))."""

    @abstractmethod
    def free_energy(self, v: Visible) -> Scalar: ...

    def laplacian(self, v: Visible) -> Scalar:
        """tr ∇²F(v): one Hessian-vector product a dimension, unless the model knows a closed form."""
        return trace_of_jacobian(jax.grad(self.free_energy), v)


class EBLVM(eqx.Module):
    """p(v, h) ∝ exp(−E(v, h))."""

    linear_in_h: ClassVar[bool] = False  # E(v, ·) is affine in each unit of h, so that its mean under q is E(v, E[h])

    @abstractmethod
    def energy(self, v: Visible, h: Latent) -> Scalar: ...

    def given(self, v: Visible) -> Callable[[Latent], Scalar]:
        """E(v, ·), with all that depends on v alone computed once. Override it to share an encoder."""
        return lambda h: self.energy(v, h)


def score(model: EBM) -> Score:
    """∇ᵥ log p(v) = −∇F(v), which the partition function does not enter."""
    return lambda v: -jax.grad(model.free_energy)(v)


def surrogate_score(model: EBLVM, posterior: Posterior, h: Latent) -> Score:
    """∇ᵥ log p̃(v, h)/q(h|v) at a fixed h; the score itself where q is the true posterior."""  # Eqn (8)
    return jax.grad(lambda v: -model.energy(v, h) - posterior(v).log_prob(h))


def expected_score(model: EBLVM, posterior: Posterior) -> Score:
    """E_q[∇ᵥ log p̃(v, h)/q(h|v)] = −E_q[∇ᵥE(v, h)], without a sample where the energy is linear in h."""
    # E_q[∇ᵥ log q(h|v)] = 0, and −∇ᵥE(v, ·) is linear too, so that its mean is its value at the mean.
    return lambda v: -jax.grad(model.energy)(v, posterior(v).mean)


def trace_of_jacobian(field: Score, v: Visible) -> Scalar:
    flat = v.ravel()
    on_flat = lambda x: field(x.reshape(v.shape)).ravel()
    columns = jax.vmap(lambda e: jnp.vdot(e, jax.jvp(on_flat, (flat,), (e,))[1]))
    return columns(jnp.eye(flat.size, dtype=flat.dtype)).sum()


def fisher(model: EBM, v: Visible) -> Scalar:
    """½‖∇F(v)‖² − tr ∇²F(v): the Fisher divergence from the data, less a constant of the data alone."""  # Eqn (2)
    return 0.5 * jnp.sum(score(model)(v) ** 2) - model.laplacian(v)
