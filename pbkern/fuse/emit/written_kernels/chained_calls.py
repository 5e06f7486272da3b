"""Kernels whose programs read just the block that the same program of another kernel wrote become one kernel.

second(first(x)),  both grid=(16,), blocks lambda i: (i, 0)     ->   body: the first's, then the second's on its block
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core as jex

from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.conditional_results import unsure_results
from pbkern.dsl.kernel import BlockMapping, Kernel, Scratch, input_fusion, with_input_fusion
from pbkern.dsl.transformations.blocks import are_apart

from .block_places import BlockPlaces
from .calls import KernelCall, Operands, Refused, assembled, check_reports, same_blocks
from .computed_inputs import check_operand
from .stand_ins import StandIn, accesses, ref_of, trace_with

# Characters of the name of a kernel that is joined of many: files are named after it.
JOINED_NAME = 80


def links(first: KernelCall, second: KernelCall) -> list[tuple[int, int]]:
    """(number of the result, number of the operand) of every value that goes from one call to the other."""
    numbers = {var: n for n, var in enumerate(first.results)}
    return [
        (numbers[atom], n)
        for n, atom in enumerate(second.operands)
        if not isinstance(atom, jex.Literal) and atom in numbers
    ]


def check_chain(first: KernelCall, second: KernelCall) -> None:
    """Raises Refused where two calls, one of which reads the other's results, cannot be one kernel."""
    one, two = first.kernel, second.kernel
    for kernel in (one, two):
        check_reports(kernel)
        if kernel.finish is not None:
            raise Refused(f"kernel `{kernel.name}` has a last stage")
        if kernel.num_scalar_prefetch or kernel.dynamic_grid:
            raise Refused(f"the grid of kernel `{kernel.name}` depends on operands")
        if kernel.aliases:
            raise Refused(f"kernel `{kernel.name}` shares arrays of operands with results")
    if one.grid != two.grid:
        raise Refused(f"their grids are {one.grid} and {two.grid}")
    if _params(one) != _params(two):
        raise Refused("their compiler_params differ")
    if _carries(one) != _carries(two):
        raise Refused(
            "programs of one of them pass values on in scratch, those of the other do not"
        )
    for result, operand in links(first, second):
        check_operand(second, operand)
        if result in unsure_results(one):
            raise Refused("values decide what is stored, and the rest is zero")
        output = one.outputs[result]
        if not same_blocks(output, two.inputs[operand]) or not are_apart(one, output):
            raise Refused("a program reads what other programs write")


def _params(kernel: Kernel) -> dict:
    """compiler_params without allow_input_fusion, which is joined operand by operand."""
    return with_input_fusion(kernel.compiler_params, ())


def _carries(kernel: Kernel) -> bool:
    """Whether programs pass values on in scratch."""
    return any(not buf.scoped for buf in kernel.scratch)


def chained(first: KernelCall, second: KernelCall, wanted: Sequence) -> KernelCall:
    """One call in place of two.

    Args:
      first: the call whose results the other one reads.
      second: the other one.
      wanted: results of the first that others read as well: results of the new call, too.
    """
    one, two = first.kernel, second.kernel
    operands = Operands()
    refs_of_first = [operands.add(*pair) for pair in zip(first.operands, one.inputs)]
    passed = {operand: result for result, operand in links(first, second)}
    refs_of_second = {
        n: operands.add(atom, mapping)
        for n, (atom, mapping) in enumerate(zip(second.operands, two.inputs))
        if n not in passed
    }
    stored = [n for n, var in enumerate(first.results) if var in wanted]
    unstored = [n for n in range(len(one.outputs)) if n not in stored]
    buffered = [n for n in unstored if not _is_value(one, n)]
    buffers = [
        Scratch(one.outputs[n].ref_shape, one.outputs[n].array.dtype, scoped=True) for n in buffered
    ]
    outputs = [*(one.outputs[n] for n in stored), *two.outputs]
    body = _ChainedBody(
        one,
        two,
        tuple(operands.mappings),
        tuple(outputs),
        refs_of_first,
        refs_of_second,
        passed,
        stored,
        buffered,
    )
    allows_fusion = dict(zip(refs_of_first, input_fusion(one)))
    for n, ref in refs_of_second.items():
        allows_fusion[ref] = allows_fusion.get(ref, True) and input_fusion(two)[n]
    changed = assembled(
        two,
        operands.mappings,
        outputs,
        (*one.scratch, *two.scratch, *buffers),
        body,
        name=one.name if one.name.endswith(two.name) else f"{one.name}_{two.name}"[:JOINED_NAME],
        origin=" and ".join(dict.fromkeys((one.origin, two.origin))),
        compiler_params=with_input_fusion(
            two.compiler_params, [allows_fusion[n] for n in range(len(operands.atoms))]
        ),
    )
    results = (*(first.results[n] for n in stored), *second.results)
    return KernelCall(changed, tuple(operands.atoms), results, second.eqn)


