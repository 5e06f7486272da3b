"""Kernel -> KernelError where scratch, or a result, is read before any program has stored to it.

    def body(x, o, total):          # total: scratch
        total[...] += x[...]        # adds to whatever is in memory
        o[...] = total[...]

Seen without running: the first program of a run of programs in order, and the second along each
dimension that is declared "parallel", where scratch of the first is not its own. What depends on
loaded values gets the benefit of the doubt; `pbkern.interpret` finds the rest as it runs.
"""

from __future__ import annotations

from pbkern import _jax
from pbkern.core.errors import KernelError
from pbkern.dsl.conditional_results import unsure_results
from pbkern.dsl.interpret import parallel_dims
from pbkern.dsl.kernel import Kernel

from .place_walk import PlaceWalk


def check_reads(kernel: Kernel) -> None:
    """Raises KernelError, at the line that reads."""
    if not kernel.num_programs:
        return
    inputs = len(kernel.inputs)
    defined = set(range(inputs))
    defined |= {inputs + n for n in unsure_results(kernel)}
    defined |= {inputs + output for _, output in kernel.aliases}
    dynamic = dict(kernel.dynamic_grid)
    sizes = [None if axis in dynamic else size for axis, size in enumerate(kernel.grid)]
    first = (0,) * len(kernel.grid)
    _follow(kernel, first, sizes, defined, "the first program")
    results = range(inputs, inputs + len(kernel.outputs))  # shared: see parallel_stores.py
    for axis in parallel_dims(kernel):
        if kernel.grid[axis] > 1 and axis not in dynamic:
            place = (*first[:axis], 1, *first[axis + 1 :])
            _follow(
                kernel,
                place,
                sizes,
                defined.union(results),
                f'program {place}: grid dimension {axis} is "parallel", '
                "and programs along it have scratch of their own",
            )


def _follow(kernel: Kernel, place, sizes, defined: set[int], program: str) -> None:
    def refuse(number: int, eqn) -> None:
        results = len(kernel.inputs) + len(kernel.outputs)
        what = (
            kernel.outputs[number - len(kernel.inputs)].origin
            if number < results
            else f"scratch {number - results}"
        )
        hint = (
            "store to it first, in each program or under pbkern.when(pbkern.program_id(axis) == 0)"
        )
        if any(place):
            hint += '; "arbitrary" in dimension_semantics, where programs run in order'
        raise KernelError(
            f"{what} of kernel `{kernel.name}` is read before anything is stored to it",
            at=_jax.user_line(eqn) or kernel.defined_at,
            why=f"in {program}; what it holds then is whatever was in memory",
            hint=hint,
        )

    PlaceWalk(place, sizes, set(defined), refuse).run(kernel.body.jaxpr)
