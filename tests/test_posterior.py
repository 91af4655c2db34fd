import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import close, golden_posterior, linear_posterior
from scipy import stats

from bism import BernoulliPosterior, GaussianPosterior
from bism.posterior import Bernoulli, Gaussian

LOGITS = jnp.array([-1.5, 0.2, 2.0])


def test_bernoulli_agrees_with_the_reference(golden):
    g = golden("bism_grbm")
    posterior = golden_posterior(g)
    q = jax.vmap(posterior)
    h = jax.vmap(lambda v, l: posterior(v).sample(l))(g["v"], g["inner_logistic"])
    close(q(g["v"]).logits, g["posterior_logits"])
    close(jax.vmap(lambda v: posterior(v).mean)(g["v"]), g["posterior_mean"])
    close(h, g["h_sample"])
    close(jax.vmap(lambda v, h: posterior(v).log_prob(h))(g["v"], h), g["log_q"])


def test_bernoulli_mass_sums_to_one_and_entropy_is_its_mean():
    q = Bernoulli(LOGITS)
    log_p = jnp.stack([q.log_prob(jnp.array(h)) for h in itertools.product([0.0, 1.0], repeat=3)])
    close(jnp.exp(log_p).sum(), 1.0, rtol=1e-14)
    close(q.entropy(), -jnp.sum(jnp.exp(log_p) * log_p), rtol=1e-12)
    close(q.mean, stats.logistic.cdf(LOGITS), rtol=1e-12)


def test_a_relaxed_bit_is_over_one_half_as_often_as_the_bit_is_one():
    q, count = Bernoulli(LOGITS), 40_000
    noise = q.noise(jax.random.key(0), (count,))
    assert noise.shape == (count, 3)
    frequency = jnp.mean(jax.vmap(q.sample)(noise) > 0.5, axis=0)
    z = (frequency - q.mean) / jnp.sqrt(q.mean * (1 - q.mean) / count)
    assert jnp.all(jnp.abs(z) < 4)


def test_the_temperature_divides_logits_and_noise():
    noise = jnp.array([0.3, -0.4, 1.0])
    for temperature in (0.1, 2.0):
        expected = stats.logistic.cdf((LOGITS + noise) / temperature)
        close(Bernoulli(LOGITS, temperature).sample(noise), expected, rtol=1e-12)


def test_straight_through_has_the_bits_value_and_the_relaxed_gradient():
    noise = jnp.array([0.3, -0.4, -1.9])
    hard, soft = Bernoulli(LOGITS, 0.5, True), Bernoulli(LOGITS, 0.5, False)
    np.testing.assert_allclose(hard.sample(noise), [0.0, 0.0, 1.0], atol=1e-15)

    def slope(straight_through):
        return jax.grad(lambda a: jnp.sum(Bernoulli(a, 0.5, straight_through).sample(noise) ** 1))(LOGITS)

    h = soft.sample(noise)
    close(slope(True), h * (1 - h) / 0.5, rtol=1e-12)
    close(slope(True), slope(False), rtol=1e-14)


def test_posteriors_hand_their_settings_to_the_distribution():
    weight, bias = jnp.array([[1.0, 2.0], [0.0, -1.0], [3.0, 0.5]]), jnp.array([0.1, 0.2, 0.3])
    q = linear_posterior(weight, bias, 0.7, True)(jnp.array([2.0, -1.0]))
    assert (q.temperature, q.straight_through, q.discrete) == (0.7, True, True)
    close(q.logits, jnp.array([0.1, 1.2, 5.8]), rtol=1e-14)
    made = BernoulliPosterior.linear(4, 3, temperature=0.3, straight_through=True, key=jax.random.key(0))(jnp.ones(4))
    assert (made.logits.shape, made.temperature, made.straight_through) == ((3,), 0.3, True)


@pytest.mark.parametrize("q", [Gaussian(jnp.array([0.5, -2.0]), jnp.array([-1.0, 0.7])), Bernoulli(LOGITS)])
def test_metric_is_the_hessian_of_kl_at_q_itself(q):
    """KL(q‖p) of two of a kind, in closed form; for p = q its Hessian in q is the Fisher information."""

    def kl(q, p):
        if isinstance(q, Gaussian):
            spread = jnp.exp(2 * q.log_std) + (q.loc - p.loc) ** 2
            return jnp.sum(p.log_std - q.log_std + 0.5 * spread * jnp.exp(-2 * p.log_std))
        return -q.entropy() - p.log_prob(q.mean)

    tangent = jax.tree.map(lambda x: jnp.cos(7 * x), q)
    hessian = jax.jvp(lambda x: jax.grad(kl)(x, q), (q,), (tangent,))[1]
    jax.tree.map(lambda x, y: close(x, y, rtol=1e-12), q.metric(tangent), hessian)


@pytest.fixture
def gaussian():
    return Gaussian(jnp.array([0.5, -2.0]), jnp.array([-1.0, 0.7]))


def test_gaussian_density_and_entropy(gaussian):
    h, reference = jnp.array([0.1, 3.0]), (gaussian.loc, jnp.exp(gaussian.log_std))
    close(gaussian.log_prob(h), stats.norm.logpdf(h, *reference).sum(), rtol=1e-12)
    close(gaussian.entropy(), stats.norm.entropy(*reference).sum(), rtol=1e-12)
    close(gaussian.mean, gaussian.loc)
    assert not gaussian.discrete


def test_gaussian_sample_is_reparameterised(gaussian):
    noise = jnp.array([1.5, -0.5])
    close(gaussian.sample(noise), gaussian.loc + jnp.exp(gaussian.log_std) * noise, rtol=1e-14)
    slope = jax.grad(lambda q: jnp.sum(q.sample(noise)))(gaussian)
    close(slope.loc, jnp.ones(2))
    close(slope.log_std, jnp.exp(gaussian.log_std) * noise, rtol=1e-14)


def test_gaussian_noise_is_standard_and_of_the_asked_shape(gaussian):
    noise = gaussian.noise(jax.random.key(1), (200, 100))
    assert noise.shape == (200, 100, 2)
    assert stats.kstest(np.ravel(noise), "norm").pvalue > 1e-3


def test_gaussian_mlp_reads_its_first_half_as_the_mean():
    posterior = GaussianPosterior.mlp(2, 3, width=5, depth=1, key=jax.random.key(0))
    v = jnp.array([0.3, -0.8])
    (mlp,) = jax.tree.leaves(posterior, is_leaf=lambda x: isinstance(x, eqx.nn.MLP))
    q = posterior(v)
    close(jnp.concatenate([q.loc, q.log_std]), mlp(v), rtol=1e-15)


def test_an_mlp_of_bits():
    posterior = BernoulliPosterior.mlp(2, 3, width=4, depth=1, key=jax.random.key(0))
    v = jnp.array([0.3, -1.0])
    assert posterior(v).mean.shape == (3,)
    np.testing.assert_allclose(posterior(v).mean, jax.nn.sigmoid(posterior.net(v)))
