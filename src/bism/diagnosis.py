"""Can this run be trusted? How far its hypergradient is from the true one, and what would bring it nearer.

The reference is the lower problem solved to convergence on one batch under fixed noise, with the implicit function
theorem's derivative there: the right-hand gradient of Theorem 2. Against it stand the responses a run could use.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PRNGKeyArray

from .bilevel import BiSM
from .divergence import fisher_of_posterior
from .method import State, parameters
from .objective import DSM, MDSM, Objective
from .reference import Problem
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
    """Theorem 2 measured: the bias after N unrolled gradient steps."""

    steps: np.ndarray
    bias: np.ndarray
    floor: float = 1e-10  # what a bias below it says is rounding

    @property
    def fit(self) -> tuple[float, float]:
        """κ and R² of the straight line through log bias over N: bias ∝ κᴺ."""
        keep = self.bias > self.floor
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
    plain: Rate  # steps of size 1/λ, λ the largest curvature at φ*
    conditioned: Rate  # steps of size CONDITIONED in coordinates of φ in which the curvature at φ* is about one
    floor: float  # bias of undamped conjugate gradients at φ*: what this measurement can tell from none
    fisher: dict[float, float]  # of q from the posterior, by the level of noise on v; empty where h is discrete

    def bias(self, lower_steps: int) -> tuple[np.ndarray, np.ndarray]:
        """(N, bias) at one K."""
        rows = [c for c in self.candidates if c.lower_steps == lower_steps and c.unroll is not None]
        return np.array([c.unroll for c in rows]), np.array([c.bias for c in rows])

    @property
    def has_reference(self) -> bool:
        return self.residual < 1e-2

    def verdict(self, tolerance: float = 0.1) -> str:
        """Which of the candidates is the cheapest whose gradient is within the tolerance, in one or two sentences."""
        if not self.has_reference:
            return (
                "The lower problem did not converge, so that there is no reference. Give q more to "
                "do: more iterations, more lower steps (--lower-steps 20), or a smaller network for it."
            )
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
    plain: Sequence[int] = (0, 1, 3, 10, 30, 100),
    conditioned: Sequence[int] = (0, 1, 2, 5, 10, 15, 20, 30),
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
        problem = Problem.of(method, state, batch, key)
        start = parameters(state.posterior)
        solved, residual = problem.solve(start)
        if not residual < 1e-2:
            nothing = Rate(np.zeros(0), np.zeros(0))
            return Diagnosis([], {}, float(residual), nothing, nothing, math.nan, _fisher(method, state, batch, key))
        at_solution = lambda iterations: problem.hypergradient(
            ConjugateGradient(iterations, damping=0.0, tolerance=1e-12), solved, state.lower_opt_state
        )
        reference = at_solution(2000)

        def bias(gradient):
            return float(optax.tree.norm(jax.tree.map(jnp.subtract, gradient, reference)) / optax.tree.norm(reference))

        responses: list[tuple[str, int | None, Response]] = [
            (f"N={n}", n, Unroll(n) if n else FirstOrder()) for n in unrolls
        ]
        responses += [(type(r).__name__, None, r) for r in implicit]
        candidates, distance, cost = [], {}, {}
        for steps in lower_steps:
            phi, opt_state = problem.descend(start, state.lower_opt_state, steps)
            distance[steps] = float(optax.tree.norm(optax.tree.sub(phi, solved)))
            for name, unroll, response in responses:
                gradient = problem.hypergradient(response, phi, opt_state)
                if name not in cost:
                    cost[name] = problem.milliseconds(response, phi, opt_state)
                candidates.append(Candidate(name, steps, unroll, bias(gradient), cost[name]))

        floor = bias(at_solution(1000))

        def rate(counts, conditioned):
            gradients = problem.unrolled(start, solved, jnp.array(counts), max(counts), conditioned)
            each = [bias(jax.tree.map(lambda x, i=i: x[i], gradients)) for i in range(len(counts))]
            return Rate(np.array(counts), np.array(each), max(floor, 1e-10))

        rates = rate(plain, False), rate(conditioned, True)
        return Diagnosis(candidates, distance, float(residual), *rates, floor, _fisher(method, state, batch, key))


def _fisher(method, state, batch, key):
    return {} if state.posterior.discrete else posterior_fisher(state, batch, key, noise_levels(method.objective))


def noise_levels(objective: Objective, count: int = 4) -> list[float]:
    """Levels of noise on v at which q was trained, from none."""
    if isinstance(objective, MDSM):
        return [0.0, *np.asarray(objective.levels(count)).tolist()]
    return [0.0, objective.sigma] if isinstance(objective, DSM) else [0.0]


def posterior_fisher(
    state: State, data: jax.Array, key: PRNGKeyArray, levels: Sequence[float] = (0.0,), particles: int = 8
) -> dict[float, float]:
    """D_F(q(h|ṽ) ‖ p(h|ṽ)) on data with noise of each level: for continuous latents."""
    model, posterior = state.best, state.q
    if posterior.discrete:
        raise ValueError("The Fisher divergence of q needs continuous latents.")

    @eqx.filter_jit
    def at(model, posterior, data, level, key):
        noise_key, h_key = jax.random.split(key)
        v = data + level * jax.random.normal(noise_key, data.shape, data.dtype)
        return fisher_of_posterior(model, posterior, v, h_key, particles)

    return {float(level): float(at(model, posterior, data, jnp.asarray(level), key)) for level in levels}
