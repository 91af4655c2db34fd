"""Adam for both levels: as the paper ran it, safe to differentiate, and few operations for a chip to launch."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree


class AdamState(NamedTuple):
    iteration: Int[Array, ""]
    mu: PyTree
    nu: PyTree
    fading: tuple[Float[Array, ""], Float[Array, ""]]  # β₁ᵗ and β₂ᵗ


def adam(learning_rate: optax.ScalarOrSchedule = 1e-3, b1=0.9, b2=0.95, eps=1e-8) -> optax.GradientTransformation:
    """optax.adam with the paper's β₂ and a slope that stays finite at a zero gradient, so that it can be unrolled."""
    # optax raises β to the power t in each step, in an operation of its own: a fifth of an iteration's launches in a
    # Gaussian RBM. A running product is fused with what uses it.
    if isinstance(learning_rate, (int, float)) and not learning_rate > 0:
        raise ValueError(f"adam: learning_rate must be positive, got {learning_rate}.")
    tiny = 1e-20  # under the root, optax's eps_root

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return AdamState(jnp.zeros((), jnp.int32), zeros, zeros, (jnp.ones(()), jnp.ones(())))

    def update(updates, state, params=None):
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, updates)
        nu = jax.tree.map(lambda n, g: b2 * n + (1 - b2) * g**2, state.nu, updates)
        first, second = b1 * state.fading[0], b2 * state.fading[1]
        rate: Any = learning_rate(state.iteration) if callable(learning_rate) else learning_rate

        def step(m, n):
            scaled = n / (1 - second).astype(n.dtype)
            return -rate * (m / (1 - first).astype(m.dtype)) / (jnp.sqrt(scaled + tiny) + eps)

        return jax.tree.map(step, mu, nu), AdamState(state.iteration + 1, mu, nu, (first, second))

    return optax.GradientTransformation(init, update)
