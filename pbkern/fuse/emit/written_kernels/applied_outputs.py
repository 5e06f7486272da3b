"""Consumers of a kernel's result are applied to its blocks before they are stored.

    relu(kernel(x))              body: o_ref[...] = v            ->   body: o_ref[...] = max(v, 0)

Where every store is to a whole block, the value that is stored is replaced. Elsewhere a block is completed first, in the
memory of a result or in scratch, and the last program that visits it applies the consumers.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern.core.errors import UnsupportedOp
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import atoms
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.dsl.conditional_results import unsure_results
from pbkern.dsl.interpret import parallel_dims
from pbkern.dsl.kernel import BlockMapping, Scratch, input_fusion, with_input_fusion
from pbkern.dsl.primitives import grid
from pbkern.fuse.access.blocks import BlockRequests, Unfusable, request, run_steps
from pbkern.fuse.access.rules import Access, NeedsWhole, is_whole, pull, whole
from pbkern.fuse.cost.kinds import SINGLE_PASS

from .block_places import BlockPlaces, full_block, ref_block
from .calls import KernelCall, Operands, Refused, assembled, check_reports
from .stand_ins import StandIn, accesses, ref_of, trace_with


def access_of_result(eqn, known: Mapping[jex.Var, Access]) -> Access | None:
    """The block of an equation's result that can be computed from `known` blocks of its operands; None where there is none.

    This inverts access rules, for operations that compute each block of their result from one block of each operand.
    """
    (var,) = eqn.outvars if len(eqn.outvars) == 1 else (None,)
    operands: list = [atom for atom in atoms(eqn) if atom in known]
    if var is None or not operands:
        return None
    name, params, shape = eqn.primitive.name, eqn.params, array_aval(var).shape
    if name in ELEMENTWISE:
        largest = max(operands, key=lambda atom: math.prod(atom.aval.shape))
        if len(largest.aval.shape) != len(shape):
            return None
        return tuple(
            span if extent == size else whole(size)
            for span, extent, size in zip(known[largest], largest.aval.shape, shape)
        )
    access, extents = known[operands[0]], operands[0].aval.shape
    if name in ("reshape", "squeeze"):
        return _reshaped(access, extents, array_aval(var))
    if name == "transpose":
        return tuple(access[axis] for axis in params["permutation"])
    if name in SINGLE_PASS and "axes" in params:
        if not all(is_whole(access[axis], extents[axis]) for axis in params["axes"]):
            return None
        return tuple(span for axis, span in enumerate(access) if axis not in params["axes"])
    if name == "broadcast_in_dim":
        source = dict(zip(params["broadcast_dimensions"], zip(access, extents)))
        return tuple(
            source[axis][0] if axis in source and source[axis][1] == size else whole(size)
            for axis, size in enumerate(shape)
        )
    return None


def _reshaped(access: Access, shape: tuple[int, ...], aval) -> Access | None:
    """The block of a reshaped array: the one that the inverse reshape would read for `access`."""
    if aval.shape == shape:
        return access
    (back,) = jax.make_jaxpr(lambda x: lax.reshape(x, shape))(aval).jaxpr.eqns
    try:
        pulled = pull(back, access)
    except NeedsWhole:
        return None
    return pulled.inputs[0] if pulled.out in (None, access) else None


def check_result(call: KernelCall, number: int) -> None:
    """Raises Refused for a result whose blocks cannot be changed before they are stored."""
    kernel = call.kernel
    if kernel.finish is not None:
        raise Refused("its last stage reads it")
    check_reports(kernel)
    mapping = kernel.outputs[number]
    if number in {result for _, result in kernel.aliases}:
        raise Refused("it shares its array with an operand")
    if kernel.dynamic_grid:
        raise Refused("its grid has a size that an operand gives")
    if number in unsure_results(kernel):
        raise Refused("values decide what is stored, and the rest is zero")
    if None in mapping.starts:
        raise Refused("its index map is not affine")
    again = revisiting(call, number)
    moving = (axis for axis, size in enumerate(kernel.grid) if size > 1 and axis not in again)
    if not all(map(mapping.moves_apart, moving)):
        raise Refused("blocks of different programs overlap")
    if set(again) & set(parallel_dims(kernel)):
        raise Refused("programs in parallel store to one block")


def revisiting(call: KernelCall, number: int) -> tuple[int, ...]:
    """Grid dimensions along which programs visit the same block of a result."""
    starts = [start for start in call.kernel.outputs[number].starts if start is not None]
    moving = frozenset().union(*(start.symbols for start in starts))
    return tuple(
        axis for axis, size in enumerate(call.kernel.grid) if size != 1 and axis not in moving
    )


@dataclass(frozen=True)
class AppliedOutput:
    """Equations that are applied to a result.

    Attributes:
      number: its place among the kernel's results.
      var: its value in the function.
      places: its blocks.
      stored: values to store in place of it, with their blocks; `var` among them where others read it.
      requests: what the equations read and compute for these blocks.
    """

    number: int
    var: jex.Var
    places: BlockPlaces
    stored: tuple[tuple[jex.Var, Access], ...]
    requests: BlockRequests

    @property
    def extras(self) -> list[tuple[jex.Var, Access]]:
        """Blocks of other arrays that the equations read."""
        return [(var, access) for var, access in self.requests.inputs if var is not self.var]


def applied_output(
    call: KernelCall,
    number: int,
    eqns: Sequence,
    stored: Sequence[jex.Var],
    known: Mapping[jex.Var, Access],
) -> AppliedOutput:
    """The equations `eqns`, requested at the blocks of a kernel's result.

    Args:
      call: the kernel's call.
      number: of the result.
      eqns: equations that read the result, in program order.
      stored: values that the kernel stores with them.
      known: block of each value that follows from the result's (`access_of_result`).

    Raises:
      Refused: the equations need more of the result than the block of one program.
    """
    var, places = call.results[number], BlockPlaces.of(call.kernel, call.kernel.outputs[number])
    wanted = tuple((value, known[value]) for value in stored)
    try:
        requests = request(eqns, [pair for pair in wanted if pair[0] is not var])
    except (NeedsWhole, Unfusable, UnsupportedOp, NotImplementedError) as e:
        raise Refused(str(e).splitlines()[0]) from None
    if list(requests.hulls.get(var, ())) != [places.access]:
        raise Refused("it is not read block by block")
    return AppliedOutput(number, var, places, wanted, requests)


def with_applied_output(call: KernelCall, applied: AppliedOutput) -> KernelCall:
    """The call of a kernel that applies the equations before it stores. Raises Refused."""
    kernel, number, places = call.kernel, applied.number, applied.places
    operands, extras = _operands(call, applied)
    replacing = [
        places.mapping if var is applied.var else places.mapping_of(var, access, f"output {n}")
        for n, (var, access) in enumerate(applied.stored, number)
    ]
    outputs = (*kernel.outputs[:number], *replacing, *kernel.outputs[number + 1 :])
    results = (
        *call.results[:number],
        *(var for var, _ in applied.stored),
        *call.results[number + 1 :],
    )
    holder = _holder(call, applied, replacing)
    scratch = kernel.scratch
    if holder == IN_SCRATCH:
        block = places.mapping.ref_shape
        scratch = (*scratch, Scratch(block, places.mapping.array.dtype, scoped=True))
    num_extras, num_further = len(operands.atoms) - len(kernel.inputs), len(replacing) - 1
    changed = assembled(
        kernel,
        operands.mappings,
        outputs,
        scratch,
        _AppliedBody(call, applied, operands.mappings, extras, outputs, holder),
        aliases=tuple(
            (operand, result + num_further * (result > number))
            for operand, result in kernel.aliases
        ),
        compiler_params=with_input_fusion(
            kernel.compiler_params, [*input_fusion(kernel), *[True] * num_extras]
        ),
    )
    return KernelCall(changed, tuple(operands.atoms), results, call.eqn)


def _operands(
    call: KernelCall, applied: AppliedOutput
) -> tuple[Operands, dict[tuple[jex.Var, Access], int]]:
    """(operands of the call and what the equations read beside, each block that they read -> number of its operand)."""
    operands, aliased = Operands(), dict(call.kernel.aliases)
    for atom, mapping in zip(call.operands, call.kernel.inputs):
        operands.add(atom, mapping, is_shared=True)
    extras = {}
    for var, access in applied.extras:
        mapping = applied.places.mapping_of(var, access, f"input {len(operands.atoms)}")
        position = operands.add(var, mapping)
        if position in aliased:
            position = operands.add(var, mapping, is_shared=True)
        extras[var, access] = position
    return operands, extras


# Holders of a block until it is complete (`_holder`), beside the new results, which have numbers.
AT_STORES = "applied where the body stores"
IN_SCRATCH = "in scratch"


@dataclass(frozen=True, eq=False)
class _AppliedBody:
    """The body of a kernel with equations applied to one of its results, as a function of Refs.

    Attributes:
      call: the call without the equations.
      applied: the equations.
      inputs, outputs: blocks of the operands and results with them; the results that replace number
        `applied.number` are as many as `applied.stored`.
      extras: each block that the equations read -> number of its operand.
      holder: as `_holder` gives it.
    """

    call: KernelCall
    applied: AppliedOutput
    inputs: Sequence[BlockMapping]
    extras: Mapping[tuple[jex.Var, Access], int]
    outputs: Sequence[BlockMapping]
    holder: str | int

    def __call__(self, *refs) -> None:
        kernel, number = self.call.kernel, self.applied.number
        places = self.applied.places
        num_inputs, end = len(self.inputs), number + len(self.applied.stored)
        given, rest = refs[: len(kernel.inputs)], refs[num_inputs:]
        before, targets, after = rest[:number], rest[number:end], list(rest[end:])
        if self.holder == AT_STORES:
            stand_in = StandIn(
                places.mapping.ref_shape,
                stored=lambda value: self._apply(value, refs, targets),
                inside=lambda axis: places.inside(refs, (*self.inputs, *self.outputs), axis),
            )
            trace_with(kernel, [*given, *before, stand_in, *after])
            return
        memory = targets[self.holder] if isinstance(self.holder, int) else after.pop()
        trace_with(kernel, [*given, *before, memory, *after])
        is_last = (
            grid.program_id(dim) == grid.num_programs(dim) - 1
            for dim in revisiting(self.call, number)
        )
        complete = functools.reduce(operator.and_, is_last, np.bool_(True))
        grid.when(complete)(lambda: self._apply(memory[...], refs, targets))

    def _apply(self, value, refs: Sequence, targets: Sequence) -> None:
        """Computes the equations on one block of the result, and stores what they give."""
        applied, number = self.applied, self.applied.number
        blocks = {
            block: full_block(refs[n][...], self.inputs[n]) for block, n in self.extras.items()
        }
        blocks[applied.var, applied.places.access] = full_block(value, applied.places.mapping)
        get = run_steps(applied.requests, blocks, applied.places.context(refs))
        computed = [
            value if var is applied.var else ref_block(get(var, access), mapping)
            for (var, access), mapping in zip(applied.stored, self.outputs[number:])
        ]
        for target, block in zip(targets, computed):
            target[...] = block


def _holder(
    call: KernelCall, applied: AppliedOutput, replacing: Sequence[BlockMapping]
) -> str | int:
    """The holder of a block until the equations are applied to it.

    AT_STORES: each store has all of it. Otherwise IN_SCRATCH, or the number of a result among `replacing` whose blocks have
    its type. Raises Refused.
    """
    kernel, number, places = call.kernel, applied.number, applied.places
    ref = ref_of(kernel, len(kernel.inputs) + number)
    body_accesses, again = list(accesses(kernel.body.jaxpr, ref)), revisiting(call, number)
    are_whole = all(access.is_whole_store for access in body_accesses)
    if are_whole and (not again or all(access.guarded for access in body_accesses)):
        return AT_STORES
    for position, (_, access) in enumerate(applied.stored):
        if access == places.access and replacing[position].array == places.mapping.array:
            return position
    if again:
        raise Refused("several programs complete a block, and no result of its type can hold it")
    return IN_SCRATCH
