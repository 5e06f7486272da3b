"""A Plan on Torch's tensors: its programs are called with addresses, what XLA keeps gets arrays by DLPack.

A call through JAX costs 60 to 160 us for its arrays alone; a call with addresses 2 to 3 (docs/decisions/044-direct-calls.md).
"""

from __future__ import annotations

import math
import pathlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.options import CompileOptions
from pbkern.frontends.torch.dtypes import torch_dtype
from pbkern.fuse.access.blocks import literal
from pbkern.fuse.emit.plan import Plan, Segment
from pbkern.targets.cpu.codegen import direct

from .decorators import JitFunction
from .direct_plans import is_direct
from .pipeline import Build, compile_programs, current_plan

Tensors = list[torch.Tensor]
# What Torch computes with is linked to the OpenMP runtime whose threads it uses.
OPENMP = pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


class TensorPlan:
    """One compiled jaxpr as a function of tensors, to a list of new ones. Raises what compiling raises.

    Attributes:
      run: the function; calling the plan is the same, and 0.1 us slower.
    """

    def __init__(self, jaxpr: jex.ClosedJaxpr, name: str, options: CompileOptions):
        with jax.enable_x64(True), _jax.types_kept(jaxpr):
            self.build: Build = compile_programs(current_plan(jaxpr, name, options), options)
        self.jaxpr, plan = jaxpr, self.build.fused
        self._steps: list[Callable[[Tensors], Tensors]] = []
        self._constants: Tensors = []
        self._results: list[tuple[int, bool]] = []
        self._whole = None if is_direct(jaxpr, plan) else _by_jax(jaxpr, name, options)
        if self._whole is None:
            self._link(plan)
        self.run: Callable[[Sequence[torch.Tensor]], Tensors] = self._one_program() or self._several_steps

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        return self.run(tensors)

    def _several_steps(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        if self._whole is not None:
            return self._whole(list(map(dense, tensors)))
        values = [t if t.is_contiguous() and not t.is_neg() and not t.is_conj() else dense(t) for t in tensors]
        values += self._constants
        for step in self._steps:
            values += step(values)
        return [values[k] if not copied else values[k].clone() for k, copied in self._results]

    def _one_program(self) -> Callable[[Sequence[torch.Tensor]], Tensors] | None:
        """The function of a plan that is one program of real numbers, whose results are the plan's in their order."""
        types: Any = self.jaxpr.in_avals
        if any(a.dtype.kind == "c" for a in types):
            return None
        first = len(self.jaxpr.in_avals) + len(self._constants)
        in_order = [k - first for k, _ in self._results] == list(range(len(self._results)))
        if len(self._steps) != 1 or not in_order or any(copied for _, copied in self._results):
            return None
        (step,), constants = self._steps, self._constants

        def run(tensors: Sequence[torch.Tensor]) -> Tensors:
            values = [t if t.is_contiguous() and not t.is_neg() else dense(t) for t in tensors]
            return step(values + constants if constants else values)

        return run

    def _link(self, plan: Plan) -> None:
        """Gives every value of the plan its place in the list that a call fills."""
        inputs = list(plan.jaxpr.invars)
        constants = [(v, _constant(c, v.aval)) for v, c in zip(plan.jaxpr.constvars, plan.consts)]
        literals = [(k, _constant(literal(v), v.aval)) for k, v in enumerate(plan.jaxpr.outvars) if isinstance(v, jex.Literal)]
        places: dict[Any, int] = {v: k for k, v in enumerate([*inputs, *(v for v, _ in constants + literals)])}
        self._constants = [c for _, c in constants + literals]
        seen, filled = set(places.values()), len(places)
        for segment in plan.segments:
            reads = [places[v] for v in segment.reads]
            self._steps.append(self._program(segment, reads) if segment.is_ours else _xla_step(segment, reads))
            places |= {v: filled + k for k, v in enumerate(segment.makes)}
            filled += len(segment.makes)
        for k, v in enumerate(plan.jaxpr.outvars):
            place = places[k if isinstance(v, jex.Literal) else v]
            self._results.append((place, place in seen))  # inputs, constants and repeats are copied
            seen.add(place)

    def _program(self, segment: Segment, reads: list[int]) -> Callable[[Tensors], Tensors]:
        compiled = self.build.compiled[segment.body.name]  # type: ignore[union-attr]
        call = direct.entry(compiled, str(OPENMP) if OPENMP.exists() else None)
        types = [(tuple(b.type.shape), _strides(b.type.shape), torch_dtype(b.type.dtype)) for b in compiled.program.outputs]
        addresses = struct.Struct(f"{len(reads) + len(types)}P").pack
        large = [(k, b.type.nbytes) for k, b in enumerate(compiled.program.outputs) if b.type.nbytes >= direct.HUGE_BYTES]
        empty = torch.empty_strided  # 0.6 us less than torch.empty
        # OpenMP's number of threads belongs to the calling thread; in threads that are new to Torch, asking it sets theirs.
        set_threads = torch.get_num_threads

        def step(values: Tensors) -> Tensors:
            set_threads()
            made = [empty(shape, strides, dtype=dtype) for shape, strides, dtype in types]
            for k, nbytes in large:
                direct.ask_for_huge_pages(made[k].data_ptr(), nbytes)
            call(addresses(*[values[k].data_ptr() for k in reads], *[t.data_ptr() for t in made]))
            return made

        return step


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a tensor whose elements lie one after the other, in elements."""
    return tuple(math.prod(max(n, 1) for n in shape[k + 1 :]) for k in range(len(shape)))


def dense(t: torch.Tensor) -> torch.Tensor:
    """The tensor with its elements one after the other, nothing left to conjugate or negate."""
    t = t.resolve_conj() if t.is_conj() else t
    return (t.resolve_neg() if t.is_neg() else t).contiguous()


def to_jax(t: torch.Tensor) -> jax.Array:
    """The same memory."""
    return jax.dlpack.from_dlpack(t.detach())


def to_torch(a: jax.Array) -> torch.Tensor:
    """The same memory."""
    return torch.from_dlpack(a)


def _by_jax(jaxpr: jex.ClosedJaxpr, name: str, options: CompileOptions) -> Callable[[Tensors], Tensors]:
    """The jaxpr as a function of JAX's arrays that is compiled as others are."""

    def whole(*arrays: jax.Array) -> list[jax.Array]:
        return jex.jaxpr_as_fun(jaxpr)(*arrays)

    whole.__name__ = name
    return _on_arrays(JitFunction(whole, options, {}))


def _xla_step(segment: Segment, reads: list[int]) -> Callable[[Tensors], Tensors]:
    call = _on_arrays(jax.jit(jex.jaxpr_as_fun(segment.body)))
    return lambda values: call([values[k] for k in reads])


def _on_arrays(call: Callable) -> Callable[[Tensors], Tensors]:
    """A function of JAX's arrays on tensors."""

    def run(tensors: Tensors) -> Tensors:
        with jax.enable_x64(True):
            return [to_torch(a) for a in call(*map(to_jax, tensors))]

    return run


def _constant(value: Any, aval: Any) -> torch.Tensor:
    array = np.array(np.broadcast_to(np.asarray(value, aval.dtype), aval.shape), order="C")
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
