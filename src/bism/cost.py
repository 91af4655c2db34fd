"""What an iteration costs: its operations, counted, and its memory, when there is too little."""

import math
from collections.abc import Callable
from typing import Any

import jax

PEAK = {"NVIDIA H200": 790e12}  # operations a second in bfloat16 that matrix products reach, as measured


def operations(fn: Callable[..., Any], *args: Any) -> float:
    """Floating-point operations of `fn`'s matrix products and convolutions: two for each multiplication.

    The zeros that a strided convolution's gradient is dilated with are not counted.
    """
    return _of_jaxpr(jax.make_jaxpr(fn)(*args).jaxpr)


def peak() -> float | None:
    return PEAK.get(jax.devices()[0].device_kind)


def memory() -> int | None:
    """Bytes of the device's memory that arrays may have, where it says so."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")


def _of_jaxpr(jaxpr):
    return sum(map(_of_equation, jaxpr.eqns))


def _of_equation(eqn):
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        depth = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
        return 2.0 * eqn.outvars[0].aval.size * depth
    if eqn.primitive.name == "conv_general_dilated":
        kernel = eqn.invars[1].aval
        outputs = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
        zeros = math.prod(eqn.params["lhs_dilation"])
        return 2.0 * eqn.outvars[0].aval.size * kernel.size / outputs / zeros
    inner = [x for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr) if _is_jaxpr(x)]
    counts = [_of_jaxpr(getattr(x, "jaxpr", x)) for x in inner]
    if eqn.primitive.name == "cond":
        return max(counts)
    return sum(counts) * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)


def _is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")


def memory_error(error: Exception, compiled: Any, args: tuple, batch_size: int) -> Exception:
    """What to raise for an error of a compiled function: if memory was short, how large a batch would have fitted."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        return error
    there = memory()
    hint = "Give a smaller batch_size."
    try:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)  # the arrays may be gone
        needs = compiled.lower(*shapes).compile().memory_analysis()
        fitting = int(batch_size * (there - needs.argument_size_in_bytes) / needs.temp_size_in_bytes)
        if 1 <= fitting < batch_size:
            hint = f"About {fitting} would fit: give a smaller batch_size."
    except Exception:  # whatever the second attempt stumbles on, the first error is the one to tell
        pass
    size = f" of {there / 2**30:.1f} GiB" if there else ""
    return MemoryError(
        f"A batch of {batch_size} does not fit into the memory{size} of {jax.devices()[0].device_kind}. {hint}"
    )
