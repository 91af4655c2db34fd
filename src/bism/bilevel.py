"""Bi-level score matching (Bao et al., NeurIPS 2020), Algorithm 1."""

from dataclasses import replace
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from .checks import check_differentiable, check_latent_model
from .divergence import KL, Divergence, Fisher
from .energy import EBLVM, surrogate_score
from .hoist import hoist
from .method import Method, State, adam, parameters, require
from .objective import Objective
from .posterior import Posterior
from .response import FirstOrder, Response, Unroll


class Draw(eqx.Module):
    """One draw of all noise: the perturbed batch, the objective's noise, the latents' noise."""

    v: Any  # None where the draws share one perturbed batch
    noise: Any
    h: Any


class LowerLevel(eqx.Module):
    """Ĝ(θ, φ), the batch mean of D(q(h|ṽ; φ) ‖ p(h|ṽ; θ)), with the noise as an argument."""  # Eqn (9)

    divergence: Divergence
    objective: Objective
    shared: Draw | None
    frame: PyTree  # what of the posterior is not φ
    optimizer: optax.GradientTransformation = eqx.field(static=True)
    opt_state: PyTree = None
    draws: Draw | None = None

    def __call__(self, theta: EBLVM, phi: PyTree, draw: Draw) -> jax.Array:
        posterior = eqx.combine(phi, self.frame)
        v, noise = (draw.v, draw.noise) if self.shared is None else (self.shared.v, self.shared.noise)

        def one(v, noise, h):
            return self.divergence.loss(theta, v, posterior(v), h) * self.objective.lower_weight(noise)

        return jnp.mean(jax.vmap(one)(v, noise, draw.h))


