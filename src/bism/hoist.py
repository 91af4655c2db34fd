"""Loop-invariant code motion: what a loop's body computes from its surroundings alone is computed once, before it.

The K lower steps share θ and ṽ, so an encoder of v need not run K times. XLA does not lift it out of a scan by itself,
and asking every energy to name its encoder would burden its author; the jaxpr already says what depends on what.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

SMALL = 128  # operations; a loop body under this is unrolled, since the loop itself would cost more than its work


class Hoisted(NamedTuple):
    call: Callable[..., Any]
    size: int  # operations left in it

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def unroll(self, steps: int) -> int:
        """How far to unroll a scan over this body: wholly if it is small, else not at all, which compiles sooner."""
        return steps if self.size <= SMALL and 0 < steps <= 16 else 1


def hoist(fn: Callable[..., Any], *args: Any) -> Hoisted:
    """`fn`, with everything that does not depend on its arguments evaluated now. `args` say the arguments' shapes."""
    closed, out_shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    jaxpr, out_tree = closed.jaxpr, jax.tree.structure(out_shape)
    known, early, late = set(jaxpr.constvars), [], []
    for eqn in jaxpr.eqns:
        if eqn.effects or any(x not in known for x in _variables(eqn.invars)):
            late.append(eqn)
        else:
            early.append(eqn)
            known.update(eqn.outvars)

    needed = dict.fromkeys(x for eqn in late for x in _variables(eqn.invars)) | dict.fromkeys(_variables(jaxpr.outvars))
    crossing = [x for x in needed if x in known]
    unnamed = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    before = jaxpr.replace(invars=[], outvars=crossing, eqns=early, debug_info=unnamed)
    after = jaxpr.replace(constvars=crossing, eqns=late)
    rest = jaxpr_as_fun(ClosedJaxpr(after, jaxpr_as_fun(ClosedJaxpr(before, closed.consts))()))
    return Hoisted(lambda *args: jax.tree.unflatten(out_tree, rest(*jax.tree.leaves(args))), len(late))


def _variables(atoms):
    return [x for x in atoms if not isinstance(x, Literal)]
