"""The lower level's answer φ̂(θ), made so that the upper loss can be differentiated straight through it.

Each response has the value and the derivative of some approximation of φ*(θ) = argmin Ĝ(θ, φ), starting at φ⁰, which is
a constant with respect to θ. It is the only place that knows how the hypergradient of Eqn (15) is had.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import PyTree

from .descent import descend

Phi = PyTree


class Lower(Protocol):
    """The lower problem as a response sees it: Ĝ(θ, φ) under one draw of the noise, and the live optimiser at φ⁰."""

    optimizer: optax.GradientTransformation
    opt_state: optax.OptState
    draws: Any  # `Response.draws` of them, along the leading axis

    def __call__(self, theta: PyTree, phi: Phi, draw: Any) -> jax.Array: ...

    def metric(self, phi: Phi, draw: Any, tangent: Phi) -> Phi:
        """The Fisher information of q(·; φ), averaged over the batch, times a tangent."""
        ...


class Response(eqx.Module):
    @property
    @abstractmethod
    def draws(self) -> int:
        """How many draws of the lower level's noise this response uses."""

    @abstractmethod
    def __call__(self, theta: PyTree, phi: Phi, lower: Lower) -> Phi: ...


class FirstOrder(Response):
    """φ̂ = φ⁰: no gradient flows through the lower level. Algorithm 1 with N = 0."""

    @property
    def draws(self):
        return 0

    def __call__(self, theta, phi, lower):
        return jax.lax.stop_gradient(phi)


class Unroll(Response):
    """φ̂ = φᴺ(θ), N differentiable steps of the lower level's optimiser from φ⁰."""  # Eqn (14)

    # The paper's text unrolls plain gradient steps; its experiments unroll Adam, continuing the live optimiser's state,
    # and that is what makes the method work. Pass `optimizer=optax.sgd(alpha)` for the text.
    steps: int = eqx.field(static=True, default=5)
    optimizer: optax.GradientTransformation | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        if self.steps < 1:
            raise ValueError(f"Unroll: steps must be at least 1, got {self.steps}; use FirstOrder() for N = 0.")

    @property
    def draws(self):
        return self.steps

    def __call__(self, theta, phi, lower):
        phi, state = jax.lax.stop_gradient((phi, lower.opt_state))
        optimizer = self.optimizer or lower.optimizer
        if self.optimizer is not None:
            state = optimizer.init(phi)
        loss = lambda phi, draw: lower(theta, phi, draw)
        phi, _, _ = descend(loss, optimizer, phi, state, lower.draws, rematerialise=True)
        return phi


class Implicit(Response):
    """φ̂ = φ⁰ with the derivative of φ*(θ): a linear solve with the lower Hessian at φ⁰ in place of unrolling."""

    @property
    def draws(self):
        return 1

    def __call__(self, theta, phi, lower):
        return implicit(theta, jax.lax.stop_gradient(phi), lower, self)

    def curvature(self, theta: PyTree, phi: Phi, lower: Lower, draw: Any) -> Callable[[Phi], Phi]:
        """x ↦ Hx"""
        return jax.linearize(jax.grad(lambda phi: lower(theta, phi, draw)), phi)[1]

    @abstractmethod
    def solve(self, curvature: Callable[[Phi], Phi], b: Phi) -> Phi:
        """An approximation of H⁻¹b."""


class Neumann(Implicit):
    """H⁻¹ as the first terms of α Σₖ (I − αH)ᵏ: what unrolled gradient steps of size α give at a stationary φ⁰."""

    terms: int = eqx.field(static=True, default=10)
    alpha: float = eqx.field(static=True, default=0.1)

    def __check_init__(self):
        if self.terms < 1 or not self.alpha > 0:
            raise ValueError("Neumann: needs terms >= 1 and alpha > 0.")

    def solve(self, curvature, b):
        def term(carry, _):
            p, total = carry
            p = jax.tree.map(lambda x, hx: x - self.alpha * hx, p, curvature(p))
            return (p, jax.tree.map(jnp.add, total, p)), None

        (_, total), _ = jax.lax.scan(term, (b, b), length=self.terms - 1)
        return jax.tree.map(lambda x: self.alpha * x, total)


class ConjugateGradient(Implicit):
    """(H + damping·I)⁻¹ by conjugate gradients on Hessian-vector products."""

    # A minibatch's lower Hessian is singular as soon as q has more weights a unit than the batch has examples; the
    # damping then decides what the directions that the batch does not see contribute.
    iterations: int = eqx.field(static=True, default=20)
    damping: float = eqx.field(static=True, default=1e-2)
    tolerance: float = eqx.field(static=True, default=1e-8)

    def __check_init__(self):
        if self.iterations < 1 or self.damping < 0:
            raise ValueError("ConjugateGradient: needs iterations >= 1 and damping >= 0.")

    def solve(self, curvature, b):
        flat, restore = ravel_pytree(b)

        # Always all iterations, so that a GPU has nothing to ask the host; once converged, or where the curvature is
        # not positive, they change nothing.
        def step(carry, _):
            x, residual, direction, size = carry
            curved = ravel_pytree(curvature(restore(direction)))[0] + self.damping * direction
            along = jnp.vdot(direction, curved)
            length = size / along
            residual = residual - length * curved
            new_size = jnp.vdot(residual, residual)
            moved = x + length * direction, residual, residual + new_size / size * direction, new_size
            going = (size > self.tolerance**2 * total) & (along > 0)
            return jax.tree.map(lambda new, old: jnp.where(going, new, old), moved, carry), None

        total = jnp.vdot(flat, flat)
        start = (jnp.zeros_like(flat), flat, flat, total)
        unroll = self.iterations if self.iterations <= 16 else 1
        return restore(jax.lax.scan(step, start, length=self.iterations, unroll=unroll)[0][0])


class NaturalGradient(ConjugateGradient):
    """As ConjugateGradient, with the Fisher information of q in place of the Hessian. For the KL divergence."""

    # The two agree where q is the true posterior. Elsewhere a minibatch's Hessian may be indefinite, and its solve
    # explode; the Fisher information never is. On a batch of fewer examples than q has weights a unit, the solve then
    # lets each φ-path follow θ's on that batch exactly, up to the damping, which may be small.
    iterations: int = eqx.field(static=True, default=10)
    damping: float = eqx.field(static=True, default=1e-3)

    def curvature(self, theta, phi, lower, draw):
        return lambda x: lower.metric(phi, draw, x)


@eqx.filter_custom_vjp
def implicit(theta: PyTree, phi: Phi, lower: Lower, response: Implicit) -> Phi:
    """φ⁰, with the derivative −H⁻¹ ∂²Ĝ/∂φ∂θ that the implicit function theorem gives φ*(θ) there."""
    return phi


@implicit.def_fwd
def _(perturbed, theta, phi, lower, response):
    return phi, None


@implicit.def_bwd
def _(residuals, cotangent, perturbed, theta, phi, lower, response):
    draw = jax.tree.map(lambda x: x[0], lower.draws)
    x = response.solve(response.curvature(theta, phi, lower, draw), cotangent)
    _, pull = eqx.filter_vjp(lambda theta: jax.grad(lambda phi: lower(theta, phi, draw))(phi), theta)
    return jax.tree.map(jnp.negative, pull(x)[0])
