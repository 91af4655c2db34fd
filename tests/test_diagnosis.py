"""Against known answers: the exact gradient of a Gaussian RBM, the curvature of a strongly convex lower problem."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_models import close, exact_posterior, gaussian_eblvm, linear_posterior, other_posterior, random_grbm
from jax.flatten_util import ravel_pytree

import bism
from bism.diagnosis import Candidate, Diagnosis, Rate, diagnose, noise_levels, posterior_fisher
from bism.method import parameters
from bism.reference import CONDITIONED, Problem

KEY = jax.random.key(0)
BATCH = jax.random.normal(jax.random.key(1), (60, 3))
MODEL = random_grbm(3, 2)
ELSEWHERE = linear_posterior(0.5 * MODEL.weights.T + 0.3, MODEL.c - 0.5)
METHOD = bism.BiSM(bism.DSM(0.3), lower_optimizer=bism.adam(0.02))


@pytest.fixture(scope="module")
def found():
    return diagnose(
        METHOD,
        state(ELSEWHERE),
        BATCH,
        KEY,
        unrolls=(0, 3, 10),
        lower_steps=(0, 20),
        implicit=(),
        plain=(0, 10, 20, 40),
        conditioned=(0, 10, 20),
    )


def state(posterior):
    return METHOD.init(MODEL, posterior, batch=BATCH, key=KEY)


def test_the_reference_is_the_exact_gradient():
    problem = Problem.of(METHOD, state(ELSEWHERE), BATCH, KEY)
    solved, residual = problem.solve(parameters(ELSEWHERE))
    assert residual < 1e-8
    close(solved.net.weight, MODEL.weights.T, rtol=1e-6)
    gradient = problem.hypergradient(bism.ConjugateGradient(100, 0.0, 1e-12), solved, None)
    draw = problem.upper_draw

    def dsm(model):
        return jnp.mean(jax.vmap(lambda v, eps: bism.DSM(0.3).loss(bism.score(model), v, eps))(draw.v, draw.noise))

    for ours, exact in zip(jax.tree.leaves(gradient), jax.tree.leaves(eqx.filter_grad(dsm)(MODEL)), strict=True):
        close(ours, exact, rtol=1e-6, of_largest=1e-6)


def test_the_bias_falls_exponentially_as_theorem_2_says(found):
    assert found.residual < 1e-8
    assert found.plain.bias[0] > 100 * found.plain.bias[-1]  # two decades
    kappa, r_squared = found.plain.fit
    assert r_squared > 0.95
    problem = Problem.of(METHOD, state(ELSEWHERE), BATCH, KEY)
    solved, _ = problem.solve(parameters(ELSEWHERE))
    flat, restore = ravel_pytree(solved)
    curvature = jax.hessian(lambda x: problem.lower()(problem.theta, restore(x), problem.lower_draw))(flat)
    curvatures = np.linalg.eigvalsh(curvature)
    assert problem.largest_curvature(solved) == pytest.approx(curvatures[-1], rel=1e-3)
    assert kappa < 1
    last = (found.plain.bias[3] / found.plain.bias[2]) ** (1 / 20)
    assert last == pytest.approx(1 - curvatures[0] / curvatures[-1], abs=0.02)


def test_conditioned_steps_fall_at_the_same_rate_in_every_direction(found):
    assert found.conditioned.bias[0] > 100 * found.conditioned.bias[-1]
    kappa, r_squared = found.conditioned.fit
    assert kappa == pytest.approx(1 - CONDITIONED, abs=0.03)
    assert r_squared > 0.99
    assert found.floor < 1e-8


@pytest.mark.parametrize("conditioned", [False, True])
def test_one_path_for_all_counts_is_what_unrolling_gives(conditioned):
    problem = Problem.of(METHOD, state(ELSEWHERE), BATCH, KEY)
    start = parameters(ELSEWHERE)
    solved, _ = problem.solve(start)
    size = 1 / problem.largest_curvature(solved)
    found = problem.unrolled(start, solved, jnp.array([0, 3]), 3, conditioned)
    first = problem.hypergradient(bism.FirstOrder(), start, None)
    jax.tree.map(lambda ours, theirs: close(ours[0], theirs), found, first)
    if not conditioned:
        third = problem.hypergradient(bism.Unroll(3, optax.sgd(float(size))), start, None)
        jax.tree.map(lambda ours, theirs: close(ours[1], theirs), found, third)


def test_more_steps_come_nearer(found):
    assert found.distance[20] < found.distance[0]
    for lower_steps in (0, 20):
        steps, bias = found.bias(lower_steps)
        assert steps.tolist() == [0, 3, 10]
        assert bias[-1] < bias[0]
    at = {(c.name, c.lower_steps): c.bias for c in found.candidates}
    assert at["N=0", 20] < at["N=0", 0]
    assert all(c.milliseconds > 0 for c in found.candidates)


def test_at_the_lower_optimum_implicit_gradients_have_no_bias():
    exact = bism.ConjugateGradient(50, 0.0, 1e-12), bism.NaturalGradient(50, 0.0, 1e-12)
    found = diagnose(
        METHOD,
        state(exact_posterior(MODEL)),
        BATCH,
        KEY,
        unrolls=(0,),
        lower_steps=(0,),
        implicit=exact,
        plain=(0,),
        conditioned=(0,),
    )
    bias = {c.name: c.bias for c in found.candidates}
    assert bias["ConjugateGradient"] < 1e-8
    assert bias["NaturalGradient"] < 1e-8
    assert bias["N=0"] > 0.01


def candidates(*rows):
    return [Candidate(name, 5, None, bias, milliseconds) for name, bias, milliseconds in rows]


def test_the_verdict_names_the_cheapest_that_is_near_enough():
    rate = Rate(np.array([0, 1]), np.ones(2))
    rows = candidates(("dear", 0.01, 9.0), ("cheap", 0.08, 2.0), ("wrong", 0.5, 1.0))
    known = Diagnosis(rows, {5: 1.0}, 1e-6, rate, rate, 1e-9, {})
    assert known.verdict().startswith("cheap with K=5 is enough: 8.0%")
    assert known.verdict(0.02).startswith("dear with K=5 is enough")
    assert "No response comes within 0%; the nearest is dear" in known.verdict(0.001).replace(
        " of the true hypergradient", ""
    )
    assert "did not converge" in Diagnosis(rows, {5: 1.0}, 0.5, rate, rate, 1e-9, {}).verdict()


def test_the_rate_is_that_of_a_straight_line():
    steps = np.array([0, 3, 10, 30])
    kappa, r_squared = Rate(steps, 0.7 * 0.9**steps).fit
    assert (kappa, r_squared) == (pytest.approx(0.9), pytest.approx(1.0))
    assert np.isnan(Rate(steps[:2], np.ones(2)).fit).all()


def test_the_fisher_divergence_of_q_has_its_closed_form():
    model = gaussian_eblvm()
    posterior = other_posterior(model)
    v = jax.random.normal(KEY, (50, 2))
    method = bism.BiSM(bism.DSM(0.5), bism.Fisher(), bism.FirstOrder())
    begun = method.init(model, posterior, batch=v, key=KEY)
    level, measured = posterior_fisher(begun, v, KEY, particles=4000).popitem()
    q = jax.vmap(posterior)(v)
    precision, at = jnp.exp(model.log_lambda), v @ model.M.T + model.m[None]
    # ∇ₕ[−E − log q] = (1/s² − λ)(h − μ) + (pull − λμ), at h ~ N(μ, s²)
    s2 = jnp.exp(2 * q.log_std)
    each = (1 / s2 - precision[None]) ** 2 * s2 + (at - precision[None] * q.loc) ** 2
    assert level == 0
    assert measured == pytest.approx(float(0.5 * each.sum(1).mean()), rel=0.02)
    assert posterior_fisher(begun, v, KEY, [1.0])[1.0] > measured  # where it was not trained


def test_levels_are_the_objectives():
    assert noise_levels(bism.SSM()) == [0.0]
    assert noise_levels(bism.DSM(0.3)) == [0.0, 0.3]
    assert noise_levels(bism.MDSM(0.1, 0.4)) == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_what_has_no_lower_level_is_refused():
    method = bism.ScoreMatching(bism.DSM(0.3))
    with pytest.raises(TypeError, match="ScoreMatching has no lower level"):
        diagnose(method, method.init(MODEL, batch=BATCH, key=KEY), BATCH, KEY)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="continuous latents"):
        posterior_fisher(state(ELSEWHERE), BATCH, KEY)


def test_single_precision_is_widened():
    narrow = jax.tree.map(lambda x: x.astype(jnp.float32) if eqx.is_inexact_array(x) else x, state(ELSEWHERE))
    with jax.enable_x64(False):
        found = diagnose(
            METHOD, narrow, BATCH.astype(jnp.float32), KEY, unrolls=(0,), lower_steps=(0,), plain=(0,), conditioned=(0,)
        )
        assert jnp.zeros(1).dtype == jnp.float32
    assert found.residual < 1e-8
    assert optax.tree.norm(parameters(narrow.posterior)).dtype == jnp.float32


def test_without_a_reference_nothing_else_is_measured(monkeypatch):
    monkeypatch.setattr(Problem, "solve", lambda self, phi: (phi, 0.5))
    found = diagnose(METHOD, state(ELSEWHERE), BATCH, KEY)
    assert not found.has_reference
    assert (found.candidates, found.distance) == ([], {})
    assert "--lower-steps 20" in found.verdict()
