"""Every way of learning through the one door, `init` and `step`; and every combination that is refused, and why.

A method is one line of METHODS. The posteriors start at the true one, where a step down the upper loss is a step of θ.
"""

from itertools import product
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from golden_models import exact_posterior, gaussian_eblvm, random_grbm, true_posterior

import bism
from bism import (
    DSM,
    KL,
    MDSM,
    NCE,
    SM,
    SSM,
    VNCE,
    BiSM,
    ContrastiveDivergence,
    Fisher,
    MaximumLikelihood,
    ScoreMatching,
)
from bism.method import parameters

KEY, SGD, LOWER = jax.random.key(0), optax.sgd(5e-3), optax.sgd(0.05)
BATCH = 0.5 + jax.random.normal(jax.random.key(1), (8, 2))
BITS, GAUSS = random_grbm(2, 3), gaussian_eblvm()
BIT_POSTERIOR, GAUSS_POSTERIOR = exact_posterior(BITS), true_posterior(GAUSS)
FREE = bism.MLPFreeEnergy(2, width=4, depth=1, key=KEY)
MLP = bism.MLPEnergy(2, 2, width=4, depth=1, key=KEY)
MLP_POSTERIOR = bism.GaussianPosterior.mlp(2, 2, width=4, depth=1, key=KEY)

OBJECTIVES = {"SM": SM(), "SSM": SSM(), "DSM": DSM(0.5), "MDSM": MDSM(0.5, 1.0, 1.0)}
RESPONSES = {
    "FirstOrder": bism.FirstOrder(),
    "Unroll": bism.Unroll(2),
    "Neumann": bism.Neumann(3, 0.05),
    "ConjugateGradient": bism.ConjugateGradient(3, damping=0.1),
    "NaturalGradient": bism.NaturalGradient(3),
}
FAMILIES = {
    "bits-KL": (BITS, BIT_POSTERIOR, KL()),
    "bits-relaxed": (BITS, BIT_POSTERIOR, KL(exact=False)),
    "gauss-KL": (GAUSS, GAUSS_POSTERIOR, KL()),
    "gauss-Fisher": (GAUSS, GAUSS_POSTERIOR, Fisher()),
}
OF_H_ALONE = {"bits": (".c",), "gauss": (".log_lambda", ".m")}  # what ∇ᵥ of E does not see, and N = 0 cannot learn


class Case(NamedTuple):
    method: bism.Method
    model: Any
    posterior: Any = None
    random: bool = True  # a step depends on its key
    falls: bool = True  # the metric "loss" is what the step descends
    still: tuple[str, ...] = ()  # parameters of θ that have no gradient


def bilevel(
    objective=OBJECTIVES["DSM"],
    divergence: bism.Divergence = KL(),
    response=RESPONSES["Unroll"],
    lower_steps=2,
    **settings,
):
    defaults: dict[str, Any] = {"lower_optimizer": LOWER, "optimizer": SGD}
    return BiSM(objective, divergence, response, lower_steps, **defaults | settings)


BILEVEL = {
    f"{o}-{r}-{f}": Case(
        bilevel(OBJECTIVES[o], FAMILIES[f][2], RESPONSES[r]),
        *FAMILIES[f][:2],
        random=(o, f) != ("SM", "bits-KL"),  # where the expectations over h are exact
        still=OF_H_ALONE[f.split("-")[0]] if r == "FirstOrder" else (),
    )
    for o, r, f in product(OBJECTIVES, RESPONSES, FAMILIES)
    if (r, f) != ("NaturalGradient", "gauss-Fisher")
}
# All triples are traced; those that run have each response and each objective on bits and on real latents.
RUN = [("DSM", r, f) for r in RESPONSES for f in ("bits-KL", "gauss-Fisher") if "-".join(("DSM", r, f)) in BILEVEL]
RUN += [(o, "FirstOrder", f) for o in ("SM", "SSM", "MDSM") for f in ("bits-KL", "gauss-Fisher")]
RUN += [("DSM", "Unroll", "bits-relaxed"), ("DSM", "NaturalGradient", "gauss-KL")]

