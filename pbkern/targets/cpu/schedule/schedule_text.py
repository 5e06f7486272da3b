"""KernelNests after the CPU's passes -> their schedule as text: what is parallel, each loop and each nest in a line.

grid 16, in parallel 16
nest [d3<24, d4<64, k2<32*] schedule(lanes=16, vector='d4', unroll=2, jam={'d3': 12}, order=('d3', 'k2')) -> %a3
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pbkern.lower.kernel_nests import KernelNests
from pbkern.lower.nest import ir
from pbkern.lower.nest.ir import Nest, Stmt


def schedule_text(nests: KernelNests, prefetch_steps: int) -> str:
    """The schedule of a kernel's nests. What they compute is not shown."""
    grid, parallel = nests.kernel.grid, [nests.kernel.grid[dim] for dim in nests.parallel]
    rows = [f"grid {_sizes(grid)}, in parallel {_sizes(parallel)}"]
    if prefetch_steps:
        rows.append(f"blocks are prefetched {prefetch_steps} steps ahead")
    rows += _lines(nests.prologue.statements)
    for case in nests.cases:
        rows += case.variant.title.splitlines()
        rows += _lines(case.statements)
    return "\n".join(rows)


def _sizes(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes)) or "1"


def _lines(stmts: Sequence[Stmt], indent: str = "") -> Iterator[str]:
    """A line for each nest and sort, and the heads of the loops and branches around them."""
    for stmt in stmts:
        head = ir.show([stmt]).partition("\n")[0]
        match stmt:
            case Nest():
                names = dict.fromkeys(store.buf.name for store in stmt.stores)
                yield f"{indent}{head} -> {', '.join(names)}"
            case ir.Sort():
                yield indent + head
            case ir.If(index=index, branches=branches):
                for number, branch in enumerate(branches):
                    yield f"{indent}case {index} == {number}:"
                    yield from _lines(branch, indent + "  ")
            case _:
                inner = [line for body in ir.bodies(stmt) for line in _lines(body, indent + "  ")]
                yield from (indent + head, *inner) if inner else ()
