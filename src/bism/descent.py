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

    Rematerialised, only (φ, optimiser state) is kept of each step for a later backward pass.
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

    body = jax.checkpoint(step) if rematerialise else step
    (phi, opt_state), values = jax.lax.scan(body, (phi, opt_state), draws, unroll=value_and_grad.unroll(steps))
    return phi, opt_state, values
