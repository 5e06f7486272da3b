"""Report of the blocks of a kernel whose author asks for several steps at a time."""

from __future__ import annotations

from pbkern.lower.grid.block_copies import BLOCK_SPACE
from pbkern.lower.kernel_nests import KernelNests
from pbkern.lower.nest.ir import AsyncCopy, Buf, Nest, Stmt, bodies

from .options import ThreadOptions


def step_report(nests: KernelNests) -> tuple[str, ...]:
    """Lines about blocks of inputs: which are copied ahead, which once, which are read in place."""
    options = nests.options
    assert isinstance(options, ThreadOptions)
    if options.stages == 1:
        return ()
    if not nests.looped:
        return (
            f"max_concurrent_steps={options.stages}: no grid dimension runs in order, so no step has a next one",
        )
    copies: dict[Buf, tuple[Buf, bool]] = {}  # operand -> its copy, and whether the device makes it
    for case in nests.cases:
        _note(case.statements, copies, False)
    names = [operand.mapping.origin for operand in nests.operands[: len(nests.kernel.inputs)]]
    rings, once, in_place = [], [], []
    for name, operand in zip(names, nests.operands):
        block, is_async = copies.get(operand.buf, (None, False))
        if block is None:
            in_place.append(name)
        elif block.circular:
            nbytes = block.size // block.shape[0] * block.dtype.itemsize
            by = "" if is_async else ", through registers of threads"
            rings.append(f"{name} ({block.shape[0]} stages of {nbytes} bytes{by})")
        else:
            once.append(name)
    ahead = options.stages - 1 - options.delay
    lines = [f"blocks of {', '.join(rings)} are copied {ahead} steps ahead"] if rings else []
    lines += [f"blocks of {', '.join(once)} do not move and are copied once"] if once else []
    lines += [f"{', '.join(in_place)} are read in place"] if in_place else []
    return tuple(lines)


def _note(stmts: tuple[Stmt, ...], copies: dict[Buf, tuple[Buf, bool]], is_async: bool) -> None:
    for stmt in stmts:
        for block in bodies(stmt):
            _note(block, copies, isinstance(stmt, AsyncCopy))
        if isinstance(stmt, Nest) and stmt.stores[0].buf.space == BLOCK_SPACE:
            for load in stmt.loads():
                if not load.buf.arena:
                    copies[load.buf] = stmt.stores[0].buf, is_async
