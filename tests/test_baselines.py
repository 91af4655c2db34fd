from dataclasses import replace
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_models import (
    THETA,
    close,
    each,
    exact_posterior,
    gaussian_eblvm,
    golden_posterior,
    grbm,
    linear_posterior,
    quick_jit,
    random_grbm,
    true_posterior,
)

from bism import (
    DSM,
    NCE,
    VNCE,
    BiSM,
    ContrastiveDivergence,
    Grid,
    MaximumLikelihood,
    ScoreMatching,
    log_likelihood,
    score,
)
from bism.baselines import discriminate, log_evidence, log_normal
from bism.method import parameters

SGD = optax.sgd(1.0)  # a step of θ is then its gradient
KEY = jax.random.key(0)
BATCH = 0.4 + jax.random.normal(jax.random.key(1), (6, 2))


def step(method, state, batch=BATCH, key=KEY):
    """The gradient that a step takes, the state after it, and the metrics."""
    after, metrics = quick_jit(method.step)(state, batch, key)
    before = parameters((state.model, state.memory if isinstance(method, NCE | VNCE) else None))
    gone = parameters((after.model, after.memory if isinstance(method, NCE | VNCE) else None))
    return jax.tree.map(jnp.subtract, before, gone), after, metrics


def start(method, model, posterior=None):
    return method.init(model, posterior, batch=BATCH, key=KEY)


def each_and_gradient(loss, learned, *batch):
    """The loss of each example, as a batch of one, and the gradient of their mean."""
    one = jax.vmap(lambda *x: loss(learned, *(y[None] for y in x)))
    return quick_jit(lambda: (one(*batch), eqx.filter_grad(loss)(learned, *batch)))()


@pytest.mark.parametrize("name", ["nce", "nce_nu"])
def test_nce_agrees_with_the_reference(golden, name):
    g = golden("sm")
    method = NCE(float(g["nce_nu"]) if name == "nce_nu" else 1.0)
    batch = jnp.asarray(g["v"]), jnp.asarray(g["nce_noise_sample"])
    losses, (model, c) = each_and_gradient(method.loss, (grbm(g), jnp.asarray(g["nce_c"])), *batch)
    close(losses, g[f"{name}_loss"])
    close(c, g[f"grad_{name}_nce_c"])
    for parameter in THETA:
        close(getattr(model, parameter), g[f"grad_{name}_{parameter}"])


def test_vnce_agrees_with_the_reference(golden):
    g = golden("sm")
    posterior, particles_last = golden_posterior(g), lambda x: jnp.swapaxes(jnp.asarray(x), 0, 1)
    data_noise, noise_noise = jnp.asarray(g["vnce_logistic_data"])[:, None], particles_last(g["vnce_logistic_noise"])
    loss = lambda learned, *batch: VNCE().loss(learned, posterior, *batch)
    batch = jnp.asarray(g["v"]), data_noise, jnp.asarray(g["vnce_noise_sample"]), noise_noise
    losses, (model, c) = each_and_gradient(loss, (grbm(g), jnp.asarray(g["nce_c"])), *batch)
    close(losses, g["vnce_loss"])
    close(c, g["grad_vnce_nce_c"])
    for parameter in THETA:
        close(getattr(model, parameter), g[f"grad_vnce_{parameter}"])

    lower = lambda posterior, *batch: VNCE().lower(posterior, grbm(g), *batch)
    losses, gradient = each_and_gradient(lower, posterior, batch[0], particles_last(g["vnce_lower_logistic"]))
    close(losses, g["vnce_lower_loss"])
    close(gradient.net.weight, g["grad_vnce_lower_posterior_weight"])
    close(gradient.net.bias, g["grad_vnce_lower_posterior_bias"])


def test_log_normal_is_a_density():
    grid = Grid((-9.0, -9.0), (9.0, 9.0), 100)
    close(jnp.exp(grid.log_integral(jax.vmap(log_normal)(grid.points))), 1.0, rtol=1e-12)
    close(log_normal(jnp.array([1.0, 2.0])), -2.5 - jnp.log(2 * jnp.pi))


def test_discriminate_is_least_where_the_ratio_is_right():
    ratio, nu = 3.0, 4.0  # of p/pₙ, at one point: the data are there ratio times as often as one noise sample
    expected = lambda log_ratio: (
        ratio * discriminate(log_ratio, jnp.array(-99.0), nu) + discriminate(jnp.array(99.0), log_ratio, nu)
    )
    assert abs(jax.grad(expected)(jnp.log(ratio))) < 1e-12
    assert jax.grad(expected)(jnp.log(ratio) + 0.1) > 0 > jax.grad(expected)(jnp.log(ratio) - 0.1)


