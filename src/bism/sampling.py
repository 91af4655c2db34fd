"""Markov chains. Every sampler is a kernel (key, state) ↦ (state, info) of one chain; `chain` runs many of many steps.

A state is whatever the chain moves: v, h, or the pair (v, h). `info` is a dictionary of what is worth watching.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from .checks import as_key
from .energy import EBLVM, EBM
from .models.grbm import GaussianRBM

Info = dict[str, Array]
Energy = Callable[[Any], Float[Array, ""]]


class Kernel(eqx.Module):
    @abstractmethod
    def init(self, position: PyTree) -> PyTree:
        """The state of a chain that starts at `position`."""

    @abstractmethod
    def __call__(self, key: PRNGKeyArray, state: PyTree) -> tuple[PyTree, Info]: ...


class Gibbs(Kernel):
    """v → h → v on a model with both conditionals. The info has the mean of v given h, which makes cleaner pictures."""

    model: GaussianRBM

    def init(self, position):
        return position

    def __call__(self, key, state):
        h_key, v_key = jax.random.split(key)
        h = self.model.sample_h(state, h_key)
        return self.model.sample_v(h, v_key), {"h": h, "mean_v": self.model.mean_v(h)}


class Langevin(Kernel):
    """x ← x − ½ε²∇E(x) + √T ε ξ. With `adjust` each move is accepted as Metropolis says, which makes it exact."""

    energy: Energy
    step: float | Array = 0.02
    temperature: float | Array = 1.0
    adjust: bool = eqx.field(static=True, default=False)

    def init(self, position):
        return position

    def __call__(self, key, state):
        noise_key, accept_key = jax.random.split(key)
        noise = normal_like(noise_key, state)
        energy, gradient = jax.value_and_grad(self.energy)(state)
        proposal = langevin_move(state, gradient, noise, self.step, self.temperature)
        if not self.adjust:
            return proposal, {"energy": energy}
        new_energy, new_gradient = jax.value_and_grad(self.energy)(proposal)
        # log of π(x')q(x|x') / π(x)q(x'|x); the drift's mean is x − ½ε²∇E, its variance Tε².
        forward = _squared(proposal, langevin_move(state, gradient, noise, self.step, 0.0))
        backward = _squared(state, langevin_move(proposal, new_gradient, noise, self.step, 0.0))
        variance = self.temperature * self.step**2
        log_ratio = (energy - new_energy) / self.temperature + (forward - backward) / (2 * variance)
        accept = jnp.log(jax.random.uniform(accept_key)) < log_ratio
        state = jax.tree.map(lambda new, old: jnp.where(accept, new, old), proposal, state)
        return state, {"energy": jnp.where(accept, new_energy, energy), "accepted": accept.astype(energy.dtype)}


class Annealed(eqx.Module):
    position: PyTree
    index: Array  # the next temperature's, or level's


class AnnealedLangevin(Kernel):
    """Langevin steps along a schedule of temperatures; past its end the last temperature stays."""

    energy: Energy
    temperatures: Float[Array, " steps"]
    step: float = 0.02

    def init(self, position):
        return Annealed(position, jnp.zeros((), jnp.int32))

    def __call__(self, key, state):
        temperature = self.temperatures[jnp.minimum(state.index, len(self.temperatures) - 1)]
        energy, gradient = jax.value_and_grad(self.energy)(state.position)
        noise = normal_like(key, state.position)
        position = langevin_move(state.position, gradient, noise, self.step, temperature)
        return Annealed(position, state.index + 1), {"energy": energy, "temperature": temperature}


class Sweep(Kernel):
    """(v, h) with bits for h: v by an adjusted Langevin step at h, then each bit from its conditional, one by one."""

    model: EBLVM
    step: float | Array = 0.1
    temperature: float | Array = 1.0

    def init(self, position):
        return position

    def __call__(self, key, state):
        v_key, h_key = jax.random.split(key)
        v, h = state
        v, info = Langevin(lambda v: self.model.energy(v, h), self.step, self.temperature, adjust=True)(v_key, v)
        given = self.model.given(v)
        energy = lambda flat: given(flat.reshape(h.shape)) / self.temperature

        def draw(flat, at):
            index, noise = at
            off, on = (flat.at[index].set(bit) for bit in (0.0, 1.0))
            return jnp.where(noise < energy(off) - energy(on), on, off), None

        noise = jax.random.logistic(h_key, (h.size,), h.dtype)
        flat, _ = jax.lax.scan(draw, h.ravel(), (jnp.arange(h.size), noise))
        return (v, flat.reshape(h.shape)), info


class Ladder(Kernel):
    """x ← D + (σ↓/σ)(x − D) + σ↑ξ down a ladder of noise levels σ, with D = x − σ₀²∇E(x) the denoiser that MDSM learns.

    D is told no σ, and the info has its own estimate ‖x − D‖/√d, the `residual`. σ↓² + σ↑² is the square of the next
    level: no noise is added with `eta` = 0; with 1, all that diffusion adds. Past the end the last step is repeated.
    """  # Kadkhodaie and Simoncelli (2021); Karras et al. (2022)

    energy: Energy
    levels: Float[Array, " levels"]
    sigma0: float = 0.1
    eta: float = 1.0

    def __check_init__(self):
        if not 0 <= self.eta <= 1 or len(self.levels) < 2:
            raise ValueError(f"Ladder: eta must be from 0 to 1 and levels two or more; {self.eta}, {len(self.levels)}.")

    def init(self, position):
        return Annealed(position, jnp.zeros((), jnp.int32))

    def __call__(self, key, state):
        index = jnp.minimum(state.index, len(self.levels) - 2)
        level, after = self.levels[index], self.levels[index + 1]
        up = self.eta * after * jnp.sqrt(1 - (after / level) ** 2)
        kept = jnp.sqrt(after**2 - up**2) / level
        energy, gradient = jax.value_and_grad(self.energy)(state.position)
        noise = normal_like(key, state.position)
        move = lambda x, g, n: x - (1 - kept) * self.sigma0**2 * g + up * n
        position = jax.tree.map(move, state.position, gradient, noise)
        size = sum(g.size for g in jax.tree.leaves(gradient))
        residual = self.sigma0**2 * jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)) / size)
        return Annealed(position, state.index + 1), {"energy": energy, "level": level, "residual": residual}


class Climb(eqx.Module):
    position: tuple[Array, Array]  # v and h
    index: Array
    step: Array  # of h


class JointLadder(Kernel):
    """h by adjusted Langevin steps on E(v, ·), their size tuned on the way; then v one level down at that h."""

    # ∇F(v) is the mean of ∇ᵥE(v, h) over p(h|v), and the denoiser of F so that of E(·, h): hence the h of temperature 1
    # at every level, which is also the h that q is trained for.
    model: EBLVM
    levels: Float[Array, " levels"]
    sigma0: float = 0.1
    eta: float = 1.0
    h_steps: int = eqx.field(static=True, default=10)
    h_step: float = 0.1

    def init(self, position):
        return Climb(position, jnp.zeros((), jnp.int32), jnp.asarray(self.h_step))

    def __call__(self, key, state):
        h_key, v_key = jax.random.split(key)
        v, h = state.position
        h, step, accepted = tuned_moves(self.model.given(v), h_key, h, state.step, self.h_steps)
        ladder = Ladder(lambda v: self.model.energy(v, h), self.levels, self.sigma0, self.eta)
        moved, info = ladder(v_key, Annealed(v, state.index))
        return Climb((moved.position, h), moved.index, step), info | {"accepted": accepted}


def tuned_moves(energy: Energy, key: PRNGKeyArray, x: Array, step: Array, steps: int) -> tuple[Array, Array, Array]:
    """x after adjusted Langevin steps, their size after them, and how many were accepted."""
    kernel = lambda step, temperature: Langevin(energy, step, temperature, adjust=True)
    return tuned(kernel, key, x, step, jnp.ones(steps))


def tuned(kernel: Callable[[Array, Array], Kernel], key: PRNGKeyArray, x: PyTree, step: Array, temperatures: Array):
    """x after steps of `kernel(step, temperature)` at each temperature, their size after them, the share accepted."""

    def move(carry, at):
        (x, step), (key, temperature) = carry, at
        x, info = kernel(step, temperature)(key, x)
        # towards the acceptance that is best in many dimensions (Roberts and Rosenthal, 1998)
        return (x, step * jnp.exp(0.1 * (info["accepted"] - 0.574))), info["accepted"]

    keys = jax.random.split(key, len(temperatures))
    (x, step), accepted = jax.lax.scan(move, (x, step), (keys, temperatures))
    return x, step, accepted.mean()


def ladder_levels(
    steps: int = 50, sigma_max: float = 1.2, sigma_min: float = 0.02, rho: float = 7.0
) -> Float[Array, " levels"]:
    """σ from `sigma_max` to `sigma_min`, evenly in σ^(1/ρ), and 0: `steps` steps of a Ladder."""
    if steps < 1 or not sigma_max >= sigma_min > 0:
        raise ValueError(
            f"A ladder needs steps >= 1 and sigma_max >= sigma_min > 0: {steps}, {sigma_max}, {sigma_min}."
        )
    levels = jnp.linspace(sigma_max ** (1 / rho), sigma_min ** (1 / rho), steps) ** rho
    return jnp.append(levels, 0.0)


def paper_temperatures(hot: int = 500, cooling: int = 2000, cold: int = 200) -> Float[Array, " steps"]:
    """T = 100, then down to 1 geometrically, then to 0 linearly: Li et al.'s schedule, 2,700 steps in the paper."""
    geometric = 100.0 ** (1 - jnp.arange(cooling) / max(cooling, 1))
    return jnp.concatenate([jnp.full(hot, 100.0), geometric, jnp.linspace(1.0, 0.0, cold)])


