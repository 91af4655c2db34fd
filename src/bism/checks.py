"""What must hold before a run starts: asked of shapes alone, so that a mistake costs no training time."""

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PRNGKeyArray

from .energy import EBLVM, EBM
from .method import Method
from .posterior import Posterior


def check_arguments(method: Any, model: Any, posterior: Any, callbacks: Any, evaluate: Any, **counts: Any) -> None:
    """Refuse what `fit` was given in place of something else, before the library that stumbles on it does."""
    if not isinstance(method, Method):
        raise TypeError(f"fit: the method comes first, as in bism.BiSM(bism.DSM(sigma=0.3)); this is {_named(method)}.")
    wanted = {"model": (model, (EBM, EBLVM)), "posterior": (posterior, Posterior)}
    for name, (given, kinds) in wanted.items():
        if given is None and name == "posterior":
            continue
        if isinstance(given, type) or not (isinstance(given, kinds) or callable(given)):
            raise TypeError(
                f"fit: {name} must be a {name}, or a function of a key that makes one; this is {_named(given)}."
            )
    if not isinstance(callbacks, Sequence) or not all(callable(each) for each in callbacks):
        raise TypeError("fit: callbacks must be a list of functions of the run.")
    if evaluate is not None and not (isinstance(evaluate, Mapping) and all(callable(f) for f in evaluate.values())):
        raise TypeError("fit: evaluate must be a dictionary of functions (model, posterior) -> number by their names.")
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"fit: {name} must be a whole number, got {value!r}.")
        if value < 1:
            raise ValueError(f"fit: {name} must be at least 1, got {value}.")


def as_key(key: Any) -> PRNGKeyArray:
    """A seed, or a key of either kind that jax.random makes."""
    if isinstance(key, (int, np.integer)):
        return jax.random.key(key)
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0:
        return key
    if isinstance(key, jax.Array) and key.dtype == jnp.uint32 and key.ndim == 1:
        return jax.random.wrap_key_data(key)
    raise TypeError(f"key must be a whole number or a jax.random.key, got {key!r}.")


def _named(x):
    return f"the class {x.__name__}: make one of it" if isinstance(x, type) else f"of type {type(x).__name__}"


def check_latent_model(method: str, model: Any, posterior: Any, v: jax.Array) -> None:
    """Refuse what has no latent variables, a posterior that cannot read v, an energy that is not one number."""
    if not isinstance(model, EBLVM):
        raise TypeError(
            f"{method} needs a model with latent variables, energy(v, h), and {type(model).__name__} has none: use "
            "ScoreMatching, which needs only free_energy(v)."
        )
    if not isinstance(posterior, Posterior):
        raise TypeError(f"{method} needs a posterior q(h|v): a bism.GaussianPosterior or bism.BernoulliPosterior.")
    h = eqx.filter_eval_shape(lambda q: q.mean, _shape_of(posterior, "The posterior", v))
    name = f"{type(model).__name__}.energy"
    _check_scalar(_shape_of(model.energy, name, v, h), f"{name}(v, h)")


def check_visible_model(method: str, model: Any, v: jax.Array) -> None:
    """Refuse what has no tractable marginal, or a free energy that is not one number."""
    if not isinstance(model, EBM):
        raise TypeError(
            f"{method} needs a model with a tractable marginal, free_energy(v), and {type(model).__name__} has none: "
            "use BiSM, which needs only energy(v, h)."
        )
    name = f"{type(model).__name__}.free_energy"
    _check_scalar(_shape_of(model.free_energy, name, v), f"{name}(v)")


def check_differentiable(optimizer: optax.GradientTransformation) -> None:
    """Refuse an optimiser whose step has a NaN slope at a zero gradient, as Adam's square root does."""

    def step(gradient):
        return optimizer.update(gradient, optimizer.init(gradient), gradient)[0]

    # One zero among others, as happens: a gradient that is zero throughout, where a norm has no slope, does not.
    with jax.ensure_compile_time_eval():  # also where the method itself is traced
        slope = jax.jacobian(step)(jnp.array([0.0, 1.0]))
    if not np.isfinite(slope).all():
        raise ValueError(
            "Unroll differentiates the lower level's optimiser, and this one's derivative is NaN at a zero gradient. "
            "Use bism.adam(...), or give optax's eps_root > 0."
        )


def _shape_of(fn, name, *args):
    try:
        return eqx.filter_eval_shape(fn, *args)
    except (TypeError, ValueError) as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in args)
        raise ValueError(f"{name} does not take arguments of shape {shapes}: {_first_line(error)}") from error


def _check_scalar(out, name):
    if getattr(out, "shape", None) != () or not jnp.issubdtype(out.dtype, jnp.floating):
        found = f"shape {tuple(out.shape)} and type {out.dtype}" if hasattr(out, "shape") else type(out).__name__
        raise ValueError(f"{name} must return one floating-point number; it returns {found}. Sum over the dimensions?")


def _first_line(error):
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
