"""Bi-level score matching (Bao et al., NeurIPS 2020), Algorithm 1."""

from dataclasses import replace
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from .checks import check_differentiable, check_latent_model
from .descent import descend
from .divergence import KL, Divergence, Fisher
from .energy import EBLVM, expected_score, surrogate_score
from .method import Method, State, parameters
from .objective import Objective
from .posterior import Posterior
from .response import NaturalGradient, Response, Unroll


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

    def metric(self, phi: PyTree, draw: Draw, tangent: PyTree) -> PyTree:
        """The mean over the batch of the Fisher information of q(h|ṽ; φ), times a tangent of φ."""
        v, noise = (draw.v, draw.noise) if self.shared is None else (self.shared.v, self.shared.noise)
        distributions = lambda phi: jax.vmap(eqx.combine(phi, self.frame))(v)
        q, moved = jax.jvp(distributions, (phi,), (tangent,))
        weight = lambda noise: self.objective.lower_weight(noise) / len(v)
        each = lambda q, t, noise: jax.tree.map(lambda x: x * weight(noise), q.metric(t))
        (pulled,) = jax.vjp(distributions, phi)[1](jax.vmap(each)(q, moved, noise))
        return pulled


class BiSM(Method):
    """Learn p(v, h) from v alone: K steps of φ on the lower level, then one of θ on the upper."""

    objective: Objective
    divergence: Divergence = KL()
    # None: NaturalGradient where KL is exact (an energy linear in h), which measured best; elsewhere Unroll(5).
    response: Response | None = None
    lower_steps: int = eqx.field(static=True, default=5)
    lower_optimizer: optax.GradientTransformation | None = eqx.field(static=True, default=None)
    # Shared: the K steps, the response and the upper loss see one perturbed batch ṽ, as Ĵ and Ĝ of the paper's text do,
    # and an encoder of ṽ runs once. Fresh: each has its own, as in the paper's experiments. h's noise is always fresh.
    noise: Literal["shared", "fresh"] = eqx.field(static=True, default="shared")
    # Sampled: F of the surrogate score at one h ~ q, as in the paper. Expected: F of that score's mean under q, free of
    # h's variance, for an energy linear in h. None: expected where KL is exact.
    score: Literal["sampled", "expected"] | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        if self.lower_steps < 0:
            raise ValueError(f"BiSM: lower_steps (K) must not be negative, got {self.lower_steps}.")
        if self.noise not in ("shared", "fresh"):
            raise ValueError(f"BiSM: noise must be 'shared' or 'fresh', got {self.noise!r}.")
        if self.score not in (None, "sampled", "expected"):
            raise ValueError(f"BiSM: score must be 'sampled' or 'expected', got {self.score!r}.")
        if isinstance(self.response, NaturalGradient) and not isinstance(self.divergence, KL):
            raise ValueError("NaturalGradient stands for KL's Hessian; for another divergence use ConjugateGradient.")

    def init(self, model, posterior=None, *, batch, key):
        check_latent_model("BiSM", model, posterior, batch[0])
        if isinstance(self.divergence, Fisher) and getattr(posterior, "discrete", False):
            raise ValueError("The Fisher divergence needs ∇ₕ, which a discrete h does not have; use divergence=KL().")
        if self.score == "expected" and not model.linear_in_h:
            raise ValueError(
                f"The expected score needs an energy linear in h; {type(model).__name__} does not say it is."
            )
        response = self.response_for(model)
        if isinstance(response, Unroll):
            check_differentiable(response.optimizer or self._lower_optimizer)
        return replace(self.start(model, posterior), lower_opt_state=self._lower_optimizer.init(parameters(posterior)))

    def step(self, state, batch, key):
        return self.update(state, *self.draw(state, batch, key))

    def draw(self, state: State, batch, key) -> tuple[Draw, Draw, Draw]:
        """The noise of one iteration: K draws for the lower steps, the response's, one for the upper loss."""
        perturb_key, lower_key, upper_key = jax.random.split(key, 3)
        first = self.lower_steps
        second = first + self.response_for(state.model).draws  # where each one's draws end
        q = eqx.filter_eval_shape(state.posterior, batch[0])
        # Two calls, so that lower noise that an exact expectation never reads is never made.
        h = q.noise(lower_key, (second, len(batch), self.divergence.particles))
        upper_h = q.noise(upper_key, (len(batch), self.divergence.particles))
        if self.noise == "shared":
            upper = Draw(*self.objective.perturb(batch, perturb_key), upper_h)
            return Draw(None, None, h[:first]), Draw(None, None, h[first:]), upper
        keys = jax.random.split(perturb_key, second + 1)
        perturbed = jax.vmap(lambda key: self.objective.perturb(batch, key))(keys)
        draws = Draw(*perturbed, jnp.concatenate([h, upper_h[None]]))
        take = lambda part: jax.tree.map(lambda x: x[part], draws)
        return take(slice(first)), take(slice(first, second)), take(second)

    def update(self, state: State, lower_draws: Draw, response_draws: Draw, upper_draw: Draw):
        """One iteration of Algorithm 1, all of its noise given."""
        theta = state.model
        phi, frame = eqx.partition(state.posterior, eqx.is_inexact_array)
        shared = upper_draw if lower_draws.v is None else None
        lower = LowerLevel(self.divergence, self.objective, shared, frame, self._lower_optimizer)

        loss = lambda phi, draw: lower(theta, phi, draw)
        phi0, opt_state, values = descend(loss, lower.optimizer, phi, state.lower_opt_state, lower_draws)  # Eqn (12)
        lower = replace(lower, opt_state=opt_state, draws=response_draws)

        response = self.response_for(theta)

        def upper(theta):  # Ĵ(θ, φ̂(θ))
            return self.upper(theta, eqx.combine(response(theta, phi0, lower), frame), upper_draw)

        value, gradient = eqx.filter_value_and_grad(upper)(theta)  # Eqn (15)
        state = replace(state, posterior=eqx.combine(phi0, frame), lower_opt_state=opt_state)
        state = self.ascend(state, (gradient, None))
        return state, {"loss": value} | ({"lower": values[-1]} if self.lower_steps else {})

    def upper(self, theta: EBLVM, posterior: Posterior, draw: Draw) -> jax.Array:
        """Ĵ(θ, φ), the batch mean of F(∇ᵥ log p̃(v, h)/q(h|v), ε, v) at h ~ q."""  # Eqn (8)
        expected = self.score == "expected" or (self.score is None and self._linear(theta))

        def one(v, noise, h_noise):
            if expected:
                return self.objective.loss(expected_score(theta, posterior), v, noise)
            # h is drawn at v and then held: the score's ∇ᵥ does not pass through it, the gradient in φ does.
            h = posterior(v).sample(h_noise[0])
            return self.objective.loss(surrogate_score(theta, posterior, h), v, noise)

        return jnp.mean(jax.vmap(one)(draw.v, draw.noise, draw.h))

    def validate(self, state, batch, key):
        _, _, draw = self.draw(state, batch, key)
        return self.upper(state.best, state.q, draw)

    def response_for(self, model: EBLVM) -> Response:
        return self.response or (NaturalGradient() if self._linear(model) else Unroll(5))

    def _linear(self, model):
        return model.linear_in_h and isinstance(self.divergence, KL) and self.divergence.exact

    @property
    def _lower_optimizer(self):
        return self.lower_optimizer or self.optimizer
