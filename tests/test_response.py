"""On G(θ, φ) = ½φᵀHφ − φᵀBθ everything is known: φ*(θ) = H⁻¹Bθ, and N gradient steps in closed form."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_models import close, quick_jit

import bism
from bism import ConjugateGradient, FirstOrder, NaturalGradient, Neumann, Unroll

H = jnp.array([[2.0, 0.3, 0.1], [0.3, 1.0, -0.2], [0.1, -0.2, 0.5]])
B = jnp.array([[1.0, -2.0], [0.5, 0.3], [0.0, 1.5]])
THETA, PHI = jnp.array([0.7, -0.4]), jnp.array([1.0, -1.0, 2.0])
BEST = jnp.linalg.solve(H, B @ THETA)
METRIC = H + 0.5 * jnp.eye(3)
ALPHA = 0.3


class Quadratic(eqx.Module):
    optimizer: optax.GradientTransformation = eqx.field(static=True)
    opt_state: optax.OptState
    draws: jax.Array

    def __call__(self, theta, phi, draw):
        return 0.5 * phi @ H @ phi - phi @ (B @ theta + draw)

    def metric(self, phi, draw, tangent):
        return METRIC @ tangent


def lower(draws=1, optimizer=None, phi=PHI):
    optimizer = optimizer or optax.sgd(1e9)  # which Unroll must not use, given one of its own
    return Quadratic(optimizer, optimizer.init(phi), jnp.zeros((draws, 3)))


def answer(response, phi, problem=None):
    """φ̂ and dφ̂/dθ."""
    problem = problem or lower(response.draws or 1)
    jacobian = jax.jacrev(lambda theta: (response(theta, phi, problem),) * 2, has_aux=True)
    return quick_jit(jacobian)(THETA)[::-1]


def test_first_order_is_a_constant():
    phi, slope = answer(FirstOrder(), PHI)
    close(phi, PHI)
    assert not slope.any()


@pytest.mark.parametrize("steps", [1, 4])
def test_unrolled_gradient_steps_have_their_closed_form(steps):
    phi, slope = answer(Unroll(steps, optax.sgd(ALPHA)), PHI)
    powers = [np.linalg.matrix_power(np.eye(3) - ALPHA * H, k) for k in range(steps + 1)]
    close(slope, ALPHA * sum(powers[:-1]) @ B, rtol=1e-12)
    close(phi, powers[-1] @ (PHI - BEST) + BEST, rtol=1e-12)


def test_each_unrolled_step_takes_its_own_draw():
    draws = jnp.array([[1.0, 0, 0], [0, 1, 0]])
    problem = eqx.tree_at(lambda p: p.draws, lower(2), draws)
    phi, _ = answer(Unroll(2, optax.sgd(ALPHA)), PHI, problem)
    step = lambda phi, draw: phi - ALPHA * (H @ phi - B @ THETA - draw)
    close(phi, step(step(PHI, draws[0]), draws[1]), rtol=1e-12)


def test_unroll_goes_on_from_the_live_optimiser_s_state():
    adam = bism.adam(0.1)
    gradient = lambda phi: H @ phi - B @ THETA
    updates, state = adam.update(gradient(PHI), adam.init(PHI), PHI)
    live = optax.apply_updates(PHI, updates)
    problem = Quadratic(adam, state, jnp.zeros((1, 3)))
    after, _ = answer(Unroll(1), live, problem)
    close(after, optax.apply_updates(live, adam.update(gradient(live), state, live)[0]), rtol=1e-12)
    m = 0.9 * 0.1 * gradient(PHI) + 0.1 * gradient(live)
    v = 0.95 * 0.05 * gradient(PHI) ** 2 + 0.05 * gradient(live) ** 2
    expected = live - 0.1 * (m / (1 - 0.9**2)) / (jnp.sqrt(v / (1 - 0.95**2)) + 1e-8)
    close(after, expected, rtol=1e-10)


def test_unroll_forgets_how_phi_came_to_be():
    through = jax.grad(lambda x: jnp.sum(Unroll(2, optax.sgd(ALPHA))(THETA, x * PHI, lower(2))))(1.0)
    assert through == 0


def test_neumann_is_unrolling_at_a_stationary_point():
    for count in (1, 5):
        _, unrolled = answer(Unroll(count, optax.sgd(ALPHA)), BEST)
        phi, slope = answer(Neumann(count, ALPHA), BEST)
        close(slope, unrolled, rtol=1e-12)
        close(phi, BEST)


def test_conjugate_gradient_is_the_implicit_function_theorem():
    phi, slope = answer(ConjugateGradient(3, damping=0.0, tolerance=0.0), BEST)
    close(slope, jnp.linalg.solve(H, B), rtol=1e-10)
    close(phi, BEST)
    _, damped = answer(ConjugateGradient(3, damping=0.25, tolerance=0.0), BEST)
    close(damped, jnp.linalg.solve(H + 0.25 * jnp.eye(3), B), rtol=1e-10)
    _, coarse = answer(ConjugateGradient(1, damping=0.0), BEST)
    assert jnp.max(jnp.abs(coarse - slope)) > 0.1


def test_natural_gradient_solves_with_the_metric():
    _, slope = answer(NaturalGradient(3, damping=0.25, tolerance=0.0), PHI)
    close(slope, jnp.linalg.solve(METRIC + 0.25 * jnp.eye(3), B), rtol=1e-10)


def test_the_error_of_unrolling_falls_geometrically():
    exact = jnp.linalg.solve(H, B)
    errors = np.array([jnp.linalg.norm(answer(Unroll(n, optax.sgd(ALPHA)), BEST)[1] - exact) for n in (5, 10, 15, 20)])
    rate = 1 - ALPHA * np.linalg.eigvalsh(H)[0]
    np.testing.assert_allclose(errors[1:] / errors[:-1], rate**5, rtol=0.05)
    terms = [jnp.linalg.norm(answer(Neumann(n, ALPHA), BEST)[1] - exact) for n in (5, 20)]
    close(terms, errors[[0, 3]])


@pytest.mark.parametrize("response", [Neumann(3, ALPHA), ConjugateGradient(5), Unroll(2, optax.sgd(ALPHA))])
def test_pytrees_of_theta_and_phi_and_what_is_no_parameter(response):
    class Theta(eqx.Module):
        x: jax.Array
        name: str
        count: jax.Array

    class Lower(Quadratic):
        def __call__(self, theta, phi, draw):
            return super().__call__(theta.x, jnp.concatenate([phi["a"], phi["b"]]), draw)

    problem = Lower(optax.sgd(1.0), optax.EmptyState(), jnp.zeros((response.draws, 3)))
    split = lambda phi: {"a": phi[:1], "none": None, "b": phi[1:]}

    def total(theta):
        phi = response(theta, split(PHI), problem)
        return jnp.sum(phi["a"]) + 2 * jnp.sum(phi["b"])

    gradient = eqx.filter_grad(total)(Theta(THETA, "theta", jnp.arange(2)))
    close(gradient.x, jnp.array([1.0, 2.0, 2.0]) @ answer(response, PHI)[1], rtol=1e-10)
    assert (gradient.name, gradient.count) == (None, None)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Unroll(0),
        lambda: Neumann(0),
        lambda: Neumann(alpha=-1.0),
        lambda: ConjugateGradient(0),
        lambda: ConjugateGradient(damping=-1.0),
    ],
)
def test_settings_that_mean_nothing_are_refused(make):
    with pytest.raises(ValueError, match=r"Unroll: steps|needs"):
        make()
