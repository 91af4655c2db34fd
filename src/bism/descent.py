"""Steps of an optimiser on a lower-level loss: the live ones of Algorithm 1 and those that are differentiated."""

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

    Rematerialised, a later backward pass needs about 2√steps times the memory of (φ, optimiser state), 3∛steps for more
    than 16, not that of a step's intermediate values. Steps few and small enough to be unrolled keep those: faster.
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
    """A scan of stretches of stretches: their starts are kept for the way back, and the inside of one at a time."""
    # By index, so that no stretch copies its draws.
    step_at = jax.checkpoint(lambda carry, i: step(carry, jax.tree.map(lambda x: x[i], draws)))

    def scan(carry, indices, lengths):
        if not lengths:
            return jax.lax.scan(step_at, carry, indices)
        whole = len(indices) - len(indices) % lengths[0]
        stretch = jax.checkpoint(lambda carry, indices: scan(carry, indices, lengths[1:]))
        carry, values = jax.lax.scan(stretch, carry, indices[:whole].reshape(-1, lengths[0]))
        carry, rest = jax.lax.scan(step_at, carry, indices[whole:])
        return carry, jnp.concatenate([values.ravel(), rest])

    return scan(carry, jnp.arange(steps), _lengths(steps, 2 if steps <= 16 else 3)[1])


def _lengths(steps, depth):
    """How many values of (φ, optimiser state) are kept at a time, and the stretches' lengths that make them fewest."""
    if depth == 1:
        return steps, ()

    def kept(length):
        inside, lengths = _lengths(length, depth - 1)
        return steps // length + steps % length + inside, (length, *lengths)

    return min(map(kept, range(1, steps + 1)))
