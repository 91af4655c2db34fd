"""Images from trained energies: samples, interpolations and restorations, and chains of h that check q.

An image is (channels, height, width) with values in [0, 1], or in bytes where it is given. Every image has a key of its
own, so that what comes out does not depend on the batches in which it was computed.
"""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Num, PRNGKeyArray

from . import sampling
from .energy import EBLVM, EBM
from .posterior import Posterior
from .sampling import AnnealedLangevin, Energy, JointLadder, Kernel, Ladder, Langevin

Images = Float[np.ndarray, "count channels height width"]
Image = Num[Any, "channels height width"]
Given = Num[Any, "count channels height width"]  # bytes or floats
Mask = Bool[Any, "*#count #channels #height #width"]
Latents = Float[np.ndarray, "count h"]
Model = EBM | EBLVM
Q = Posterior | None  # None for an EBM


class Schedule(eqx.Module):
    """How noise becomes an image: from noise around `centre`, by so many steps of a kernel, and then x − σ₀²∇E."""

    sigma0: float = eqx.field(default=0.1, kw_only=True)  # MDSM's

    @property
    @abstractmethod
    def steps(self) -> int: ...

    @abstractmethod
    def kernel(self, energy: Energy) -> Kernel: ...

    @abstractmethod
    def joint_kernel(self, model: EBLVM) -> Kernel: ...  # of pairs (v, h)

    @abstractmethod
    def start(self, key: PRNGKeyArray, centre: Array) -> Array: ...

    def walk(self, kernel: Kernel, key: PRNGKeyArray, position: Any) -> Any:
        move = lambda state, key: (kernel(key, state)[0], None)
        return jax.lax.scan(move, kernel.init(position), jax.random.split(key, self.steps))[0].position

    def finish(self, energy: Energy, x: Array) -> Array:
        return sampling.denoise(energy, x, self.sigma0)

    def image(self, energy: Energy, key: PRNGKeyArray, centre: Array) -> Array:
        start_key, key = jax.random.split(key)
        return self.finish(energy, self.walk(self.kernel(energy), key, self.start(start_key, centre)))


class Annealing(Schedule):
    """Annealed Langevin, as in the paper."""

    temperatures: Float[Array, " steps"] = eqx.field(default_factory=sampling.paper_temperatures)
    step: float = 0.02

    @property
    def steps(self):
        return len(self.temperatures)

    def start(self, key, centre):
        return centre + jax.random.normal(key, centre.shape)

    def kernel(self, energy):
        return AnnealedLangevin(energy, self.temperatures, self.step)

    def joint_kernel(self, model):
        return self.kernel(lambda position: model.energy(*position))


class Denoising(Schedule):
    """Down a ladder of noise levels. The first of them is MDSM's largest, or lower; the last is 0."""

    levels: Float[Array, " levels"] = eqx.field(default_factory=sampling.ladder_levels)
    eta: float = 1.0
    h_steps: int = 10  # at each level, where h moves too
    h_step: float = 0.1  # the first size of these

    @property
    def steps(self):
        return len(self.levels) - 2  # the last step, to 0, is x − σ₀²∇E

    def start(self, key, centre):
        return centre + self.levels[0] * jax.random.normal(key, centre.shape)

    def kernel(self, energy):
        return Ladder(energy, self.levels, self.sigma0, self.eta)

    def joint_kernel(self, model):
        return JointLadder(model, self.levels, self.sigma0, self.eta, self.h_steps, self.h_step)


def generate(
    model: Model,
    key: PRNGKeyArray,
    count: int,
    schedule: Schedule,
    *,
    shape: tuple[int, int, int],
    h: Float[Any, "count h"] | None = None,
    posterior: Posterior | None = None,
    clean: Given | None = None,
    joint: bool = False,
    h_dim: int | None = None,
    batch_size: int = 500,
) -> Images:
    """`count` images: from p(v) of an EBM; from p(v|h) of an EBLVM, or with `joint` from p(v, h), h of size `h_dim`.

    h is given, or it is the mean of q(h|v) of `clean` images picked at random, which is the paper's way.
    """
    noise_key, pick_key = jax.random.split(key)
    keys, name = jax.random.split(noise_key, count), type(model).__name__
    if joint:
        if not isinstance(model, EBLVM) or h_dim is None or h is not None:
            raise ValueError(f"generate: joint samples need h_dim=, no h= and a model with energy(v, h), not {name}.")
        return _images(eqx.Partial(_joint, model, schedule, tuple(shape), (h_dim,)), batch_size, keys)
    if h is None and isinstance(model, EBLVM) and posterior is not None and clean is not None:
        picked = jax.random.randint(pick_key, (count,), 0, len(clean))
        h = encode(posterior, np.asarray(clean)[np.asarray(picked)], batch_size=batch_size)
    if h is None and not isinstance(model, EBM):
        raise ValueError(f"generate: {name} needs h=, or posterior= and clean= images, or joint=True.")
    if h is not None and (not isinstance(model, EBLVM) or np.ndim(h) != 2 or len(h) != count):
        raise ValueError(f"generate: h= has one row for each of {count} images, and is for a model with energy(v, h).")
    return _images(eqx.Partial(_given_h, model, schedule, tuple(shape)), batch_size, keys, h)


