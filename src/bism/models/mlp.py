"""Latent-variable energies of vectors whose posterior nobody has in closed form."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from ..energy import EBLVM, EBM


class MLPEnergy(EBLVM):
    """E(v, h) = ½‖h‖² + ½‖v/s‖² + g(f(v), h): an encoder of v, coupled to h by a small network.

    The two quadratic terms make the energy normalisable whatever the networks do: the networks end in a bounded map.
    """

    encoder: eqx.nn.MLP
    head: eqx.nn.MLP
    log_scale: jax.Array

    def __init__(self, v_dim: int, h_dim: int, *, width: int = 64, depth: int = 2, key: PRNGKeyArray):
        if min(v_dim, h_dim, width) < 1 or depth < 1:
            raise ValueError("MLPEnergy: v_dim, h_dim, width and depth must be at least 1.")
        encoder_key, head_key = jax.random.split(key)
        self.encoder = eqx.nn.MLP(v_dim, width, width, depth, jax.nn.silu, key=encoder_key)
        self.head = eqx.nn.MLP(width + h_dim, width, width, 1, jax.nn.silu, key=head_key)
        self.log_scale = jnp.zeros(())

    def energy(self, v, h):
        return self.given(v)(h)

    def given(self, v):
        code = self.encoder(v)
        prior = 0.5 * jnp.sum(v**2) * jnp.exp(-2 * self.log_scale)
        return lambda h: prior + 0.5 * jnp.sum(h**2) + jnp.sum(jax.nn.softplus(self.head(jnp.concatenate([code, h]))))


class MLPFreeEnergy(EBM):
    """F(v) = ½‖v/s‖² + Σ softplus(net(v)): the fully visible companion."""

    net: eqx.nn.MLP
    log_scale: jax.Array

    def __init__(self, v_dim: int, *, width: int = 64, depth: int = 3, key: PRNGKeyArray):
        self.net = eqx.nn.MLP(v_dim, width, width, depth, jax.nn.silu, key=key)
        self.log_scale = jnp.zeros(())

    def free_energy(self, v):
        return 0.5 * jnp.sum(v**2) * jnp.exp(-2 * self.log_scale) + jnp.sum(jax.nn.softplus(self.net(v)))
