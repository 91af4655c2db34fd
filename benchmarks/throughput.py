"""Time an iteration, method by method, beside the figures recorded for the paper's released code.

    python benchmarks/throughput.py [--repeats 5] [--seconds 1.0] [--deep 100 200]

Each line is the median over the repeats of a compiled loop of whole iterations: noise, K lower steps, response, both
optimisers, the gather of the minibatch. Peers were measured once, on other machines: read the ratios, not the digits.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import bism
from bism.cost import peak
from bism.experiments.timing import iteration, milliseconds
from bism.image_recipe import ImageRecipe, to_unit
from bism.images import Images

# Milliseconds an iteration of the released PyTorch code: on 2 CPU cores, and on an NVIDIA H200 (None: not recorded).
PEERS = {
    ("checkerboard", "BiDSM N=5 K=5"): (14.7, None),
    ("Frey-sized", "BiDSM N=0 K=5"): (None, 17.0),
    ("Frey-sized", "BiDSM N=5 K=5"): (None, 86.7),
    ("Frey-sized", "BiDSM N=10 K=5"): (None, 111.3),
}
# The same of deep energies: data, the released code (TF32) and what is asked, on an H200.
DEEP = {"mnist": ((1, 32, 32), 67.7), "cifar10": ((3, 32, 32), 97.4)}
PROBLEMS = {"checkerboard": (2, 4, 60_000, 0.05), "Frey-sized": (560, 400, 1_400, 0.3)}


def methods(sigma: float) -> dict[str, bism.Method]:
    dsm, sampled = bism.DSM(sigma), bism.KL(exact=False)
    responses = {0: bism.FirstOrder()} | {n: bism.Unroll(n) for n in (1, 5, 10)}
    return {
        "CD-5": bism.ContrastiveDivergence(5),
        "SSM": bism.ScoreMatching(bism.SSM()),
        "DSM": bism.ScoreMatching(dsm),
        "NCE": bism.NCE(),
        "VNCE": bism.VNCE(),
        **{f"BiDSM N={n} K=5": bism.BiSM(dsm, sampled, response) for n, response in responses.items()},
        "BiDSM (default)": bism.BiSM(dsm),
        "BiSSM (default)": bism.BiSM(bism.SSM()),
    }


def deep(name: str, batch_size: int, **options) -> tuple[float, float]:
    """Milliseconds and operations of an iteration of BiMDSM, K=5, N=0, h=50, on random bytes, in 16 bits."""
    shape, _ = DEEP[name]
    data = np.random.default_rng(0).integers(0, 256, (2000, *shape), np.uint8)
    images = Images(data, None, None, None, name, shape[1:], False, "")
    recipe = ImageRecipe.of(name, images, batch_size=batch_size)
    method, model, posterior = recipe.build(shape)
    key = jax.random.key(0)
    parts = model(key), posterior(key)
    ms = iteration(method, *parts, jnp.asarray(data), prepare=to_unit(recipe.flip), batch_size=batch_size, **options)
    return ms, recipe.operations(shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each repeat")
    parser.add_argument("--deep", type=int, nargs="*", metavar="BATCH", help="only deep energies, at these batch sizes")
    options = parser.parse_args()
    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    print(f"bism {bism.__version__}, JAX {jax.__version__}, {device.platform}: {device.device_kind}; batch 100\n")
    budget = {"repeats": options.repeats, "seconds": options.seconds}
    if options.deep is not None or on_gpu:
        top = peak()
        for name, (_, peer) in DEEP.items():
            for batch_size in options.deep or (100, 200, 400):
                ms, each = deep(name, batch_size, **budget)
                rate = 1e3 * each / ms
                share = f", {rate / top:.0%} of {top / 1e12:.0f}" if top else ""
                beside = f"; released code {peer} ms, {peer / ms:.0f}x" if batch_size == 100 and on_gpu else ""
                print(
                    f"{name:14s} batch {batch_size:4d} {ms:10.2f} ms, {rate / 1e12:.1f} TFLOP/s{share}{beside}",
                    flush=True,
                )
        if options.deep is not None:
            return
    print(f"{'problem':14s} {'method':16s} {'ms/iteration':>12s} {'released code':>14s} {'ratio':>7s}")
    for problem, (v_dim, h_dim, count, sigma) in PROBLEMS.items():
        for name, method in methods(sigma).items():
            ours = milliseconds(method, v_dim, h_dim, count, **budget)
            peer = PEERS.get((problem, name), (None, None))[on_gpu]
            beside = f"{peer:11.1f} ms {peer / ours:6.0f}x" if peer else f"{'—':>14s} {'':>7s}"
            print(f"{problem:14s} {name:16s} {ours:12.3f} {beside}", flush=True)


if __name__ == "__main__":
    main()
