"""What the latents of an energy capture: moons, rings and eight Gaussians, coloured by the posterior mean of each."""

import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import bism
from bism.data import NAMED
from bism.report import scatter


def main(steps: int = 6_000, names: Sequence[str] = ("moons", "rings", "eight-gaussians")) -> dict[str, bism.Run]:
    runs = {}
    for name in names:
        data = NAMED[name](20_000)
        run = bism.fit(
            bism.BiSM(bism.DSM(sigma=0.15), response=bism.Unroll(5), ema=0.999),
            lambda key: bism.MLPEnergy(2, 2, width=64, key=key),
            lambda key: bism.GaussianPosterior.mlp(2, 2, width=64, key=key),
            data=data,
            steps=steps,
            progress=f"{name:16s}",
        )
        shown = data[:3000]
        means = np.asarray(jax.vmap(lambda v, q=run.posterior: q(v).mean)(jnp.asarray(shown)))
        samples = run.sample(jax.random.key(1), 3000)
        panels = {
            "data": shown,
            "samples": samples,
            "first latent": (shown, means[:, 0]),
            "second": (shown, means[:, 1]),
        }
        scatter(panels).savefig(f"latents-{name}.png", dpi=110)
        runs[name] = run
    return runs


if __name__ == "__main__":
    main(int(sys.argv[1])) if len(sys.argv) > 1 else main()
