"""BiSM against the reference, through `BiSM.update` with all noise given, and against the identities it must obey."""

from dataclasses import replace
from functools import cache, cached_property

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_models import (
    THETA,
    close,
    exact_posterior,
    gaussian_eblvm,
    golden_posterior,
    grbm,
    quick_jit,
    random_grbm,
    true_posterior,
    two_points,
)

import bism
from bism import (
    DSM,
    KL,
    MDSM,
    SM,
    SSM,
    BiSM,
    ConjugateGradient,
    FirstOrder,
    Fisher,
    NaturalGradient,
    Neumann,
    Unroll,
    score,
)
from bism.bilevel import Draw, LowerLevel
from bism.method import parameters

FRONT = ("bidsm", "bissm")
SAMPLED = KL(exact=False)  # by one relaxed sample, as in the paper


update = quick_jit(lambda method, state, *draws: method.update(state, *draws))
sgd, adam = cache(optax.sgd), cache(bism.adam)  # one object for each setting, so that what is compiled is found again


def iterate(method, state, *draws):
    """The upper gradient that an iteration takes (with plain descent at rate one, what θ loses), and its outcome."""
    after, metrics = update(method, state, *draws)
    return jax.tree.map(jnp.subtract, parameters(state.model), parameters(after.model)), after, metrics


class Reference:
    """One front of bism_grbm.npz: what goes into `update`.

    `fresh` gives each step noise of its own, `same` the same to each; `shared` is `same` by way of one shared batch.
    """

    def __init__(self, g, front, variant):
        self.g, self.front, self.variant = g, front, variant
        self.model, self.posterior, self.v = grbm(g), golden_posterior(g), g["v"]
        self.objective = DSM(float(g["noise_std"])) if front == "bidsm" else SSM()
        betas = float(g["adam_beta1"]), float(g["adam_beta2"])
        self.adam = adam(float(g["adam_lr"]), *betas, float(g["adam_eps"]))
        self.sgd = sgd(float(g["sgd_alpha"]))

    def method(self, response=FirstOrder(), lower_steps=5):
        settings = {"optimizer": sgd(1.0), "lower_optimizer": self.adam, "score": "sampled"}
        return BiSM(self.objective, SAMPLED, response, lower_steps, **settings)

    def draw(self, eps, logistic, lead=()):
        eps, h = (jnp.broadcast_to(x, lead + x.shape[-2:]) for x in (eps, logistic))
        v, direction = (jnp.broadcast_to(x, lead + x.shape) for x in (self.v, self.g["upper_direction"][:, None]))
        if self.front == "bidsm":
            v, direction = v + float(self.g["noise_std"]) * eps, eps
        return Draw(v, direction, h[..., None, :])

    def steps(self, kind, count):
        if self.variant == "fresh":
            of_each = self.g[f"{kind}_eps_steps"][:count], self.g[f"{kind}_logistic_steps"][:count]
            return self.draw(*of_each, lead=(count,))
        draw = self.draw(self.g["inner_eps"], self.g["inner_logistic"], lead=(count,))
        return Draw(None, None, draw.h) if self.variant == "shared" else draw

    def upper_draw(self):
        kind = "upper" if self.variant == "fresh" else "inner"
        return self.draw(self.g[f"{kind}_eps"], self.g[f"{kind}_logistic"])

    def iterate(self, response=FirstOrder(), lower_steps=5, state=None):
        method = self.method(response, lower_steps)
        state = state or method.init(self.model, self.posterior, batch=self.v, key=jax.random.key(0))
        draws = self.steps("inner", lower_steps), self.steps("unroll", response.draws), self.upper_draw()
        return iterate(method, state, *draws)

    @cached_property
    def after_lower_steps(self):
        """The state after K = 5 lower steps, θ as it was: where unrolling starts."""
        _, after, _ = self.iterate()
        return replace(after, model=self.model)

    def expected(self, name):
        return self.g[f"{self.front}_{'fresh' if self.variant == 'fresh' else 'same'}_{name}"]