@dataclass(frozen=True, eq=False)
class _ChainedBody:
    """The bodies of two kernels one after the other, as a function of Refs.

    A result of the first kernel that is neither stored nor buffered is a value: the second body reads the traced array.

    Attributes:
      first, second: the kernels.
      inputs, outputs: blocks of the joined kernel.
      refs_of_first: per operand of the first kernel, its number in the joined one.
      refs_of_second: operand of the second kernel -> its number in the joined one; without `passed`.
      passed: operand of the second kernel -> the result of the first that it is.
      stored: results of the first that are results of the joined kernel, the first of these.
      buffered: results of the first that scratch holds, the last of the joined kernel's.
    """

    first: Kernel
    second: Kernel
    inputs: tuple[BlockMapping, ...]
    outputs: tuple[BlockMapping, ...]
    refs_of_first: Sequence[int]
    refs_of_second: Mapping[int, int]
    passed: Mapping[int, int]
    stored: Sequence[int]
    buffered: Sequence[int]

    def __call__(self, *refs) -> None:
        end = len(self.inputs) + len(self.outputs)
        results, memory = refs[len(self.inputs) : end], refs[end:]
        num_first, num_second = len(self.first.scratch), len(self.second.scratch)
        scratch_of_first = memory[:num_first]
        scratch_of_second = memory[num_first : num_first + num_second]
        buffers = memory[num_first + num_second :]
        targets = [
            self._target(result, results, buffers, refs)
            for result in range(len(self.first.outputs))
        ]
        inputs_of_first = [refs[n] for n in self.refs_of_first]
        trace_with(self.first, [*inputs_of_first, *targets, *scratch_of_first])
        inputs_of_second = [
            self._source(operand, targets, refs) for operand in range(len(self.second.inputs))
        ]
        results_of_second = results[len(self.stored) :]
        trace_with(self.second, [*inputs_of_second, *results_of_second, *scratch_of_second])

    def _target(self, result: int, results: Sequence, buffers: Sequence, refs: Sequence) -> Any:
        """The Ref, or its stand-in, to which the first body stores a result."""
        if result in self.stored:
            return results[self.stored.index(result)]
        if result in self.buffered:
            return buffers[self.buffered.index(result)]
        values: list = []  # the one that the body stores
        shape = self.first.outputs[result].ref_shape
        return StandIn(shape, lambda: values[0], values.append, self._inside(result, refs))

    def _source(self, operand: int, targets: Sequence, refs: Sequence) -> Any:
        """The Ref, or its stand-in, from which the second body loads an operand."""
        if operand not in self.passed:
            return refs[self.refs_of_second[operand]]
        result = self.passed[operand]
        target = targets[result]
        if result not in self.buffered:  # a value, or a result, which has the same edges
            return target
        return StandIn(target.shape, inside=self._inside(result, refs), ref=target)

    def _inside(self, result: int, refs: Sequence) -> Callable[[int], jax.Array]:
        """Gives in_bounds along a dimension of a block of the first kernel's result."""
        places = BlockPlaces.of(self.first, self.first.outputs[result])
        return lambda axis: places.inside(refs, (*self.inputs, *self.outputs), axis)


def _is_value(kernel: Kernel, result: int) -> bool:
    """Whether a body stores a result once, as a whole and in no branch, and never loads it."""
    ref = ref_of(kernel, len(kernel.inputs) + result)
    stores = list(accesses(kernel.body.jaxpr, ref))
    return len(stores) == 1 and stores[0].is_whole_store and stores[0].depth == 0
