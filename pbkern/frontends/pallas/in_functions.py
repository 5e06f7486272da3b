"""Pallas calls in a function -> calls of kernels, which fuse with their neighbours and share launches.

f = pbkern.jit(lambda x: relu(pl.pallas_call(...)(x)))      jaxpr: pallas_call, max   ->   pbkern_kernel, max
"""

from __future__ import annotations

from collections.abc import Sequence

from pbkern.core.errors import UnsupportedOp
from pbkern.core.jax_types import array_aval
from pbkern.dsl.call import kernel_p

from .call import import_call


def kernel_call(eqn, operands: Sequence, target: str) -> list | None:
    """Results of a pallas_call equation's kernel; None where XLA has to make the call.

    These calls print, run in JAX's interpreter, have arrays that kernels hold as others, or cannot be compiled: then the
    call's own lowering says why. Operands that share arrays with results XLA updates in place, where a program would copy them.
    """
    params = {name: param for name, param in eqn.params.items() if name != "interpret"}
    if eqn.params["interpret"] or eqn.effects or eqn.params["input_output_aliases"]:
        return None
    try:
        imported = import_call(**params, target=target)
    except UnsupportedOp:
        return None
    kernel = imported.kernel
    given = [eqn.invars[number] for number in imported.operands]
    for atom, held in (*zip(given, kernel.in_types), *zip(eqn.outvars, kernel.out_types)):
        if array_aval(atom).dtype != held.dtype:
            return None
    return kernel_p.bind(*[operands[number] for number in imported.operands], kernel=kernel)