@pytest.mark.parametrize("nu", [1.0, 3.0])
def test_nce_finds_the_true_model_stationary(nu):
    """In expectation over data and noise, by quadrature, at the model of the data and its log Z."""
    model, grid = random_grbm(2, 2), Grid((-9.0, -9.0), (9.0, 9.0), 80)
    log_p = -each(model.free_energy, grid.points)
    learned = model, grid.log_integral(log_p)
    one = lambda learned, v, y: NCE(nu).loss(learned, v[None], y[None])
    p = jnp.exp(log_p - learned[1] + grid.log_area)
    q = jnp.exp(each(log_normal, grid.points) + grid.log_area)

    def expected(learned):
        far = jnp.full(2, 40.0)  # where the other half of the loss is a constant
        data = jax.vmap(lambda v: one(learned, v, far))(grid.points)
        noise = jax.vmap(lambda y: one(learned, far, y))(grid.points)
        return jnp.sum(p * data + q * noise) - one(learned, far, far)

    gradient = quick_jit(eqx.filter_grad(expected))(learned)
    assert max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(gradient)) < 1e-9


def test_nce_and_vnce_learn_their_normaliser():
    model = random_grbm(2, 3)
    for method, posterior in ((NCE(optimizer=SGD), None), (VNCE(optimizer=SGD), exact_posterior(model))):
        state = start(method, model, posterior)
        (_, slope), after, metrics = step(method, state)
        assert state.memory == 0 != after.memory
        close(after.memory, -slope)
        if isinstance(method, NCE):
            noise = jax.random.normal(KEY, BATCH.shape)
            loss, (_, expected) = quick_jit(eqx.filter_value_and_grad(method.loss))((model, state.memory), BATCH, noise)
            close(slope, expected)
            close(metrics["loss"], loss)


def test_log_evidence_under_the_true_posterior_is_the_free_energy():
    bits, gauss = random_grbm(2, 3), gaussian_eblvm()
    for model, posterior in ((bits, exact_posterior(bits)), (gauss, true_posterior(gauss))):
        noise = posterior(BATCH[0]).noise(KEY, (4,))
        close(log_evidence(model, posterior, BATCH[0], noise), -model.free_energy(BATCH[0]), rtol=1e-12)


def test_vnce_under_the_true_posterior_is_nce():
    model = gaussian_eblvm()
    posterior, learned = true_posterior(model), (model, jnp.array(0.7))
    _, data_noise, y, noise_noise = VNCE(nu=2.0).draw(posterior, BATCH, KEY)
    assert (data_noise.shape, noise_noise.shape) == ((6, 1, 3), (6, 5, 3))
    vnce = quick_jit(partial(VNCE(nu=2.0).loss, learned, posterior))(BATCH, data_noise, y, noise_noise)
    close(vnce, quick_jit(partial(NCE(nu=2.0).loss, learned))(BATCH, y), rtol=1e-12)


def test_score_matching_steps_down_its_objective():
    model, objective = random_grbm(2, 3), DSM(0.5)
    x, eps = objective.perturb(BATCH, KEY)

    def loss(model):
        return jnp.mean(jax.vmap(lambda v, e: 0.5 * jnp.sum((score(model)(v) + e / 0.5) ** 2))(x, eps))

    method = ScoreMatching(objective, optimizer=SGD)
    (gradient, _), _, metrics = step(method, start(method, model))
    value, expected = quick_jit(eqx.filter_value_and_grad(loss))(model)
    close(metrics["loss"], value)
    jax.tree.map(close, gradient, expected)


def test_maximum_likelihood_s_gradient_is_that_of_the_log_likelihood():
    """The mean of ∇F over the data less that over the model, the latter by quadrature."""
    model, grid = random_grbm(2, 3), Grid((-12.0, -12.0), (12.0, 12.0), 120)
    method = MaximumLikelihood(optimizer=SGD)
    (gradient, _), _, metrics = step(method, start(method, model))

    @quick_jit
    def phases(model):
        p = jnp.exp(grid.log_density(model.free_energy).ravel() + grid.log_area)
        mean_f = lambda m, points, weights: weights @ jax.vmap(m.free_energy)(points)
        data = jax.grad(mean_f)(model, BATCH, jnp.full(6, 1 / 6))
        return jax.tree.map(jnp.subtract, data, jax.grad(mean_f)(model, grid.points, p))

    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-10), gradient, phases(model))
    close(metrics["loss"], -quick_jit(log_likelihood)(model, BATCH).mean())


