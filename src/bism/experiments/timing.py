"""The time of one iteration, all of it: noise, lower steps, response, optimisers and the gather of the minibatch."""

import statistics
import time

import equinox as eqx
import jax

from ..method import Method
from ..models import GaussianRBM
from ..posterior import BernoulliPosterior


def milliseconds(
    method: Method, v_dim: int, h_dim: int, count: int, *, batch_size: int = 100, repeats: int = 5, seconds: float = 1.0
) -> float:
    """Of a Gaussian RBM on `count` random examples: the median of `repeats` compiled loops of about `seconds` each."""
    key = jax.random.key(0)
    data = jax.random.uniform(key, (count, v_dim))
    model = GaussianRBM(v_dim, h_dim, key=key)
    posterior = BernoulliPosterior.linear(v_dim, h_dim, key=key)
    arrays, static = eqx.partition(method.init(model, posterior, batch=data[:batch_size], key=key), eqx.is_array)

    @jax.jit
    def iterate(arrays, steps, key):
        def one(i, arrays):
            batch_key, step_key = jax.random.split(jax.random.fold_in(key, i))
            batch = data[jax.random.randint(batch_key, (batch_size,), 0, count)]
            state, _ = method.step(eqx.combine(arrays, static), batch, step_key)
            return eqx.filter(state, eqx.is_array)

        return jax.lax.fori_loop(0, steps, one, arrays)

    def timed(steps):
        begun = time.perf_counter()
        jax.block_until_ready(iterate(arrays, steps, key))
        return time.perf_counter() - begun

    timed(1)
    steps = max(int(seconds / (timed(10) / 10)), 1)
    return 1e3 * statistics.median(timed(steps) / steps for _ in range(repeats))