@pytest.fixture(scope="module")
def reference(golden):
    return cache(lambda front, variant: Reference(golden("bism_grbm"), front, variant))


@pytest.mark.parametrize("front", FRONT)
def test_losses_and_direct_gradients_agree_with_the_reference(reference, front):
    r = reference(front, "fresh")
    g, method, draw = r.g, r.method(), r.upper_draw()
    split = lambda draw: jax.tree.map(lambda x: x[:, None], draw)  # one example a batch: the loss of each

    @quick_jit
    def all_of(model, posterior):
        each = jax.vmap(lambda draw: method.upper(model, posterior, draw))(split(draw))
        upper = eqx.filter_grad(lambda both: method.upper(*both, draw))((model, posterior))
        phi, frame = eqx.partition(posterior, eqx.is_inexact_array)
        lower = LowerLevel(SAMPLED, r.objective, None, frame, r.adam)
        inner = r.draw(g["inner_eps"], g["inner_logistic"])
        lower_each = jax.vmap(lambda draw: lower(model, phi, draw))(split(inner))
        return each, upper, lower_each, jax.grad(lambda phi: lower(model, phi, inner))(phi)

    each, (theta, phi), lower_each, lower = all_of(r.model, r.posterior)
    close(each, g[f"{front}_upper_loss"])
    close(lower_each, g[f"{front}_lower_loss"])
    for name in THETA:
        close(getattr(theta, name), g[f"grad_{front}_upper_{name}"])
    for name in ("weight", "bias"):
        close(getattr(phi.net, name), g[f"grad_{front}_upper_posterior_{name}"])
        close(getattr(lower.net, name), g[f"grad_{front}_lower_posterior_{name}"])
    assert not theta.c.any()


@pytest.mark.parametrize("variant", ["shared", "fresh"])
@pytest.mark.parametrize("front", FRONT)
def test_lower_steps_and_first_order_agree_with_the_reference(reference, front, variant):
    r = reference(front, variant)
    for steps in (1, 2, 5):
        gradient, after, metrics = r.iterate(FirstOrder(), steps)
        close(after.posterior.net.weight, r.expected(f"K{steps}_posterior_weight"))
        close(after.posterior.net.bias, r.expected(f"K{steps}_posterior_bias"))
    adam = after.lower_opt_state
    assert adam.iteration == 5
    for name in ("weight", "bias"):
        close(getattr(adam.mu.net, name), r.expected(f"K5_adam_m_{name}"))
        close(getattr(adam.nu.net, name), r.expected(f"K5_adam_v_{name}"))
    close(metrics["loss"], r.expected("adam_N0_upper_loss_mean"))
    close(metrics["loss"], r.expected("adam_N0_upper_loss").mean())
    for name in THETA:
        close(getattr(gradient, name), r.expected(f"adam_N0_hypergrad_{name}"))
    assert not gradient.c.any()


# Our unrolled Adam is the live one (adamstd), the released code's (adam) has its epsilon elsewhere: that changes its
# gradients by some 1e-7 of the largest entry.
RULES = {"adam": {"adamstd": (1e-9, 1e-7, None), "adam": (1e-6, 1e-6, 1e-6)}, "sgd": {"sgd": (1e-9, 1e-9, None)}}


@pytest.mark.parametrize("variant", ["same", "fresh"])
@pytest.mark.parametrize("front", FRONT)
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("rule", RULES)
def test_unrolled_hypergradients_agree_with_the_reference(reference, front, variant, steps, rule):
    r = reference(front, variant)
    response = Unroll(steps, r.sgd if rule == "sgd" else None)
    gradient, after, metrics = r.iterate(response, 0, r.after_lower_steps)
    for name, (of_loss, of_gradient, of_largest) in RULES[rule].items():
        close(metrics["loss"], r.expected(f"{name}_N{steps}_upper_loss").mean(), of_loss)
        for parameter in THETA:
            expected = r.expected(f"{name}_N{steps}_hypergrad_{parameter}")
            close(getattr(gradient, parameter), expected, of_gradient, of_largest)
    assert eqx.tree_equal(after.posterior, r.after_lower_steps.posterior)  # the unrolled steps are thrown away
    assert jnp.linalg.norm(gradient.c) > 1e-3  # reached only through φᴺ(θ)


