"""Models and posteriors of the golden files, a latent-variable model known in closed form, and how closely to agree."""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from bism import EBLVM, EBM, BernoulliPosterior, GaussianPosterior, GaussianRBM

THETA = ("b", "c", "W", "log_sigma")


def quick_jit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """For what is called once, and compiles longer than it runs."""
    return eqx.filter_jit(fn, compiler_options={"xla_backend_optimization_level": 0})  # pyright: ignore[reportCallIssue]


def each(fn, *args):
    """`fn` of each example."""
    return quick_jit(lambda *args: jax.vmap(fn)(*args))(*(jnp.asarray(x) for x in args))


def close(actual, expected, rtol=1e-9, of_largest=None):
    """Every entry within `rtol` of its own size, or `of_largest` (a thousandth of that) of the array's largest."""
    largest = np.max(np.abs(expected), initial=0)
    np.testing.assert_allclose(actual, expected, rtol, (1e-3 * rtol if of_largest is None else of_largest) * largest)


def grbm(arrays: Mapping) -> GaussianRBM:
    model = GaussianRBM(*arrays["W"].shape, key=jax.random.key(0))
    return eqx.tree_at(lambda m: [getattr(m, name) for name in THETA], model, [jnp.asarray(arrays[n]) for n in THETA])


def linear_posterior(weight, bias, temperature=0.1, straight_through=False) -> BernoulliPosterior:
    net = eqx.nn.Linear(weight.shape[1], weight.shape[0], key=jax.random.key(0))
    net = eqx.tree_at(lambda net: (net.weight, net.bias), net, (jnp.asarray(weight), jnp.asarray(bias)))
    return BernoulliPosterior(net, float(temperature), straight_through)


def golden_posterior(arrays: Mapping) -> BernoulliPosterior:
    return linear_posterior(arrays["posterior_weight"], arrays["posterior_bias"], arrays["temperature"])


def exact_posterior(model: GaussianRBM) -> BernoulliPosterior:
    """p(h|v) of a Gaussian RBM, which the linear posterior can be."""
    return linear_posterior(model.weights.T, model.c)


def random_grbm(v_dim, h_dim, seed=0, **settings) -> GaussianRBM:
    """A Gaussian RBM with all of its parameters away from zero."""
    model = GaussianRBM(v_dim, h_dim, key=jax.random.key(seed), **settings)
    log_sigma = 0.3 * jax.random.normal(jax.random.key(seed + 1), model.log_sigma.shape) - 0.1
    return eqx.tree_at(lambda m: m.log_sigma, model, log_sigma)


class GaussianEBLVM(EBLVM, EBM):
    """E(v, h) = ½ Σ aᵢvᵢ² + ½ Σ λⱼhⱼ² − hᵀMv − bᵀv − mᵀh: p(h|v), with independent units, and p(v) are Gaussian."""

    log_a: jax.Array
    log_lambda: jax.Array
    M: jax.Array
    b: jax.Array
    m: jax.Array

    def energy(self, v, h):
        quadratic = jnp.sum(jnp.exp(self.log_a) * v**2) + jnp.sum(jnp.exp(self.log_lambda) * h**2)
        return 0.5 * quadratic - h @ self.M @ v - self.b @ v - self.m @ h

    def free_energy(self, v):
        pull, scale = self.M @ v + self.m, jnp.exp(-self.log_lambda)
        of_h = 0.5 * jnp.sum(pull**2 * scale + jnp.log(2 * jnp.pi * scale))
        return 0.5 * jnp.sum(jnp.exp(self.log_a) * v**2) - self.b @ v - of_h

    @property
    def covariance(self):
        """of v"""
        return jnp.linalg.inv(jnp.diag(jnp.exp(self.log_a)) - self.M.T @ jnp.diag(jnp.exp(-self.log_lambda)) @ self.M)

    @property
    def mean(self):
        """of v"""
        return self.covariance @ (self.b + self.M.T @ (self.m * jnp.exp(-self.log_lambda)))


def gaussian_eblvm() -> GaussianEBLVM:
    return GaussianEBLVM(
        log_a=jnp.log(jnp.array([1.5, 2.0])),
        log_lambda=jnp.log(jnp.array([1.2, 0.8, 2.0])),
        M=jnp.array([[0.6, -0.3], [0.2, 0.7], [-0.5, 0.4]]),
        b=jnp.array([0.3, -0.2]),
        m=jnp.array([0.1, -0.4, 0.5]),
    )


class Affine(eqx.Module):
    """(mean, log_std) of h: an affine map of v, and a constant."""

    weight: jax.Array
    bias: jax.Array
    log_std: jax.Array

    def __call__(self, v):
        return self.weight @ v + self.bias, self.log_std


def true_posterior(model: GaussianEBLVM) -> GaussianPosterior:
    scale = jnp.exp(-model.log_lambda)
    return GaussianPosterior(Affine(scale[:, None] * model.M, scale * model.m, -0.5 * model.log_lambda))


def other_posterior(model: GaussianEBLVM) -> GaussianPosterior:
    """Not p(h|v)."""
    return jax.tree.map(lambda x: 0.7 * x + 0.2, true_posterior(model))


def two_points(count: int, h_dim: int):
    """Noise of two particles whose mean is exactly that of N(0, I), for whatever is quadratic in each unit alone."""
    return jnp.broadcast_to(jnp.array([1.0, -1.0])[None, :, None], (count, 2, h_dim))
