"""The time of one iteration, all of it: noise, lower steps, response, optimisers and the gather of the minibatch."""

import statistics
import time
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array

from ..method import Method
from ..models import GaussianRBM
from ..posterior import BernoulliPosterior
from ..training import Prepare

BLOCK = 100  # iterations in one compiled loop


def milliseconds(
    method: Method, v_dim: int, h_dim: int, count: int, *, batch_size: int = 100, repeats: int = 5, seconds: float = 1.0
) -> float:
    """Of a Gaussian RBM on `count` random examples."""
    key = jax.random.key(0)
    model = GaussianRBM(v_dim, h_dim, key=key)
    posterior = BernoulliPosterior.linear(v_dim, h_dim, key=key)
    data = jax.random.uniform(key, (count, v_dim))
    return iteration(method, model, posterior, data, batch_size=batch_size, repeats=repeats, seconds=seconds)


def iteration(
    method: Method,
    model: Any,
    posterior: Any,
    data: Array,
    *,
    prepare: Prepare = lambda batch, key: batch,
    batch_size: int = 100,
    repeats: int = 5,
    seconds: float = 1.0,
) -> float:
    """Milliseconds: the median of `repeats` compiled loops of about `seconds` each."""
    key = jax.random.key(0)
    state = method.init(model, posterior, batch=prepare(data[:batch_size], key), key=key)
    arrays, static = eqx.partition(state, eqx.is_array)

    @jax.jit
    def iterate(arrays, key, data):
        def one(arrays, at):
            rows, key = at
            state, _ = method.step(eqx.combine(arrays, static), prepare(data[rows], key), key)
            return eqx.filter(state, eqx.is_array), None

        rows = jax.random.randint(key, (BLOCK, batch_size), 0, len(data))
        return jax.lax.scan(one, arrays, (rows, jax.random.split(key, BLOCK)))[0]

    def timed(times):
        begun, found = time.perf_counter(), None
        for _ in range(times):
            found = iterate(arrays, key, data)
        jax.block_until_ready(found)
        return (time.perf_counter() - begun) / (times * BLOCK)

    timed(1)
    times = max(int(seconds / (timed(1) * BLOCK)), 1)
    return 1e3 * statistics.median(timed(times) for _ in range(repeats))
