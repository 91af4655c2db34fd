"""log Z of a Gaussian RBM by annealed importance sampling (Neal, 2001), with what tells whether to trust it."""

from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from .likelihood import states
from .models.grbm import GaussianRBM


class Estimate(NamedTuple):
    """log Z with a 95 % interval. The estimate of Z is unbiased, so that log Z tends to be too low, not too high."""

    log_z: float
    low: float
    high: float
    effective: float  # chains that the weights are worth; a few of many means that log Z cannot be trusted
    log_weights: np.ndarray

    @property
    def trusted(self) -> bool:
        return self.effective >= 0.05 * len(self.log_weights) and self.high - self.low < 1.0


def tempered(model: GaussianRBM, beta: Array | float) -> GaussianRBM:
    """The model with its coupling and hidden bias scaled by β: independent at 0, itself at 1."""
    return eqx.tree_at(lambda m: (m.W, m.c), model, (beta * model.W, beta * model.c))


def log_base(model: GaussianRBM) -> Float[Array, ""]:
    """log Z at β = 0: N(b, σ²) and uniform bits."""
    return tempered(model, 0.0).log_weight(jnp.zeros_like(model.c)) + model.c.size * jnp.log(2.0)


def linear_schedule(temperatures: int = 2000) -> Float[Array, " temperatures"]:
    if temperatures < 2:
        raise ValueError(f"AIS needs at least two temperatures, from 0 to 1; got {temperatures}.")
    return jnp.linspace(0.0, 1.0, temperatures)


def adaptive_schedule(
    model: GaussianRBM,
    key: PRNGKeyArray,
    temperatures: int | None = None,
    *,
    chains: int = 256,
    effective: float = 0.98,
    most: int = 2000,
) -> Float[Array, " temperatures"]:
    """Temperatures each so far from the last that the weights between them keep a share `effective` of the chains.

    If their number is given, so many of the same density.
    """

    start_key, key = jax.random.split(key)
    states, betas = _start(model, start_key, chains), [jnp.zeros(())]
    while betas[-1] < 1:
        key, sweep_key = jax.random.split(key)
        beta, states = _advance(model, betas[-1], states, sweep_key, effective, most)
        betas.append(beta)
    found = jnp.stack(betas)
    if temperatures is None:
        return found
    even = linear_schedule(temperatures)
    return jnp.interp(even, jnp.linspace(0.0, 1.0, len(found)), found)


def ais(
    model: GaussianRBM,
    key: PRNGKeyArray,
    *,
    chains: int = 2000,
    schedule: Float[Array, " temperatures"] | Literal["linear", "adaptive"] = "adaptive",
    temperatures: int = 2000,
) -> Estimate:
    """log Z by `chains` runs from independent units to the model, one v → h → v sweep a temperature.

    On a Gaussian RBM of the Frey faces, 500 chains of 2,000 adaptive temperatures are worth three times as many
    independent ones as of linear temperatures.
    """
    if chains < 2:
        raise ValueError(f"AIS needs at least two chains, got {chains}.")
    if isinstance(schedule, str):
        schedule_key, key = jax.random.split(key)
        even = linear_schedule(temperatures)
        schedule = even if schedule == "linear" else adaptive_schedule(model, schedule_key, len(even))
    _check(schedule)
    return estimate(forward_weights(model, key, jnp.asarray(schedule), chains))


def reverse_ais(
    model: GaussianRBM,
    key: PRNGKeyArray,
    samples: Float[Array, "chains v"],
    *,
    schedule: Float[Array, " temperatures"] | None = None,
    temperatures: int = 2000,
) -> Estimate:
    """log Z from exact samples of the model, annealed back to independent units: tends to be too high.

    With `ais` it brackets log Z (Grosse et al., 2015), as far as the samples are the model's own.
    """
    schedule = linear_schedule(temperatures) if schedule is None else schedule
    _check(schedule)
    log_weights = _backward(model, key, jnp.asarray(schedule), jnp.asarray(samples))
    found = estimate(log_weights)
    base = float(log_base(model))
    return Estimate(base - found.log_z, base - found.high, base - found.low, found.effective, found.log_weights)


def exact_samples(model: GaussianRBM, key: PRNGKeyArray, count: int) -> Float[Array, "count v"]:
    """Independent samples, by enumeration of h."""
    h_key, v_key = jax.random.split(key)
    hidden = states(model.c.size)
    chosen = hidden[jax.random.categorical(h_key, jax.vmap(model.log_weight)(hidden), shape=(count,))]
    return jax.vmap(model.sample_v)(chosen, jax.random.split(v_key, count))


