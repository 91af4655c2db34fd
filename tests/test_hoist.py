import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_models import close
from jax.extend.core import jaxprs_in_params

import bism
from bism.descent import descend
from bism.hoist import SMALL, hoist

W = jax.random.normal(jax.random.key(0), (20, 20)) / 5
X = jnp.linspace(-1.0, 1.0, 20)


def body(phi, draw):
    """An encoder of X alone, and a little that is the argument's."""
    code = jnp.tanh(W @ jnp.tanh(W @ X))
    return {"value": jnp.sum(jnp.sin(phi["a"] * code)) + draw, "code": code, "none": None, "phi": phi}


def products(jaxpr, *shapes, looped=False):
    """How many matrix products with arguments of these shapes a jaxpr holds: (outside of loops, inside of them)."""
    count = np.zeros(2, int)
    for eqn in jaxpr.eqns:
        found = {x.aval.shape for x in eqn.invars}
        count[int(looped)] += eqn.primitive.name == "dot_general" and found.issuperset(shapes)
        for inner in jaxprs_in_params(eqn.params):
            count += products(inner, *shapes, looped=looped or eqn.primitive.name == "scan")
    return tuple(count)


def test_values_are_those_of_the_function():
    phi, draw = {"a": jnp.array(0.7), "b": [None, jnp.arange(3.0)]}, jnp.array(2.0)
    hoisted = hoist(body, phi, draw)
    for a in (0.7, -1.3):
        phi = phi | {"a": jnp.array(a)}
        expected, found = body(phi, draw), hoisted(phi, draw)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        jax.tree.map(close, found, expected)


def test_what_does_not_depend_on_the_arguments_is_gone():
    phi, draw = {"a": jnp.array(0.7)}, jnp.array(2.0)
    whole = len(jax.make_jaxpr(body)(phi, draw).eqns)
    hoisted = hoist(body, phi, draw)
    left = jax.make_jaxpr(hoisted.call)(phi, draw)
    assert products(jax.make_jaxpr(body)(phi, draw), W.shape) == (2, 0)
    assert products(left, W.shape) == (0, 0)
    assert len(left.eqns) <= hoisted.size == whole - 4  # two products, two tanh


def test_constants_none_and_arguments_passed_straight_through():
    assert hoist(lambda x, y: (x, None, 3.0), 1.0, None)(2.0, None) == (2.0, None, 3.0)
    np.testing.assert_array_equal(hoist(lambda x: (W, x), 1.0)(2.0)[0], W)


def test_gradients_pass_through_what_was_hoisted():
    def loop(w, lifted):
        loss = lambda phi: jnp.sum(jnp.sin(phi * jnp.tanh(w @ X)))
        step = jax.grad(loss)
        step = hoist(step, X[0]) if lifted else step
        return jax.lax.scan(lambda phi, _: (phi - 0.1 * step(phi), None), jnp.array(0.3), length=4)[0]

    for w in (W, 2 * W):
        gradient = jax.jit(jax.grad(loop), static_argnums=1)
        close(gradient(w, True), gradient(w, False), rtol=1e-12)
        assert jnp.linalg.norm(gradient(w, True)) > 1e-3


@pytest.mark.parametrize("rematerialise", [False, True])
def test_an_encoder_runs_once_for_all_steps(rematerialise):
    def phi_of(w):
        loss = lambda phi, draw: jnp.sum((phi * jnp.tanh(w @ X) - draw) ** 2)
        optimizer, phi = optax.sgd(0.01), jnp.ones(20)
        draws = jnp.ones((7, 20))
        return descend(loss, optimizer, phi, optimizer.init(phi), draws, rematerialise=rematerialise)[0]

    assert products(jax.make_jaxpr(phi_of)(W), W.shape) == (1, 0)
    # Nor does the backward pass: one product forward, and the outer product X ⊗ · is no (20, 20) argument.
    assert products(jax.make_jaxpr(jax.grad(lambda w: phi_of(w).sum()))(W), W.shape) == (1, 0)


@pytest.mark.parametrize(("noise", "expected"), [("shared", (3, 0)), ("fresh", (2, 1))])
def test_bism_encodes_a_shared_batch_outside_of_its_lower_steps(noise, expected):
    model = bism.MLPEnergy(3, 2, width=20, depth=2, key=jax.random.key(0))
    posterior = bism.GaussianPosterior.mlp(3, 2, width=4, depth=1, key=jax.random.key(1))
    method = bism.BiSM(bism.DSM(0.3), bism.Fisher(), bism.FirstOrder(), lower_steps=3, noise=noise)
    batch = jnp.ones((5, 3))
    state = method.init(model, posterior, batch=batch, key=jax.random.key(2))
    state, static = eqx.partition(state, eqx.is_array)
    step = lambda state, key: method.step(eqx.combine(state, static), batch, key)[1]
    jaxpr = jax.make_jaxpr(step)(state, jax.random.key(3))
    assert model.encoder.layers[0].weight.shape == (20, 3)
    # The upper loss takes two, the encoder's own and one of the score's derivative; the lower level takes the third.
    assert products(jaxpr, (20, 3), (5, 3)) == expected


def test_effects_stay_in_the_loop():
    seen = []

    def noisy(x):
        jax.debug.callback(lambda: seen.append(0))
        return x + 1

    hoisted = hoist(noisy, 1.0)
    assert hoisted(1.0) == hoisted(0.0) + 1 == 2
    jax.effects_barrier()
    assert len(seen) == 2


def test_small_bodies_are_unrolled_and_long_or_large_loops_are_not():
    small = hoist(lambda x: x + 1, 1.0)
    assert (small.size, small.unroll(5), small.unroll(16), small.unroll(17), small.unroll(0)) == (1, 5, 16, 1, 1)

    def large(x):
        for _ in range(SMALL + 1):
            x = x + 1
        return x

    assert hoist(large, 1.0).unroll(5) == 1