def interpolate(
    model: EBLVM, posterior: Posterior, a: Image, b: Image, count: int, key: PRNGKeyArray, schedule: Schedule
) -> Images:
    """Images of p(v|h), h on the line from q's mean at a to that at b, all by the noise of `generate`'s first image."""
    first, last = (encode(posterior, np.asarray(x)[None]) for x in (a, b))
    h = np.linspace(first[0], last[0], count, dtype=first.dtype)
    keys = jnp.repeat(jax.random.split(jax.random.split(key)[0], 1), count)
    return _images(eqx.Partial(_given_h, model, schedule, np.shape(a)), count, keys, h)


def inpaint(
    model: Model, posterior: Q, key: PRNGKeyArray, v: Given, known: Mask, schedule: Schedule, *, batch_size: int = 500
) -> Images:
    """The images v, all but their `known` pixels made anew, with h the mean of q at the image as it then is."""
    v, known = _pixels(v), np.asarray(known)
    if known.dtype != bool:
        raise TypeError(f"inpaint: known= must say True or False of each pixel; it is {known.dtype}.")
    known, one = np.broadcast_to(known, v.shape), eqx.Partial(_inpainted, marginal(model, posterior), schedule)
    return _images(one, batch_size, jax.random.split(key, len(v)), v, known)


def denoise_images(model: Model, posterior: Q, noisy: Given, sigma0: float = 0.1, *, batch_size: int = 500) -> Images:
    """v − σ₀²∇ᵥE(v, h), h the mean of q(h|v), in which the model is told no level of the noise. σ₀ is MDSM's."""
    return _images(eqx.Partial(sampling.denoise, marginal(model, posterior), sigma0=sigma0), batch_size, _pixels(noisy))


def energies(model: Model, posterior: Q, v: Given, *, batch_size: int = 500) -> Float[np.ndarray, "count"]:
    """E(v, h), h the mean of q(h|v); or F(v)."""
    return _all(marginal(model, posterior), batch_size, _pixels(v))


def encode(posterior: Posterior, v: Given, *, batch_size: int = 500) -> Latents:
    """The means of q(h|v)."""
    return _all(eqx.Partial(_mean, posterior), batch_size, _pixels(v))


class PosteriorChain(NamedTuple):
    h: Float[np.ndarray, "count kept h"]  # of p(h|v)
    acceptance: Float[np.ndarray, "count"]
    q_mean: Latents
    q_std: Latents

    @property
    def shift(self) -> Latents:  # of q's mean from p's, in standard deviations of p
        return (self.q_mean - self.h.mean(1)) / self.h.std(1)

    @property
    def spread(self) -> Latents:  # of q, in standard deviations of p
        return self.q_std / self.h.std(1)


def posterior_chain(
    model: EBLVM,
    posterior: Posterior,
    v: Given,
    key: PRNGKeyArray,
    steps: int = 2000,
    every: int = 10,
    *,
    batch_size: int = 500,
) -> PosteriorChain:
    """p(h|v) of each v by adjusted Langevin, from a sample of q and in units of its spread, each `every`-th step kept.

    Half as many steps before them tune the size of a step.
    """
    if posterior.discrete or not isinstance(model, EBLVM):
        raise TypeError(f"posterior_chain needs energy(v, h) and a q of real h; the model is {type(model).__name__}.")
    if not 1 <= every <= steps:
        raise ValueError(f"posterior_chain: every must be between 1 and steps; got {every} and {steps}.")
    v, one = _pixels(v), eqx.Partial(_chain_of_h, model, posterior, steps, every)
    return PosteriorChain(*_all(one, batch_size, jax.random.split(key, len(v)), v))


