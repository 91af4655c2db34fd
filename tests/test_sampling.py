"""Chains against closed forms. Unadjusted Langevin on ½x² has variance T/(1 − ε²/4), adjusted T, whatever the step."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import close, gaussian_eblvm, quick_jit, random_grbm

from bism import (
    EBLVM,
    EBM,
    AnnealedLangevin,
    Gibbs,
    Grid,
    JointLadder,
    Kernel,
    Ladder,
    Langevin,
    MLPFreeEnergy,
    Sweep,
    chain,
    denoise,
    ladder_levels,
    sample,
    trajectory,
)
from bism.likelihood import states
from bism.sampling import langevin_move, normal_like, paper_temperatures

KEY = jax.random.key(0)
GRBM, GAUSS = random_grbm(2, 3), gaussian_eblvm()
LEVELS = jnp.array([1.0, 0.6, 0.3, 0.0])
half_square = lambda x: 0.5 * jnp.sum(x**2)


def check_mean(samples, mean, std=None, z=4.5):
    """The mean of independent samples, within its standard error."""
    samples, mean = np.asarray(samples), np.asarray(mean)
    error = (samples.std(0) if std is None else std) / len(samples) ** 0.5
    assert np.all(np.abs(samples.mean(0) - mean) < z * error), (samples.mean(0), mean, error)


def check_moments(samples, mean, covariance):
    check_mean(samples, mean)
    samples, mean, covariance = (np.asarray(x) for x in (samples, mean, covariance))
    centred = samples - mean
    check_mean((centred[:, :, None] * centred[:, None, :]).reshape(len(samples), -1), covariance.ravel())


def grbm_moments(model):
    """Mean and covariance of v, and the mean of h, by enumeration of h."""
    h = states(model.c.size)
    weight = jax.nn.softmax(jax.vmap(model.log_weight)(h))
    means = jax.vmap(model.mean_v)(h)
    mean = weight @ means
    centred = means - mean[None]
    covariance = jnp.diag(jnp.exp(2 * model.log_sigma)) + (centred.T * weight[None]) @ centred
    return mean, covariance, weight @ h


class Case(NamedTuple):
    kernel: Kernel
    position: Any
    info: set[str]


CASES = {
    "Gibbs": Case(Gibbs(GRBM), jnp.array([0.3, -0.4]), {"h", "mean_v"}),
    "Langevin": Case(Langevin(half_square, 0.3), jnp.ones((2, 2)), {"energy"}),
    "adjusted": Case(Langevin(GAUSS.free_energy, 0.3, adjust=True), jnp.ones(2), {"energy", "accepted"}),
    "joint": Case(
        Langevin(lambda x: GAUSS.energy(*x), 0.3, adjust=True), (jnp.ones(2), jnp.ones(3)), {"energy", "accepted"}
    ),
    "annealed": Case(AnnealedLangevin(half_square, jnp.array([3.0, 1.0])), jnp.ones(2), {"energy", "temperature"}),
    "sweep": Case(Sweep(GRBM), (jnp.ones(2), jnp.ones(3)), {"energy", "accepted"}),
    "ladder": Case(Ladder(half_square, LEVELS), jnp.ones(2), {"energy", "level", "residual"}),
    "joint ladder": Case(
        JointLadder(GAUSS, LEVELS), (jnp.ones(2), jnp.ones(3)), {"energy", "level", "residual", "accepted"}
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_kernel_is_a_pure_map_of_key_and_state(case):
    kernel, keys = case.kernel, jax.random.split(KEY, 2)
    step = quick_jit(kernel)
    state = kernel.init(case.position)
    after, info = step(keys[0], state)
    same = lambda a, b: all((x == y).all() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    assert set(info) == case.info
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    assert same(step(keys[0], state), (after, info))
    if "accepted" not in info:
        assert not same(step(keys[1], state)[0], after)


@pytest.mark.parametrize("name", ["Gibbs", "joint", "annealed", "ladder"])
def test_chains_side_by_side_go_their_own_ways(name):
    kernel, position, infos = CASES[name]
    starts = jax.tree.map(lambda x: jnp.stack([x, 2 * x, x]), position)
    states, info = trajectory(kernel, KEY, starts, 6, every=2)
    last, _ = chain(kernel, KEY, starts, 6)
    shapes = lambda lead: jax.tree.map(lambda x: (*lead, *x.shape), kernel.init(position))
    assert jax.tree.map(jnp.shape, last) == shapes((3,))
    assert jax.tree.map(jnp.shape, states) == shapes((3, 3))
    assert set(info) == infos
    assert all(x.shape[:2] == (3, 3) for x in info.values())
    v = jax.tree.leaves(last)[0]
    assert not (v[0] == v[2]).any()


def test_gibbs_has_the_enumerated_moments():
    mean, covariance, mean_h = grbm_moments(GRBM)
    v, info = chain(Gibbs(GRBM), KEY, jnp.zeros((8000, 2)), 40)
    check_moments(v, mean, covariance)
    check_mean(info["h"], mean_h)
    close(info["mean_v"], jax.vmap(GRBM.mean_v)(info["h"]), rtol=1e-12)
    check_mean(info["mean_v"], mean)


def test_enumerated_moments_are_those_by_quadrature():
    grid = Grid((-12.0, -12.0), (12.0, 12.0), 120)
    weight = jnp.exp(grid.log_density(GRBM.free_energy).ravel() + grid.log_area)
    mean, covariance, _ = grbm_moments(GRBM)
    close(weight @ grid.points, mean, rtol=1e-9)
    centred = grid.points - mean[None]
    close((centred.T * weight[None]) @ centred, covariance, rtol=1e-9)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_a_large_step_biases_langevin_by_a_known_factor_and_adjusting_mends_it(temperature):
    eps, start = 1.3, jnp.zeros((8000, 1))
    unadjusted, _ = chain(Langevin(half_square, eps, temperature), KEY, start, 60)
    check_moments(unadjusted, jnp.zeros(1), jnp.array([[temperature / (1 - eps**2 / 4)]]))
    adjusted, info = chain(Langevin(half_square, eps, temperature, adjust=True), KEY, start, 100)
    check_moments(adjusted, jnp.zeros(1), jnp.array([[temperature]]))
    assert abs(unadjusted.var() / adjusted.var() - 1) > 0.5
    assert 0.5 < info["accepted"].mean() < 0.95


def test_adjusted_langevin_has_the_gaussian_s_moments_at_a_large_step():
    samples, _ = chain(Langevin(GAUSS.free_energy, 1.0, adjust=True), KEY, jnp.zeros((8000, 2)), 150)
    check_moments(samples, GAUSS.mean, GAUSS.covariance)


def test_adjusted_langevin_on_a_double_well():
    """Where the acceptance does more than rescale: E x² and E x⁴ of exp(−x⁴ + 2x²), by quadrature."""
    energy = lambda x: jnp.sum(x**4 - 2 * x**2)
    start = jax.random.uniform(KEY, (8000, 1), minval=-1.5, maxval=1.5)  # in the tails so large a step is stuck
    x, info = chain(Langevin(energy, 0.7, adjust=True), KEY, start, 150)
    grid = np.linspace(-4, 4, 4001)
    p = np.exp(-(grid**4) + 2 * grid**2)
    check_mean(x, 0.0)
    check_mean(x**2, p @ grid**2 / p.sum())
    check_mean(x**4, p @ grid**4 / p.sum())
    close(info["energy"], jax.vmap(energy)(x), rtol=1e-12)


def test_a_joint_chain_has_the_marginal_of_v():
    start = jnp.zeros((8000, 2)), jnp.zeros((8000, 3))
    (v, _), _ = chain(Langevin(lambda x: GAUSS.energy(*x), 0.9, adjust=True), KEY, start, 150)
    check_moments(v, GAUSS.mean, GAUSS.covariance)


def test_the_move_is_half_a_squared_step_downhill_and_root_t_of_noise():
    x, g, n = jnp.array([1.0, 2.0]), jnp.array([4.0, -2.0]), jnp.array([0.5, 1.0])
    close(langevin_move(x, g, n, 0.2, 9.0), jnp.array([1.0 - 0.08 + 0.3, 2.0 + 0.04 + 0.6]), rtol=1e-14)
    pair = langevin_move((x, -x), (g, -g), (n, -n), 0.2, 9.0)
    close(pair[0], -pair[1], rtol=1e-14)


def test_noise_of_a_pair_is_independent():
    a, b = normal_like(KEY, (jnp.zeros(20_000), jnp.zeros(20_000)))
    check_mean(jnp.stack([a, b, a * b, a**2, b**2], 1), np.array([0.0, 0.0, 0.0, 1.0, 1.0]))


def test_temperatures_agree_with_the_reference(golden):
    g = golden("langevin")
    close(paper_temperatures(), g["temperatures_schedule"])
    close(paper_temperatures(2, 0, 3), jnp.array([100.0, 100.0, 1.0, 0.5, 0.0]))


def test_annealing_walks_its_schedule_and_stays_at_its_end(golden):
    temperatures = jnp.asarray(golden("langevin")["temperatures"])
    kernel = AnnealedLangevin(half_square, temperatures, 0.1)
    states, info = trajectory(kernel, KEY, jnp.ones((4, 2)), 9)
    close(info["temperature"][:, 0], jnp.concatenate([temperatures, jnp.full(3, temperatures[-1])]))
    assert states.index[:, 0].tolist() == list(range(1, 10))
    close(info["energy"][1:], jax.vmap(jax.vmap(half_square))(states.position[:-1]), rtol=1e-12)


def test_without_temperature_annealing_is_gradient_descent():
    kernel = AnnealedLangevin(half_square, jnp.zeros(1), 0.4)
    states, _ = chain(kernel, KEY, jnp.ones((1, 2)), 5)
    close(states.position, jnp.full((1, 2), (1 - 0.5 * 0.4**2) ** 5), rtol=1e-12)


@pytest.mark.parametrize("eta", [0.0, 0.4, 1.0])
def test_a_step_down_the_ladder_has_the_next_level_s_noise_around_the_denoiser(eta):
    """D(x) = 0.3 x + 0.7, from x of the first level's noise: kept² σ² + σ↑² is the square of the next level."""
    energy = lambda x: 0.5 * 0.7 * jnp.sum((x - 1) ** 2) / 0.2**2
    kernel, x = Ladder(energy, LEVELS, 0.2, eta), jnp.array([2.0, -1.0])
    up = eta * 0.6 * (1 - 0.6**2) ** 0.5
    kept = (0.6**2 - up**2) ** 0.5
    states, info = chain(kernel, KEY, jnp.broadcast_to(x, (4000, 2)), 1)
    d = 0.3 * x + 0.7
    if eta:
        check_moments(states.position, d + kept * (x - d), up**2 * jnp.eye(2))
    else:
        close(states.position[0], d + kept * (x - d), rtol=1e-12)
    close(info["residual"][0], jnp.sqrt(jnp.mean((x - d) ** 2)), rtol=1e-12)
    close(info["level"], jnp.ones(4000))


