"""Kernel, arrays -> arrays: inside and outside JAX transformations.

A call binds the primitive `pbkern_kernel` (param: kernel), whose lowering each target registers, and
whose transformations transformations/rules.py does;
`interpret=True` binds `pbkern_interpret` instead, which runs interpret.py in a callback.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.interpreters import mlir

from pbkern import _jax
from pbkern.core.errors import KernelError, TargetError

from . import checks
from .interpret import interpret as interpret_kernel
from .kernel import ArrayType, Kernel, call_traced
from .specs import array_type

kernel_p = jex.Primitive("pbkern_kernel")
interpret_p = jex.Primitive("pbkern_interpret")


@_jax.hides_own_frames
def call_kernel(kernel: Kernel, *arrays, interpret: bool = False) -> list[jax.Array]:
    """Runs a Kernel on arrays of its input types; works under jit, vmap and other JAX transformations.

    Args:
      kernel: the Kernel.
      *arrays: one per entry of kernel.in_types, of that shape and dtype.
      interpret: run in the NumPy interpreter, with bounds and races checked.
    Returns an array for each of its results. Raises KernelError for arrays of other types.

    Examples:
      >>> @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((4,), "float32"))
      ... def doubled(x, o):
      ...     o[...] = 2 * x[...]
      >>> traced = doubled.trace(jnp.ones(4))  # a Kernel
      >>> [result.tolist() for result in pbkern.call_kernel(traced, jnp.arange(4.0))]
      [[0.0, 2.0, 4.0, 6.0]]
    """
    operands = checked_arrays(arrays, kernel.defined_at)
    given = [ArrayType(tuple(operand.shape), np.dtype(operand.dtype)) for operand in operands]
    if given != list(kernel.in_types):
        raise KernelError(
            f"kernel `{kernel.name}` is called on other types than it was traced for",
            at=kernel.defined_at,
            why=f"takes ({', '.join(map(str, kernel.in_types))}), given ({', '.join(map(str, given))})",
            hint="trace it again for these, or convert the arrays",
        )
    if interpret and not any(isinstance(operand, jax.core.Tracer) for operand in operands):
        return [
            jnp.asarray(result) for result in interpret_kernel(kernel, *map(np.asarray, operands))
        ]  # errors arrive as they are
    return checks.called(
        kernel, lambda: (interpret_p if interpret else kernel_p).bind(*operands, kernel=kernel)
    )


call_traced.append(call_kernel)


def checked_arrays(arrays: Sequence, at: str | None) -> list[jax.Array]:
    """Arguments as arrays of JAX's; KernelError for those of NumPy that JAX does not take."""
    for n, array in enumerate(arrays):
        if isinstance(array, np.ndarray):
            array_type(array, f"operand {n}", at)
    return [jnp.asarray(operand) for operand in arrays]


def _result_types(*_, kernel: Kernel) -> list:
    return [jax.core.ShapedArray(type_.shape, type_.dtype) for type_ in kernel.out_types]


def _run_in_callback(*arrays, kernel: Kernel) -> list:
    results = [jax.ShapeDtypeStruct(type_.shape, type_.dtype) for type_ in kernel.out_types]
    return jax.pure_callback(
        lambda *values: interpret_kernel(kernel, *values),
        results,
        *arrays,
        vmap_method="sequential",
    )


def _no_target(ctx, *_, kernel: Kernel):
    raise TargetError(
        f"no target compiles kernel `{kernel.name}` for {', '.join(ctx.module_context.platforms)}",
        at=kernel.defined_at or None,
        hint="import pbkern registers the targets of this installation; interpret=True runs anywhere",
    )


for _p in (kernel_p, interpret_p):
    _p.multiple_results = True
    _p.def_abstract_eval(_result_types)
    _jax.set_eager_rule(_p)

mlir.register_lowering(kernel_p, _no_target)
mlir.register_lowering(interpret_p, mlir.lower_fun(_run_in_callback, multiple_results=True))
