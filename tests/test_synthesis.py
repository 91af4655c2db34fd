"""Images against closed forms: on quadratic energies every schedule is a linear recursion of mean and variance."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import Affine, exact_posterior, quick_jit, random_grbm
from test_sampling import check_mean, check_moments

from bism import EBLVM, EBM, GaussianPosterior, ladder_levels, synthesis
from bism.synthesis import (
    Annealing,
    Denoising,
    denoise_images,
    encode,
    energies,
    generate,
    inpaint,
    interpolate,
    posterior_chain,
)

KEY, SHAPE, SIGMA0 = jax.random.key(0), (1, 2, 2), 0.1
MEAN = np.array([0.3, 0.5, 0.6, 0.7])
SCHEDULES = {
    "annealing": Annealing(jnp.geomspace(4.0, 1.0, 30), 0.1),
    "denoising": Denoising(ladder_levels(12, 0.6)),
    "deterministic": Denoising(ladder_levels(12, 0.6), eta=0.0),
}
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
both_schedules = pytest.mark.parametrize("schedule", [SCHEDULES["annealing"], SCHEDULES["denoising"]])


class Quadratic(EBM):
    """½(v − m)ᵀP(v − m) / σ₀², with D(v) = v − P(v − m): the blind denoiser of a point mass where P = I."""

    P: jax.Array
    traces: ClassVar[list] = []

    def free_energy(self, v):
        self.traces.append(v.shape)
        d = v.ravel() - MEAN
        return d @ self.P @ d / (2 * SIGMA0**2)


class Pair(EBLVM):
    """κ‖v − Ah‖²/2σ₀² + 50‖h − ½‖², D(v) = (1 − κ)v + κAh. A's columns are orthogonal, and q can be p(h|v)."""

    kappa: float = 1.0
    A: ClassVar[np.ndarray] = np.array([[0.5, 0.2], [0.5, -0.2], [0.4, 0.25], [0.4, -0.25]])

    def energy(self, v, h):
        return self.kappa * jnp.sum((v.ravel() - self.A @ h) ** 2) / (2 * SIGMA0**2) + 50 * jnp.sum((h - 0.5) ** 2)

    def true(self) -> Affine:
        pull = self.kappa / SIGMA0**2
        precision = pull * np.sum(self.A**2, 0) + 100
        parts = pull * self.A.T / precision[:, None], 50 / precision, -0.5 * np.log(precision)
        return Affine(*map(jnp.asarray, parts))


class Flat(GaussianPosterior):
    def __call__(self, v):
        return super().__call__(v.ravel())


POINT = Quadratic(jnp.eye(4))
BLEND = Quadratic(jnp.array([[0.9, -0.2, 0.1, 0.3], [-0.2, 1.0, 0.3, 0.0], [0.1, 0.3, 1.1, -0.2], [0.3, 0, -0.2, 0.8]]))
PAIR = Pair()
TRUE = PAIR.true()
Q = Flat(TRUE)
CLEAN = np.random.default_rng(0).integers(60, 200, (9, *SHAPE)).astype(np.uint8)
KNOWN = np.array([[True, False], [False, True]])


