"""Can this run be trusted? How far its hypergradient is from the true one, and what would bring it nearer.

The reference is the lower problem solved to convergence on one batch under fixed noise, with the implicit function
theorem's derivative there: the right-hand gradient of Theorem 2. Against it stand the responses a run could use.
"""

import math
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
from .objective import DSM, MDSM, Objective
from .response import ConjugateGradient, FirstOrder, NaturalGradient, Response, Unroll


@dataclass
class Candidate:
    name: str
    lower_steps: int
    unroll: int | None  # None: implicit
    bias: float  # ‖gradient − reference‖ / ‖reference‖
    milliseconds: float  # of one hypergradient


@dataclass
class Rate:
    """Theorem 2 measured: the bias after N unrolled gradient steps of size 1/λ, λ the largest curvature at φ*."""

    steps: np.ndarray
    bias: np.ndarray

    @property
    def fit(self) -> tuple[float, float]:
        """κ and R² of the straight line through log bias over N: bias ∝ κᴺ."""
        keep = self.bias > 1e-10
        if keep.sum() < 3:
            return math.nan, math.nan
        x, y = self.steps[keep], np.log(self.bias[keep])
        slope, intercept = np.polyfit(x, y, 1)
        return float(np.exp(slope)), float(1 - np.var(y - slope * x - intercept) / np.var(y))


@dataclass
class Diagnosis:
    candidates: list[Candidate]
    distance: dict[int, float]  # ‖φ⁰ − φ*‖ by K
    residual: float  # ‖∂Ĝ/∂φ‖ at φ*, relative to that at φ: how well the reference is solved
    rate: Rate
    fisher: dict[float, float]  # of q from the posterior, by the level of noise on v; empty where h is discrete

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
    theorem: Sequence[int] = (0, 1, 3, 10, 30, 100, 300),
) -> Diagnosis:
    """Measure, on one batch, the gradient bias of each N and K, of the implicit responses, and Theorem 2's rate.

    All is computed in double precision: in single, the lower problem is not solved well enough to be a reference.
    """
    if not isinstance(method, BiSM):
        raise TypeError(f"diagnose is for bi-level methods; {type(method).__name__} has no lower level.")
    with jax.enable_x64(True):
        state, batch = jax.tree.map(
            lambda x: x.astype(float) if eqx.is_inexact_array(x) else x, (state, jnp.asarray(batch))
        )
        problem = _Problem.of(method, state, batch, key)
        start = parameters(state.posterior)
        solved, residual = problem.solve(start)
        exact = ConjugateGradient(500, damping=0.0, tolerance=1e-12)
        reference = problem.hypergradient(exact, solved, state.lower_opt_state)

        def bias(gradient):
            return float(_distance(gradient, reference) / optax.tree.norm(reference))

        responses: list[tuple[str, int | None, Response]] = [
            (f"N={n}", n, Unroll(n) if n else FirstOrder()) for n in unrolls
        ]
        responses += [(type(r).__name__, None, r) for r in implicit]
        candidates, distance = [], {}
        for steps in lower_steps:
            phi, opt_state = problem.descend(start, state.lower_opt_state, steps)
            distance[steps] = float(_distance(phi, solved))
            for name, unroll, response in responses:
                gradient, milliseconds = problem.timed(response, phi, opt_state)
                candidates.append(Candidate(name, steps, unroll, bias(gradient), milliseconds))

        descent = optax.sgd(1 / float(problem.largest_curvature(solved)))
        plain = [Unroll(n, descent) if n else FirstOrder() for n in theorem]
        rate = [bias(problem.hypergradient(response, start, state.lower_opt_state)) for response in plain]
        levels = noise_levels(method.objective)
        fisher = {} if state.posterior.discrete else posterior_fisher(state, batch, key, levels)
        return Diagnosis(candidates, distance, float(residual), Rate(np.array(theorem), np.array(rate)), fisher)


def noise_levels(objective: Objective, count: int = 4) -> list[float]:
    """Levels of noise on v at which q was trained, from none."""
    if isinstance(objective, MDSM):
        return [0.0, *np.asarray(objective.levels(count)).tolist()]
    return [0.0, objective.sigma] if isinstance(objective, DSM) else [0.0]


def _distance(a, b):
    return optax.tree.norm(jax.tree.map(jnp.subtract, a, b))


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
    def solve(self, phi, iterations: int = 5000):
        """φ* of this batch, and how much of the gradient is left there."""
        lower = self.lower()
        loss = lambda phi: lower(self.theta, phi, self.lower_draw)
        optimizer = optax.lbfgs(memory_size=20)
        value_and_grad = optax.value_and_grad_from_state(loss)
        first = optax.tree.norm(jax.grad(loss)(phi))

        def more(carry):
            i, _, _, size = carry
            return (i < iterations) & (size > 1e-9 * first)

        def step(carry):
            i, phi, opt_state, _ = carry
            value, gradient = value_and_grad(phi, state=opt_state)
            updates, opt_state = optimizer.update(gradient, opt_state, phi, value=value, grad=gradient, value_fn=loss)
            return i + 1, optax.apply_updates(phi, updates), opt_state, optax.tree.norm(gradient)

        _, phi, _, size = jax.lax.while_loop(more, step, (0, phi, optimizer.init(phi), first))
        return phi, size / first

    @eqx.filter_jit
    def largest_curvature(self, phi):
        """By power iterations."""
        lower = self.lower()
        curved = jax.linearize(jax.grad(lambda phi: lower(self.theta, phi, self.lower_draw)), phi)[1]

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
