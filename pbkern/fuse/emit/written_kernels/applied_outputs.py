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
from pbkern.core.jaxprs import atoms
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
    """The block of an equation's result that follows from `known` blocks of operands; None where none does.

    The inverse of access rules, for operations whose blocks correspond.
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
    """The block of an array in another shape: what the reshape back would read."""
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
      number: which result.
      var: its variable.
      places: its blocks.
      stored: values to store, with their blocks; `var` among them where others read it.
      requests: the equations at these blocks.
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
    """Raises Refused where the equations need more of the result than the block of one program."""
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
    """The call of a kernel that applies the equations before it stores."""
    kernel, number, places = call.kernel, applied.number, applied.places
    operands, aliased = Operands(), dict(kernel.aliases)
    for atom, mapping in zip(call.operands, kernel.inputs):
        operands.add(atom, mapping, is_shared=True)
    extras = {}
    for var, access in applied.extras:
        mapping = places.mapping_of(var, access, f"input {len(operands.atoms)}")
        position = operands.add(var, mapping)
        if position in aliased:
            position = operands.add(var, mapping, is_shared=True)
        extras[var, access] = position
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
    at_stores, buffer = _where(call, applied, replacing)
    scratch = kernel.scratch
    if not at_stores and buffer is None:
        block = places.mapping.ref_shape
        scratch = (*scratch, Scratch(block, places.mapping.array.dtype, scoped=True))
    num_inputs, last = len(operands.atoms), len(replacing)

    def run(*refs):
        given, rest = refs[:num_inputs], refs[num_inputs:]
        targets = rest[number : number + last]

        def apply(value) -> None:
            blocks = {
                block: full_block(refs[n][...], operands.mappings[n]) for block, n in extras.items()
            }
            blocks[applied.var, places.access] = full_block(value, places.mapping)
            get = run_steps(applied.requests, blocks, places.context(refs))
            computed = [
                value if var is applied.var else ref_block(get(var, access), mapping)
                for (var, access), mapping in zip(applied.stored, replacing)
            ]
            for target, block in zip(targets, computed):
                target[...] = block

        before, after = rest[:number], rest[number + last :]
        if at_stores:
            inside = lambda axis: places.inside(refs, (*operands.mappings, *outputs), axis)
            stand_in = StandIn(places.mapping.ref_shape, stored=apply, inside=inside)
            trace_with(kernel, [*given[: len(kernel.inputs)], *before, stand_in, *after])
            return
        memory = rest[-1] if buffer is None else targets[buffer]
        after = after[: len(after) - (buffer is None)]
        trace_with(kernel, [*given[: len(kernel.inputs)], *before, memory, *after])
        dims = revisiting(call, number)
        is_last = (grid.program_id(dim) == grid.num_programs(dim) - 1 for dim in dims)
        complete = functools.reduce(operator.and_, is_last, np.bool_(True))
        grid.when(complete)(lambda: apply(memory[...]))

    changed = assembled(
        kernel,
        operands.mappings,
        outputs,
        scratch,
        run,
        aliases=tuple(
            (operand, result + (last - 1) * (result > number)) for operand, result in kernel.aliases
        ),
        compiler_params=with_input_fusion(
            kernel.compiler_params,
            [*input_fusion(kernel), *[True] * (num_inputs - len(kernel.inputs))],
        ),
    )
    return KernelCall(changed, tuple(operands.atoms), results, call.eqn)


def _where(
    call: KernelCall, applied: AppliedOutput, replacing: Sequence[BlockMapping]
) -> tuple[bool, int | None]:
    """(whether the equations are applied where the body stores, which new result holds a block until it is complete).

    None for the second: scratch. Raises Refused.
    """
    kernel, number, places = call.kernel, applied.number, applied.places
    ref = ref_of(kernel, len(kernel.inputs) + number)
    body_accesses, again = list(accesses(kernel.body.jaxpr, ref)), revisiting(call, number)
    if all(one.is_whole_store for one in body_accesses) and (
        not again or all(one.guarded for one in body_accesses)
    ):
        return True, None
    for position, (_, access) in enumerate(applied.stored):
        if access == places.access and replacing[position].array == places.mapping.array:
            return False, position
    if again:
        raise Refused("several programs complete a block, and no result of its type can hold it")
    return False, None