@pytest.fixture(autouse=True, scope="module")
def _quick():
    """These compile longer than they run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthesis, "_each", quick_jit(lambda one, *rows: jax.vmap(one)(*rows)))
        yield


def pixels(images):
    return np.asarray(images, float).reshape(len(images), -1)


def near(actual, expected, atol=2e-6):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def moments(schedule, P):
    """The mean and covariance of what a schedule makes with D(x) = x − P(x − m)."""
    mean, covariance, eye = np.full(4, 0.5) - MEAN, np.eye(4), np.eye(4)
    if isinstance(schedule, Annealing):
        rate = schedule.step**2 / (2 * SIGMA0**2)
        moves = [(rate, t**0.5 * schedule.step) for t in np.asarray(schedule.temperatures)] + [(1.0, 0.0)]
    else:
        moves, covariance = [], float(schedule.levels[0]) ** 2 * eye
        for level, after in zip(schedule.levels[:-1], schedule.levels[1:], strict=True):
            up = schedule.eta * after * np.sqrt(1 - (after / level) ** 2)
            moves.append((1 - np.sqrt(after**2 - up**2) / level, up))
    for rate, noise in moves:
        keep = eye - rate * np.asarray(P)
        mean, covariance = keep @ mean, keep @ covariance @ keep.T + noise**2 * eye
    return mean + MEAN, covariance


@each_schedule
def test_a_point_mass_is_where_all_schedules_end(schedule):
    images = generate(POINT, KEY, 5, schedule, shape=SHAPE)
    assert images.dtype == np.float32
    near(images, np.broadcast_to(np.reshape(MEAN, SHAPE), (5, *SHAPE)))


@each_schedule
def test_a_quadratic_energy_s_images_have_the_moments_of_the_recursion(schedule):
    mean, covariance = moments(schedule, BLEND.P)
    assert np.all(np.abs(mean - 0.5) + 4.5 * np.diag(covariance) ** 0.5 < 0.55)  # so that few are clipped
    check_moments(pixels(generate(BLEND, KEY, 4000, schedule, shape=SHAPE, batch_size=4000)), mean, covariance)


def test_a_fine_ladder_ends_at_the_data_of_a_blind_denoiser():
    """Where D does not shrink what it should keep: along the null space of P, the start is kept but for its noise."""
    line = Quadratic(jnp.diag(jnp.array([0.0, 1.0, 1.0, 1.0])))
    images = generate(line, KEY, 500, Denoising(ladder_levels(40, 0.1), eta=0.0), shape=SHAPE)
    near(pixels(images)[:, 1:], np.broadcast_to(MEAN[1:], (500, 3)))
    check_mean(pixels(images)[:, 0], 0.5, 0.1)


def test_defaults_are_the_paper_s_2700_steps_and_a_ladder_of_50():
    annealing, denoising = Annealing(), Denoising()
    assert (annealing.steps, annealing.step, annealing.sigma0) == (2700, 0.02, 0.1)
    assert denoising.levels[-1] == 0
    assert denoising.steps == 49  # and then the denoiser


@both_schedules
def test_images_of_given_latents_are_those_of_their_rows_in_batches_of_any_size(schedule):
    h = np.asarray(jax.random.uniform(KEY, (7, 2), minval=0.3, maxval=0.9))
    near(pixels(generate(PAIR, KEY, 7, schedule, shape=SHAPE, h=h, batch_size=3)), h @ Pair.A.T)
    soft = Pair(0.6)
    whole, parts = (generate(soft, KEY, 7, schedule, shape=SHAPE, h=h, batch_size=n) for n in (500, 3))
    near(whole, parts)
    assert np.abs(pixels(whole) - h @ Pair.A.T).max() > 1e-3


def test_images_follow_the_posterior_of_clean_images_picked_at_random():
    options = pixels(encode(Q, CLEAN)) @ Pair.A.T
    images = pixels(generate(PAIR, KEY, 40, SCHEDULES["denoising"], shape=SHAPE, posterior=Q, clean=CLEAN))
    distance = np.abs(images[:, None] - options[None]).max(2)
    assert distance.min(1).max() < 1e-5
    assert len(set(distance.argmin(1))) > 6
    near(encode(Q, CLEAN), encode(Q, CLEAN / 255))


def test_batches_and_calls_share_one_program():
    Quadratic.traces.clear()
    generate(BLEND, KEY, 10, SCHEDULES["denoising"], shape=(1, 1, 4), batch_size=4)
    once = len(Quadratic.traces)
    assert once > 0
    fresh = Quadratic(1.1 * BLEND.P)
    generate(fresh, jax.random.key(1), 8, Denoising(ladder_levels(12, 0.5)), shape=(1, 1, 4), batch_size=4)
    assert len(Quadratic.traces) == once


def test_joint_annealing_has_the_moments_of_the_recursion():
    """(v, h) ← (v, h) − ½ε²(H(v, h) − g) + √T ε ξ, then v is denoised."""
    schedule = Annealing(jnp.geomspace(4.0, 0.2, 60), 0.08)
    A, pull = Pair.A, 1 / SIGMA0**2
    hessian = np.block([[pull * np.eye(4), -pull * A], [-pull * A.T, pull * A.T @ A + 100 * np.eye(2)]])
    centre = np.concatenate([A @ [0.5, 0.5], [0.5, 0.5]])
    mean, covariance = np.array([0.5] * 4 + [0.0] * 2) - centre, np.eye(6)
    for t in np.asarray(schedule.temperatures):
        keep = np.eye(6) - 0.5 * schedule.step**2 * hessian
        mean, covariance = keep @ mean, keep @ covariance @ keep.T + t * schedule.step**2 * np.eye(6)
    last = (np.eye(6) - SIGMA0**2 * hessian)[:4]
    images = pixels(generate(PAIR, KEY, 4000, schedule, shape=SHAPE, joint=True, h_dim=2, batch_size=2000))
    check_moments(images, last @ mean + centre[:4], last @ covariance @ last.T)


def test_joint_denoising_is_a_gibbs_chain_between_the_levels():
    """v' = D + (σ↓/σ)(v − D) + σ↑ξ with D = Ah and h ~ p(h|v), whose chain of every level has nearly converged."""
    schedule = Denoising(ladder_levels(6, 0.3, 0.05), h_steps=40, h_step=0.05)
    A, W, of_h = Pair.A, np.asarray(TRUE.weight), np.diag(np.exp(2 * np.asarray(TRUE.log_std)))
    mean, covariance, mean_h, covariance_h = np.full(4, 0.5), 0.3**2 * np.eye(4), np.zeros(2), np.eye(2)
    # The h at which v is finished was drawn for the v of the level before.
    for level, after in zip(schedule.levels[:-2], schedule.levels[1:-1], strict=True):
        up = after * np.sqrt(1 - (after / level) ** 2)
        kept = np.sqrt(after**2 - up**2) / level
        mean_h, covariance_h = W @ mean + np.asarray(TRUE.bias), W @ covariance @ W.T + of_h
        keep = kept * np.eye(4) + (1 - kept) * A @ W
        mean = kept * mean + (1 - kept) * A @ mean_h
        covariance = keep @ covariance @ keep.T + (1 - kept) ** 2 * A @ of_h @ A.T + up**2 * np.eye(4)
    images = pixels(generate(PAIR, KEY, 4000, schedule, shape=SHAPE, joint=True, h_dim=2, batch_size=2000))
    check_moments(images, A @ mean_h, A @ covariance_h @ A.T)


