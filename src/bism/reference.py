"""The lower problem of one batch, solved to convergence, and the hypergradients that approximations of it give."""

import time
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from .bilevel import BiSM, Draw, LowerLevel
from .descent import descend

CONDITIONED = 0.3  # the size of the conditioned gradient steps: κ is about 1 − 0.3
DAMPING = 1e-4  # of solves with the curvature, relative to its largest


class Problem(eqx.Module):
    """Both levels on one batch, every draw of a level the same."""

    method: BiSM
    theta: Any
    frame: PyTree
    lower_draw: Draw
    upper_draw: Draw

    @classmethod
    def of(cls, method, state, batch, key):
        method = replace(method, noise="shared", lower_steps=1)
        lower, _, upper = method.draw(state, batch, key)
        frame = eqx.filter(state.posterior, eqx.is_inexact_array, inverse=True)
        return cls(method, state.model, frame, jax.tree.map(lambda x: x[0], lower), upper)

    def draws(self, count):
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), self.lower_draw)

    def lower(self, opt_state=None, count=0):
        draws = self.draws(count) if count else None
        optimizer = self.method.lower_optimizer or self.method.optimizer
        return LowerLevel(
            self.method.divergence, self.method.objective, self.upper_draw, self.frame, optimizer, opt_state, draws
        )

    @eqx.filter_jit
    def descend(self, phi, opt_state, steps):
        lower = self.lower()
        loss = lambda phi, draw: lower(self.theta, phi, draw)
        return descend(loss, lower.optimizer, phi, opt_state, self.draws(steps))[:2]

    def loss(self, phi):
        return self.lower()(self.theta, phi, self.lower_draw)

    @eqx.filter_jit
    def solve(self, phi, iterations: int = 500, newton: int = 40):
        """φ* of this batch, and how much of the gradient is left there: L-BFGS, then damped Newton steps."""
        optimizer = optax.lbfgs(memory_size=20)
        value_and_grad = optax.value_and_grad_from_state(self.loss)
        slope = jax.grad(self.loss)
        first = optax.tree.norm(slope(phi))
        unsolved = lambda size: size > 1e-9 * first

        def step(carry):
            i, phi, state, _ = carry
            value, gradient = value_and_grad(phi, state=state)
            moves, state = optimizer.update(gradient, state, phi, value=value, grad=gradient, value_fn=self.loss)
            return i + 1, optax.apply_updates(phi, moves), state, optax.tree.norm(gradient)

        more = lambda carry: (carry[0] < iterations) & unsolved(carry[-1])
        _, phi, _, _ = jax.lax.while_loop(more, step, (0, phi, optimizer.init(phi), first))

        def newton_step(carry):
            i, phi, damping, size = carry
            tried = optax.tree.sub(phi, _solve_damped(slope, phi, damping, slope(phi)))
            tried_size = optax.tree.norm(slope(tried))
            better = tried_size < size
            phi = jax.tree.map(lambda new, old: jnp.where(better, new, old), tried, phi)
            return i + 1, phi, jnp.where(better, 0.1, 10) * damping, jnp.where(better, tried_size, size)

        more = lambda carry: (carry[0] < newton) & unsolved(carry[-1])
        start = (0, phi, DAMPING * self.largest_curvature(phi), optax.tree.norm(slope(phi)))
        _, phi, _, size = jax.lax.while_loop(more, newton_step, start)
        return phi, size / jnp.maximum(first, 1e-8)  # φ may have been there from the start

    @eqx.filter_jit
    def largest_curvature(self, phi):
        """By power iterations."""
        curved = jax.linearize(jax.grad(self.loss), phi)[1]

        def power(x, _):
            x = curved(x)
            size = optax.tree.norm(x)
            return jax.tree.map(lambda x: x / size, x), size

        return jax.lax.scan(power, jax.tree.map(jnp.ones_like, phi), length=100)[1][-1]

    @eqx.filter_jit
    def hypergradient(self, response, phi, opt_state):
        lower = self.lower(opt_state, response.draws)

        def upper(theta):
            return self.method.upper(theta, eqx.combine(response(theta, phi, lower), self.frame), self.upper_draw)

        return eqx.filter_grad(upper)(self.theta)

    def milliseconds(self, response, phi, opt_state):
        begun = time.perf_counter()
        for _ in range(3):
            jax.block_until_ready(self.hypergradient(response, phi, opt_state))
        return 1e3 * (time.perf_counter() - begun) / 3

    @eqx.filter_jit
    def unrolled(self, phi, solved, counts, most, conditioned):
        """The hypergradient after each of `counts` gradient steps from φ, plain or conditioned by the curvature at φ*.

        As Unroll has it, but one program for all counts: the path is kept, and each count goes back along it.
        """
        lower = self.lower()
        slope = lambda theta, phi: jax.grad(lambda phi: lower(theta, phi, self.lower_draw))(phi)
        largest = self.largest_curvature(solved)

        def move(gradient):
            if not conditioned:
                return optax.tree.scale(1 / largest, gradient)
            whitened = _solve_damped(jax.grad(self.loss), solved, DAMPING * largest, gradient)
            return optax.tree.scale(CONDITIONED, whitened)

        forward = lambda phi, _: (optax.tree.sub(phi, move(slope(self.theta, phi))), phi)
        path = jax.lax.scan(forward, phi, length=most + 1)[1]
        at = lambda i: jax.tree.map(lambda x: x[i], path)

        def after(count):
            upper = lambda both: self.method.upper(both[0], eqx.combine(both[1], self.frame), self.upper_draw)

            def back(i, carry):
                _, pull = eqx.filter_vjp(slope, self.theta, at(count - 1 - i))
                return jax.tree.map(jnp.subtract, carry, pull(move(carry[1])))

            return jax.lax.fori_loop(0, count, back, eqx.filter_grad(upper)((self.theta, at(count))))[0]

        return jax.lax.map(after, counts)


def _solve_damped(slope, phi, damping, b):
    """(H + damping·I)⁻¹b, H the slope's derivative at φ."""
    curved = jax.linearize(slope, phi)[1]
    damped = lambda x: optax.tree.add_scale(curved(x), damping, x)
    return jax.scipy.sparse.linalg.cg(damped, b, tol=1e-8, maxiter=100)[0]
