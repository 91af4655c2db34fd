"""Can this run be trusted? How far its hypergradient is from the true one, and what would bring it nearer.

The reference is the lower problem solved to convergence on one batch under fixed noise, with the implicit function
theorem's derivative there: the right-hand gradient of Theorem 2. Against it stand the responses a run could use.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PRNGKeyArray, PyTree

from .bilevel import BiSM, Draw, LowerLevel
from .descent import descend
from .divergence import Fisher
from .method import State, parameters
from .response import ConjugateGradient, FirstOrder, NaturalGradient, Response, Unroll


@dataclass
class Candidate:
    name: str
    lower_steps: int
    unroll: int | None  # None: implicit
    bias: float  # ‖gradient − reference‖ / ‖reference‖
    milliseconds: float  # of one hypergradient


@dataclass
class Diagnosis:
    candidates: list[Candidate]
    distance: dict[int, float]  # ‖φ⁰ − φ*‖ by K
    reference_norm: float
    residual: float  # ‖∂Ĝ/∂φ‖ at φ*, relative to that at φ: how well the reference is solved
    kappa: float | None  # Theorem 2's rate, fitted to the bias over N
    r_squared: float | None

    def bias(self, lower_steps: int) -> tuple[np.ndarray, np.ndarray]:
        """(N, bias) at one K."""
        rows = [c for c in self.candidates if c.lower_steps == lower_steps and c.unroll is not None]
        return np.array([c.unroll for c in rows]), np.array([c.bias for c in rows])

    def verdict(self, tolerance: float = 0.1) -> str:
        """Which of the candidates is the cheapest whose gradient is within the tolerance, in one or two sentences."""
        if not self.residual < 1e-2:
            return "The lower problem did not converge, so that there is no reference: train the posterior further."
        enough = [c for c in self.candidates if c.bias <= tolerance]
        best = min(self.candidates, key=lambda c: c.bias)
        if not enough:
            return (
                f"No response comes within {tolerance:.0%} of the true hypergradient; the nearest is {best.name} with "
                f"K={best.lower_steps}, {best.bias:.0%} off. More lower steps or a faster lower optimiser are needed."
            )
        cheapest = min(enough, key=lambda c: c.milliseconds)
        text = (
            f"{cheapest.name} with K={cheapest.lower_steps} is enough: {cheapest.bias:.1%} from the true hypergradient"
        )
        return f"{text}, {cheapest.milliseconds:.1f} ms each. The most exact is {best.name}, {best.bias:.2%} off."


def diagnose(
    method: BiSM,
    state: State,
    batch: jax.Array,
    key: PRNGKeyArray,
    *,
    unrolls: Sequence[int] = (0, 1, 2, 5, 10, 20),
    lower_steps: Sequence[int] = (0, 5, 20),
    implicit: Sequence[Response] = (NaturalGradient(), ConjugateGradient()),
    optimizer: optax.GradientTransformation | None = None,
) -> Diagnosis:
    """Measure the gradient bias of each N and K, and of the implicit responses, on one batch.

    `optimizer` unrolls instead of the method's own: optax.sgd(α) is the one Theorem 2 speaks of.
    """
    if not isinstance(method, BiSM):
        raise TypeError(f"diagnose is for bi-level methods; {type(method).__name__} has no lower level.")
    problem = _Problem.of(method, state, batch, key)
    start = parameters(state.posterior)
    solved, residual = problem.solve(start)
    reference = problem.hypergradient(
        ConjugateGradient(500, damping=0.0, tolerance=1e-10), solved, state.lower_opt_state
    )
    norm = float(optax.global_norm(reference))

    candidates, distance = [], {}
    for steps in lower_steps:
        phi, opt_state = problem.descend(start, state.lower_opt_state, steps)
        distance[steps] = float(optax.global_norm(jax.tree.map(jnp.subtract, phi, solved)))
        responses: list[tuple[str, int | None, Response]] = [
            (f"N={n}", n, Unroll(n, optimizer) if n else FirstOrder()) for n in unrolls
        ]
        responses += [(type(r).__name__, None, r) for r in implicit]
        for name, unroll, response in responses:
            gradient, milliseconds = problem.timed(response, phi, opt_state)
            bias = float(optax.global_norm(jax.tree.map(jnp.subtract, gradient, reference))) / norm
            candidates.append(Candidate(name, steps, unroll, bias, milliseconds))
    found = Diagnosis(candidates, distance, norm, float(residual), None, None)
    found.kappa, found.r_squared = fit_rate(*found.bias(max(lower_steps)))
    return found


def fit_rate(steps: np.ndarray, bias: np.ndarray) -> tuple[float | None, float | None]:
    """(κ, R²) of the straight line through log bias over N: bias ∝ κᴺ."""
    keep = bias > 1e-12
    if keep.sum() < 3:
        return None, None
    x, y = steps[keep].astype(float), np.log(bias[keep])
    slope, intercept = np.polyfit(x, y, 1)
    explained = 1 - np.var(y - slope * x - intercept) / np.var(y)
    return float(np.exp(slope)), float(explained)


class _Problem(eqx.Module):
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

    @eqx.filter_jit
    def solve(self, phi, iterations: int = 2000):
        """φ* of this batch, and how much of the gradient is left there."""
        lower = self.lower()
        loss = lambda phi: lower(self.theta, phi, self.lower_draw)
        optimizer = optax.lbfgs(memory_size=20)
        value_and_grad = optax.value_and_grad_from_state(loss)
        first = optax.global_norm(jax.grad(loss)(phi))

        def more(carry):
            i, _, _, size = carry
            return (i < iterations) & (size > 1e-10 * first)

        def step(carry):
            i, phi, opt_state, _ = carry
            value, gradient = value_and_grad(phi, state=opt_state)
            updates, opt_state = optimizer.update(gradient, opt_state, phi, value=value, grad=gradient, value_fn=loss)
            return i + 1, optax.apply_updates(phi, updates), opt_state, optax.global_norm(gradient)

        _, phi, _, size = jax.lax.while_loop(more, step, (0, phi, optimizer.init(phi), first))
        return phi, size / first

    @eqx.filter_jit
    def hypergradient(self, response, phi, opt_state):
        lower = self.lower(opt_state, response.draws)

        def upper(theta):
            return self.method.upper(theta, eqx.combine(response(theta, phi, lower), self.frame), self.upper_draw)

        return eqx.filter_grad(upper)(self.theta)

    def timed(self, response, phi, opt_state):
        gradient = jax.block_until_ready(self.hypergradient(response, phi, opt_state))
        begun = time.perf_counter()
        for _ in range(3):
            jax.block_until_ready(self.hypergradient(response, phi, opt_state))
        return gradient, 1e3 * (time.perf_counter() - begun) / 3


def posterior_fisher(
    state: State, data: jax.Array, key: PRNGKeyArray, levels: Sequence[float] = (0.0,), particles: int = 8
) -> dict[float, float]:
    """D_F(q(h|ṽ) ‖ p(h|ṽ)) on data with noise of each level: for continuous latents."""
    model, posterior = state.best, state.posterior
    if posterior.discrete:
        raise ValueError("The Fisher divergence of q needs continuous latents.")

    @jax.jit
    def at(level, key):
        noise_key, h_key = jax.random.split(key)
        v = data + level * jax.random.normal(noise_key, data.shape, data.dtype)
        h = eqx.filter_eval_shape(posterior, data[0]).noise(h_key, (len(data), particles))
        return jnp.mean(jax.vmap(lambda v, h: Fisher(particles).loss(model, v, posterior(v), h))(v, h))

    return {float(level): float(at(level, key)) for level in levels}
