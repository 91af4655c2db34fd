"""Time an iteration, method by method, beside the figures recorded for the paper's released code.

    python benchmarks/throughput.py [--repeats 5] [--seconds 1.0]

Each line is the median over the repeats of a compiled loop of whole iterations: noise, K lower steps, response, both
optimisers, the gather of the minibatch. Peers were measured once, on other machines: read the ratios, not the digits.
"""

import argparse

import jax

import bism
from bism.experiments.timing import milliseconds

# Milliseconds an iteration of the released PyTorch code: on 2 CPU cores, and on an NVIDIA H200 (None: not recorded).
PEERS = {
    ("checkerboard", "BiDSM N=5 K=5"): (14.7, None),
    ("Frey-sized", "BiDSM N=0 K=5"): (None, 17.0),
    ("Frey-sized", "BiDSM N=5 K=5"): (None, 86.7),
    ("Frey-sized", "BiDSM N=10 K=5"): (None, 111.3),
}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each repeat")
    options = parser.parse_args()
    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    print(f"bism {bism.__version__}, JAX {jax.__version__}, {device.platform}: {device.device_kind}; batch 100\n")
    print(f"{'problem':14s} {'method':16s} {'ms/iteration':>12s} {'released code':>14s} {'ratio':>7s}")
    for problem, (v_dim, h_dim, count, sigma) in PROBLEMS.items():
        for name, method in methods(sigma).items():
            ours = milliseconds(method, v_dim, h_dim, count, repeats=options.repeats, seconds=options.seconds)
            peer = PEERS.get((problem, name), (None, None))[on_gpu]
            beside = f"{peer:11.1f} ms {peer / ours:6.0f}x" if peer else f"{'—':>14s} {'':>7s}"
            print(f"{problem:14s} {name:16s} {ours:12.3f} {beside}", flush=True)


if __name__ == "__main__":
    main()
