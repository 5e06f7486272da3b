"""Kernel -> rough time of one program, to decide how many programs make a task and whether threads pay at all."""

from __future__ import annotations

import math

from jax.extend import core as jex

from pbkern._jax import cached_by_jaxpr_alone
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import inner_jaxprs
from pbkern.dsl.kernel import Kernel
from pbkern.targets.costs.sorts import line_cycles
from pbkern.targets.cpu.math.op_cycles import COST

# Cycles of a core in a nanosecond, roughly. Source: not recorded.
CYCLES_PER_NS = 3.5
# Elements of a vector operation, roughly: float32 in 512 bits.
ROUGH_LANES = 16
# Bytes that a core moves in a nanosecond, roughly. Source: not recorded.
BYTES_PER_NS = 25.0


def program_ns(kernel: Kernel) -> float:
    """Nanoseconds of one program on one core: arithmetic at 16 lanes, or block bytes from memory, whichever is more."""
    cycles = _cycles(kernel.body.jaxpr)
    moved = sum(
        math.prod(mapping.ref_shape) * mapping.array.dtype.itemsize
        for mapping in (*kernel.inputs, *kernel.outputs)
    )
    return max(cycles / CYCLES_PER_NS, moved / BYTES_PER_NS) + 10.0


@cached_by_jaxpr_alone
def _cycles(jaxpr: jex.Jaxpr) -> float:
    total = 0.0
    for eqn in jaxpr.eqns:
        size = max((math.prod(getattr(var.aval, "shape", ())) for var in eqn.outvars), default=0)
        name = eqn.primitive.name
        inner = list(inner_jaxprs(eqn))
        if inner:
            trips = eqn.params.get("length", 8) if name in ("scan", "while") else 1
            total += trips * sum(_cycles(j.jaxpr) for j in inner)
        elif name == "dot_general":
            (lhs_k, _), _ = eqn.params["dimension_numbers"]
            total += (
                size
                * math.prod(array_aval(eqn.invars[0]).shape[axis] for axis in lhs_k)
                / (2 * ROUGH_LANES)
            )
        elif name == "conv_general_dilated":
            spec = eqn.params["dimension_numbers"].rhs_spec
            total += (
                size
                * math.prod(array_aval(eqn.invars[1]).shape[axis] for axis in spec[1:])
                / (2 * ROUGH_LANES)
            )
        elif name == "sort":
            length = max(array_aval(eqn.outvars[0]).shape[eqn.params["dimension"]], 1)
            dtypes = [array_aval(var).dtype for var in eqn.invars]
            lines = size // length
            total += lines * line_cycles(lines, length, dtypes, eqn.params["num_keys"])
        elif name.startswith(("reduce", "arg", "cum")):
            total += math.prod(array_aval(eqn.invars[0]).shape) / ROUGH_LANES
        else:
            total += size * COST.get(name, 1.0) / ROUGH_LANES  # others move elements
    return total


# Nanoseconds of a task; a shorter one costs more to hand out than it saves. Source: not recorded.
TASK_NS = 8_000.0
# Nanoseconds of a launch; a shorter one stays on one thread. Source: not recorded.
SERIAL_NS = 25_000.0
# Long tasks keep neighbours on one core, but at the end threads wait for the last one: up to half
# of it each, on average.
LONG_NS = 200_000.0


def tasks(kernel: Kernel, programs: int, threads: int) -> tuple[int, int]:
    """(programs per task, threads) of a launch."""
    sequential = max(kernel.num_programs // max(programs, 1), 1)
    each = program_ns(kernel) * sequential
    if threads == 1 or programs < 2 or each * programs < SERIAL_NS:
        return max(programs, 1), 1
    chunk = max(int(TASK_NS / each), 1, min(programs // (threads * 16), int(LONG_NS / each)))
    return min(chunk, -(-programs // threads)), threads