@pytest.mark.parametrize(("front", "variant"), [("bidsm", "shared"), ("bissm", "shared"), ("bidsm", "fresh")])
def test_one_whole_iteration_agrees_with_the_reference(reference, front, variant):
    r = reference(front, variant)
    gradient, after, metrics = r.iterate(Unroll(5), 5)
    close(metrics["loss"], r.expected("adamstd_N5_upper_loss").mean())
    for parameter in THETA:
        close(getattr(gradient, parameter), r.expected(f"adamstd_N5_hypergrad_{parameter}"), 1e-7)
    close(after.posterior.net.weight, r.expected("K5_posterior_weight"))


@pytest.mark.parametrize("variant", ["shared", "fresh"])
@pytest.mark.parametrize("front", FRONT)
def test_unrolled_posteriors_agree_with_the_reference(reference, front, variant):
    r = reference(front, variant)
    start, draw = r.after_lower_steps, r.upper_draw()
    phi, frame = eqx.partition(start.posterior, eqx.is_inexact_array)
    lower = LowerLevel(
        SAMPLED, r.objective, draw if variant == "shared" else None, frame, r.adam, start.lower_opt_state
    )
    first = lambda steps: replace(lower, draws=r.steps("unroll", steps))
    cases = [(rule, steps) for rule in RULES for steps in (1, 2, 5)]
    answers = quick_jit(
        lambda: [Unroll(n, r.sgd if rule == "sgd" else None)(r.model, phi, first(n)).net for rule, n in cases]
    )()
    for (rule, steps), net in zip(cases, answers, strict=True):
        for name, (rtol, _, of_largest) in RULES[rule].items():
            close(net.weight, r.expected(f"{name}_N{steps}_posterior_weight"), rtol, of_largest)
            close(net.bias, r.expected(f"{name}_N{steps}_posterior_bias"), rtol, of_largest)


OBJECTIVES = [DSM(0.3), SSM(), SM(), MDSM(0.2, 0.9, 0.4)]


def classic(objective, model, draw):
    """The objective's loss on the model's own marginal."""
    return jnp.mean(jax.vmap(lambda v, n: objective.loss(score(model), v, n))(draw.v, draw.noise))


@quick_jit
def classic_gradient(objective, model, draw):
    return eqx.filter_grad(lambda model: classic(objective, model, draw))(model)


def one_iteration(objective, response, h):
    """The draws of an iteration with no lower steps, on one perturbed batch; `h` is one draw of the latents' noise."""
    batch = jax.random.normal(jax.random.key(5), (len(h), 2))
    v, noise = objective.perturb(batch, jax.random.key(6))
    times = lambda count: Draw(None, None, jnp.broadcast_to(h, (count, *h.shape)))
    return batch, times(0), times(response.draws), Draw(v, noise, h)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("settings", [{}, {"coupling": "scaled", "shared_scale": True}])
def test_under_the_exact_posterior_every_loss_is_the_marginals(objective, settings):
    model = random_grbm(2, 3, **settings)
    posterior = exact_posterior(model)
    for seed in range(2):
        h = jax.random.logistic(jax.random.key(seed), (6, 1, 3))
        _, _, _, draw = one_iteration(objective, FirstOrder(), h)

        @quick_jit
        def losses(posterior, draw, objective=objective):
            upper = lambda score: BiSM(objective, score=score).upper(model, posterior, draw)
            return upper("sampled"), upper("expected"), classic(objective, model, draw)

        sampled, expected, exact = losses(posterior, draw)
        close(sampled, exact, rtol=1e-12)
        close(expected, exact, rtol=1e-12)


