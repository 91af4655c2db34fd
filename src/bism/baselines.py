"""What the paper compares BiSM with: score matching, contrastive divergence, NCE and VNCE; exact maximum likelihood."""

from collections.abc import Callable
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from .checks import check_latent_model, check_visible_model
from .descent import descend
from .energy import EBLVM, EBM, score
from .likelihood import log_partition
from .method import Method, parameters
from .models.grbm import GaussianRBM
from .objective import Objective
from .posterior import Posterior
from .sampling import Gibbs, Kernel

Optimizer = optax.GradientTransformation


class ScoreMatching(Method):
    """Classic score matching of a model with a tractable free energy: any objective, on −∇F(v)."""

    objective: Objective

    def init(self, model, posterior=None, *, batch, key):
        check_visible_model("ScoreMatching", model, batch[0])
        return self.start(model)

    def loss(self, model: EBM, batch, key) -> Float[Array, ""]:
        v, noise = self.objective.perturb(batch, key)
        return jnp.mean(jax.vmap(lambda v, noise: self.objective.loss(score(model), v, noise))(v, noise))

    def step(self, state, batch, key):
        loss, gradient = eqx.filter_value_and_grad(self.loss)(state.model, batch, key)
        return self.ascend(state, (gradient, None)), {"loss": loss}

    def validate(self, state, batch, key):
        return self.loss(state.best, batch, key)


class MaximumLikelihood(Method):
    """Exact maximum likelihood by enumeration of h: the ceiling of a small Gaussian RBM."""

    def init(self, model, posterior=None, *, batch, key):
        if not isinstance(model, GaussianRBM):
            raise TypeError(f"MaximumLikelihood enumerates a Gaussian RBM; {type(model).__name__} is none.")
        check_visible_model("MaximumLikelihood", model, batch[0])
        log_partition(model)  # refuses what cannot be enumerated
        return self.start(model)

    def loss(self, model: GaussianRBM, batch) -> Float[Array, ""]:
        return jnp.mean(jax.vmap(model.free_energy)(batch)) + log_partition(model)

    def step(self, state, batch, key):
        loss, gradient = eqx.filter_value_and_grad(self.loss)(state.model, batch)
        return self.ascend(state, (gradient, None)), {"loss": loss}

    def validate(self, state, batch, key):
        return self.loss(state.best, batch)


class ContrastiveDivergence(Method):
    """The gradient of F(data) − F(samples) after k steps of a chain, from the data (CD-k) or its last end (PCD-k)."""

    steps: int = eqx.field(static=True, default=1)
    persistent: bool = eqx.field(static=True, default=False)
    kernel: Callable[[EBM], Kernel] = eqx.field(static=True, default=Gibbs)

    def __check_init__(self):
        if self.steps < 1:
            raise ValueError(f"ContrastiveDivergence: steps (k) must be at least 1, got {self.steps}.")

    def init(self, model, posterior=None, *, batch, key):
        check_visible_model("ContrastiveDivergence", model, batch[0])
        if self.kernel is Gibbs and not isinstance(model, GaussianRBM):
            raise TypeError(
                f"Gibbs sampling needs a Gaussian RBM, not {type(model).__name__}; give ContrastiveDivergence a "
                "kernel=lambda model: bism.Langevin(model.free_energy, step=...)."
            )
        return replace(self.start(model), memory=batch if self.persistent else None)

    def negatives(self, model, start, key):
        kernel = self.kernel(model)

        def move(states, key):
            return jax.vmap(lambda k, s: kernel(k, s)[0])(jax.random.split(key, len(start)), states), None

        states, _ = jax.lax.scan(move, jax.vmap(kernel.init)(start), jax.random.split(key, self.steps))
        return jax.lax.stop_gradient(states)

    def loss(self, model: EBM, batch, negatives) -> Float[Array, ""]:
        return jnp.mean(jax.vmap(model.free_energy)(batch)) - jnp.mean(jax.vmap(model.free_energy)(negatives))

    def step(self, state, batch, key):
        negatives = self.negatives(state.model, state.memory if self.persistent else batch, key)
        loss, gradient = eqx.filter_value_and_grad(self.loss)(state.model, batch, negatives)
        state = self.ascend(state, (gradient, None))
        return replace(state, memory=negatives if self.persistent else None), {"loss": loss}

    def validate(self, state, batch, key):
        return self.loss(state.best, batch, self.negatives(state.best, batch, key))


def log_normal(v: Array) -> Float[Array, ""]:
    """log N(v; 0, I), the noise that data are told from."""
    return -0.5 * jnp.sum(v**2) - 0.5 * v.size * jnp.log(2 * jnp.pi)


def discriminate(log_data: Array, log_noise: Array, nu: float) -> Float[Array, ""]:
    """The logistic loss of telling data from ν times as much noise by log p/(ν pₙ), at one point of each."""
    return -(jax.nn.log_sigmoid(log_data - jnp.log(nu)) + nu * jax.nn.log_sigmoid(jnp.log(nu) - log_noise))