@both_schedules
def test_interpolations_end_at_images_of_the_ends_latents(schedule):
    soft = Pair(0.6)
    a, b = CLEAN[:2]
    images = interpolate(soft, Q, a, b, 5, KEY, schedule)
    assert images.shape == (5, *SHAPE)
    ends = [generate(soft, KEY, 1, schedule, shape=SHAPE, h=encode(Q, x[None])) for x in (a, b)]
    near(images[[0, -1]], np.concatenate(ends))
    # One noise: what is linear in h and ξ is then linear along the line.
    near(images[2], (images[0] + images[4]) / 2)


@pytest.mark.parametrize(
    "schedule", [Annealing(jnp.geomspace(4.0, 0.01, 80), 0.1), Denoising(ladder_levels(60, 0.5, 0.002))]
)
def test_inpainting_keeps_what_is_known_and_gives_the_rest_its_conditional_mean(schedule):
    v = np.full((3000, *SHAPE), 0.9, np.float32)
    v[:, 0, 0, 0] = 0.123
    images = inpaint(BLEND, None, KEY, v, KNOWN, schedule, batch_size=3000)
    assert (images[:, :, KNOWN] == v[:, :, KNOWN]).all()
    known = KNOWN.ravel()
    P, mean = np.asarray(BLEND.P), MEAN
    pull = P[np.ix_(~known, known)] @ (v[0].ravel() - mean)[known]
    check_mean(pixels(images)[:, ~known], mean[~known] - np.linalg.solve(P[np.ix_(~known, ~known)], pull))


def test_inpainting_with_latents_goes_to_the_fixed_point_of_denoising():
    """With D(x) = A E_q[h|x] and x known in part, the rest is what solves x = D(x) there."""
    schedule = Denoising(ladder_levels(150, 0.2, 1e-4), eta=0.0)
    images = pixels(inpaint(PAIR, Q, KEY, CLEAN[:1], KNOWN, schedule))[0]
    known = KNOWN.ravel()
    matrix, bias = Pair.A @ np.asarray(TRUE.weight), Pair.A @ np.asarray(TRUE.bias)
    right = bias[~known] + matrix[np.ix_(~known, known)] @ images[known]
    near(images[~known], np.linalg.solve(np.eye(2) - matrix[np.ix_(~known, ~known)], right), 1e-3)
    assert (images[known] == (CLEAN[0] / np.float32(255)).ravel()[known]).all()


def test_blind_denoising_and_energies_take_h_at_the_mean_of_q():
    soft, other = Pair(0.6), Pair(0.3).true()
    q = Flat(other)
    noisy = np.clip(CLEAN / 255 + 0.05, 0, 1)
    x = pixels(noisy)
    h = x @ np.asarray(other.weight).T + np.asarray(other.bias)[None]
    near(encode(q, noisy), h)
    near(pixels(denoise_images(soft, q, noisy, batch_size=4)), 0.4 * x + 0.6 * h @ Pair.A.T)
    expected = 0.6 * ((x - h @ Pair.A.T) ** 2).sum(1) / (2 * SIGMA0**2) + 50 * ((h - 0.5) ** 2).sum(1)
    np.testing.assert_allclose(energies(soft, q, noisy, batch_size=4), expected, rtol=1e-5)

    d = (x - MEAN) @ np.asarray(BLEND.P)
    near(pixels(denoise_images(BLEND, None, noisy)), x - d)
    np.testing.assert_allclose(energies(BLEND, None, noisy), ((x - MEAN) * d).sum(1) / (2 * SIGMA0**2), rtol=1e-5)
    assert denoise_images(BLEND, None, 3 + noisy).max() == 1


