"""What `fit` knows of a method: `init`, `step` and a validation loss; and the state that all of them carry."""

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from .optimizer import adam
from .posterior import Posterior

Model = Any  # an EBM, an EBLVM or both: each method says in `init` which it needs
Batch = Float[Array, "batch ..."]
Metrics = dict[str, Float[Array, ""]]


class Average(eqx.Module):
    """The moving averages of θ, φ and what of the memory is learned, which belong together: φ follows θ as it was."""

    model: Any
    posterior: Any
    learned: Any
    age: Float[Array, ""]


class State(eqx.Module):
    """All that training changes. `memory` is the method's own: NCE's normaliser, PCD's chains."""

    model: Any
    posterior: Any
    opt_state: PyTree
    lower_opt_state: PyTree = None
    memory: PyTree = None
    average: Average | None = None  # where the method keeps one

    @property
    def best(self) -> Any:
        """The model to use: the average where there is one."""
        return self.model if self.average is None else self.average.model

    @property
    def q(self) -> Any:
        """The posterior of that model."""
        return self.posterior if self.average is None else self.average.posterior

    @property
    def learned(self) -> Any:
        """What else belongs to that model: NCE's normaliser."""
        return self.memory if self.average is None else self.average.learned


class Method(eqx.Module):
    """A way of learning. Methods are pure: all that changes is in the state."""

    optimizer: optax.GradientTransformation = eqx.field(static=True, default=adam(), kw_only=True)
    ema: float | None = eqx.field(static=True, default=None, kw_only=True)  # the decay of the averages of θ and φ

    def __check_init__(self):
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"{type(self).__name__}: ema, the decay of the average, must be between 0 and 1.")

    @abstractmethod
    def init(self, model: Model, posterior: Posterior | None = None, *, batch: Batch, key: PRNGKeyArray) -> State:
        """The first state. `batch` is one batch of the data, for shapes and for chains that start at the data."""

    @abstractmethod
    def step(self, state: State, batch: Batch, key: PRNGKeyArray) -> tuple[State, Metrics]: ...

    @abstractmethod
    def validate(self, state: State, batch: Batch, key: PRNGKeyArray) -> Float[Array, ""]:
        """The method's own loss on held-out data."""

    def start(self, model: Model, posterior: Posterior | None = None, memory: PyTree = None) -> State:
        opt_state = self.optimizer.init(parameters((model, memory)))
        average = Average(model, posterior, memory, jnp.zeros(())) if self.ema else None
        return State(model, posterior, opt_state, memory=memory, average=average)

    def ascend(self, state: State, gradient: PyTree, memory: PyTree = None) -> State:
        """θ (and what of `memory` is learned) after one step of the upper optimiser, and the averages."""  # Eqn (16)
        old = (state.model, memory)
        updates, opt_state = self.optimizer.update(gradient, state.opt_state, parameters(old))
        model, memory = eqx.apply_updates(old, updates)
        average = state.average
        if self.ema and average is not None:
            # At first over a tenth of the states so far, so that nothing is left of the random start.
            decay = jnp.minimum(self.ema, (average.age + 1) / (average.age + 10))
            blend = lambda a, x: (decay * a + (1 - decay) * x).astype(x.dtype) if eqx.is_inexact_array(x) else a
            old, new = (average.model, average.posterior, average.learned), (model, state.posterior, memory)
            theta, phi, learned = jax.tree.map(blend, old, new)
            average = Average(theta, phi, learned, average.age + 1)
        return replace(state, model=model, opt_state=opt_state, memory=memory, average=average)


def parameters(tree: PyTree) -> PyTree:
    return eqx.filter(tree, eqx.is_inexact_array)
