"""Launches of PTX on NumPy arrays."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

import numpy as np

from pbkern.core.errors import KernelError
from pbkern.core.machine import MOST_BLOCK_THREADS

from .counts import Counts
from .machine import SimulatedLaunch, smallest_access
from .memory import Arrays
from .parse import PtxProgram, parse

_REGISTER = re.compile(r"%[\w$]+")
_parsed = functools.lru_cache(maxsize=256)(parse)


def simulate_ptx(
    text: str,
    grid: int,
    block: int,
    arrays: Sequence[np.ndarray],
    *,
    shared_bytes: int = 0,
    check: bool = True,
    unwritten: bool = False,
) -> Counts:
    """Runs the one kernel of a PTX text on NumPy arrays, which it updates.

    Args:
      text: PTX of one module.
      grid: number of blocks.
      block: number of threads in each.
      arrays: per parameter an array, which must be contiguous, or a NumPy scalar.
      shared_bytes: shared memory that the launch adds to what the text declares.
      unwritten: shared memory may be read before a store: what is read there is not used.
      check: races and reads of shared memory and registers before a store are found; registers that nothing
        has stored are 0 otherwise. Accesses outside of memory, threads that are not together and waits without end always
        are found.
    Returns what it has cost. Raises SimulationError; KernelError for arguments that do not fit;
    InternalError for instructions that are not simulated.

    Examples:
      >>> text = '''
      ... .version 8.0
      ... .target sm_90a
      ... .address_size 64
      ... .visible .entry doubled(.param .u64 x) {
      ... .reg .b32 %t; .reg .b64 %a; .reg .f32 %f;
      ... ld.param.u64 %a, [x];
      ... mov.u32 %t, %tid.x;
      ... mad.wide.u32 %a, %t, 4, %a;
      ... ld.global.f32 %f, [%a];
      ... add.f32 %f, %f, %f;
      ... st.global.f32 [%a], %f;
      ... ret;
      ... }
      ... '''
      >>> x = np.arange(4, dtype=np.float32)
      >>> counts = pbkern.simulate_ptx(text, grid=1, block=4, arrays=[x])
      >>> x.tolist()
      [0.0, 2.0, 4.0, 6.0]
    """
    program = _parsed(text)
    values, held = _arguments(program, arrays)
    if not 1 <= block <= MOST_BLOCK_THREADS or program.threads not in (None, block):
        raise KernelError(
            f"kernel `{program.name}` cannot run with {block} threads in a block",
            why=f"it takes {program.threads or f'1 to {MOST_BLOCK_THREADS}'}",
        )
    if grid <= 0:
        return Counts()
    numbers = {
        values.index(Arrays.address(k)): k for k in range(len(held))
    }  # position of a parameter -> array
    stored = {
        numbers[parameter] for parameter in written_parameters(program) if parameter in numbers
    }
    memory = Arrays(held, stored, check, smallest_access(program, "global"))
    launch = SimulatedLaunch(
        program, grid, block, values, memory, _shared(program, shared_bytes), check, unwritten
    )
    launch.run()
    return launch.counts


def _shared(program: PtxProgram, dynamic: int) -> int:
    return (-(-program.shared_bytes // 16) * 16 if dynamic else program.shared_bytes) + dynamic


def _arguments(
    program: PtxProgram, arrays: Sequence[np.ndarray]
) -> tuple[list[int], list[np.ndarray]]:
    """(bits per parameter, arrays by number)."""
    if len(arrays) != len(program.parameters):
        raise KernelError(
            f"kernel `{program.name}` takes {len(program.parameters)} arguments",
            why=f"{len(arrays)} are given",
        )
    values: list[int] = []
    held: list[np.ndarray] = []
    for k, array in enumerate(arrays):
        if isinstance(array, np.generic):
            values.append(int(array.view(f"uint{8 * array.itemsize}")))
            continue
        if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
            raise KernelError(
                f"argument {k} of kernel `{program.name}` is no contiguous NumPy array",
                why=str(type(array)),
                hint="numpy.ascontiguousarray",
            )
        values.append(Arrays.address(len(held)))
        held.append(array)
    return values, held


@functools.lru_cache(maxsize=256)
def _written(name: str, code: tuple, parameters: tuple) -> frozenset[int]:
    sources: dict[str, set[int]] = {}
    positions: set[int] = set()
    changed = True
    while changed:
        changed = False
        for op, operands in code:
            names = [_REGISTER.findall(operand) for operand in operands]
            if op[0] == "ld" and "param" in op:
                position = next((number for n, number in parameters if n in operands[1]), None)
                mine = set() if position is None else {position}
            elif op[0] in ("st", "red", "atom"):
                address = operands[1 if op[0] == "atom" else 0]
                positions |= set().union(
                    *(sources.get(r, set()) for r in _REGISTER.findall(address))
                )
                continue
            elif op[0] in ("ld", "cp", "ldmatrix"):  # what they give is no address
                continue
            else:
                mine = set().union(*(sources.get(r, set()) for rs in names[1:] for r in rs))
            for register in names[0] if names else ():
                if not mine <= sources.setdefault(register, set()):
                    sources[register] |= mine
                    changed = True
    return frozenset(positions)


def written_parameters(program: PtxProgram) -> frozenset[int]:
    """Positions of the parameters from which addresses of stores come."""
    code = tuple((instruction.op, instruction.operands) for instruction in program.code)
    return _written(
        program.name, code, tuple((n, position) for n, (position, _) in program.parameters.items())
    )