def estimate(log_weights: Float[Array, " chains"]) -> Estimate:
    """The log of the mean weight, with an interval from the spread of the weights."""
    log_weights = jnp.asarray(log_weights)
    if not jnp.isfinite(log_weights).all():
        raise FloatingPointError(
            "Some chains left the finite numbers: the coupling is too strong for the scale of v. Standardise the data, "
            "bound log_sigma or train with a smaller learning rate."
        )
    count = len(log_weights)
    log_mean = jax.nn.logsumexp(log_weights) - jnp.log(count)
    ratio = jnp.exp(log_weights - log_mean)
    error = 1.96 * float(jnp.std(ratio, ddof=1)) / count**0.5
    low = float(log_mean) + np.log(max(1 - error, 1e-12)) if error < 1 else -np.inf
    high = float(log_mean) + np.log1p(error)
    return Estimate(float(log_mean), low, high, float(_effective(log_weights)), np.asarray(log_weights))


def _check(schedule):
    if len(schedule) < 2 or schedule[0] != 0 or schedule[-1] != 1 or (jnp.diff(schedule) <= 0).any():
        raise ValueError("AIS: a schedule must rise from 0 to 1.")


def _effective(log_weights):
    return jnp.exp(2 * jax.nn.logsumexp(log_weights) - jax.nn.logsumexp(2 * log_weights))


def _log_ratio(field, old, new):
    """log p̃_new(v)/p̃_old(v), in which the quadratic term cancels."""
    return jnp.sum(jax.nn.softplus(new * field) - jax.nn.softplus(old * field), -1)


@eqx.filter_jit
def _advance(model, beta, states, key, effective, most):
    """The next temperature, and the chains after a sweep at it."""
    field = jax.vmap(model.field)(states)

    def share(step):
        return _effective(_log_ratio(field, beta, beta + step)) / len(states)

    def halve(_, bounds):
        low, high = bounds
        middle = 0.5 * (low + high)
        enough = share(middle) >= effective
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    rest = 1 - beta
    step, _ = jax.lax.fori_loop(0, 30, halve, (0.0 * rest, rest))
    step = jnp.where(share(rest) >= effective, rest, jnp.maximum(step, 1 / most))
    beta = jnp.minimum(beta + step, 1.0)
    return beta, _sweep(tempered(model, beta), states, key)


def _sweep(model, states, key):
    h_key, v_key = jax.random.split(key)
    h = jax.random.bernoulli(h_key, jax.nn.sigmoid(states @ model.weights + model.c[None])).astype(states.dtype)
    mean = model.b[None] + _row(model, 2) * (h @ model.weights.T)
    return mean + _row(model, 1) * jax.random.normal(v_key, states.shape, states.dtype)


def _start(model, key, chains):
    noise = jax.random.normal(key, (chains, model.b.size), model.b.dtype)
    return model.b[None] + _row(model, 1) * noise


@eqx.filter_jit
def forward_weights(
    model: GaussianRBM, key: PRNGKeyArray, schedule: Float[Array, " temperatures"], chains: int
) -> Float[Array, " chains"]:
    """The logarithms of the chains' weights, each of which has Z as its mean: what `estimate` takes."""
    start_key, key = jax.random.split(key)

    def anneal(carry, at):
        states, log_weights, old = carry
        beta, key = at
        log_weights += _log_ratio(states @ model.weights + model.c[None], old, beta)
        return (_sweep(tempered(model, beta), states, key), log_weights, beta), None

    start = (_start(model, start_key, chains), jnp.zeros(chains, model.b.dtype), schedule[0])
    keys = jax.random.split(key, len(schedule) - 1)
    return jax.lax.scan(anneal, start, (schedule[1:], keys))[0][1] + log_base(model)


@eqx.filter_jit
def _backward(model, key, schedule, samples):
    def anneal(carry, at):
        states, log_weights, old = carry
        beta, key = at
        # The reversal of a forward step: move at the old temperature, then weigh the step down.
        states = _sweep(tempered(model, old), states, key)
        log_weights += _log_ratio(states @ model.weights + model.c[None], old, beta)
        return (states, log_weights, beta), None

    down = schedule[::-1]
    start = (samples, jnp.zeros(len(samples), model.b.dtype), down[0])
    keys = jax.random.split(key, len(down) - 1)
    return jax.lax.scan(anneal, start, (down[1:], keys))[0][1]


def _row(model, power):
    """σ^power of each visible unit, as one row."""
    return jnp.exp(power * jnp.broadcast_to(model.log_sigma, model.b.shape))[None]
