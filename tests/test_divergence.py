import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_models import (
    close,
    gaussian_eblvm,
    golden_posterior,
    grbm,
    other_posterior,
    quick_jit,
    random_grbm,
    true_posterior,
    two_points,
)

from bism import KL, Fisher
from bism.descent import descend
from bism.likelihood import states
from bism.posterior import Bernoulli

V = jnp.array([[0.7, -1.1], [0.0, 0.4], [-0.6, 1.3], [1.5, 0.9], [-1.0, -1.0]])


@pytest.mark.parametrize("prefix", ["bidsm", "bissm"])
def test_kl_agrees_with_the_reference(golden, prefix):
    g = golden("bism_grbm")
    model, x = grbm(g), g["v"] + (g["noise_std"] * g["inner_eps"] if prefix == "bidsm" else 0)

    def mean_and_each(posterior):
        each = jax.vmap(lambda v, l: KL(exact=False).loss(model, v, posterior(v), l[None]))(x, g["inner_logistic"])
        return each.mean(), each

    gradient, each = quick_jit(jax.grad(mean_and_each, has_aux=True))(golden_posterior(g))
    close(each, g[f"{prefix}_lower_loss"])
    close(gradient.net.weight, g[f"grad_{prefix}_lower_posterior_weight"])
    close(gradient.net.bias, g[f"grad_{prefix}_lower_posterior_bias"])


def moments(model, posterior, v):
    """(mean, variance) of q and of p at v."""
    q, p = posterior(v), true_posterior(model)(v)
    return q.loc, jnp.exp(2 * q.log_std), p.loc, jnp.exp(2 * p.log_std)


def exact_kl(model, posterior, v):
    mq, vq, mp, vp = moments(model, posterior, v)
    return 0.5 * jnp.sum(jnp.log(vp / vq) + (vq + (mq - mp) ** 2) / vp - 1) + model.free_energy(v)


def exact_fisher(model, posterior, v):
    mq, vq, mp, vp = moments(model, posterior, v)
    return 0.5 * jnp.sum(vq * (1 / vp - 1 / vq) ** 2 + ((mq - mp) / vp) ** 2)


CLOSED_FORMS = [(KL(2), exact_kl), (Fisher(2), exact_fisher)]


@pytest.mark.parametrize(("divergence", "exact"), CLOSED_FORMS)
def test_value_and_gradient_are_the_closed_forms(divergence, exact):
    model, noise = gaussian_eblvm(), two_points(1, 3)[0]
    estimate = lambda posterior, v: divergence.loss(model, v, posterior(v), noise)
    closed = lambda posterior, v: exact(model, posterior, v)
    each = lambda loss: quick_jit(jax.vmap(jax.value_and_grad(loss), (None, 0)))(other_posterior(model), V)
    jax.tree.map(close, each(estimate), each(closed))


@pytest.mark.parametrize("divergence", [KL(2), Fisher(2)])
def test_the_minimiser_is_the_true_posterior(divergence):
    model, noise = gaussian_eblvm(), two_points(len(V), 3)

    def loss(posterior, noise):
        return jnp.mean(jax.vmap(lambda v, n: divergence.loss(model, v, posterior(v), n))(V, noise))

    optimizer, start = optax.sgd(0.1), other_posterior(model)
    draws = jnp.broadcast_to(noise, (1500, *noise.shape))
    found, _, values = quick_jit(lambda phi: descend(loss, optimizer, phi, optimizer.init(phi), draws))(start)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-7), found, true_posterior(model))
    at_optimum = jnp.mean(jax.vmap(model.free_energy)(V)) if isinstance(divergence, KL) else 0.0
    np.testing.assert_allclose(values[-1], at_optimum, atol=1e-12)


def test_under_the_true_posterior_every_sample_gives_the_free_energy_and_no_fisher():
    model, noise = gaussian_eblvm(), jax.random.normal(jax.random.key(0), (4, 3))
    q = true_posterior(model)(V[0])
    each = lambda divergence: quick_jit(jax.vmap(lambda one: divergence.loss(model, V[0], q, one[None])))(noise)
    close(each(KL()), jnp.full(4, model.free_energy(V[0])), rtol=1e-12)
    assert jnp.all(each(Fisher()) < 1e-25)


@pytest.mark.parametrize(("divergence", "exact"), [(KL(20_000), exact_kl), (Fisher(20_000), exact_fisher)])
def test_random_particles_estimate_the_closed_form(divergence, exact):
    model = gaussian_eblvm()
    posterior = other_posterior(model)
    q = posterior(V[0])
    noise = q.noise(jax.random.key(0), (divergence.particles,))
    each = quick_jit(jax.vmap(lambda one: divergence.loss(model, V[0], q, one[None])))(noise)
    close(quick_jit(divergence.loss)(model, V[0], q, noise), each.mean(), rtol=1e-12)
    error = each.std() / len(each) ** 0.5
    assert abs(each.mean() - exact(model, posterior, V[0])) < 4 * error


def test_kl_of_bits_is_the_sum_over_their_states():
    model, v = random_grbm(2, 3), jnp.array([0.5, -0.8])
    q = Bernoulli(jnp.array([0.3, -1.0, 2.0]))
    h = states(3)
    log_q = jax.vmap(q.log_prob)(h)
    log_p = -jax.vmap(lambda h: model.energy(v, h))(h) + model.free_energy(v)
    divergence = jnp.sum(jnp.exp(log_q) * (log_q - log_p))
    at = jax.vmap(lambda h: KL().at(model.given(v), q, h))(h)
    close(jnp.sum(jnp.exp(log_q) * at), divergence + model.free_energy(v), rtol=1e-12)
    close(KL().loss(model, v, q, jnp.zeros((1, 3))), divergence + model.free_energy(v), rtol=1e-12)


@pytest.mark.parametrize("exact", [True, False])
def test_only_the_exact_kl_of_bits_is_stationary_at_the_true_posterior(exact):
    model, v = random_grbm(2, 3), jnp.array([0.5, -0.8])
    logits, noise = model.field(v), jax.random.logistic(jax.random.key(0), (100_000, 3))
    loss = lambda logits: KL(exact=exact).loss(model, v, Bernoulli(logits, 0.5), noise)
    gradient = quick_jit(jax.grad(loss))(logits)
    if exact:
        np.testing.assert_allclose(gradient, 0, atol=1e-15)
    else:  # the mean of a relaxed bit less that of the bit
        close(gradient, jax.vmap(Bernoulli(logits, 0.5).sample)(noise).mean(0) - jax.nn.sigmoid(logits), 1e-7)
        assert jnp.max(jnp.abs(gradient)) > 5 * (0.25 / len(noise)) ** 0.5