METHODS = {f"BiSM-{name}": BILEVEL[name] for name in map("-".join, RUN)} | {
    "BiSM-Adam": Case(bilevel(lower_optimizer=bism.adam(1e-2)), BITS, jax.tree.map(lambda x: 0.9 * x, BIT_POSTERIOR)),
    "BiSM-K0": Case(bilevel(lower_steps=0), BITS, BIT_POSTERIOR),
    "BiSM-fresh": Case(bilevel(noise="fresh"), BITS, BIT_POSTERIOR),
    "BiSM-sgd": Case(bilevel(response=bism.Unroll(2, optax.sgd(0.1))), BITS, BIT_POSTERIOR),
    "BiSM-mlp": Case(bilevel(divergence=Fisher(2), response=bism.FirstOrder()), MLP, MLP_POSTERIOR, falls=False),
    "SM": Case(ScoreMatching(SM(), optimizer=SGD), BITS, random=False),
    "SSM": Case(ScoreMatching(SSM(), optimizer=SGD), BITS),
    "SSM-gaussian": Case(ScoreMatching(SSM("gaussian", 2), optimizer=SGD), BITS),
    "SSM-sphere": Case(ScoreMatching(SSM("sphere"), optimizer=SGD), BITS),
    "DSM": Case(ScoreMatching(DSM(0.5), optimizer=SGD), BITS),
    "DSM-average": Case(ScoreMatching(DSM(0.5), optimizer=SGD, ema=0.9), BITS),
    "MDSM": Case(ScoreMatching(MDSM(0.5, 1.0, 1.0), optimizer=SGD), FREE),
    "ML": Case(MaximumLikelihood(optimizer=SGD), BITS, random=False),
    "CD": Case(ContrastiveDivergence(2, optimizer=SGD), BITS, falls=False),
    "PCD": Case(ContrastiveDivergence(persistent=True, optimizer=SGD), BITS, falls=False),
    "CD-Langevin": Case(
        ContrastiveDivergence(kernel=lambda model: bism.Langevin(model.free_energy, 0.5), optimizer=SGD),
        FREE,
        falls=False,
    ),
    "NCE": Case(NCE(optimizer=SGD), FREE),
    "VNCE-bits": Case(VNCE(2, 2, optimizer=SGD, lower_optimizer=LOWER), BITS, BIT_POSTERIOR),
    "VNCE-K0": Case(VNCE(2, 0, optimizer=SGD), BITS, BIT_POSTERIOR),
    "VNCE-gauss": Case(VNCE(2, 2, nu=2.0, optimizer=SGD, lower_optimizer=LOWER), GAUSS, GAUSS_POSTERIOR),
}


def begin(case):
    return case.method.init(case.model, case.posterior, batch=BATCH, key=KEY)


def compiled(case, state):
    static = eqx.filter(state, eqx.is_array, inverse=True)

    def step(arrays, key):
        state, metrics = case.method.step(eqx.combine(arrays, static), BATCH, key)
        return eqx.filter(state, eqx.is_array), metrics

    return jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})  # these compile longer than they run


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def kind(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype) if hasattr(x, "shape") else x, tree)


@pytest.mark.parametrize("case", METHODS.values(), ids=METHODS)
def test_step(case):
    start = begin(case)
    step, arrays = compiled(case, start), eqx.filter(start, eqx.is_array)
    keys = jax.random.split(KEY, 3)
    first, _ = step(arrays, keys[0])
    second, metrics = step(first, keys[1])
    assert kind(second) == kind(arrays)
    assert "loss" in metrics
    assert all(value.shape == () and np.isfinite(value) for value in metrics.values())

    old, new = (jax.tree_util.tree_leaves_with_path(parameters(state.model)) for state in (start, second))
    still = {jax.tree_util.keystr(path) for (path, x), (_, y) in zip(old, new, strict=True) if (x == y).any()}
    assert still == set(case.still)

    learns_q = getattr(case.method, "lower_steps", 0) > 0
    assert (bits(second.posterior) != bits(start.posterior)) == learns_q

    assert bits(step(first, keys[1])) == bits((second, metrics))
    assert (bits(step(first, keys[2])) != bits((second, metrics))) == case.random

    if case.falls:
        losses = []
        for _ in range(40):  # one key, so that all of them are of one sample
            arrays, metrics = step(arrays, keys[0])
            losses.append(float(metrics["loss"]))
        assert losses[-1] < losses[0]


REST = {name: case for name, case in BILEVEL.items() if f"BiSM-{name}" not in METHODS}


@pytest.mark.parametrize("case", REST.values(), ids=REST)
def test_a_step_keeps_the_kind_of_its_state(case):
    state = begin(case)
    after, metrics = eqx.filter_eval_shape(case.method.step, state, BATCH, KEY)
    assert kind(after) == kind(state)
    assert {name: x.shape for name, x in metrics.items()} == {"loss": (), "lower": ()}


def bits_of(units):
    return bism.GaussianRBM(2, units, key=KEY), bism.BernoulliPosterior.linear(2, units, key=KEY)


