"""Your own energy in ten lines: one that nobody has a posterior for, learned from v alone."""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp

import bism
from bism.data import moons
from bism.report import scatter


class Tangled(bism.EBLVM):
    net: eqx.nn.MLP

    def energy(self, v, h):
        tangle = self.net(jnp.concatenate([v, h, jnp.sin(v * h)]))
        return 0.5 * jnp.sum(v**2) + 0.25 * jnp.sum(h**4) + jnp.sum(jax.nn.softplus(tangle))


def main(steps: int = 8_000, picture: str = "own_energy.png") -> bism.Run:
    key = jax.random.key(0)
    model = Tangled(eqx.nn.MLP(6, 64, 64, 2, jax.nn.silu, key=key))
    posterior = bism.GaussianPosterior.mlp(2, 2, key=key)
    method = bism.BiSM(bism.DSM(sigma=0.1), response=bism.Unroll(2), ema=0.999)
    run = bism.fit(method, model, posterior, data=moons(20_000), steps=steps)
    samples = run.sample(key, 2000)
    scatter({"data": moons(2000), "samples": samples}).savefig(picture, dpi=110)
    return run


if __name__ == "__main__":
    main(int(sys.argv[1])) if len(sys.argv) > 1 else main()
