"""Kernels whose programs read just the block that the same program of another kernel wrote become one kernel.

second(first(x)),  both grid=(16,), blocks lambda i: (i, 0)     ->   body: the first's, then the second's on its block
"""

from __future__ import annotations

from collections.abc import Sequence

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
    return [(numbers[atom], n) for n, atom in enumerate(second.operands) if atom in numbers]


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
    return with_input_fusion(kernel.compiler_params, ())


def _carries(kernel: Kernel) -> bool:
    return any(not buf.scoped for buf in kernel.scratch)


def chained(first: KernelCall, second: KernelCall, wanted: Sequence) -> KernelCall:
    """One call in place of two. `wanted`: results of the first that others read."""
    one, two = first.kernel, second.kernel
    passed = {operand: result for result, operand in links(first, second)}
    operands = Operands()
    places_of_first = [operands.add(*pair) for pair in zip(first.operands, one.inputs)]
    places_of_second = {
        n: operands.add(atom, mapping)
        for n, (atom, mapping) in enumerate(zip(second.operands, two.inputs))
        if n not in passed
    }
    stored = [n for n, var in enumerate(first.results) if var in wanted]
    outputs = [one.outputs[n] for n in stored] + list(two.outputs)
    values = [n for n in range(len(one.outputs)) if n not in stored and _is_value(one, n)]
    held = [n for n in range(len(one.outputs)) if n not in stored and n not in values]
    buffers = [
        Scratch(one.outputs[n].ref_shape, one.outputs[n].array.dtype, scoped=True) for n in held
    ]
    mappings = (*operands.mappings, *outputs)
    count, ends = len(operands.atoms), len(operands.atoms) + len(outputs)

    def run(*refs):
        results, memory = refs[count:ends], refs[ends:]
        borders = len(one.scratch), len(one.scratch) + len(two.scratch)
        scratch_of_first, scratch_of_second = memory[: borders[0]], memory[slice(*borders)]
        spare = iter(memory[borders[1] :])
        blocks: dict = {}

        def target(n: int):
            if n in stored:
                return results[stored.index(n)]
            if n in held:
                return next(spare)
            put = lambda value: blocks.__setitem__(n, value)
            return StandIn(
                one.outputs[n].ref_shape, lambda: blocks[n], put, _inside(one, n, refs, mappings)
            )

        targets = [target(n) for n in range(len(one.outputs))]
        trace_with(one, [*(refs[n] for n in places_of_first), *targets, *scratch_of_first])

        def source(n: int):
            if n not in passed:
                return refs[places_of_second[n]]
            ref = targets[passed[n]]
            if passed[n] not in held:  # a value, or a result, which has the same edges
                return ref
            return StandIn(ref.shape, inside=_inside(one, passed[n], refs, mappings), ref=ref)

        inputs = [source(n) for n in range(len(two.inputs))]
        trace_with(two, [*inputs, *results[len(stored) :], *scratch_of_second])

    flags = dict(zip(places_of_first, input_fusion(one)))
    for n, place in places_of_second.items():
        flags[place] = flags.get(place, True) and input_fusion(two)[n]
    changed = assembled(
        two,
        operands.mappings,
        outputs,
        (*one.scratch, *two.scratch, *buffers),
        run,
        name=one.name if one.name.endswith(two.name) else f"{one.name}_{two.name}"[:JOINED_NAME],
        origin=" and ".join(dict.fromkeys((one.origin, two.origin))),
        compiler_params=with_input_fusion(two.compiler_params, [flags[n] for n in range(count)]),
    )
    results = (*(first.results[n] for n in stored), *second.results)
    return KernelCall(changed, tuple(operands.atoms), results, second.eqn)


def _inside(kernel: Kernel, result: int, refs: Sequence, mappings: Sequence[BlockMapping]):
    places = BlockPlaces.of(kernel, kernel.outputs[result])
    return lambda axis: places.inside(refs, mappings, axis)


def _is_value(kernel: Kernel, result: int) -> bool:
    """Whether a body stores a result once, as a whole, for sure, and does not look at it again."""
    ref = ref_of(kernel, len(kernel.inputs) + result)
    stores = list(accesses(kernel.body.jaxpr, ref))
    return len(stores) == 1 and stores[0].is_whole_store and stores[0].depth == 0