def test_posterior_chains_have_the_true_posterior_and_tell_how_far_q_is():
    q = Flat(Affine(TRUE.weight, TRUE.bias + 0.05, TRUE.log_std + 0.4))
    chain = posterior_chain(PAIR, q, np.repeat(CLEAN[:2], 400, 0), KEY, 200, every=2, batch_size=400)
    assert chain.h.shape == (800, 100, 2)
    mean, std = pixels(encode(Q, CLEAN[:2])), np.exp(np.asarray(TRUE.log_std))
    for i in range(2):
        rows = slice(400 * i, 400 * (i + 1))
        check_moments(chain.h[rows, -1], mean[i], np.diag(std**2))
        near(chain.shift[rows].mean(0), 0.05 / std, 0.03)
    near(chain.q_mean, np.repeat(mean, 400, 0) + 0.05)
    near(chain.spread.mean(0), np.full(2, np.exp(0.4)), 0.06)
    assert 0.45 < chain.acceptance.mean() < 0.75


def test_what_diverges_is_not_passed_on():
    wild = Quadratic(1e30 * jnp.eye(4))
    with pytest.raises(FloatingPointError, match=r"6 of 6 images.*a smaller step"):
        generate(wild, KEY, 6, Annealing(jnp.ones(40), 1.0), shape=SHAPE)


BITS = random_grbm(4, 3)
REFUSED = {
    "no latents": (
        lambda: generate(PAIR, KEY, 3, Denoising(), shape=SHAPE),
        ValueError,
        "Pair needs h=",
    ),
    "no clean images": (
        lambda: generate(PAIR, KEY, 3, Denoising(), shape=SHAPE, posterior=Q),
        ValueError,
        "clean= images",
    ),
    "no posterior": (lambda: generate(PAIR, KEY, 3, Denoising(), shape=SHAPE, clean=CLEAN), ValueError, "posterior="),
    "too few latents": (
        lambda: generate(PAIR, KEY, 3, Denoising(), shape=SHAPE, h=np.zeros((2, 2))),
        ValueError,
        "one row for each of 3",
    ),
    "h of an EBM": (
        lambda: generate(BLEND, KEY, 3, Denoising(), shape=SHAPE, h=np.zeros((3, 2))),
        ValueError,
        "energy",
    ),
    "joint EBM": (lambda: generate(BLEND, KEY, 3, Denoising(), shape=SHAPE, joint=True, h_dim=2), ValueError, "joint"),
    "joint of no size": (lambda: generate(PAIR, KEY, 3, Denoising(), shape=SHAPE, joint=True), ValueError, "h_dim="),
    "no images": (lambda: generate(BLEND, KEY, 0, Denoising(), shape=SHAPE), ValueError, "an image or more"),
    "no batch": (lambda: generate(BLEND, KEY, 3, Denoising(), shape=SHAPE, batch_size=0), ValueError, "one or more"),
    "one image": (lambda: encode(Q, CLEAN[0]), ValueError, r"uint8 \(1, 2, 2\)"),
    "integers": (lambda: energies(BLEND, None, CLEAN.astype(int)), ValueError, "bytes or floats.* int64"),
    "a float mask": (
        lambda: inpaint(BLEND, None, KEY, CLEAN, np.ones(SHAPE), Denoising()),
        TypeError,
        "True or False of each pixel",
    ),
    "an EBLVM alone": (lambda: energies(PAIR, None, CLEAN), TypeError, "A posterior goes with"),
    "an EBM with q": (lambda: denoise_images(BLEND, Q, CLEAN), TypeError, "none with free_energy"),
    "bits": (lambda: posterior_chain(BITS, exact_posterior(BITS), CLEAN, KEY), TypeError, "a q of real h"),
    "every": (lambda: posterior_chain(PAIR, Q, CLEAN, KEY, 5, every=6), ValueError, "got 6 and 5"),
}


@pytest.mark.parametrize(("make", "kind", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused(make, kind, reason):
    with pytest.raises(kind, match=reason):
        make()