def grbm_free_energy_gradient(model, v):
    """∂F/∂(W, b, c), written out, averaged over v."""
    p = jax.nn.sigmoid(jax.vmap(model.field)(v))
    precision = jnp.exp(-2 * model.log_sigma)
    return -v.T @ p / len(v), -(v - model.b[None]).mean(0) * precision, -p.mean(0)


@pytest.mark.parametrize("persistent", [False, True])
def test_contrastive_divergence_takes_data_less_samples(persistent):
    model = random_grbm(2, 3)
    method = ContrastiveDivergence(3, persistent, optimizer=SGD)
    state = start(method, model)
    for key in jax.random.split(KEY, 2):
        chain_start = state.memory if persistent else BATCH
        negatives = quick_jit(method.negatives)(state.model, chain_start, key)
        (gradient, _), after, _ = step(method, state, key=key)
        model = state.model
        data, samples = grbm_free_energy_gradient(model, BATCH), grbm_free_energy_gradient(model, negatives)
        for got, d, s in zip((gradient.W, gradient.b, gradient.c), data, samples, strict=True):
            close(got, d - s)
        if persistent:
            close(after.memory, negatives, rtol=1e-12)  # the next chain goes on from here
        else:
            assert after.memory is None
        state = after


def test_contrastive_divergence_is_still_at_data_of_its_own_model():
    """In distribution the chain leaves the model's own samples alone, so that the gradient has mean zero."""
    model, grid = random_grbm(2, 2), Grid((-9.0, -9.0), (9.0, 9.0), 200)
    density = grid.log_density(model.free_energy).ravel()
    p = jnp.exp(density + grid.log_area)
    data = grid.points[jax.random.choice(KEY, len(p), (20_000,), p=p)]
    sampler = quick_jit(ContrastiveDivergence(1).negatives)
    negatives = sampler(model, data, jax.random.key(7))
    p, n = (np.asarray(jax.nn.sigmoid(each(model.field, v))) for v in (data, negatives))
    difference = p - n
    assert np.all(np.abs(difference.mean(0)) < 4 * difference.std(0) / len(data) ** 0.5)
    shifted = sampler(model, data + 2, KEY)
    assert jnp.all((data + 2 - shifted).mean(0) > 0.5)  # while other data are drawn towards the model


def test_the_average_follows_theta_and_phi():
    method = BiSM(DSM(0.5), optimizer=optax.sgd(0.1), ema=0.15)
    state = start(method, random_grbm(2, 3), linear_posterior(jnp.ones((3, 2)), jnp.zeros(3)))
    _, one, _ = step(method, state)
    _, two, _ = step(method, one)
    for of in (lambda state: state.model.W, lambda state: state.posterior.net.weight):
        first = 0.1 * of(state) + 0.9 * of(one)  # 1/10 at first, 2/11 would be next
        close(of(two.average), 0.15 * first + 0.85 * of(two), rtol=1e-12)
    assert (two.best, two.q) == (two.average.model, two.average.posterior)


@pytest.mark.parametrize("method", [NCE(optimizer=SGD, ema=0.15), VNCE(optimizer=SGD, ema=0.15)], ids=["NCE", "VNCE"])
def test_the_average_has_its_own_normaliser(method):
    model = random_grbm(2, 3)
    state = start(method, model, exact_posterior(model) if isinstance(method, VNCE) else None)
    _, one, _ = step(method, state)
    _, two, _ = step(method, one)
    close(two.learned, 0.15 * 0.9 * one.memory + 0.85 * two.memory, rtol=1e-12)
    as_used = replace(two, model=two.best, posterior=two.q, memory=two.learned, average=None)
    close(method.validate(two, BATCH, KEY), method.validate(as_used, BATCH, KEY), rtol=1e-12)


def test_models_that_a_method_cannot_learn_are_refused():
    gauss = gaussian_eblvm()
    with pytest.raises(TypeError, match="enumerates a Gaussian RBM"):
        start(MaximumLikelihood(), gauss)
    with pytest.raises(TypeError, match="Gibbs sampling needs a Gaussian RBM"):
        start(ContrastiveDivergence(), gauss)
    with pytest.raises(TypeError, match="needs a posterior"):
        start(VNCE(), gauss)
    with pytest.raises(ValueError, match="at least 1"):
        ContrastiveDivergence(0)