REFUSED = {
    "Fisher of bits": (lambda: begin_with(bilevel(divergence=Fisher()), BITS, BIT_POSTERIOR), ValueError, "discrete h"),
    "BiSM of an EBM": (
        lambda: begin_with(bilevel(), FREE, BIT_POSTERIOR),
        TypeError,
        "MLPFreeEnergy has none: use",
    ),
    "VNCE of an EBM": (lambda: begin_with(VNCE(), FREE, BIT_POSTERIOR), TypeError, "MLPFreeEnergy has none: use Score"),
    "SM of an EBLVM": (lambda: begin_with(ScoreMatching(SM()), MLP), TypeError, "MLPEnergy has none: use BiSM"),
    "CD of an EBLVM": (lambda: begin_with(ContrastiveDivergence(), MLP), TypeError, "MLPEnergy has none: use BiSM"),
    "NCE of an EBLVM": (lambda: begin_with(NCE(), MLP), TypeError, "MLPEnergy has none: use BiSM"),
    "Gibbs of no RBM": (lambda: begin_with(ContrastiveDivergence(), FREE), TypeError, "kernel=lambda model"),
    "ML of no RBM": (lambda: begin_with(MaximumLikelihood(), FREE), TypeError, "MLPFreeEnergy is none"),
    "ML of 21 bits": (lambda: begin_with(MaximumLikelihood(), bits_of(21)[0]), ValueError, "stops at 20"),
    "BiSM without q": (lambda: begin_with(bilevel(), BITS), TypeError, "needs a posterior"),
    "VNCE without q": (lambda: begin_with(VNCE(), BITS), TypeError, "needs a posterior"),
    "a network as q": (lambda: begin_with(bilevel(), BITS, BIT_POSTERIOR.net), TypeError, "needs a posterior"),
    "q of other bits": (
        lambda: begin_with(bilevel(), BITS, bits_of(4)[1]),
        ValueError,
        r"energy.* \(2,\), \(4,\)",
    ),
    "Unroll of Adam": (
        lambda: begin_with(bilevel(lower_optimizer=optax.adam(1e-3)), BITS, BIT_POSTERIOR),
        ValueError,
        "NaN at a zero gradient",
    ),
    "Unroll's own Adam": (
        lambda: begin_with(bilevel(response=bism.Unroll(2, optax.adam(1e-3))), BITS, BIT_POSTERIOR),
        ValueError,
        "NaN at a zero gradient",
    ),
    "K < 0": (lambda: bilevel(lower_steps=-1), ValueError, r"\(K\) must not be negative, got -1"),
    "noise": (lambda: bilevel(noise="common"), ValueError, "'shared' or 'fresh', got 'common'"),
    "score": (lambda: bilevel(score="mean"), ValueError, "'sampled' or 'expected', got 'mean'"),
    "expected score": (
        lambda: begin_with(bilevel(score="expected"), MLP, MLP_POSTERIOR),
        ValueError,
        "linear in h; MLPE",
    ),
    "natural Fisher": (
        lambda: bilevel(divergence=Fisher(), response=bism.NaturalGradient()),
        ValueError,
        "for another divergence use ConjugateGradient",
    ),
    "N < 1": (lambda: bism.Unroll(0), ValueError, r"FirstOrder\(\) for N = 0"),
    "Neumann's terms": (lambda: bism.Neumann(0), ValueError, "terms >= 1"),
    "Neumann's step": (lambda: bism.Neumann(alpha=0.0), ValueError, "alpha > 0"),
    "CG's iterations": (lambda: bism.ConjugateGradient(0), ValueError, "iterations >= 1"),
    "CG's damping": (lambda: bism.ConjugateGradient(damping=-1.0), ValueError, "damping >= 0"),
    "directions": (lambda: SSM("cube"), ValueError, "unknown directions 'cube'"),  # type: ignore[arg-type]
    "projections": (lambda: SSM(projections=0), ValueError, "at least 1, got 0"),
    "DSM's sigma": (lambda: DSM(0.0), ValueError, "must be positive, got 0"),
    "DSM's NaN": (lambda: DSM(float("nan")), ValueError, "must be positive, got nan"),
    "MDSM's range": (lambda: MDSM(1.0, 0.5), ValueError, "sigma_min <= sigma_max"),
    "MDSM's sigma0": (lambda: MDSM(sigma0=0.0), ValueError, "sigma0 > 0"),
    "spacing": (lambda: MDSM(spacing="cubic"), ValueError, "unknown spacing 'cubic'"),  # type: ignore[arg-type]
    "k < 1": (lambda: ContrastiveDivergence(0), ValueError, r"\(k\) must be at least 1, got 0"),
    "RBM of no bits": (lambda: bits_of(0), ValueError, "at least 1, got 2 and 0"),
    "coupling": (lambda: bism.GaussianRBM(2, 2, coupling="x", key=KEY), ValueError, "'plain' or 'scaled'"),  # type: ignore
    "VNCE's K < 0": (lambda: VNCE(lower_steps=-1), ValueError, "lower_steps not negative"),
    "VNCE of no particles": (lambda: VNCE(particles=0), ValueError, "particles must be at least 1"),
    "VNCE's nu": (lambda: VNCE(nu=-1.0), ValueError, "nu positive"),
    "NCE's nu": (lambda: NCE(nu=0.0), ValueError, "must be positive, got 0"),
    "KL of no particles": (lambda: KL(0), ValueError, "KL: particles must be at least 1, got 0"),
    "Fisher of no particles": (lambda: Fisher(0), ValueError, "Fisher: particles must be at least 1, got 0"),
    "an average's decay": (lambda: MaximumLikelihood(ema=1.5), ValueError, "MaximumLikelihood: ema.* between 0 and 1"),
}


def begin_with(method, model, posterior=None):
    return begin(Case(method, model, posterior))


@pytest.mark.parametrize(("make", "kind", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused(make, kind, reason):
    with pytest.raises(kind, match=reason):
        make()


def test_unroll_takes_clipping():
    clipped = optax.chain(optax.clip_by_global_norm(1.0), bism.adam())
    begin_with(bilevel(lower_optimizer=clipped), BITS, BIT_POSTERIOR)  # what a diverged run is told to do
