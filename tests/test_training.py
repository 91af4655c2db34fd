"""`fit`: the same run however it is had, a clock whose every tick is known, and models that are learned back."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_models import exact_posterior, gaussian_eblvm, other_posterior, random_grbm

import bism

KEY = jax.random.key(7)
DATA = np.random.default_rng(0).normal(0.5, 1.0, (16, 2))
METHOD = bism.ContrastiveDivergence(persistent=True, ema=0.5)  # it has memory, an average and noise
MAKE = lambda key: bism.GaussianRBM(2, 3, key=key)


def fit(
    method: bism.Method = METHOD,
    model: Any = MAKE,
    posterior: Any = None,
    data: Any = DATA,
    steps=12,
    batch_size=8,
    **settings,
):
    defaults: dict[str, Any] = {"progress": False, "key": KEY}
    return bism.fit(method, model, posterior, data=data, steps=steps, batch_size=batch_size, **defaults | settings)


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


def without_time(history):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in history]


@pytest.fixture(scope="module")
def plain():
    return fit(validation=DATA[:4], evaluate_every=1)


def test_what_is_logged_changes_nothing(plain):
    assert plain.step == 12
    assert [row["step"] for row in plain.history] == list(range(1, 13))

    seen = []
    note = lambda run: seen.append((run.step, len(run.history)))
    evaluate = {"mean": lambda model, posterior: model.b.mean()}
    other = fit(log_every=4, evaluate_every=6, checkpoint_every=10, callbacks=[note], evaluate=evaluate)
    assert bits(other.state) == bits(plain.state)
    steps, losses = other.curve("loss")
    assert seen == [(step, i + 1) for i, step in enumerate([4, 6, 8, 10, 12])]
    assert steps.tolist() == [4, 6, 8, 10, 12]
    steps, means = other.curve("mean")
    assert steps.tolist() == [6, 12]
    assert means[-1] == pytest.approx(other.model.b.mean())
    fine = plain.curve("loss")[1]
    np.testing.assert_allclose(losses, [fine[a:b].mean() for a, b in [(0, 4), (4, 6), (6, 8), (8, 10), (10, 12)]])

    odd = fit(log_every=5)  # in blocks of five, and the rest
    assert bits(odd.state) == bits(plain.state)
    np.testing.assert_allclose(odd.curve("loss")[1], [fine[a:b].mean() for a, b in [(0, 5), (5, 10), (10, 12)]])

    with pytest.raises(KeyError, match="no 'speed' was recorded; there is loss, validation"):
        plain.curve("speed")
    with pytest.raises(TypeError, match="one seed"):
        plain[0]


def test_resumed_is_uninterrupted(plain, tmp_path):
    settings = {"folder": tmp_path, "validation": DATA[:4], "evaluate_every": 1}
    first = fit(steps=5, **settings)  # in the middle of an epoch
    assert bits(first.state) != bits(plain.state)
    whole = fit(resume=True, **settings)
    assert bits(whole.loop) == bits(plain.loop)
    assert without_time(whole.history) == without_time(plain.history)
    assert fit(resume=True, **settings).step == 12  # and there is no more to do


def test_seeds(plain):
    run = fit(seeds=3)
    assert len({bits(run[i].model)[0] for i in range(3)}) == 3
    assert bits(run[-1].loop) == bits(run[2].loop)
    assert [row["loss"] for row in run[1].history] == run.curve("loss")[1][:, 1].tolist()
    with pytest.raises(IndexError, match="seed 3 of 3"):
        run[3]

    alone = fit(key=jax.random.split(KEY, 3)[1])
    for x, y in zip(jax.tree.leaves(alone.state), jax.tree.leaves(run[1].state), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)
    assert bits(alone.state) != bits(plain.state)


def test_seeds_one_by_one_are_those_at_once(monkeypatch):
    settings: dict[str, Any] = {"seeds": 2, "validation": DATA[:4], "evaluate_every": 4}
    settings["evaluate"] = {"mean": lambda model, posterior: model.b.mean()}
    at_once = fit(**settings)
    monkeypatch.setattr(bism.training, "STACKED", 0)
    one_by_one = fit(**settings)
    for x, y in zip(jax.tree.leaves(one_by_one.loop), jax.tree.leaves(at_once.loop), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)
    for name in ("loss", "validation", "mean"):
        np.testing.assert_allclose(one_by_one.curve(name)[1], at_once.curve(name)[1], rtol=1e-9)


class Clock(bism.Method):
    """Its memory is how often each example was seen, and the number of steps, from a start that the key decides."""

    def init(self, model, posterior=None, *, batch, key):
        return self.start(model, memory=(jnp.zeros(32), jax.random.randint(key, (), 0, 4)))

    def step(self, state, batch, key):
        seen, time = state.memory
        memory = seen.at[batch[:, 0].astype(int)].add(1), time + 1
        return replace(state, memory=memory), {"loss": time.astype(float)}

    def validate(self, state, batch, key):
        return (state.memory[1] - 6.0) ** 2 + batch.sum()


@pytest.mark.parametrize("count", [16, 19])
def test_every_example_is_seen_once_an_epoch(count):
    seen = [np.zeros(count)]
    note = lambda run: seen.append(np.asarray(run.state.memory[0][:count]))
    fit(Clock(), data=np.arange(1.0 * count)[:, None], log_every=1, callbacks=[note])
    batches = np.diff(seen, axis=0)
    each = batches[::2] + batches[1::2]
    assert each.max() == 1  # twelve steps of eight are six epochs; what does not fill a batch waits for another epoch
    assert each.sum(1).tolist() == [16] * 6
    assert len({batch.tobytes() for batch in batches[::2]}) == 6


def test_validation_keeps_the_best_state():
    run = fit(Clock(), data=np.arange(16.0)[:, None], validation=np.ones((3, 1)), evaluate_every=1, seeds=3)
    starts = run.state.memory[1] - 12
    assert len(set(starts.tolist())) > 1
    assert run.best.memory[1].tolist() == [6] * 3
    assert run.best.memory[0].sum(-1).tolist() == [8.0 * (6 - start) for start in starts]
    steps, losses = run.curve("validation")
    np.testing.assert_array_equal(losses, (np.add.outer(steps, starts) - 6.0) ** 2 + 3)
    assert run.loop.best_loss.tolist() == [3.0] * 3
    unvalidated = fit(Clock(), data=np.arange(16.0)[:, None])
    assert unvalidated.best is unvalidated.state


def test_average():
    batch = jnp.asarray(DATA)
    method = bism.ScoreMatching(bism.DSM(0.5), optimizer=optax.sgd(0.1), ema=0.75)
    state, points = method.init(MAKE(KEY), batch=batch, key=KEY), [MAKE(KEY).W]
    for i in range(2):
        state, _ = eqx.filter_jit(method.step)(state, batch, jax.random.key(i))
        points.append(state.model.W)
    by_hand = 2 / 11 * (0.1 * points[0] + 0.9 * points[1]) + 9 / 11 * points[2]  # it begins short and grows to 0.75
    np.testing.assert_allclose(state.best.W, by_hand, rtol=1e-14)
    assert replace(state, average=None).best is state.model


def test_callbacks_may_keep_what_they_are_given():
    kept = []
    run = fit(callbacks=[lambda run: kept.append(run.state.model)], log_every=4)
    assert bits(kept[-1]) == bits(run.state.model)
    assert bits(kept[0]) != bits(run.state.model)


def test_schedule_and_clipping():
    points = []
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(optax.piecewise_constant_schedule(0.1, {3: 0.0})))
    method = bism.MaximumLikelihood(optimizer=optimizer)
    flat = lambda run: np.concatenate([np.ravel(x).copy() for x in jax.tree.leaves(run.state.model)])
    fit(method, data=10 * DATA, steps=5, log_every=1, callbacks=[lambda run: points.append(flat(run))])
    moves = np.linalg.norm(np.diff(points, axis=0), axis=1)
    np.testing.assert_allclose(moves, [0.05, 0.05, 0, 0], atol=1e-12)


def test_fresh_noise():
    model = random_grbm(2, 3)
    for noise in ("fresh", "shared"):
        method = bism.BiSM(bism.DSM(0.5), lower_steps=3, response=bism.Unroll(2), noise=noise)
        state = method.init(model, exact_posterior(model), batch=jnp.asarray(DATA), key=KEY)
        lower, response, upper = eqx.filter_jit(method.draw)(state, jnp.asarray(DATA), KEY)
        if noise == "shared":
            assert lower.v is None
            assert response.v is None
        else:
            all_v = np.concatenate([lower.v, response.v, upper.v[None]])
            assert len({v.tobytes() for v in all_v}) == 3 + 2 + 1
            all_noise = np.concatenate([lower.noise, response.noise, upper.noise[None]])
            np.testing.assert_allclose(all_v, DATA + 0.5 * all_noise)


@pytest.fixture(scope="module")
def truth():
    """A Gaussian RBM of four well-separated modes, and exact samples of it: h from its 4 weights, then v."""
    model = bism.GaussianRBM(2, 2, key=KEY)
    known = (jnp.array([[2.0, 0.5], [-1.0, 1.5]]), jnp.array([-0.5, -0.5]), jnp.array([-1.0, 0.3]), jnp.full(2, -0.2))
    model = eqx.tree_at(lambda m: (m.W, m.b, m.c, m.log_sigma), model, known)
    states = bism.likelihood.states(2)
    h_key, v_key = jax.random.split(KEY)
    h = states[jax.random.categorical(h_key, jax.vmap(model.log_weight)(states), shape=(4000,))]
    return model, jax.vmap(model.sample_v)(h, jax.random.split(v_key, 4000))


ADAM = bism.adam(1e-2)
LEARN = {
    "ML": (bism.MaximumLikelihood(optimizer=ADAM), None, 0.01),
    "DSM": (bism.ScoreMatching(bism.DSM(0.1), optimizer=ADAM), None, 0.05),
    "BiSM": (bism.BiSM(bism.DSM(0.3), optimizer=ADAM), lambda key: bism.BernoulliPosterior.linear(2, 2, key=key), 0.1),
}


@pytest.mark.parametrize(("method", "posterior", "short"), LEARN.values(), ids=LEARN)
def test_learns_a_known_model_back(truth, method, posterior, short):
    model, v = truth
    run = fit(method, lambda key: bism.GaussianRBM(2, 2, key=key), posterior, v[:3000], 3000, 100)
    best = bism.log_likelihood(model, v[3000:]).mean()
    before = bism.log_likelihood(bism.GaussianRBM(2, 2, key=KEY), v[3000:]).mean()
    after = bism.log_likelihood(run.model, v[3000:]).mean()
    assert before < best - 0.3
    assert best - short < after < best + 0.02


@pytest.mark.parametrize("divergence", [bism.KL(), bism.Fisher()], ids=["KL", "Fisher"])
def test_bism_learns_the_covariance_of_gaussian_data(divergence):
    covariance = jnp.array([[1.0, 0.6], [0.6, 0.8]])
    v = jax.random.multivariate_normal(KEY, jnp.array([0.5, -0.3]), covariance, (2000,))
    start = jax.tree.map(lambda x: 0.3 * x, gaussian_eblvm())
    optimizer = bism.adam(optax.cosine_decay_schedule(1e-2, 1000))
    method = bism.BiSM(bism.DSM(0.5), divergence, bism.Unroll(2), optimizer=optimizer, lower_optimizer=ADAM)
    model = fit(method, start, other_posterior(start), v, 1000, 100).model
    np.testing.assert_allclose(model.covariance, jnp.cov(v.T) + 0.25 * jnp.eye(2), atol=0.05)
    np.testing.assert_allclose(model.mean, v.mean(0), atol=0.05)


def test_a_run_is_shown_in_a_line(plain):
    assert repr(plain).startswith("Run(ContrastiveDivergence of a GaussianRBM, 12 iterations, {'loss': ")
    assert "12 iterations, 2 seeds, {}" in repr(replace(plain, seeds=2, history=[]))
