from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import THETA, close, grbm, quick_jit, random_grbm

from bism import DSM, MDSM, SM, SSM, fisher, score


def cases(g):
    """Each golden objective, with the points and the noise of its reference."""
    v, eps, sigma = g["v"], g["mdsm_eps"], float(g["dsm_noise_std"])
    ends = float(g["mdsm_sigma_begin"]), float(g["mdsm_sigma_end"]), float(g["mdsm_sigma0"])
    linear, geometric = g["mdsm_levels_linear"], g["mdsm_levels_geometrical"]
    return {
        "sm": (SM(), v, None),
        "ssm": (SSM(), v, g["ssm_direction"][:, None]),
        "dsm": (DSM(sigma), v + sigma * g["dsm_eps"], g["dsm_eps"]),
        "mdsm_linear": (MDSM(*ends), v + linear[:, None] * eps, (eps, linear)),
        "mdsm_geometrical": (MDSM(*ends, "geometric"), v + geometric[:, None] * eps, (eps, geometric)),
    }


@pytest.mark.parametrize("name", ["sm", "ssm", "dsm", "mdsm_linear", "mdsm_geometrical"])
def test_losses_and_gradients_agree_with_the_reference(golden, name):
    g = golden("sm")
    objective, x, noise = cases(g)[name]

    def mean_and_each(model):
        each = jax.vmap(lambda v, noise: objective.loss(score(model), v, noise))(x, noise)
        return each.mean(), each

    gradient, each = quick_jit(eqx.filter_grad(mean_and_each, has_aux=True))(grbm(g))
    close(each, g[f"mdsm_loss_{name[5:]}" if name.startswith("mdsm") else f"{name}_loss"])
    for parameter in THETA:
        close(getattr(gradient, parameter), g[f"grad_{name}_{parameter}"])


@pytest.mark.parametrize(("spacing", "name"), [("linear", "linear"), ("geometric", "geometrical")])
def test_mdsm_lays_its_levels_over_the_batch(golden, spacing, name):
    g = golden("sm")
    objective = MDSM(float(g["mdsm_sigma_begin"]), float(g["mdsm_sigma_end"]), spacing=spacing)
    levels = g[f"mdsm_levels_{name}"]
    close(objective.levels(6), levels)
    x, noise = objective.perturb(jnp.asarray(g["v"]), jax.random.key(0))
    close(noise[1], levels)
    close(x, g["v"] + levels[:, None] * noise[0])
    close(jax.vmap(objective.lower_weight)(noise), 1 / levels)


def test_mdsm_draws_the_level_of_a_batch_of_one():
    keys = jax.random.split(jax.random.key(0), 400)
    levels = jax.vmap(lambda key: MDSM(0.1, 2.0).perturb(jnp.zeros((1, 2)), key)[1][1])(keys)
    assert levels.shape == (400, 1)
    assert 0.1 <= levels.min() < 0.2 < 1.9 < levels.max() <= 2.0
    assert abs(levels.mean() - 1.05) < 4 * 1.9 / (12 * 400) ** 0.5


def test_dsm_moves_the_batch_by_sigma_times_its_noise():
    batch = jax.random.normal(jax.random.key(0), (500, 2, 3))
    x, eps = DSM(0.3).perturb(batch, jax.random.key(1))
    close(x, batch + 0.3 * eps, rtol=1e-14)
    assert abs(float(eps.var()) - 1) < 4 * (2 / eps.size) ** 0.5
    assert DSM(0.3).lower_weight(eps[0]) == 1


def test_denoising_losses_vanish_at_the_score_of_the_noised_point():
    clean, eps = jnp.array([0.5, -1.0, 2.0]), jnp.array([0.3, 1.4, -0.8])
    at_x0 = lambda variance: lambda v: -(v - clean) / variance
    assert DSM(0.4).loss(at_x0(0.4**2), clean + 0.4 * eps, eps) < 1e-25
    assert MDSM(sigma0=0.2).loss(at_x0(0.2**2), clean + 0.7 * eps, (eps, jnp.array(0.7))) < 1e-20
    # and with the sign of the energy turned, ½‖2ε/σ‖²
    close(DSM(0.4).loss(lambda v: -at_x0(0.4**2)(v), clean + 0.4 * eps, eps), 2 * jnp.sum(eps**2) / 0.4**2)


def test_score_matching_is_least_at_the_data_s_own_moments():
    data = jnp.array([[1.0], [5.0]])  # mean 3, variance 4

    def loss(mean, log_variance):
        s = lambda v: -(v - mean) * jnp.exp(-log_variance)
        return jnp.mean(jax.vmap(lambda v: SM().loss(s, v, None))(data))

    at = (jnp.array(3.0), jnp.log(jnp.array(4.0)))
    np.testing.assert_allclose(quick_jit(jax.grad(loss, (0, 1)))(*at), (0, 0), atol=1e-15)
    assert np.all(np.linalg.eigvalsh(quick_jit(jax.hessian(loss, (0, 1)))(*at)) > 0.05)


@pytest.mark.parametrize("dim", [2, 3])
def test_ssm_over_all_sign_vectors_is_sm(dim):
    model = random_grbm(dim, 4)
    signs = jnp.array(np.meshgrid(*[[-1.0, 1.0]] * dim)).reshape(dim, -1).T

    @quick_jit
    def losses(v):
        one_by_one = jax.vmap(lambda u: SSM().loss(score(model), v, u[None]))(signs)
        at_once = SSM(projections=len(signs)).loss(score(model), v, signs)
        return fisher(model, v), SM().loss(score(model), v, None), at_once, one_by_one.mean()

    exact, *others = losses(jnp.linspace(-1.0, 1.5, dim))
    close(jnp.array(others), jnp.full(3, exact), rtol=1e-12)


@pytest.mark.parametrize("directions", ["rademacher", "gaussian", "sphere"])
def test_directions_have_identity_covariance(directions):
    batch = jnp.zeros((2, 2, 2))
    x, u = SSM(directions, 20_000).perturb(batch, jax.random.key(3))
    assert u.shape == (2, 20_000, 2, 2)
    assert x is batch
    flat = u.reshape(-1, 4)
    fourth = {"rademacher": 1.0, "gaussian": 3.0, "sphere": 2.0}[directions]  # E uᵢ⁴, on the sphere 3d/(d + 2)
    deviation = jnp.where(jnp.eye(4) > 0, (fourth - 1) ** 0.5, 1.0) / len(flat) ** 0.5
    assert jnp.all(jnp.abs(flat.T @ flat / len(flat) - jnp.eye(4)) <= 4.5 * deviation + 1e-12)
    close(jnp.mean(jnp.prod(flat[:, :1], 1) ** 4), fourth, rtol=0.05)


def test_sphere_directions_all_have_length_root_d():
    _, u = SSM("sphere", 10).perturb(jnp.zeros((3, 2, 5)), jax.random.key(0))
    close(jnp.sum(u**2, (2, 3)), jnp.full((3, 10), 10.0), rtol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DSM(0.0), "sigma must be positive"),
        (lambda: MDSM(1.0, 0.5), "sigma_min <= sigma_max"),
        (lambda: MDSM(spacing=cast(Any, "cubic")), "unknown spacing"),
        (lambda: SSM(cast(Any, "cube")), "unknown directions"),
        (lambda: SSM(projections=0), "at least 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
