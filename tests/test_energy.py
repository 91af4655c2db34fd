import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from golden_models import (
    close,
    each,
    exact_posterior,
    gaussian_eblvm,
    golden_posterior,
    grbm,
    linear_posterior,
    other_posterior,
    quick_jit,
    random_grbm,
    true_posterior,
)

from bism import EBM, fisher, score, surrogate_score
from bism.energy import expected_score, trace_of_jacobian
from bism.likelihood import states


def test_score_and_laplacian_agree_with_the_reference(golden):
    g = golden("grbm")
    model = grbm(g)
    close(each(score(model), g["v"]), g["score"])
    close(-each(model.laplacian, g["v"]), g["score_jacobian_trace"])
    close(-each(lambda v: EBM.laplacian(model, v), g["v"]), g["score_jacobian_trace"])


def test_fisher_is_the_exact_score_matching_loss(golden):
    g = golden("sm")
    close(each(lambda v: fisher(grbm(g), v), g["v"]), g["sm_loss"])


def test_trace_of_jacobian_of_a_matrix_shaped_field():
    A = jnp.arange(36.0).reshape(6, 6)
    field = lambda v: (A @ v.ravel()).reshape(2, 3)
    assert trace_of_jacobian(field, jnp.ones((2, 3))) == 0 + 7 + 14 + 21 + 28 + 35


def test_score_points_up_the_density():
    model = gaussian_eblvm()
    v = jnp.array([0.7, -1.1])
    close(score(model)(v), -jnp.linalg.solve(model.covariance, v - model.mean))
    close(score(model)(model.mean) + 1, jnp.ones(2))


@pytest.mark.parametrize("prefix", ["bidsm", "bissm"])
def test_surrogate_score_agrees_with_the_reference(golden, prefix):
    g = golden("bism_grbm")
    model, posterior = grbm(g), golden_posterior(g)
    x = g["v"] + g["noise_std"] * g["upper_eps"] if prefix == "bidsm" else g["v"]

    def one(v, noise):
        return surrogate_score(model, posterior, posterior(v).sample(noise))(v)

    close(quick_jit(jax.vmap(one))(x, g["upper_logistic"]), g[f"{prefix}_posterior_score"])


@pytest.mark.parametrize("settings", [{}, {"coupling": "scaled", "shared_scale": True}])
def test_under_the_true_posterior_the_surrogate_score_is_the_score_for_every_h(settings):
    model = random_grbm(3, 4, **settings)
    v, h = jnp.array([0.4, -1.2, 2.0]), jnp.array([[0.0, 0, 0, 0], [1, 0, 1, 1], [0.3, 0.9, -2.0, 7.0]])
    surrogate = quick_jit(jax.vmap(lambda h, posterior: surrogate_score(model, posterior, h)(v), (0, None)))
    exact = jnp.broadcast_to(quick_jit(score(model))(v), (3, 3))
    close(surrogate(h, exact_posterior(model)), exact, rtol=1e-12)
    wrong = linear_posterior(model.weights.T + 0.1, model.c)
    assert jnp.all(jnp.linalg.norm(surrogate(h, wrong) - exact, axis=1) > 1e-2)


def test_expected_score_is_the_surrogate_score_s_mean_over_the_bits():
    model = random_grbm(3, 4)
    posterior, v = linear_posterior(0.5 * model.W.T + 0.1, model.c - 0.4), jnp.array([0.4, -1.2, 2.0])
    mass = jax.vmap(lambda h: jnp.exp(posterior(v).log_prob(h)))(states(4))
    of_each = quick_jit(jax.vmap(lambda h: surrogate_score(model, posterior, h)(v)))(states(4))
    close(quick_jit(expected_score(model, posterior))(v), mass @ of_each, rtol=1e-12)


def test_under_the_true_gaussian_posterior_it_is_the_marginals():
    model = gaussian_eblvm()
    v, h = jnp.array([0.7, -1.1]), jnp.array([5.0, -3.0, 0.1])
    close(surrogate_score(model, true_posterior(model), h)(v), score(model)(v), rtol=1e-12)
    gap = surrogate_score(model, other_posterior(model), h)(v) - score(model)(v)
    assert jnp.linalg.norm(gap) > 0.1


def test_given_is_the_energy_at_that_v():
    class Product(type(gaussian_eblvm())):
        def energy(self, v, h):
            return jnp.sum(v) * jnp.prod(h)

    base = gaussian_eblvm()
    model = Product(**{name: getattr(base, name) for name in ("log_a", "log_lambda", "M", "b", "m")})
    assert model.given(jnp.array([1.0, 2.0]))(jnp.array([2.0, 3.0])) == 18
    assert eqx.tree_equal(model.given(jnp.ones(2))(jnp.ones(3)), jnp.array(2.0))
