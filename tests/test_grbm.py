import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import close, each, grbm, quick_jit, random_grbm

from bism import EBM, GaussianRBM, Grid, log_likelihood, log_partition, score
from bism.likelihood import states

SETTINGS = [
    {},
    {"shared_scale": True},
    {"coupling": "scaled"},
    {"coupling": "scaled", "shared_scale": True},
]
V = jnp.array([[0.5, -1.0, 2.0], [-0.3, 0.8, -1.7]])


def test_energies_and_conditionals_agree_with_the_reference(golden):
    g = golden("grbm")
    model = grbm(g)
    close(each(model.energy, g["v"], g["h"]), g["energy"])
    close(each(lambda v, h: model.given(v)(h), g["v"], g["h"]), g["energy"])
    close(each(model.energy, g["v"], g["h_relaxed"]), g["energy_h_relaxed"])
    for h, energy in zip(g["h_particles"], g["energy_h_particles"], strict=True):
        close(each(model.energy, g["v"], h), energy)
    close(each(model.free_energy, g["v"]), g["free_energy"])
    close(jax.nn.sigmoid(each(model.field, g["v"])), g["mean_h_given_v"])
    close(each(model.mean_v, g["h"]), g["mean_v_given_h"])


def test_partition_function_and_likelihood_agree_with_the_reference(golden):
    g = golden("grbm")
    close(quick_jit(log_partition)(grbm(g)), g["log_Z"], rtol=1e-12)
    close(quick_jit(log_likelihood)(grbm(g), jnp.asarray(g["v"])), g["log_likelihood"])


def test_the_scaled_coupling_with_one_scale_is_the_paper_s_text():
    model = random_grbm(3, 4, coupling="scaled", shared_scale=True)
    assert model.log_sigma.shape == ()
    v, h, sigma = np.asarray(V[0]), np.array([1.0, 0.0, 0.3, 1.0]), np.exp(model.log_sigma)
    W, b, c = (np.asarray(x) for x in (model.W, model.b, model.c))
    text = np.sum((v - b) ** 2) / (2 * sigma**2) - c @ h - (v @ W @ h) / sigma
    close(model.energy(V[0], jnp.asarray(h)), text, rtol=1e-12)


@pytest.mark.parametrize("settings", SETTINGS)
def test_free_energy_sums_over_h(settings):
    model = random_grbm(3, 4, **settings)
    sums = lambda v: -jax.nn.logsumexp(-jax.vmap(lambda h: model.energy(v, h))(states(4)))
    close(each(model.free_energy, V), each(sums, V), rtol=1e-12)


@pytest.mark.parametrize("settings", SETTINGS)
def test_laplacian_is_the_trace_of_the_hessian(settings):
    model = random_grbm(3, 4, **settings)
    trace = each(lambda v: jnp.trace(jax.hessian(model.free_energy)(v)), V)
    close(each(model.laplacian, V), trace, rtol=1e-12)
    close(each(lambda v: EBM.laplacian(model, v), V), trace, rtol=1e-12)


@pytest.mark.parametrize("settings", SETTINGS)
def test_conditionals_are_those_of_the_joint(settings):
    model = random_grbm(3, 4, **settings)
    joint = jax.nn.softmax(-jax.vmap(lambda h: model.energy(V[0], h))(states(4)))
    close(jax.nn.sigmoid(model.field(V[0])), joint @ states(4), rtol=1e-12)
    h = jnp.array([1.0, 0.0, 1.0, 1.0])
    # E(·, h) is quadratic: its minimum is the mean of v given h, and its curvature the inverse of the variance.
    of_v = lambda v: model.energy(v, h)
    slope, curvature = quick_jit(lambda v: (jax.grad(of_v)(v), jax.hessian(of_v)(v)))(model.mean_v(h))
    np.testing.assert_allclose(slope, 0, atol=1e-13)
    precision = jnp.broadcast_to(jnp.exp(-2 * model.log_sigma), (3,))
    np.testing.assert_allclose(curvature, jnp.diag(precision), atol=1e-12)


@pytest.mark.parametrize("settings", SETTINGS)
def test_log_weight_is_the_integral_over_v(settings):
    model, grid = random_grbm(2, 3, **settings), Grid((-12.0, -12.0), (12.0, 12.0), 120)
    for h in states(3)[jnp.array([0, 3, 7])]:
        values = each(lambda v, h=h: -model.energy(v, h), grid.points)
        close(model.log_weight(h), grid.log_integral(values), rtol=1e-10)


def test_samples_have_the_conditional_moments():
    model, count = random_grbm(3, 4), 20_000
    keys = jax.random.split(jax.random.key(0), count)
    h = np.asarray(each(lambda key: model.sample_h(V[0], key), keys))
    p = jax.nn.sigmoid(model.field(V[0]))
    assert set(np.unique(h)) == {0.0, 1.0}
    assert jnp.all(jnp.abs(h.mean(0) - p) < 4 * jnp.sqrt(p * (1 - p) / count))
    on = jnp.asarray(h[0])
    v = each(lambda key: model.sample_v(on, key), keys)
    sigma = jnp.exp(model.log_sigma)
    assert jnp.all(jnp.abs(v.mean(0) - model.mean_v(on)) < 4 * sigma / count**0.5)
    assert jnp.all(jnp.abs(v.var(0) / sigma**2 - 1) < 4 * (2 / count) ** 0.5)


def test_starts_as_in_the_paper():
    model = GaussianRBM(30, 16, key=jax.random.key(0))
    for x in (model.W, model.b, model.c):
        assert 0.2 < jnp.max(jnp.abs(x)) <= 0.25
    assert not model.log_sigma.any()
    assert jnp.min(model.W) < 0 < jnp.max(model.W)


def test_score_is_zero_at_a_mode_of_the_free_energy():
    model = random_grbm(2, 3)
    mode = jax.lax.fori_loop(0, 400, lambda _, v: v + 0.2 * score(model)(v), jnp.zeros(2))
    assert jnp.linalg.norm(score(model)(mode)) < 1e-10
    around = mode[None] + 0.1 * jnp.array([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
    assert jnp.all(each(model.free_energy, around) > model.free_energy(mode))


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        GaussianRBM(0, 3, key=jax.random.key(0))
    with pytest.raises(ValueError, match="'plain' or 'scaled'"):
        GaussianRBM(2, 3, coupling="other", key=jax.random.key(0))  # pyright: ignore[reportArgumentType]
