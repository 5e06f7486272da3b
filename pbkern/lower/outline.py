"""Long lists of statements -> functions of their own, which LLVM compiles in time that is proportional to their number.

MLIR's passes and LLVM take more than twice the time for a function of twice the length; functions also compile on threads, and
LLVM's optimiser runs only on those that have scalar loops (docs/decisions/019-large-bodies.md).

What a piece of text uses from outside are constants, which its function defines anew, memory and indices, which it is passed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import InternalError
from .text import Block, Text

NAME = re.compile(r"%\w+")
DEFINED = re.compile(r"(%\w+)(?:(?::\d+)? =|: )")
# Lines of a piece, and of the shortest one.
PIECE, SHORT = 4000, 400
# The type of the scratch memory, which is not known before all of a kernel is lowered.
ARENA_TYPE = "memref<arena>"
ARENA = "%arena"


@dataclass(frozen=True)
class Segment:
    """Lines [start, end) of a block, which one statement wrote. scalar: whether they hold scalar loops."""

    start: int
    end: int
    scalar: bool

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Piece:
    """A function that a kernel calls. passed: what it is passed, with types; constants: what it defines."""

    name: str
    lines: tuple[str, ...]
    passed: Mapping[str, str]
    constants: Mapping[str, str]
    views: tuple[str, ...]  # scratch buffers that it takes from the arena
    scalar: bool

    @property
    def call(self) -> str:
        return f"func.call @{self.name}({', '.join(self.passed)}) : ({', '.join(self.passed.values())}) -> ()"

    @property
    def declaration(self) -> str:
        return f"func.func private @{self.name}({', '.join(self.passed.values())})"

    def text(self, attributes: Mapping[str, str], views: Mapping[str, str]) -> str:
        """The function. attributes: of what it is passed, by name; views: the definition of each scratch buffer."""
        arguments = ", ".join(f"{n}: {t}{attributes.get(n, '')}" for n, t in self.passed.items())
        constants = [f"{n} = {t}" for n, t in self.constants.items()]
        return "\n".join([f"func.func @{self.name}({arguments}) {{", *constants, *(views[v] for v in self.views), *self.lines,
                          "return", "}"])


class Outliner:
    """Makes the pieces of one kernel. operands: types of its arrays, by name."""

    def __init__(self, kernel: str, text: Text, operands: Mapping[str, str]):
        self.kernel, self.text, self.operands = kernel, text, operands
        self.pieces: list[Piece] = []

    def outline(self, block: Block, runs: list[list[Segment]], scratch: set[str]) -> bool:
        """Where segments are long together, puts calls in their place: of all that hold scalar loops, and of long others.

        What lies between the segments of a run, index arithmetic, goes before them. scratch: names of buffers in the arena.
        Returns whether it did so.
        """
        if sum(len(s) for run in runs for s in run) <= PIECE:
            return False
        groups = [g for run in runs for g in _groups(run) if g[0].scalar or sum(map(len, g)) >= SHORT]
        calls = [self._piece([line for s in g for line in block.lines[s.start : s.end]], g[0].scalar, scratch) for g in groups]
        for g, call in reversed(list(zip(groups, calls))):
            between = [line for s, after in zip(g, g[1:]) for line in block.lines[s.end : after.start]]
            block.lines[g[0].start : g[-1].end] = [*between, call]
        return True

    def _piece(self, lines: list[str], scalar: bool, scratch: set[str]) -> str:
        """The call of a new piece. Raises InternalError for lines that use a value from outside which is no index."""
        used = dict.fromkeys(n for line in lines for n in NAME.findall(line))
        own = {n for line in lines for n in DEFINED.findall(line)}
        constants = {n: t for t, n in self.text.constants.items() if n in used}
        views = tuple(n for n in used if n in scratch)
        passed = {}
        for n in used.keys() - own - constants.keys() - {*views, ARENA}:
            if n not in self.operands and n not in self.text.indices:
                raise InternalError(f"a part of kernel {self.kernel} uses {n} of another part, which is no index")
            passed[n] = self.operands.get(n, "index")
        passed = {n: passed[n] for n in used if n in passed} | ({ARENA: ARENA_TYPE} if views or ARENA in used else {})
        self.pieces.append(Piece(f"{self.kernel}_{len(self.pieces)}", tuple(lines), passed, constants, views, scalar))
        return self.pieces[-1].call


def _groups(run: list[Segment]) -> list[list[Segment]]:
    """Neighbours that make one piece: alike, and not much longer than PIECE together."""
    groups: list[list[Segment]] = []
    for s in run:
        if groups and groups[-1][0].scalar == s.scalar and sum(map(len, groups[-1])) + len(s) <= PIECE:
            groups[-1].append(s)
        else:
            groups.append([s])
    return groups