def test_the_ladder_ends_at_the_denoiser_and_stays_on_its_last_step():
    energy = lambda x: 0.5 * jnp.sum((x - 3) ** 2) / 0.1**2
    states, info = trajectory(Ladder(energy, LEVELS), KEY, jnp.zeros((2, 2)), 5)
    close(info["level"][:, 0], jnp.array([1.0, 0.6, 0.3, 0.3, 0.3]))
    close(states.position[2:], jnp.full((3, 2, 2), 3.0), rtol=1e-12)
    assert not (states.position[1] == states.position[2]).any()
    assert states.index[:, 0].tolist() == [1, 2, 3, 4, 5]


def test_levels_fall_evenly_in_a_root_of_them_and_end_in_0():
    close(ladder_levels(3, 4.0, 1.0, rho=2.0), jnp.array([4.0, 1.5**2, 1.0, 0.0]))
    close(ladder_levels(5, 1.0, 0.1, rho=1e7)[:-1], jnp.geomspace(1.0, 0.1, 5), rtol=1e-5)
    for wrong in ((0, 1.0, 0.1), (5, 0.1, 1.0), (5, 1.0, 0.0)):
        with pytest.raises(ValueError, match="steps >= 1 and sigma_max >= sigma_min > 0"):
            ladder_levels(*wrong)
    for levels, eta in ((LEVELS, 1.1), (LEVELS[:1], 1.0)):
        with pytest.raises(ValueError, match="eta must be from 0 to 1 and levels two or more"):
            Ladder(half_square, levels, eta=eta)