def solved_problem(kind):
    """A model, its true posterior, a divergence which that posterior minimises exactly, and noise of h."""
    if kind.startswith("bits"):
        model = random_grbm(2, 3)
        noise = jax.random.logistic(jax.random.key(1), (12, 1, 3))
        return model, exact_posterior(model), KL(), noise
    model = gaussian_eblvm()
    return model, true_posterior(model), {"kl": KL(2), "fisher": Fisher(2)}[kind], two_points(12, 3)


def gradient_at_optimum(kind, objective, response):
    """The hypergradient where φ⁰ = φ*(θ), and the gradient of the objective on the marginal."""
    model, posterior, divergence, h = solved_problem(kind)
    score = "expected" if kind == "bits, expected score" else "sampled"
    method = BiSM(objective, divergence, response, 0, optimizer=sgd(1.0), score=score)
    batch, *draws = one_iteration(objective, response, h)
    state = method.init(model, posterior, batch=batch, key=jax.random.key(0))
    gradient, after, _ = iterate(method, state, *draws)
    assert eqx.tree_equal(after.posterior, posterior)
    exact = classic_gradient(objective, model, draws[-1])
    return flat(gradient), flat(exact)


def flat(tree):
    return jnp.concatenate([x.ravel() for x in jax.tree.leaves(tree)])


CASES = [
    *(("kl", o) for o in OBJECTIVES),
    ("bits", OBJECTIVES[0]),
    ("bits, expected score", OBJECTIVES[1]),
    ("fisher", OBJECTIVES[0]),
]


@pytest.mark.parametrize(("kind", "objective"), CASES)
def test_the_implicit_hypergradient_at_the_optimum_is_the_marginals_gradient(kind, objective):
    response = ConjugateGradient(60, damping=0.0, tolerance=1e-13)
    gradient, exact = gradient_at_optimum(kind, objective, response)
    np.testing.assert_allclose(gradient, exact, atol=1e-6 * jnp.linalg.norm(exact))


@pytest.mark.parametrize(("kind", "objective"), [("kl", DSM(0.3)), ("bits", DSM(0.3)), ("kl", MDSM(0.2, 0.9, 0.4))])
def test_the_natural_gradient_is_the_implicit_one_at_the_optimum(kind, objective):
    response = NaturalGradient(60, damping=0.0, tolerance=1e-13)
    gradient, exact = gradient_at_optimum(kind, objective, response)
    np.testing.assert_allclose(gradient, exact, atol=1e-6 * jnp.linalg.norm(exact))


@pytest.mark.parametrize(("kind", "alpha"), [("bits", 2.0), ("kl", 0.4)])
def test_unrolling_at_the_optimum_tends_to_it_geometrically(kind, alpha):
    def error(response):
        gradient, exact = gradient_at_optimum(kind, DSM(0.3), response)
        return float(jnp.linalg.norm(gradient - exact) / jnp.linalg.norm(exact))

    errors = [error(FirstOrder())] + [error(Unroll(n, sgd(alpha))) for n in (40, 80, 120)]
    assert errors[0] > 0.05
    assert errors[3] < 1e-7
    falls = np.diff(np.log(errors[1:]))
    assert np.all(falls < 0)
    np.testing.assert_allclose(falls[1], falls[0], rtol=0.05)


@pytest.mark.parametrize("kind", ["bits", "kl"])
def test_neumann_is_unrolled_gradient_descent_at_the_optimum(kind):
    unrolled, _ = gradient_at_optimum(kind, DSM(0.3), Unroll(4, sgd(0.4)))
    neumann, _ = gradient_at_optimum(kind, DSM(0.3), Neumann(4, 0.4))
    close(neumann, unrolled, rtol=1e-9)


def test_mdsm_weighs_the_lower_level_by_the_inverse_of_each_level():
    model, posterior, divergence, h = solved_problem("kl")
    objective = MDSM(0.5, 2.0)
    _, _, _, draw = one_iteration(objective, FirstOrder(), h)
    each = quick_jit(jax.vmap(lambda v, h: divergence.loss(model, v, posterior(v), h)))(draw.v, h)
    phi, frame = eqx.partition(posterior, eqx.is_inexact_array)
    lower = LowerLevel(divergence, objective, draw, frame, sgd(1.0))
    close(quick_jit(lower)(model, phi, Draw(None, None, h)), jnp.mean(each / draw.noise[1]))