class NCE(Method):
    """Noise-contrastive estimation against N(0, I), the log-normaliser learned. `memory` is that normaliser."""

    nu: float = eqx.field(static=True, default=1.0)

    def __check_init__(self):
        if not self.nu > 0:
            raise ValueError(f"NCE: nu, the ratio of noise to data, must be positive, got {self.nu}.")

    def init(self, model, posterior=None, *, batch, key):
        check_visible_model("NCE", model, batch[0])
        return self.start(model, memory=jnp.zeros(()))

    def loss(self, learned: tuple[EBM, Array], batch, noise) -> Float[Array, ""]:
        model, log_z = learned

        def log_ratio(v):
            return -model.free_energy(v) - log_z - log_normal(v)

        return jnp.mean(jax.vmap(lambda v, y: discriminate(log_ratio(v), log_ratio(y), self.nu))(batch, noise))

    def step(self, state, batch, key):
        noise = jax.random.normal(key, batch.shape, batch.dtype)
        loss, gradient = eqx.filter_value_and_grad(self.loss)((state.model, state.memory), batch, noise)
        return self.ascend(state, gradient, state.memory), {"loss": loss}

    def validate(self, state, batch, key):
        return self.loss((state.best, state.learned), batch, jax.random.normal(key, batch.shape, batch.dtype))


class VNCE(Method):
    """Variational NCE (Rhodes & Gutmann, 2019): NCE for p(v, h), with q(h|v) in place of the posterior."""

    particles: int = eqx.field(static=True, default=5)
    lower_steps: int = eqx.field(static=True, default=5)
    nu: float = eqx.field(static=True, default=1.0)
    lower_optimizer: Optimizer | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        if self.particles < 1 or self.lower_steps < 0 or not self.nu > 0:
            raise ValueError("VNCE: particles must be at least 1, lower_steps not negative and nu positive.")

    def init(self, model, posterior=None, *, batch, key):
        check_latent_model("VNCE", model, posterior, batch[0])
        state = self.start(model, posterior, memory=jnp.zeros(()))
        return replace(state, lower_opt_state=self._lower_optimizer.init(parameters(posterior)))

    def lower(self, posterior: Posterior, model: EBLVM, batch, noise) -> Float[Array, ""]:
        """−log 1/S Σ p̃(v, hₛ)/q(hₛ|v), whose minimum over φ is the tightest bound."""
        return -jnp.mean(jax.vmap(lambda v, n: log_evidence(model, posterior, v, n))(batch, noise))

    def loss(self, learned: tuple[EBLVM, Array], posterior, batch, data_noise, noise, noise_noise) -> Float[Array, ""]:
        """`data_noise` is of one particle at each datum, `noise_noise` of several at each point of `noise`."""
        model, log_z = learned

        def one(v, v_noise, y, y_noise):
            data = log_evidence(model, posterior, v, v_noise) - log_z - log_normal(v)
            return discriminate(data, log_evidence(model, posterior, y, y_noise) - log_z - log_normal(y), self.nu)

        return jnp.mean(jax.vmap(one)(batch, data_noise, noise, noise_noise))

    def draw(self, posterior, batch, key):
        keys = jax.random.split(key, 3)
        q = eqx.filter_eval_shape(posterior, batch[0])
        noise = jax.random.normal(keys[0], batch.shape, batch.dtype)
        data_noise, noise_noise = q.noise(keys[1], (len(batch), 1)), q.noise(keys[2], (len(batch), self.particles))
        return batch, data_noise, noise, noise_noise

    def step(self, state, batch, key):
        lower_key, upper_key = jax.random.split(key)
        q = eqx.filter_eval_shape(state.posterior, batch[0])
        noise = q.noise(lower_key, (self.lower_steps, len(batch), self.particles))
        phi, frame = eqx.partition(state.posterior, eqx.is_inexact_array)

        loss = lambda phi, noise: self.lower(eqx.combine(phi, frame), state.model, batch, noise)
        phi, opt_state, _ = descend(loss, self._lower_optimizer, phi, state.lower_opt_state, noise)
        posterior = eqx.combine(phi, frame)
        draw = self.draw(posterior, batch, upper_key)
        value, gradient = eqx.filter_value_and_grad(self.loss)((state.model, state.memory), posterior, *draw)
        state = replace(state, posterior=posterior, lower_opt_state=opt_state)
        return self.ascend(state, gradient, state.memory), {"loss": value}

    def validate(self, state, batch, key):
        draw = self.draw(state.q, batch, key)
        return self.loss((state.best, state.learned), state.q, *draw)

    @property
    def _lower_optimizer(self):
        return self.lower_optimizer or self.optimizer


def log_evidence(model: EBLVM, posterior: Posterior, v, noise) -> Float[Array, ""]:
    """log 1/S Σ p̃(v, hₛ)/q(hₛ|v) at the samples of explicit noise."""
    q, energy = posterior(v), model.given(v)
    h = jax.vmap(q.sample)(noise)
    return jax.nn.logsumexp(jax.vmap(lambda h: -energy(h) - q.log_prob(h))(h)) - jnp.log(len(noise))
