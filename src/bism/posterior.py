"""The variational posterior q(h|v; φ): a network that maps one v to a distribution over h.

Sampling is a pure function of explicit noise, so that every gradient of a sample is the reparameterised one.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

Latent = Float[Array, "..."]
Scalar = Float[Array, ""]


class Distribution(eqx.Module):
    """A distribution over one h."""

    discrete: ClassVar[bool]

    @abstractmethod
    def noise(self, key: PRNGKeyArray, lead: tuple[int, ...] = ()) -> Latent:
        """Noise for `lead` samples; it depends on the parameters' shapes alone."""

    @abstractmethod
    def sample(self, noise: Latent) -> Latent: ...

    @abstractmethod
    def log_prob(self, h: Latent) -> Scalar: ...

    @abstractmethod
    def entropy(self) -> Scalar: ...

    @property
    @abstractmethod
    def mean(self) -> Latent: ...

    @abstractmethod
    def metric(self, tangent: Any) -> "Distribution":
        """The Fisher information of the parameters times a tangent of them: KL's Hessian where q is the posterior."""


class Gaussian(Distribution):
    loc: Latent
    log_std: Latent
    discrete = False

    @property
    def mean(self):
        return self.loc

    def noise(self, key, lead=()):
        return jax.random.normal(key, lead + self.loc.shape, self.loc.dtype)

    def sample(self, noise):
        return self.loc + jnp.exp(self.log_std) * noise

    def log_prob(self, h):
        z = (h - self.loc) * jnp.exp(-self.log_std)
        return jnp.sum(-0.5 * z**2 - self.log_std - 0.5 * jnp.log(2 * jnp.pi))

    def metric(self, tangent):
        return Gaussian(jnp.exp(-2 * self.log_std) * tangent.loc, 2 * tangent.log_std)

    def entropy(self):
        return jnp.sum(self.log_std + 0.5 * jnp.log(2 * jnp.pi * jnp.e))


class Bernoulli(Distribution):
    """Independent bits, sampled by the Gumbel-softmax relaxation."""

    logits: Latent
    temperature: float = eqx.field(static=True, default=0.1)
    straight_through: bool = eqx.field(static=True, default=False)
    discrete = True

    @property
    def mean(self):
        return jax.nn.sigmoid(self.logits)

    def noise(self, key, lead=()):
        return jax.random.logistic(key, lead + self.logits.shape, self.logits.dtype)

    def sample(self, noise):
        soft = jax.nn.sigmoid((self.logits + noise) / self.temperature)
        if self.straight_through:
            return soft + jax.lax.stop_gradient((soft > 0.5).astype(soft.dtype) - soft)
        return soft

    def log_prob(self, h):
        # The Bernoulli mass at a relaxed h, not the density of the relaxed variable: the two agree at the corners.
        return jnp.sum(h * self.logits - jax.nn.softplus(self.logits))

    def metric(self, tangent):
        p = self.mean
        return Bernoulli(p * (1 - p) * tangent.logits, self.temperature, self.straight_through)

    def entropy(self):
        return jnp.sum(jax.nn.softplus(self.logits) - self.mean * self.logits)


class Posterior(eqx.Module):
    """v ↦ q(·|v)."""

    discrete: ClassVar[bool]

    @abstractmethod
    def __call__(self, v: Float[Array, "..."]) -> Distribution: ...


class GaussianPosterior(Posterior):
    """q(h|v) = N(mean, diag exp(2 log_std)); `net` returns the pair (mean, log_std)."""

    net: Callable
    discrete = False

    def __call__(self, v):
        mean, log_std = self.net(v)
        return Gaussian(mean, log_std)

    @classmethod
    def mlp(cls, v_dim: int, h_dim: int, *, width: int = 64, depth: int = 2, key: PRNGKeyArray) -> "GaussianPosterior":
        return cls(_Halves(eqx.nn.MLP(v_dim, 2 * h_dim, width, depth, jax.nn.silu, key=key)))


class _Halves(eqx.Module):
    """One output vector, read as (mean, log_std)."""

    net: eqx.nn.MLP

    def __call__(self, v):
        mean, log_std = jnp.split(self.net(v), 2)
        return mean, log_std


class BernoulliPosterior(Posterior):
    """q(h|v) = ∏ Bernoulli(sigmoid(logits)); `net` returns the logits."""

    net: Callable
    temperature: float = eqx.field(static=True, default=0.1)
    straight_through: bool = eqx.field(static=True, default=False)
    discrete = True

    def __call__(self, v):
        return Bernoulli(self.net(v), self.temperature, self.straight_through)

    @classmethod
    def linear(cls, v_dim: int, h_dim: int, *, temperature: float = 0.1, straight_through: bool = False, key):
        """One linear layer of logits: the paper's posterior for a Gaussian RBM."""
        return cls(eqx.nn.Linear(v_dim, h_dim, key=key), temperature, straight_through)

    @classmethod
    def mlp(cls, v_dim: int, h_dim: int, *, width: int = 64, depth: int = 2, key: PRNGKeyArray) -> "BernoulliPosterior":
        return cls(eqx.nn.MLP(v_dim, h_dim, width, depth, jax.nn.silu, key=key))