def marginal(model: Model, posterior: Q) -> Energy:
    """F(v), or what stands for it: E(v, h) at the mean of q(h|v), through which no gradient passes."""
    if posterior is not None and isinstance(model, EBLVM):
        return eqx.Partial(_energy_at_mean, model, posterior)
    if posterior is None and isinstance(model, EBM):
        return model.free_energy  # an Equinox method is a tree, as a Partial is
    raise TypeError(
        f"A posterior goes with energy(v, h), and none with free_energy(v); the model is {type(model).__name__}."
    )


def _energy_at_mean(model, posterior, v):
    return model.energy(v, jax.lax.stop_gradient(posterior(v).mean))


def _mean(posterior, v):
    return posterior(v).mean


def _given_h(model, schedule, shape, key, h):
    energy = model.free_energy if h is None else lambda v: model.energy(v, h)
    return schedule.image(energy, key, jnp.full(shape, 0.5))


def _joint(model, schedule, shape, h_shape, key):
    v_key, h_key, key = jax.random.split(key, 3)
    start = schedule.start(v_key, jnp.full(shape, 0.5)), jax.random.normal(h_key, h_shape)
    v, h = schedule.walk(schedule.joint_kernel(model), key, start)
    return schedule.finish(lambda v: model.energy(v, h), v)


def _inpainted(energy, schedule, key, v, known):
    def held(x):
        # Of a known pixel the gradient is (x − v)/σ₀²: its D is v, and it has noise as the others have, as in training.
        pull = jnp.sum(jnp.where(known, x - v, 0) ** 2) / (2 * schedule.sigma0**2)
        return pull + energy(jnp.where(known, jax.lax.stop_gradient(x), x))

    return jnp.where(known, v, schedule.image(held, key, jnp.where(known, v, 0.5)))


def _chain_of_h(model, posterior, steps, every, key, v):
    start_key, warm_key, key = jax.random.split(key, 3)
    q, given = posterior(v), model.given(v)
    std = jnp.exp(q.log_std)
    energy = lambda z: given(q.mean + std * z)
    z = jax.random.normal(start_key, std.shape)
    z, step, _ = sampling.tuned_moves(energy, warm_key, z, jnp.asarray(0.5), steps // 2)
    z, info = sampling.trajectory(Langevin(energy, step, adjust=True), key, z[None], steps, every)
    return jax.vmap(lambda z: q.mean + std * z)(z[:, 0]), info["accepted"].mean(), q.mean, std


def _images(one: Callable, batch_size: int, *rows) -> Images:
    done = []
    for images in _batches(one, batch_size, *rows):
        if broken := int((~np.isfinite(images)).any((1, 2, 3)).sum()):
            raise FloatingPointError(
                f"{broken} of {len(images)} images are not finite: take a smaller step, start from less noise, no more "
                "than in training, or use the average of the model, State.best."
            )
        done.append(np.clip(images, 0, 1))
    return np.concatenate(done)


def _all(one: Callable, batch_size: int, *rows) -> Any:
    return jax.tree.map(lambda *parts: np.concatenate(parts), *_batches(one, batch_size, *rows))


def _batches(one: Callable, batch_size: int, *rows):
    """`one` of each row, batch after batch, compiled once: the last is filled up with the first rows."""
    count = len(rows[0])
    if count < 1 or batch_size < 1:
        raise ValueError(f"There must be an image or more, in batches of one or more; got {count} and {batch_size}.")
    size, host = min(count, batch_size), partial(np.asarray, dtype=np.float32)
    for start in range(0, count, size):
        batch = jax.tree.map(itemgetter(np.arange(start, start + size) % count), rows)
        yield jax.tree.map(itemgetter(slice(count - start)), jax.tree.map(host, _each(one, *batch)))


@eqx.filter_jit
def _each(one, *rows):
    return jax.vmap(one)(*rows)


def _pixels(images: Given) -> Images:
    images = np.asarray(images)
    if images.ndim != 4 or not (images.dtype == np.uint8 or np.issubdtype(images.dtype, np.floating)):
        raise ValueError(f"Images are bytes or floats of four dimensions, not {images.dtype} {images.shape}.")
    return images / np.float32(255) if images.dtype == np.uint8 else images.astype(np.float32)
