import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import (
    close,
    each,
    exact_posterior,
    gaussian_eblvm,
    linear_posterior,
    other_posterior,
    quick_jit,
    random_grbm,
    true_posterior,
)

from bism import Grid, log_likelihood, log_partition
from bism.likelihood import free_energy_of, marginal, states

WIDE = Grid((-12.0, -12.0), (12.0, 12.0), 150)
V = jnp.array([[0.5, -1.0], [-0.3, 0.8], [2.0, 1.0]])


def test_states_are_all_of_them_once():
    assert {tuple(map(int, s)) for s in states(3)} == {(i, j, k) for i in (0, 1) for j in (0, 1) for k in (0, 1)}
    assert states(3).shape == (8, 3)
    with pytest.raises(ValueError, match="Use AIS"):
        states(21)


@pytest.mark.parametrize("settings", [{}, {"coupling": "scaled", "shared_scale": True}])
def test_log_partition_is_the_integral_of_the_free_energy(settings):
    model = random_grbm(2, 3, **settings)
    values = -each(model.free_energy, WIDE.points)
    close(quick_jit(log_partition)(model), WIDE.log_integral(values), rtol=1e-11)


def test_log_density_on_the_grid_is_the_log_likelihood():
    model = random_grbm(2, 3)
    density = quick_jit(WIDE.log_density)(model.free_energy)
    close(density.ravel(), quick_jit(log_likelihood)(model, WIDE.points), rtol=1e-9)
    close(jnp.sum(jnp.exp(density + WIDE.log_area)), 1.0, rtol=1e-12)


def test_grid_runs_along_x_first_and_is_not_square():
    grid = Grid((0.0, 10.0), (4.0, 12.0), 2)
    close(grid.points, jnp.array([[1.0, 10.5], [3.0, 10.5], [1.0, 11.5], [3.0, 11.5]]))
    close(jnp.exp(grid.log_area), 2.0)
    close(grid.log_integral(jnp.zeros(4)), jnp.log(8.0))
    rows = grid.log_density(lambda v: v[1])
    assert rows[0, 0] == rows[0, 1] > rows[1, 0]


def test_under_the_true_posterior_one_sample_gives_the_free_energy():
    bits, gauss = random_grbm(2, 3), gaussian_eblvm()
    for model, posterior in ((bits, exact_posterior(bits)), (gauss, true_posterior(gauss))):
        estimate = marginal(model, posterior, jax.random.key(0), particles=4)
        close(each(estimate, V), each(model.free_energy, V), rtol=1e-10)


@pytest.mark.parametrize("kind", ["bits", "gauss"])
def test_importance_sampling_is_unbiased_for_the_density(kind):
    if kind == "bits":
        model = random_grbm(2, 3)
        posterior = linear_posterior(0.5 * model.weights.T + 0.2, model.c - 0.3)
    else:
        model = gaussian_eblvm()
        posterior = jax.tree.map(lambda x: 0.9 * x + 0.05, true_posterior(model))
    keys = jax.random.split(jax.random.key(1), 400)
    estimates = each(lambda key: marginal(model, posterior, key, 200)(V[0]), keys)
    ratio = jnp.exp(model.free_energy(V[0]) - estimates)
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / len(ratio) ** 0.5
    assert ratio.std() < 0.2


def test_one_particle_bounds_the_free_energy_from_above_by_the_kl():
    model = gaussian_eblvm()
    posterior, true = other_posterior(model)(V[0]), true_posterior(model)(V[0])
    keys = jax.random.split(jax.random.key(1), 20_000)
    bounds = each(lambda key: marginal(model, other_posterior(model), key, 1)(V[0]), keys)
    log_ratio = true.log_std - posterior.log_std
    spread = jnp.exp(2 * posterior.log_std) + (posterior.loc - true.loc) ** 2
    kl = jnp.sum(log_ratio + 0.5 * spread * jnp.exp(-2 * true.log_std) - 0.5)
    assert kl > 0.1
    assert abs(bounds.mean() - model.free_energy(V[0]) - kl) < 4 * bounds.std() / len(bounds) ** 0.5


def test_free_energy_of_is_the_models_own_or_an_estimate():
    model = random_grbm(2, 3)
    key = jax.random.key(0)
    assert free_energy_of(model, None, key) == model.free_energy

    class Joint(eqx.Module):
        energy = staticmethod(model.energy)
        given = staticmethod(model.given)

    joint = Joint()
    with pytest.raises(ValueError, match="Joint has no free energy"):
        free_energy_of(joint, None, key)  # pyright: ignore[reportArgumentType]
    estimate = free_energy_of(joint, exact_posterior(model), key)  # pyright: ignore[reportArgumentType]
    np.testing.assert_allclose(quick_jit(estimate)(V[0]), model.free_energy(V[0]), rtol=1e-10)
