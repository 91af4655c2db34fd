"""What must hold before a run starts: asked of shapes alone, so that a mistake costs no training time."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from .energy import EBLVM, EBM
from .posterior import Posterior


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
    gradient = jnp.array([0.0, 1.0])
    if not np.isfinite(jax.jacobian(step)(gradient)).all():
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