@pytest.mark.parametrize("noise", ["shared", "fresh"])
def test_draws_are_as_many_as_the_steps_and_each_is_its_own(noise):
    model, posterior, batch = gaussian_eblvm(), true_posterior(gaussian_eblvm()), jnp.zeros((4, 2))
    method = BiSM(DSM(0.5), KL(particles=3, exact=False), Unroll(2), 5, bism.adam(), noise=noise)
    state = method.init(model, posterior, batch=batch, key=jax.random.key(0))
    lower, response, upper = quick_jit(method.draw)(state, batch, jax.random.key(1))
    assert (lower.h.shape, response.h.shape, upper.h.shape) == ((5, 4, 3, 3), (2, 4, 3, 3), (4, 3, 3))
    assert len(np.unique(np.concatenate([np.ravel(d.h) for d in (lower, response, upper)]))) == 8 * 36
    close(upper.v, 0.5 * upper.noise)
    if noise == "shared":
        assert lower.v is lower.noise is response.v is response.noise is None
    else:
        close(lower.v, 0.5 * lower.noise)
        assert len(np.unique(np.concatenate([np.ravel(d.v) for d in (lower, response, upper)]))) == 8 * 8


def test_fifty_unrolled_steps_take_at_most_twice_the_memory_of_five():
    single = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32) if eqx.is_inexact_array(x) else x, tree)
    model = single(bism.GaussianRBM(560, 400, key=jax.random.key(0)))
    posterior = single(bism.BernoulliPosterior.linear(560, 400, key=jax.random.key(0)))
    batch = jnp.zeros((100, 560), jnp.float32)

    def memory(steps):
        """All of an iteration's, the state included, which is given away as `fit` does."""
        method = BiSM(DSM(0.3), KL(), Unroll(steps), optimizer=adam(2e-4))
        state = method.init(model, posterior, batch=batch, key=jax.random.key(0))
        arrays, static = eqx.partition(state, eqx.is_array)
        step = lambda arrays, key: eqx.filter(method.step(eqx.combine(arrays, static), batch, key), eqx.is_array)
        found = jax.jit(step, donate_argnums=0).lower(arrays, jax.random.key(0)).compile().memory_analysis()
        assert found is not None
        return found.temp_size_in_bytes + found.argument_size_in_bytes

    five = memory(5)
    assert five > 20 * model.W.nbytes  # θ, φ and Adam's state of each, and of φ at every step
    assert memory(50) <= 2 * five


def test_the_defaults_follow_the_energy():
    linear, other = BiSM(DSM(0.3)), BiSM(DSM(0.3), KL(exact=False))
    assert isinstance(linear.response_for(random_grbm(2, 3)), NaturalGradient)
    for response in (linear.response_for(gaussian_eblvm()), other.response_for(random_grbm(2, 3))):
        assert isinstance(response, Unroll)
        assert response.steps == 5


def test_settings_that_mean_nothing_are_refused():
    model, batch = random_grbm(2, 3), jnp.zeros((4, 2))
    start = lambda method: method.init(model, exact_posterior(model), batch=batch, key=jax.random.key(0))
    with pytest.raises(ValueError, match="must not be negative"):
        BiSM(DSM(0.3), lower_steps=-1)
    with pytest.raises(ValueError, match="'shared' or 'fresh'"):
        BiSM(DSM(0.3), noise="old")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="discrete h"):
        start(BiSM(DSM(0.3), Fisher()))
    with pytest.raises(ValueError, match="eps_root"):
        start(BiSM(DSM(0.3), response=Unroll(2), optimizer=optax.adam(1e-3)))
    with pytest.raises(TypeError, match="needs a posterior"):
        BiSM(DSM(0.3)).init(model, batch=batch, key=jax.random.key(0))