def test_the_joint_ladder_descends_by_the_denoiser_of_the_marginal():
    """D = v − ∇F(v) in the mean, as h ~ p(h|v); the spread of h adds Mᵀ Λ⁻¹ M."""
    start = jnp.full((8000, 2), 0.5), jax.random.normal(KEY, (8000, 3))
    states, info = chain(JointLadder(GAUSS, LEVELS, 0.6, h_steps=60, h_step=0.5), KEY, start, 1)
    kept = 0.6**2
    mean = start[0][0] - (1 - kept) * 0.6**2 * jax.grad(GAUSS.free_energy)(start[0][0])
    of_h = GAUSS.M.T @ jnp.diag(jnp.exp(-GAUSS.log_lambda)) @ GAUSS.M
    noise = 0.6**2 * (1 - kept) * jnp.eye(2)
    check_moments(states.position[0], mean, noise + ((1 - kept) * 0.6**2) ** 2 * of_h)
    assert 0.45 < info["accepted"].mean() < 0.95


def test_denoise_is_the_mean_of_the_clean_point():
    """Of N(0, s²) data under noise σ₀, E[clean|x] = x s²/(s² + σ₀²): Tweedie's formula, on the noised energy."""
    s2, sigma0 = 0.5, 0.3
    x = jnp.array([1.0, -2.0])
    noised = lambda x: 0.5 * jnp.sum(x**2) / (s2 + sigma0**2)
    close(denoise(noised, x, sigma0), x * s2 / (s2 + sigma0**2), rtol=1e-12)


