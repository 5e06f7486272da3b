"""Decorated function, arguments -> what it runs, as a function of JAX: calls of its kernels, and what XLA keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.api.pipeline import current_plan
from pbkern.core.errors import ArgumentError
from pbkern.core.jaxprs.calls import called_jaxpr
from pbkern.core.jaxprs.evaluation import evaluate
from pbkern.core.jaxprs.retracing import retrace
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.call import kernel_p
from pbkern.dsl.kernel import Kernel
from pbkern.frontends.jax import call
from pbkern.fuse.emit.run_as_jax import CallKernel, run_as_jax

PALLAS = "pallas_call"


def call_kernel(kernel: Kernel, operands: list) -> list:
    """Calls a kernel as it is."""
    return kernel_p.bind(*operands, kernel=kernel)


@dataclass(frozen=True)
class HostOperations:
    """Operations that a decorated function runs for arguments of some types.

    Attributes:
      traced: the function as jax.jit traces it.
      leaves: types of its arguments' arrays.
      kernels: fused kernels, by name.
      target: name of the target that compiles them.
    """

    name: str
    target: str
    traced: Any
    leaves: list
    kernels: dict[str, Kernel]

    def run(self, leaves: list, call: CallKernel = call_kernel) -> list:
        """Results' arrays, traceable; `call` calls the kernels."""
        closed = self.traced.jaxpr
        return evaluate(
            closed.jaxpr, closed.consts, leaves, inline_calls=False, bind=_bind_with(call)
        )

    def run_as_defined(self, leaves: list) -> list:
        """Results' arrays by the function's definition, with its own derivatives; traceable."""
        return jex.jaxpr_as_fun(self.traced.jaxpr)(*leaves)

    @property
    def jaxpr(self) -> jex.ClosedJaxpr:
        """The function as equations, canonical ones, of which some call kernels."""
        with _jax.types_kept(self.traced.jaxpr):
            closed = jax.make_jaxpr(self.run)(self.leaves)
            return retrace(closed, functools.partial(_import_pallas_call, self.target))


def host_function(function: Any, args: tuple, kwargs: dict) -> HostOperations:
    """Plans a decorated function for arguments like these. Raises ArgumentError for others."""
    if not hasattr(function, "with_kernels"):
        raise ArgumentError(
            "only a decorated function has kernels", why=f"given {function!r}", hint="pbkern.jit(f)"
        )
    traced = function.trace(*args, **kwargs)
    kernels = {kernel.name: kernel for kernel in function.kernels(*args, **kwargs)}
    leaves = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in traced.jaxpr.in_avals]
    return HostOperations(function.__name__, function.options.target, traced, leaves, kernels)


def _bind_with(call_of: CallKernel) -> Callable:
    """Binds equations; a fused function's is what its plan runs."""

    def bind(eqn, *operands) -> list:
        if eqn.primitive is not call.call_p:
            inner = called_jaxpr(eqn)
            if inner is None:
                return _jax.bind_again(eqn, operands)
            return evaluate(inner.jaxpr, inner.consts, operands, inline_calls=False, bind=bind)
        params = eqn.params
        plan = current_plan(
            params["jaxpr"], params["name"], params["options"], params["donated"]
        ).fused
        return plan.evaluate(operands, lambda program, inputs: run_as_jax(program, inputs, call_of))

    return bind


def _import_pallas_call(target: str, eqn, *operands) -> list | None:
    """A Pallas call as a kernel of ours."""
    if eqn.primitive.name != PALLAS or eqn.params["interpret"]:
        return None
    from pbkern.frontends.pallas.call import held_like, import_call

    params = {key: param for key, param in eqn.params.items() if key != "interpret"}
    imported = import_call(**params, target=target)
    held = [
        held_like(operands[number], type_.dtype)
        for number, type_ in zip(imported.operands, imported.kernel.in_types)
    ]
    results = call_kernel(imported.kernel, held)
    return [held_like(result, var.aval.dtype) for result, var in zip(results, eqn.outvars)]
