"""Producers of a kernel's operand are computed on the blocks that its body reads.

    y = x * s;  kernel(y)        body: v = y_ref[...]            ->   kernel'(x, s)    body: v = x_ref[...] * s_ref[...]

The author's blocks say which elements of y a program reads, access rules which elements of x and s these follow from. What
a block holds outside of its array is as unspecified as before: every result that is stored comes from the same elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import jax
from jax.extend import core as jex

from pbkern.core.errors import UnsupportedOp
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.kernel import BlockMapping, Kernel, input_fusion, with_input_fusion
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
      number: its place among the kernel's operands.
      var: its value in the function.
      places: its blocks.
      requests: what the equations read and compute for these blocks.
      times: elements that a program loads of a block, over the block's elements.
    """

    number: int
    var: jex.Var
    places: BlockPlaces
    requests: BlockRequests
    times: float


def check_operand(call: KernelCall, number: int) -> None:
    """Raises Refused for an operand that has to be an array, so that no equations can take its place."""
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
    """The operand with the equations that compute it, requested at its blocks. Raises Refused."""
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
    """Elements that one access loads."""
    return math.prod(getattr(index, "size", 1) for index in indices)


def with_computed_inputs(call: KernelCall, computed: Sequence[ComputedInput]) -> KernelCall:
    """The call of a kernel that computes these operands."""
    kernel, by_number = call.kernel, {operand.number: operand for operand in computed}
    allows_fusion = input_fusion(kernel)
    operands, flags = Operands(), []
    new_numbers: dict[int, int] = {}  # of the operands that stay
    for number, mapping in enumerate(kernel.inputs):
        if number not in by_number:
            # Operands that are given twice stay two: each has a Ref.
            new_numbers[number] = operands.add(call.operands[number], mapping, is_shared=True)
            flags.append(allows_fusion[number])
    sources = _add_sources(operands, computed, new_numbers, dict(kernel.aliases))
    flags += [True] * (len(operands.atoms) - len(flags))
    changed = assembled(
        kernel,
        operands.mappings,
        kernel.outputs,
        kernel.scratch,
        _ComputedBody(kernel, operands.mappings, new_numbers, by_number, sources),
        aliases=tuple((new_numbers[operand], result) for operand, result in kernel.aliases),
        dynamic_grid=tuple((axis, new_numbers[operand]) for axis, operand in kernel.dynamic_grid),
        compiler_params=with_input_fusion(kernel.compiler_params, flags),
    )
    further = call.operands[len(kernel.inputs) :]
    return KernelCall(changed, (*operands.atoms, *further), call.results, call.eqn)


def _add_sources(
    operands: Operands,
    computed: Sequence[ComputedInput],
    new_numbers: Mapping[int, int],
    aliased: Mapping[int, int],
) -> dict[int, list[int]]:
    """Adds what the equations read to the operands that stay.

    Operands that share their array with a result are not read for it: the body may have written to them.

    Returns:
      Number of a computed operand -> numbers of the operands that its equations read.
    """
    reusable = {new for old, new in new_numbers.items() if old not in aliased}
    sources: dict[int, list[int]] = {}
    for operand in computed:
        sources[operand.number] = []
        for var, access in operand.requests.inputs:
            mapping = operand.places.mapping_of(var, access, f"input {len(operands.atoms)}")
            number = operands.add(var, mapping)
            if number < len(new_numbers) and number not in reusable:
                number = operands.add(var, mapping, is_shared=True)
            sources[operand.number].append(number)
    return sources


@dataclass(frozen=True, eq=False)
class _ComputedBody:
    """The body of a kernel with some operands computed where it loads them, as a function of Refs.

    Attributes:
      kernel: the kernel without the equations.
      inputs: blocks of the operands with them.
      new_numbers: operand of `kernel` -> its number among these.
      computed: operand of `kernel` -> the equations that compute it.
      sources: operand of `kernel` -> numbers of the operands that these read.
    """

    kernel: Kernel
    inputs: Sequence[BlockMapping]
    new_numbers: Mapping[int, int]
    computed: Mapping[int, ComputedInput]
    sources: Mapping[int, Sequence[int]]

    def __call__(self, *refs) -> None:
        inputs = [
            self._stand_in(self.computed[n], refs)
            if n in self.computed
            else refs[self.new_numbers[n]]
            for n in range(len(self.kernel.inputs))
        ]
        trace_with(self.kernel, [*inputs, *refs[len(self.inputs) :]])

    def _stand_in(self, operand: ComputedInput, refs: Sequence) -> StandIn:
        requests, places = operand.requests, operand.places

        def contents() -> jax.Array:
            blocks = {
                block: full_block(refs[n][...], self.inputs[n])
                for block, n in zip(requests.inputs, self.sources[operand.number])
            }
            get = run_steps(requests, blocks, places.context(refs))
            return ref_block(get(operand.var, places.access), places.mapping)

        mappings = (*self.inputs, *self.kernel.outputs)
        inside = lambda axis: places.inside(refs, mappings, axis)
        return StandIn(places.mapping.ref_shape, contents, inside=inside)