def denoise(energy: Energy, x: PyTree, sigma0: float = 0.1) -> PyTree:
    """x − σ₀²∇E(x), the expected clean point behind x: the last step after annealing."""
    return jax.tree.map(lambda x, g: x - sigma0**2 * g, x, jax.grad(energy)(x))


def langevin_move(x: PyTree, gradient: PyTree, noise: PyTree, step, temperature) -> PyTree:
    scale = jnp.sqrt(temperature) * step
    return jax.tree.map(lambda x, g, n: x - 0.5 * step**2 * g + scale * n, x, gradient, noise)


def normal_like(key: PRNGKeyArray, tree: PyTree) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(
        structure, [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    )


def _squared(a, b):
    return sum(jnp.sum((x - y) ** 2) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@eqx.filter_jit
def chain(kernel: Kernel, key: PRNGKeyArray, positions: PyTree, steps: int) -> tuple[PyTree, Info]:
    """The states, and the last infos, of chains that start at each of `positions`, after `steps` steps."""
    states = jax.vmap(kernel.init)(positions)
    return _advance(kernel, key, states, steps)


@eqx.filter_jit
def trajectory(kernel: Kernel, key: PRNGKeyArray, positions: PyTree, steps: int, every: int = 1) -> tuple[PyTree, Info]:
    """The states and infos at each `every`-th step, along a new leading axis."""

    def stretch(states, key):
        states, info = _advance(kernel, key, states, every)
        return states, (states, info)

    return jax.lax.scan(stretch, jax.vmap(kernel.init)(positions), jax.random.split(key, steps // every))[1]


def _advance(kernel, key, states, steps):
    def step(key, states):
        return jax.vmap(kernel)(jax.random.split(key, len(jax.tree.leaves(states)[0])), states)

    if steps < 1:
        raise ValueError(f"A chain needs at least one step, got {steps}.")
    keys = jax.random.split(key, steps)
    states, _ = jax.lax.scan(lambda states, key: (step(key, states)[0], None), states, keys[:-1])
    return step(keys[-1], states)  # apart from the others, so that only its info is kept


def sample(
    model: EBM | EBLVM,
    key: PRNGKeyArray | int,
    count: int,
    *,
    shape: tuple[int, ...] | None = None,
    h_shape: tuple[int, ...] | None = None,
    binary: bool = False,
    steps: int = 1000,
) -> Float[Array, "count ..."]:
    """`count` samples of v: block Gibbs for a Gaussian RBM, else adjusted Langevin on F(v) or jointly on E(v, h).

    Other than for a Gaussian RBM, say the `shape` of one v, and for a latent-variable model the `h_shape` of one h, and
    whether h is `binary`: its bits are then drawn in turn. A run knows all that: `run.sample(key, count)`.
    Langevin chains start at N(0, 1) and cool from temperature 10 to 1 over the first half of their steps, while the
    size of those is tuned, for each chain.
    """
    if count < 1 or steps < 2:
        raise ValueError(f"sample: count must be at least 1 and steps at least 2, got {count} and {steps}.")
    start_key, h_key, chain_key = jax.random.split(as_key(key), 3)
    if isinstance(model, GaussianRBM):
        v = chain(Gibbs(model), chain_key, jax.random.uniform(start_key, (count, model.b.size)), steps)[0]
        return _sound(v, jnp.isfinite(v).all(1))
    if shape is None or (h_shape is None and not isinstance(model, EBM)):
        need = "shape= of one v" if isinstance(model, EBM) else "shape= of one v and h_shape= of one h"
        raise ValueError(f"sample: {type(model).__name__} does not say its size; give {need}.")
    v = jax.random.normal(start_key, (count, *shape))
    if isinstance(model, EBM):
        return _sound(*_cooled(model, chain_key, v, steps, False))
    h_shape = (count, *(h_shape or ()))
    bits = lambda: jax.random.bernoulli(h_key, shape=h_shape).astype(v.dtype)
    start = v, bits() if binary else jax.random.normal(h_key, h_shape)
    (v, _), moved = _cooled(model, chain_key, start, steps, binary)
    return _sound(v, moved)


@eqx.filter_jit
def _cooled(model: EBM | EBLVM, key, starts, steps, binary):
    """The model is an argument, so that a second call with another of its kind compiles nothing."""
    energy: Energy = model.free_energy if isinstance(model, EBM) else lambda x: model.energy(*x)

    def kernel(step, temperature):
        if binary and isinstance(model, EBLVM):
            return Sweep(model, step, temperature)
        return Langevin(energy, step, temperature, adjust=True)

    def one(key, x):
        warm_key, key = jax.random.split(key)
        x, step, _ = tuned(kernel, warm_key, x, jnp.asarray(0.1), 10.0 ** jnp.linspace(1.0, 0.0, steps // 2))

        def move(x, key):
            x, info = kernel(step, 1.0)(key, x)
            return x, info["accepted"]

        x, accepted = jax.lax.scan(move, x, jax.random.split(key, steps - steps // 2))
        return x, accepted.any()

    return jax.vmap(one)(jax.random.split(key, len(jax.tree.leaves(starts)[0])), starts)


def _sound(v, moved):
    if not isinstance(v, Tracer) and (lost := int((~moved).sum())):
        raise FloatingPointError(
            f"{lost} of {len(v)} chains are lost, where no move is accepted: is the energy finite, does it grow with v?"
        )
    return v