class BiSM(Method):
    """Learn p(v, h) from v alone: K steps of φ on the lower level, then one of θ on the upper."""

    objective: Objective
    divergence: Divergence = KL()
    response: Response = Unroll(5)
    lower_steps: int = eqx.field(static=True, default=5)
    optimizer: optax.GradientTransformation = eqx.field(static=True, default=adam())
    lower_optimizer: optax.GradientTransformation | None = eqx.field(static=True, default=None)
    noise: Literal["shared", "fresh"] = eqx.field(static=True, default="shared")
    ema: float | None = eqx.field(static=True, default=None)

    # Shared: the K steps, the response and the upper loss see one perturbed batch ṽ, as Ĵ and Ĝ of the paper's text do,
    # and an encoder of ṽ runs once. Fresh: each has its own, as in the paper's experiments. Noise of h is always fresh.

    def __check_init__(self):
        if self.lower_steps < 0:
            raise ValueError(f"BiSM: lower_steps (K) must not be negative, got {self.lower_steps}.")
        if self.noise not in ("shared", "fresh"):
            raise ValueError(f"BiSM: noise must be 'shared' or 'fresh', got {self.noise!r}.")

    def init(self, model, posterior=None, *, batch, key):
        require(model, EBLVM, "BiSM")
        if not isinstance(posterior, Posterior):
            raise TypeError("BiSM needs a posterior q(h|v): a bism.GaussianPosterior or bism.BernoulliPosterior.")
        if isinstance(self.divergence, Fisher) and posterior.discrete:
            raise ValueError("The Fisher divergence needs ∇ₕ, which a discrete h does not have; use divergence=KL().")
        check_latent_model(model, posterior, batch[0])
        if isinstance(self.response, Unroll):
            check_differentiable(self.response.optimizer or self._lower_optimizer)
        return replace(self.start(model, posterior), lower_opt_state=self._lower_optimizer.init(parameters(posterior)))

    def step(self, state, batch, key):
        return self.update(state, *self.draw(state, batch, key))

    def draw(self, state: State, batch, key) -> tuple[Draw, Draw, Draw]:
        """The noise of one iteration: K draws for the lower steps, the response's, one for the upper loss."""
        counts = {"lower": self.lower_steps, "response": self.response.draws, "upper": 1}
        total = sum(counts.values())
        key, latent_key = jax.random.split(key)
        if self.noise == "shared":
            v, noise = self.objective.perturb(batch, key)
            perturbed = [(v, noise)] + [(None, None)] * 2
        else:
            v, noise = jax.vmap(lambda k: self.objective.perturb(batch, k))(jax.random.split(key, total))
        q = eqx.filter_eval_shape(state.posterior, batch[0])
        h = q.noise(latent_key, (total, batch.shape[0], self.divergence.particles))
        ends = [counts["lower"], counts["lower"] + counts["response"]]
        cut = lambda tree: [jax.tree.map(lambda x: x[a:b], tree) for a, b in zip([0, *ends], [*ends, total], strict=True)]
        pieces = cut((v, noise, h)) if self.noise == "fresh" else [(None, None, part) for part in cut(h)]
        lower, response, upper = (Draw(*piece) for piece in pieces)
        upper = jax.tree.map(lambda x: x[0], upper)
        return lower, response, (Draw(v, noise, upper.h) if self.noise == "shared" else upper)

    def update(self, state: State, lower_draws: Draw, response_draws: Draw, upper_draw: Draw):
        """One iteration of Algorithm 1, all of its noise given."""
        theta = state.model
        phi, frame = eqx.partition(state.posterior, eqx.is_inexact_array)
        shared = upper_draw if lower_draws.v is None else None
        lower = LowerLevel(self.divergence, self.objective, shared, frame, self._lower_optimizer)

        phi0, opt_state, divergence = self.descend(theta, phi, state.lower_opt_state, lower, lower_draws)  # Eqn (12)
        lower = replace(lower, opt_state=opt_state, draws=response_draws)

        def upper(theta):  # Ĵ(θ, φ̂(θ))
            return self.upper(theta, eqx.combine(self.response(theta, phi0, lower), frame), upper_draw)

        loss, gradient = eqx.filter_value_and_grad(upper)(theta)  # Eqn (15)
        state = self.ascend(state, (gradient, None))
        state = replace(state, posterior=eqx.combine(phi0, frame), lower_opt_state=opt_state)
        return state, {"loss": loss} | ({"lower": divergence} if self.lower_steps else {})

    def descend(self, theta, phi, opt_state, lower: LowerLevel, draws: Draw):
        """φ after K steps on Ĝ, its optimiser's state, and the last step's Ĝ."""
        if self.lower_steps == 0:
            return phi, opt_state, jnp.nan
        first = jax.tree.map(lambda x: x[0], draws)
        value_and_grad = hoist(jax.value_and_grad(lambda phi, draw: lower(theta, phi, draw)), phi, first)

        def step(carry, draw):
            phi, opt_state = carry
            value, gradient = value_and_grad(phi, draw)
            updates, opt_state = lower.optimizer.update(gradient, opt_state, phi)
            return (optax.apply_updates(phi, updates), opt_state), value

        (phi, opt_state), values = jax.lax.scan(
            step, (phi, opt_state), draws, unroll=value_and_grad.unroll(self.lower_steps)
        )
        return phi, opt_state, values[-1]

    def upper(self, theta: EBLVM, posterior: Posterior, draw: Draw) -> jax.Array:
        """Ĵ(θ, φ), the batch mean of F(∇ᵥ log p̃(v, h)/q(h|v), ε, v) at h ~ q."""  # Eqn (8)

        def one(v, noise, h_noise):
            # h is drawn at v and then held: the score's ∇ᵥ does not pass through it, the gradient in φ does.
            h = posterior(v).sample(h_noise[0])
            return self.objective.loss(surrogate_score(theta, posterior, h), v, noise)

        return jnp.mean(jax.vmap(one)(draw.v, draw.noise, draw.h))

    def validate(self, state, batch, key):
        _, _, draw = self.draw(state, batch, key)
        return self.upper(state.best, state.posterior, draw)

    @property
    def _lower_optimizer(self):
        return self.lower_optimizer or self.optimizer
