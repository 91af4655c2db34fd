"""log Z by annealed importance sampling against enumeration, and what tells that it cannot be trusted."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import random_grbm

from bism.ais import adaptive_schedule, ais, estimate, exact_samples, linear_schedule, log_base, reverse_ais, tempered
from bism.likelihood import log_partition

KEY = jax.random.key(0)
MODEL = random_grbm(8, 12)
STRONG = eqx.tree_at(lambda m: m.W, MODEL, 3 * MODEL.W)


@pytest.mark.parametrize("schedule", ["linear", "adaptive"])
def test_it_agrees_with_enumeration(schedule):
    exact = log_partition(MODEL)
    found = ais(MODEL, KEY, chains=1000, temperatures=1000, schedule=schedule)
    assert abs(found.log_z - exact) < 0.05
    assert found.low < exact < found.high
    assert found.trusted


def test_forward_and_reverse_bracket_the_truth():
    exact = float(log_partition(STRONG))
    below = np.mean([ais(STRONG, jax.random.key(i), chains=20, temperatures=3).log_z for i in range(20)])
    samples = [exact_samples(STRONG, jax.random.key(i), 20) for i in range(20)]
    above = np.mean([reverse_ais(STRONG, jax.random.key(i), x, temperatures=3).log_z for i, x in enumerate(samples)])
    assert below < exact < above
    fine = reverse_ais(STRONG, KEY, exact_samples(STRONG, KEY, 500), temperatures=2000)
    assert fine.log_z == pytest.approx(exact, abs=0.1)


def test_exact_samples_have_the_models_moments():
    small = random_grbm(2, 3)
    v = exact_samples(small, KEY, 40_000)
    axis = jnp.linspace(-8, 8, 161)
    grid = jnp.stack(jnp.meshgrid(axis, axis), -1).reshape(-1, 2)
    density = jnp.exp(-jax.vmap(small.free_energy)(grid))
    mean = (density[:, None] * grid).sum(0) / density.sum()
    spread = jnp.sqrt((density[:, None] * (grid - mean[None]) ** 2).sum(0) / density.sum())
    np.testing.assert_allclose(v.mean(0), mean, atol=0.03)
    np.testing.assert_allclose(v.std(0), spread, rtol=0.02)


def test_at_no_coupling_there_is_nothing_to_estimate():
    free = tempered(MODEL, 0.0)
    found = ais(free, KEY, chains=10, temperatures=2)
    assert found.log_z == pytest.approx(float(log_partition(free)), abs=1e-9)
    assert found.log_z == pytest.approx(float(log_base(MODEL)), abs=1e-9)
    assert found.effective == pytest.approx(10)


def test_the_adaptive_schedule_spends_temperatures_where_they_are_needed():
    easy, hard = adaptive_schedule(MODEL, KEY), adaptive_schedule(STRONG, KEY)
    for betas in (easy, hard):
        assert (betas[0], betas[-1]) == (0, 1)
        assert (jnp.diff(betas) > 0).all()
    assert len(hard) > 1.5 * len(easy)
    fine = adaptive_schedule(STRONG, KEY, 501)
    assert len(fine) == 501
    close = jnp.interp(jnp.linspace(0, 1, len(hard)), jnp.linspace(0, 1, 501), fine)
    np.testing.assert_allclose(close, hard, atol=0.01)


def test_the_interval_and_the_effective_number_follow_from_the_weights():
    equal = estimate(jnp.full(100, 2.5))
    assert (equal.log_z, equal.low, equal.high) == (pytest.approx(2.5),) * 3
    assert equal.effective == pytest.approx(100)
    weights = jnp.log(jnp.array([1.0, 3.0]))
    two = estimate(weights)
    assert two.log_z == pytest.approx(np.log(2))
    assert two.effective == pytest.approx(16 / 10)
    half = 1.96 * np.std([0.5, 1.5], ddof=1) / 2**0.5
    assert two.high == pytest.approx(np.log(2) + np.log1p(half))
    lone = estimate(jnp.zeros(1000).at[0].set(40.0))
    assert lone.effective == pytest.approx(1)
    assert lone.low == -np.inf
    assert not lone.trusted


def test_an_estimate_not_to_be_trusted_says_so_and_what_to_do():
    rough = ais(STRONG, KEY, chains=20, temperatures=2)
    assert not rough.trusted
    with pytest.raises(ValueError, match="at least two temperatures, from 0 to 1; got 1"):
        linear_schedule(1)
    with pytest.raises(ValueError, match="at least two temperatures"):
        ais(MODEL, KEY, temperatures=1)
    with pytest.raises(ValueError, match="at least two chains"):
        ais(MODEL, KEY, chains=1)
    with pytest.raises(ValueError, match="schedule must rise from 0 to 1"):
        ais(MODEL, KEY, schedule=jnp.array([0.2, 1.0]))
    lost = eqx.tree_at(lambda m: m.W, MODEL, jnp.full_like(MODEL.W, 1e200))
    with pytest.raises(FloatingPointError, match="left the finite numbers"):
        ais(lost, KEY, chains=2, temperatures=3)
