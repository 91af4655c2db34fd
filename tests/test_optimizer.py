import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bism import adam

PARAMS = {"a": jnp.array([1.0, -2.0]), "b": jnp.array(3.0)}


@pytest.mark.parametrize("rate", [0.1, optax.cosine_decay_schedule(0.1, 20)])
def test_the_steps_are_optax_s(rate):
    ours, theirs = adam(rate), optax.adam(rate, 0.9, 0.95, eps_root=1e-20)
    (a, b), states = (PARAMS, PARAMS), (ours.init(PARAMS), theirs.init(PARAMS))
    for i in range(20):
        gradients = [jax.tree.map(lambda x, i=i: jnp.sin((i + 1) * x), params) for params in (a, b)]
        (da, sa), (db, sb) = (o.update(g, s) for o, g, s in zip((ours, theirs), gradients, states, strict=True))
        a, b, states = optax.apply_updates(a, da), optax.apply_updates(b, db), (sa, sb)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10)


def test_the_slope_at_a_zero_gradient_is_finite():
    step = lambda g: adam(0.1).update(g, adam(0.1).init(g))[0]
    np.testing.assert_allclose(jax.jacobian(step)(jnp.zeros(2)), -0.1 / (1e-10 + 1e-8) * np.eye(2), rtol=1e-9)


def test_parameters_keep_their_precision():
    params = jnp.ones(3, jnp.float32)
    updates, state = adam().update(params, adam().init(params))
    moments = [optax.tree.get(state, name) for name in ("mu", "nu")]
    assert [x.dtype for x in jax.tree.leaves([updates, *moments])] == 3 * [jnp.float32.dtype]


@pytest.mark.parametrize("rate", [0.0, -1e-3, float("nan")])
def test_a_rate_is_positive(rate):
    with pytest.raises(ValueError, match="learning_rate must be positive"):
        adam(rate)