def test_steps_are_the_reference_s_unless_said(golden):
    g, x = golden("langevin"), jnp.array([1.0, -2.0])
    assert Langevin(half_square).step == AnnealedLangevin(half_square, jnp.ones(1)).step == g["sigma"]
    close(denoise(half_square, x), x * (1 - g["sigma0"] ** 2))


def test_sample_of_each_kind_of_model_has_its_moments():
    mean, covariance, _ = grbm_moments(GRBM)
    check_moments(sample(GRBM, KEY, 4000, steps=60), mean, covariance)
    check_moments(sample(GAUSS, KEY, 4000, shape=(2,), steps=240), GAUSS.mean, GAUSS.covariance)


def test_sample_of_a_model_without_free_energy_moves_v_and_h():
    class Joint(EBLVM):
        def energy(self, v, h):
            return GAUSS.energy(v, h)

    samples = sample(Joint(), KEY, 4000, shape=(2,), h_shape=(3,), steps=240)
    check_moments(samples, GAUSS.mean, GAUSS.covariance)
    with pytest.raises(ValueError, match="h_shape= of one h"):
        sample(Joint(), KEY, 5, shape=(2,))
    with pytest.raises(ValueError, match="shape= of one v"):
        sample(MLPFreeEnergy(2, width=2, depth=1, key=KEY), KEY, 5)
    with pytest.raises(ValueError, match="at least one step"):
        chain(Gibbs(GRBM), KEY, jnp.zeros((3, 2)), 0)


def test_chains_that_are_lost_are_told():
    class Holed(EBM):
        def free_energy(self, v):
            return jnp.where(v[0] > 0, jnp.nan, 0.5) * jnp.sum(v**2)

    with pytest.raises(FloatingPointError, match=r"^[1-9] of 10 chains are lost, where no move is accepted"):
        sample(Holed(), KEY, 10, shape=(2,), steps=100)
    wide = eqx.tree_at(lambda m: m.log_sigma, GRBM, GRBM.log_sigma + 800.0)
    with pytest.raises(FloatingPointError, match="5 of 5 chains are lost"):
        sample(wide, KEY, 5, steps=10)


def test_narrow_densities_far_from_the_start_are_sampled():
    class Narrow(EBM):
        def free_energy(self, v):
            return 0.5 * jnp.sum((v - 3) ** 2) / 0.04**2

    check_moments(sample(Narrow(), KEY, 2000, shape=(2,), steps=400), jnp.full(2, 3.0), 0.04**2 * jnp.eye(2))


class Bits(EBLVM):
    """Not linear in h: E(v, h) = ½ e^{h₁h₂} ‖v − Mh‖² − cᵀh, with p(v|h) Gaussian and all sums over h at hand."""

    M: jax.Array
    c: jax.Array

    def energy(self, v, h):
        return 0.5 * jnp.exp(h[0] * h[1]) * jnp.sum((v - self.M @ h) ** 2) - self.c @ h

    def moments(self):
        h = states(3)
        precision = jnp.exp(h[:, 0] * h[:, 1])
        weight = jax.nn.softmax(h @ self.c - jnp.log(precision))  # in two dimensions of v
        means = h @ self.M.T
        mean = weight @ means
        centred = means - mean[None]
        return mean, (weight @ (1 / precision)) * jnp.eye(2) + (centred.T * weight[None]) @ centred, weight @ h


BITS = Bits(jnp.array([[1.0, -0.5, 0.8], [0.0, 1.5, -1.0]]), jnp.array([0.3, -0.4, 0.8]))


def test_bits_and_v_in_turn_have_the_enumerated_moments():
    mean, covariance, mean_h = BITS.moments()
    start = jnp.zeros((8000, 2)), jnp.zeros((8000, 3))
    states, info = chain(Sweep(BITS, 0.9), KEY, start, 60)
    v, h = states
    check_moments(v, mean, covariance)
    check_mean(h, mean_h)
    assert set(np.unique(h)) == {0.0, 1.0}
    assert 0.5 < info["accepted"].mean() < 1


def test_sample_of_bits_is_told_that_they_are():
    mean, covariance, _ = BITS.moments()
    check_moments(sample(BITS, KEY, 4000, shape=(2,), h_shape=(3,), binary=True, steps=240), mean, covariance)
    with pytest.raises(ValueError, match="count must be at least 1 and steps at least 2, got 0 and 1000"):
        sample(GRBM, KEY, 0)
