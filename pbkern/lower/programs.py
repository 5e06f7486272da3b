"""KernelNests -> MLIR text, as far as every target writes it alike.

That is loops over sequential grid dimensions, where blocks start, which case of the body holds,
branches and loops of statements. How statements, nests and scratch are written is a target's own:
it derives its class from ProgramText.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pbkern.core.affine import Affine

from .grid import block_shift
from .grid.edge_variants import Extent
from .kernel_nests import BodyCase, KernelNests
from .mlir.text import Block, Text
from .nest.ir import For, If, Stmt, While


class ProgramText:
    """State of writing the programs of one kernel.

    Attributes:
      shown: cases as texts, in the order in which they are written.
    """

    text: Text

    def __init__(self, nests: KernelNests):
        self.nests, self.kernel = nests, nests.kernel
        self.shown: list[str] = []

    # ---------------------------------------------------------------- a target's own

    def dynamic_size(self, block: Block, operand: int) -> str:
        """A grid dimension's size, as an index: the value of an operand."""
        raise NotImplementedError

    def statements(self, block: Block, stmts: Sequence[Stmt]) -> None:
        """Appends statements."""
        raise NotImplementedError

    def body(self, block: Block, case: BodyCase) -> None:
        """Appends the body for some of the programs."""
        self.shown.append(str(case))
        self.statements(block, case.statements)

    def before_body(self, block: Block) -> None:
        """Appends what comes between the starts of blocks and the body."""

    # ---------------------------------------------------------------- programs

    def in_order(self, block: Block, dims: Sequence[int], program: Callable[[Block], None]) -> None:
        """Loops over grid dimensions, one inside the other, around what `program` appends."""
        if not dims:
            program(block)
            return
        operand = dict(self.kernel.dynamic_grid).get(dims[0])
        size: int | str = self.kernel.grid[dims[0]]
        if (
            operand is not None
        ):  # a size above the bound would reach programs whose blocks no array has
            bound = self.text.index(self.kernel.grid[dims[0]])
            size = self.text.put(
                block, "arith.minsi", (self.dynamic_size(block, operand), bound), "index"
            )

        def fill(inner: Block, _: object) -> list:
            self.in_order(inner, dims[1:], program)
            return []

        self.text.loop(block, f"%g{dims[0]}", 0, size, 1, fill)

    def program(self, block: Block) -> None:
        """Block starts, then the body: guarded only where some block may cross an edge."""
        nests = self.nests
        if not nests.cases:
            return
        for dim, shift in nests.shifts.items():
            _, start = self.text.affine(block, Affine.symbol(f"%g{dim}", shift.block))
            limit = self.text.index(shift.limit)
            block.values[block_shift.symbol(dim)] = self.text.put(
                block, "arith.minsi", (start, limit), "index"
            )
        self.statements(block, list(nests.prologue.statements))
        self.before_body(block)
        if nests.crossing:
            inside, guarded = nests.cases
            condition = self._all_inside(block, nests.crossing)
            self.text.when(
                block,
                condition,
                lambda inner: self.body(inner, inside),
                lambda inner: self.body(inner, guarded),
            )
        else:
            self._choose(block, nests.ragged, nests.cases)

    def _choose(self, block: Block, ragged: Sequence[int], cases: Sequence[BodyCase]) -> None:
        """The body for the programs at this place of the grid."""
        if not ragged:
            (case,) = cases
            self.body(block, case)
            return
        dim, *rest = ragged
        last = self.text.index(self.kernel.grid[dim] - 1)
        test = self.text.put(
            block,
            "arith.cmpi",
            (self.text.named(block.lookup(f"%g{dim}")[1]), last),
            "index",
            " ult, %s, %s",
        )
        before, at_end = (
            [body_case for body_case in cases if (dim in body_case.variant.last) is end]
            for end in (False, True)
        )
        self.text.when(
            block,
            test,
            lambda inner: self._choose(inner, rest, before),
            lambda inner: self._choose(inner, rest, at_end),
        )

    def _all_inside(self, block: Block, blocks: Sequence[Extent]) -> str:
        """Whether these are inside their arrays."""
        tests = []
        for extent in blocks:
            _, name = self.text.affine(block, extent.start)
            lower = self.text.put(
                block, "arith.cmpi", (name, self.text.index(0)), "index", " sge, %s, %s"
            )
            upper = self.text.put(
                block,
                "arith.cmpi",
                (name, self.text.index(extent.length - extent.size)),
                "index",
                " sle, %s, %s",
            )
            tests.append(self.text.put(block, "arith.andi", (lower, upper), "i1"))
        condition, *rest = dict.fromkeys(tests)
        for test in rest:
            condition = self.text.put(block, "arith.andi", (condition, test), "i1")
        return condition

    # ---------------------------------------------------------------- statements that hold others

    def branch(self, block: Block, stmt: If) -> None:
        _, value = block.lookup(stmt.index)

        def chain(inner: Block, index: int) -> None:
            if index == len(stmt.branches) - 1:
                self.statements(inner, stmt.branches[index])
                return
            test = self.text.put(
                inner,
                "arith.cmpi",
                (self.text.named(value), self.text.index(index)),
                "index",
                " eq, %s, %s",
            )
            self.text.when(
                inner,
                test,
                lambda x: self.statements(x, stmt.branches[index]),
                lambda x: chain(x, index + 1),
            )

        chain(block, 0)

    def trips(self, block: Block, loop: For) -> int | str:
        return (
            loop.trips
            if isinstance(loop.trips, int)
            else self.text.named(block.lookup(loop.trips)[1])
        )

    def counted_loop(self, block: Block, loop: For) -> None:
        def fill(inner: Block, _: object) -> list:
            self.statements(inner, loop.body)
            return []

        self.text.loop(block, loop.counter, 0, self.trips(block, loop), 1, fill)

    def conditional_loop(self, block: Block, loop: While) -> None:
        before, after = Block(block), Block(block)
        self.statements(before, loop.condition)
        predicate = loop.predicate
        value = (
            self.text.named(before.lookup(predicate)[1])
            if predicate.startswith("%")
            else self.text.index(int(predicate))
        )
        test = self.text.put(
            before, "arith.cmpi", (value, self.text.index(0)), "index", " ne, %s, %s"
        )
        self.statements(after, loop.body)
        before.add("scf.condition", (test,))
        after.add("scf.yield")
        block.add(
            "scf.while",
            (),
            "() -> ()",
            regions=(
                before,
                after,
            ),
            words=("", "do"),
        )
