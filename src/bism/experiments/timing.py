"""The time of one iteration, all of it: noise, lower steps, response, optimisers and the gather of the minibatch."""

import statistics
import time
from functools import partial

import equinox as eqx
import jax

from ..method import Method
from ..models import GaussianRBM
from ..posterior import BernoulliPosterior

BLOCK = 100  # iterations in one compiled loop


def milliseconds(
    method: Method, v_dim: int, h_dim: int, count: int, *, batch_size: int = 100, repeats: int = 5, seconds: float = 1.0
) -> float:
    """Of a Gaussian RBM on `count` random examples: the median of `repeats` compiled loops of about `seconds` each."""
    key = jax.random.key(0)
    data = jax.random.uniform(key, (count, v_dim))
    model = GaussianRBM(v_dim, h_dim, key=key)
    posterior = BernoulliPosterior.linear(v_dim, h_dim, key=key)
    arrays, static = eqx.partition(method.init(model, posterior, batch=data[:batch_size], key=key), eqx.is_array)

    @partial(jax.jit, static_argnums=1)
    def iterate(arrays, steps, key):
        def one(arrays, at):
            rows, key = at
            state, _ = method.step(eqx.combine(arrays, static), data[rows], key)
            return eqx.filter(state, eqx.is_array), None

        rows = jax.random.randint(key, (steps, batch_size), 0, count)
        return jax.lax.scan(one, arrays, (rows, jax.random.split(key, steps)))[0]

    def timed(times):
        begun = time.perf_counter()
        jax.block_until_ready([iterate(arrays, BLOCK, key) for _ in range(times)])
        return (time.perf_counter() - begun) / (times * BLOCK)

    timed(1)
    times = max(int(seconds / (timed(1) * BLOCK)), 1)
    return 1e3 * statistics.median(timed(times) for _ in range(repeats))
