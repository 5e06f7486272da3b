"""breakpoint: Python's debugger in a body, in interpret mode."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from pbkern import _jax

breakpoint_p = jex.Primitive("breakpoint")  # *values ->; params: names
breakpoint_p.multiple_results = True


@breakpoint_p.def_effectful_abstract_eval
def _breakpoint_type(*_, names):
    return [], {_jax.debug_effect}


def breakpoint(*values, **named) -> None:
    """Stops in Python's debugger (builtins.breakpoint, so PYTHONBREAKPOINT applies) when the interpreter gets here.

    There are at hand: `program`, the program's grid indices; `refs`, {name: NumPy array} of every
    Ref of the body, where writing changes what the kernel sees; `values`, {name or number: value}
    of the arguments; `at`, the line.

    Args:
      *values: arrays or numbers to look at, by position.
      **named: further ones, by name.

    For kernels with interpret=True and pbkern.interpret. Compiling a kernel with a breakpoint
    raises UnsupportedOp.

    Examples:
      >>> @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((4,), "float32"), interpret=True)
      ... def stops(x, o):
      ...     o[...] = x[...] + 1
      ...     pbkern.breakpoint(total=o[...].sum())
      >>> stops(np.ones(4, np.float32)).tolist()  # with PYTHONBREAKPOINT=0
      [2.0, 2.0, 2.0, 2.0]
    """
    arrays = [jnp.asarray(value) for value in (*values, *named.values())]
    breakpoint_p.bind(*arrays, names=(*range(len(values)), *named))


def stop(eqn, program: tuple[int, ...], refs: Mapping[str, np.ndarray], operands: Sequence) -> None:
    """Stops the interpreter at a breakpoint. Its frame is the one that the debugger shows."""
    at = _jax.user_line(eqn)
    values = {name: np.asarray(operand)[()] for name, operand in zip(eqn.params["names"], operands)}
    builtins.breakpoint()
    del at, program, refs, values  # in view until here
