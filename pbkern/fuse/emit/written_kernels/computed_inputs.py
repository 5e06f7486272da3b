"""Producers of a kernel's operand are computed on the blocks that its body reads.

    y = x * s;  kernel(y)        body: v = y_ref[...]            ->   kernel'(x, s)    body: v = x_ref[...] * s_ref[...]

The author's blocks say which elements of y a program reads, access rules which elements of x and s these follow from. What
a block holds outside of its array is as unspecified as before: every result that is stored comes from the same elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import jax
from jax.extend import core as jex

from pbkern.core.errors import UnsupportedOp
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.kernel import input_fusion, with_input_fusion
from pbkern.dsl.primitives.ref_access import GatheredIndex
from pbkern.fuse.access.blocks import BlockRequests, Unfusable, request, run_steps
from pbkern.fuse.access.rules import NeedsWhole

from .block_places import BlockPlaces, full_block, ref_block
from .calls import KernelCall, Operands, Refused, assembled, check_reports
from .stand_ins import StandIn, accesses, ref_of, trace_with


@dataclass(frozen=True)
class ComputedInput:
    """An operand of a call, computed by equations.

    Attributes:
      number: which operand.
      var: the value that it is.
      places: its blocks.
      requests: the equations at these blocks.
      times: how often a program reads a block, by its elements.
    """

    number: int
    var: jex.Var
    places: BlockPlaces
    requests: BlockRequests
    times: float


def check_operand(call: KernelCall, number: int) -> None:
    """Raises Refused for an operand that cannot be computed in the kernel, whatever makes it."""
    kernel = call.kernel
    if number >= len(kernel.inputs):
        raise Refused("its last stage reads it")
    check_reports(kernel)
    if not input_fusion(kernel)[number]:
        raise Refused("allow_input_fusion forbids it")
    if number < kernel.num_scalar_prefetch:
        raise Refused("it is prefetched: index maps may read it")
    if number in {operand for _, operand in kernel.dynamic_grid}:
        raise Refused("it is the size of a grid dimension")
    if number in dict(kernel.aliases):
        raise Refused("it shares its array with a result")
    for body_access in accesses(kernel.body.jaxpr, ref_of(kernel, number)):
        if body_access.access.kind != "load":
            raise Refused("the body stores to it")
        if any(isinstance(index, GatheredIndex) for index in body_access.access.indices):
            raise Refused("the body reads it at places that are values")


def computed_input(call: KernelCall, number: int, eqns: Sequence) -> ComputedInput:
    """An operand as `eqns` compute it. Raises Refused."""
    kernel, var = call.kernel, call.operands[number]
    places = BlockPlaces.of(kernel, kernel.inputs[number])
    block = max(math.prod(places.mapping.ref_shape), 1)
    loads = accesses(kernel.body.jaxpr, ref_of(kernel, number))
    times = sum(load.turns * _elements(load.access.indices, load.shape) for load in loads) / block
    try:
        requests = request(eqns, [(var, places.access)])
    except (NeedsWhole, Unfusable, UnsupportedOp, NotImplementedError) as e:
        raise Refused(str(e).splitlines()[0]) from None
    return ComputedInput(number, var, places, requests, times)


def _elements(indices: Iterable, shape: Sequence[int]) -> int:
    return math.prod(getattr(index, "size", 1) for index in indices)


def with_computed_inputs(call: KernelCall, computed: Sequence[ComputedInput]) -> KernelCall:
    """The call of a kernel that computes these operands."""
    kernel, by_number = call.kernel, {one.number: one for one in computed}
    aliased, allowed = dict(kernel.aliases), input_fusion(kernel)
    operands, flags, moved = Operands(), [], {}
    for number, mapping in enumerate(kernel.inputs):
        if number not in by_number:
            # Operands that are given twice stay two: each has a Ref.
            moved[number] = operands.add(call.operands[number], mapping, is_shared=True)
            flags.append(allowed[number])
    blocks_of: dict[int, list[int]] = {}
    reusable = {n for old, n in moved.items() if old not in aliased}
    for one in computed:
        blocks_of[one.number] = []
        for var, access in one.requests.inputs:
            mapping = one.places.mapping_of(var, access, f"input {len(operands.atoms)}")
            number = operands.add(var, mapping)
            if number < len(moved) and number not in reusable:
                number = operands.add(var, mapping, is_shared=True)
            blocks_of[one.number].append(number)
    mappings = (*operands.mappings, *kernel.outputs)
    flags += [True] * (len(operands.atoms) - len(flags))

    def run(*refs):
        def stand_in(one: ComputedInput) -> StandIn:
            numbers = blocks_of[one.number]

            def contents() -> jax.Array:
                blocks = {
                    block: full_block(refs[n][...], operands.mappings[n])
                    for block, n in zip(one.requests.inputs, numbers)
                }
                get = run_steps(one.requests, blocks, one.places.context(refs))
                return ref_block(get(one.var, one.places.access), one.places.mapping)

            shape = one.places.mapping.ref_shape
            inside = lambda axis: one.places.inside(refs, mappings, axis)
            return StandIn(shape, contents, inside=inside)

        inputs = [
            stand_in(by_number[n]) if n in by_number else refs[moved[n]]
            for n in range(len(kernel.inputs))
        ]
        trace_with(kernel, [*inputs, *refs[len(operands.atoms) :]])

    changed = assembled(
        kernel,
        operands.mappings,
        kernel.outputs,
        kernel.scratch,
        run,
        aliases=tuple((moved[operand], result) for operand, result in kernel.aliases),
        dynamic_grid=tuple((axis, moved[operand]) for axis, operand in kernel.dynamic_grid),
        compiler_params=with_input_fusion(kernel.compiler_params, flags),
    )
    further = call.operands[len(kernel.inputs) :]
    return KernelCall(changed, (*operands.atoms, *further), call.results, call.eqn)
