"""Steps of an optimiser on a lower-level loss: the live ones of Algorithm 1 and those that are differentiated."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from .hoist import hoist


def descend(
    loss: Callable[[PyTree, Any], Array],
    optimizer: optax.GradientTransformation,
    phi: PyTree,
    opt_state: optax.OptState,
    draws: PyTree,
    *,
    rematerialise: bool = False,
) -> tuple[PyTree, optax.OptState, Array]:
    """φ and the optimiser's state after a step on `loss(φ, draw)` for each of the draws, and the loss at each step.

    Rematerialised, a later backward pass needs about 2√steps times the memory of (φ, optimiser state), not of a step's
    intermediate values. Steps few and small enough to be unrolled keep those: that is faster and costs little.
    """
    steps = len(jax.tree.leaves(draws)[0])
    if steps == 0:
        return phi, opt_state, jnp.zeros(0)
    value_and_grad = hoist(jax.value_and_grad(loss), phi, jax.tree.map(lambda x: x[0], draws))

    def step(carry, draw):
        phi, opt_state = carry
        value, gradient = value_and_grad(phi, draw)
        updates, opt_state = optimizer.update(gradient, opt_state, phi)
        return (optax.apply_updates(phi, updates), opt_state), value

    unroll = value_and_grad.unroll(steps)
    if rematerialise and unroll == 1:
        (phi, opt_state), values = _scan_rematerialised(step, (phi, opt_state), draws, steps)
    else:
        (phi, opt_state), values = jax.lax.scan(step, (phi, opt_state), draws, unroll=unroll)
    return phi, opt_state, values


def _scan_rematerialised(step, carry, draws, steps):
    """A scan of √steps stretches: kept for the backward pass are their starts, and the inside of one at a time."""
    step = jax.checkpoint(step)
    stretch = math.isqrt(steps)
    whole = steps - steps % stretch
    cut = lambda x: x[:whole].reshape(-1, stretch, *x.shape[1:])
    inner = jax.checkpoint(lambda carry, draws: jax.lax.scan(step, carry, draws))
    carry, values = jax.lax.scan(inner, carry, jax.tree.map(cut, draws))
    carry, rest = jax.lax.scan(step, carry, jax.tree.map(lambda x: x[whole:], draws))
    return carry, jnp.concatenate([values.ravel(), rest])
