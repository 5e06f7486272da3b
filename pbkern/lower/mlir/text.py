"""Structured MLIR under construction: blocks, hoisted constants, index arithmetic.

Memory is flat: every buffer is a 1-d memref, addresses are affine sums computed here and placed in
the shallowest block that knows their symbols, so that loops hold additions of constants only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from pbkern.core.affine import Affine
from pbkern.core.budget import Budget

from . import range_reports
from .element_types import mlir_type
from .math_table import SHARED, MathTable
from .operation import NOT_UNROLLED, TILE, OpenRegion, Operation, Region, for_syntax, walk
from .ops import Builder, CallRare, KnownValues, Ssa
from .range_reports import RangeReport

ENDS = ("scf.yield", "scf.condition")  # of regions
BRANCHES = ("scf.if", "scf.while")
# Types of constants that are kept in registers through a loop: whole registers, since LLVM has no
# others in assembly.
PINNED = tuple(
    f"vector<{bits // int(el[1:])}x{el}>"
    for bits in (128, 256, 512)
    for el in ("f32", "f64", "i32", "i64")
)
# Loops of fewer trips leave their constants to the loop around them. Source: not recorded.
SHORT_TRIPS = 16
# Most constants that are kept in registers: the rest of 32 registers holds values.
MAX_PINNED = 26
STACK = "memref.alloca"


class Block:
    """Operations of one region.

    `values` maps symbols defined here to SSA index names or ints (single-trip loops); `wrong` are
    reports of ranges that nothing has looked at yet. `is_counted`: whether its lines are spent of the
    budget one by one; those of a region that a builder opened are spent with the operation that holds it.
    """

    def __init__(self, parent: Block | None, text: Text | None = None, *, is_counted: bool = True):
        if text is None:
            assert parent is not None, "the outermost block is given its text"
            text = parent.text
        self.parent = parent
        self.text: Text = text
        self.wrong: list[RangeReport] = []
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.operations: list[Operation] = []
        self.values: dict[str, str | int] = {}
        self.memo: dict = {}
        self.builders: dict[int, Builder] = {}
        self.has_long_loops = False
        self.is_counted = is_counted

    def add(
        self,
        name: str,
        operands: tuple[str, ...] = (),
        types: str = "",
        syntax: str | None = None,
        *,
        regions: Sequence[Block] = (),
        words: tuple[str, ...] = ("", "else"),
        **defined,
    ) -> None:
        """Appends an operation, whose regions hold what is in these blocks.

        defined: its result, count and arguments.
        """
        for region in regions:
            region.report()
            region.builders.clear()  # they refer to the block: only the garbage collector would free its operations
        self.operations.append(
            Operation(
                name,
                operands,
                types,
                syntax,
                tuple(Region(region.operations, word) for region, word in zip(regions, words)),
                **defined,
            )
        )

    def take(self, block: Block) -> None:
        """Appends what is in another block."""
        self.operations += block.operations
        self.wrong += block.wrong
        block.builders.clear()

    def report(self) -> None:
        """Appends what looks at reports of ranges; whatever ends the region stays its last operation."""
        if not self.wrong:
            return
        last = (
            [self.operations.pop()] if self.operations and self.operations[-1].name in ENDS else []
        )
        self.operations.append(
            range_reports.written(self.wrong, partial(self.text.put, self), self.text.const)
        )
        self.operations += last
        self.wrong = []

    def lookup(self, symbol: str) -> tuple[Block, str | int]:
        block: Block | None = self
        while block is not None:
            if symbol in block.values:
                return block, block.values[symbol]
            block = block.parent
        raise KeyError(symbol)

    def ancestor(self, depth: int) -> Block:
        block = self
        while block.depth > depth:
            assert block.parent is not None
            block = block.parent
        return block


class Text:
    """One function: names, constants, blocks.

    `math`: the target's own versions of functions; `pins`: whether vector constants of loops are
    kept in registers; `most_constants`: those of a loop from which on addends among them are read
    from memory, 0: never; `budget`: of lines. `call_rare`: see Builder; None until somebody sets it.
    """

    def __init__(
        self,
        *,
        approx: bool,
        contract: bool,
        math: MathTable = SHARED,
        pins: bool = False,
        most_constants: int = 0,
        budget: Budget | None = None,
    ):
        self.call_rare: CallRare | None = None
        self.approx, self.contract, self.math, self.pins = approx, contract, math, pins
        self.most_constants = most_constants
        self.budget = budget or Budget()
        self._count = 0
        self.constants: dict[str, Operation] = {}  # by name, in the order in which they are defined
        self._constant_names: dict[tuple[str, str, str], str] = {}
        self.known = KnownValues()
        self.top = Block(None, self)
        self.indices: set[str] = set()  # names of type index

    def name(self) -> str:
        self._count += 1
        return f"%v{self._count}"

    def const(self, literal: str, types: str = "", name: str = "arith.constant") -> str:
        """The name of a constant, which is defined once at the top of the function."""
        key = literal, types, name
        if key not in self._constant_names:
            result = self._constant_names[key] = self.name()
            syntax = f" {literal}" if name == "arith.constant" else literal
            self.constants[result] = Operation(name, (), types, syntax, result=result)
        return self._constant_names[key]

    def local(self, kind: str) -> str:
        """A new buffer of type `kind` on the stack of the whole function.

        The remark keeps it apart from others like it.
        """
        return self.const("() {alignment = 64 : i64}", f"{kind} // {self.name()}", STACK)

    def index(self, value: int) -> str:
        return self.const(str(int(value)), "index")

    def named(self, value: str | int) -> str:
        """The name of an index, which may be a number."""
        return value if isinstance(value, str) else self.index(value)

    def add_indices(self, block: Block, x: str | int, y: str | int) -> str | int:
        """The sum of two indices, which may be numbers."""
        if isinstance(x, int) and isinstance(y, int):
            return x + y
        if x == 0:
            return y
        return self.put(block, "arith.addi", (self.named(x), self.named(y)), "index")

    def put(
        self,
        block: Block,
        name: str,
        operands: tuple[str, ...] = (),
        types: str = "",
        syntax: str | None = None,
        regions: tuple[Region, ...] = (),
        arguments: tuple[str, ...] = (),
    ) -> str:
        """Appends an operation with one result, and returns the result's name."""
        result = self.name()
        op = Operation(name, operands, types, syntax, regions, arguments, result=result)
        if block.is_counted:
            self.budget.spend(op.size if regions else 1)
        block.operations.append(op)
        if types.endswith("index") and name != "arith.cmpi":
            self.indices.add(result)
        return result

    def open_region(self) -> OpenRegion:
        """A region of an operation that a builder appends when the region is complete."""
        block = Block(None, self, is_counted=False)
        return OpenRegion(block.operations, partial(self.put, block), self.name)

    def load_vector(
        self,
        block: Block,
        place: tuple[str, str],
        kind: str,
        el: str,
        lanes: int,
        mask: Ssa | None = None,
    ) -> Ssa:
        """Elements from place = (buffer of type `kind`, index) on; zeros where a mask is not set."""
        vector = mlir_type(el, lanes)
        if mask is None:
            return Ssa(self.put(block, "vector.load", place, f"{kind}, {vector}"), el, lanes)
        zero = self.builder(block, lanes).c(0, el)
        operands = (*place, mask.name, zero.name)
        types = f"{kind}, {mask.type}, {vector} into {vector}"
        return Ssa(self.put(block, "vector.maskedload", operands, types), el, lanes)

    def store_vector(
        self, block: Block, value: Ssa, place: tuple[str, str], kind: str, mask: Ssa | None = None
    ) -> None:
        """Elements to place = (buffer of type `kind`, index) on, where a mask is set.

        The first element alone is stored without a mask: see targets/llvm/repairs.py.
        """
        if mask is not None and self._is_first_lane(mask):
            value, mask = self.builder(block, value.lanes).shuffle(value, value, range(1)), None
        if mask is None:
            block.add("vector.store", (value.name, *place), f"{kind}, {value.type}")
        else:
            operands = (*place, mask.name, value.name)
            block.add("vector.maskedstore", operands, f"{kind}, {mask.type}, {value.type}")

    def _is_first_lane(self, mask: Ssa) -> bool:
        known = self._constant_names.get((" [1]", mask.type, "vector.constant_mask"))
        return known == mask.name

    def builder(self, block: Block, lanes: int) -> Builder:
        if lanes not in block.builders:
            block.builders[lanes] = Builder(
                lanes,
                partial(self.put, block),
                self.const,
                self.open_region,
                approx=self.approx,
                contract=self.contract,
                math=self.math,
                known=self.known,
                wrong=lambda report: block.wrong.append(report),
                call_rare=self.call_rare,
            )
        return block.builders[lanes]

    def affine(self, block: Block, affine: Affine, extra: int = 0) -> tuple[Block, str]:
        """SSA index of an affine expression, and the shallowest block that holds it."""
        const, terms = affine.const + extra, []
        for symbol, coefficient in affine.terms:
            where, value = block.lookup(symbol)
            if isinstance(value, int):
                const += value * coefficient
            else:
                terms.append((where.depth, symbol, value, coefficient, where))
        terms.sort(key=lambda term: (term[0], str(term[1])))
        if not terms:
            return self.top, self.index(const)
        where, current = self.sum_of_indices(
            [(at, self.scaled_index(at, value, weight)) for _, _, value, weight, at in terms]
        )
        if const:
            current = self.once(where, "addi", current, const)
        return where, current

    def sum_of_indices(self, parts: Sequence[tuple[Block, str]]) -> tuple[Block, str]:
        """The sum of indices that blocks hold, each added in the shallowest block that knows it."""
        (where, total), *rest = sorted(parts, key=lambda part: part[0].depth)
        for at, part in rest:
            where, total = at, self.once(at, "addi", total, part)
        return where, total

    def scaled_index(self, block: Block, index: str, factor: int) -> str:
        return index if factor == 1 else self.once(block, "muli", index, factor)

    def once(self, block: Block, op: str, x: str, y: str | int) -> str:
        """An operation of indices, which is written once in a block."""
        key = op, x, y
        if key not in block.memo:
            block.memo[key] = self.put(block, f"arith.{op}", (x, self.named(y)), "index")
        return block.memo[key]

    def loop(
        self,
        block: Block,
        symbol: str,
        low: int,
        high: int | str,
        step: int,
        fill,
        carried: Sequence[Ssa] = (),
        *,
        unrolls: bool = True,
    ) -> list[Ssa]:
        """scf.for; `fill(inner block, carried values) -> next values`. A loop of one trip leaves no loop behind.

        `unrolls`: whether LLVM may unroll it.
        """
        short = isinstance(high, int) and high - low < SHORT_TRIPS * step
        if isinstance(high, int) and high <= low:
            return list(carried)
        inner = Block(block)
        if isinstance(high, int) and high - low <= step:
            inner.values[symbol] = low
            results = fill(inner, list(carried))
            block.take(inner)
            return results
        iv = self.name()
        inner.values[symbol] = iv
        self.indices.add(iv)
        args = [Ssa(self.name(), carry.el, carry.lanes) for carry in carried]
        results = fill(inner, args)
        reports = self._carried_reports(inner)
        carried, args, results = (
            [*values, *(report.value for report in of_loop)]
            for values, of_loop in zip((carried, args, results), reports)
        )
        types = [carry.type for carry in carried]
        bound = self.named(high)
        operands = [iv, self.index(low), bound, self.index(step)]
        name = self.name() if carried else None
        if carried:
            inner.add("scf.yield", tuple(result.name for result in results), ", ".join(types))
        for arg, carry in zip(args, carried):
            operands += [arg.name, carry.name]
        carries = [Ssa(f"{name}#{k}", carry.el, carry.lanes) for k, carry in enumerate(carried)]
        if not inner.has_long_loops and (block.parent is None or not short):
            if self.pins:
                self._pin(block, inner)
            elif self.most_constants:
                self._put_addends_in_memory(block, inner)
        block.has_long_loops |= inner.has_long_loops or not short
        block.add(
            "scf.for",
            tuple(operands),
            "",
            for_syntax(types),
            regions=(inner,),
            result=name,
            count=len(carried),
            arguments=(iv, *(arg.name for arg in args)),
            attributes="" if unrolls and TILE not in types else NOT_UNROLLED,
        )
        starts, _, _ = reports
        count = len(carries) - len(starts)
        block.wrong += [
            report._replace(value=value) for report, value in zip(starts, carries[count:])
        ]
        return carries[:count]

    def _carried_reports(
        self, inner: Block
    ) -> tuple[list[RangeReport], list[RangeReport], list[RangeReport]]:
        """Reports that a loop carries, one of each kind in its body, which has none left.

        Returns:
          (before the loop, at the beginning of a trip, at its end).
        """
        starts = range_reports.nothing(inner.wrong, self.const)
        held = [report._replace(value=report.value._replace(name=self.name())) for report in starts]
        ends = [
            range_reports.joined(report, inner.wrong, partial(self.put, inner)) for report in held
        ]
        inner.wrong = []
        return starts, held, ends

    def unrolled(
        self, block: Block, symbol: str, low: int, high: int, step: int, fill, carried: list[Ssa]
    ) -> list[Ssa]:
        """Writes a loop out: one copy of the body after the other."""
        for at in range(low, high, step):
            carried = self.loop(block, symbol, at, min(at + step, high), step, fill, carried)
        return carried

    def _pin(self, block: Block, inner: Block) -> None:
        """Loads the vector constants of a loop before it.

        LLVM hoists constants out of whole loop nests, finds too many for the registers, and then
        loads those of the hottest loop in every step. What an (empty) assembly statement has
        returned is no constant to it, and one with side effects stays where it is. Constants by
        which LLVM chooses instructions remain constants.
        """
        operations = list(walk(inner.operations))
        if any(op.name in BRANCHES for op in operations):
            return
        vectors = self._vector_constants()
        choosing = {op.names[-1] for op in operations if _chooses(op)}
        used = dict.fromkeys(
            ssa_name
            for op in operations
            for ssa_name in op.names
            if ssa_name in vectors and ssa_name not in choosing
        )
        if not used or len(used) > MAX_PINNED:
            return
        keep = ' has_side_effects "", "=v,0" %s'
        pins = {
            ssa_name: self.put(block, "llvm.inline_asm", (ssa_name,), f"({kind}) -> {kind}", keep)
            for ssa_name, kind in ((ssa_name, vectors[ssa_name]) for ssa_name in used)
        }

        def rename(name: str) -> str:
            return pins.get(name, name)

        inner.operations = [op.renamed(lambda _: rename) for op in inner.operations]

    def _vector_constants(self) -> dict[str, str]:
        """Name -> type of each constant that fills a register."""
        return {
            name: constant.types
            for name, constant in self.constants.items()
            if constant.name == "arith.constant" and constant.types in PINNED
        }

    def _put_addends_in_memory(self, block: Block, inner: Block) -> None:
        """Moves constants that a loop's multiply-adds add, such as coefficients, to memory, where constants fill the registers.

        x86 takes an addend from memory in the instruction that adds it. LLVM would load all constants before the loop and
        keep on the stack what does not fit the registers, values of the loop too, until few points are under way at once.
        It neither moves nor joins volatile loads.
        Measured on Zen 3, 65,536 float32: exp, tanh and sqrt in one loop 112 us, 81 so; softplus 124 and 104; logarithm 57 and
        53; exact gelu 78 and 80. Where constants leave registers free, sigmoid 43 and 46.
        """
        vectors, operations = self._vector_constants(), inner.operations
        choosing = {op.names[-1] for op in operations if _chooses(op)}
        used = {name for op in operations for name in op.operands if name in vectors}
        if len(used - choosing) < self.most_constants or any(op.regions for op in operations):
            return
        places = self._in_memory(
            block,
            dict.fromkeys(
                op.operands[2]
                for op in operations
                if op.name == "math.fma" and op.operands[2] in vectors
            ),
        )
        read = Block(inner)

        def load(name: str) -> str:
            pointer, number = places[name]
            kind = vectors[name]
            place = f"(!llvm.ptr) -> !llvm.ptr, {kind}", f" %s[{number}]"
            address = self.put(read, "llvm.getelementptr", (pointer,), *place)
            return self.put(read, "llvm.load", (address,), f"!llvm.ptr -> {kind}", " volatile %s")

        for op in operations:
            addend = op.operands[2] if op.name == "math.fma" else ""
            read.operations.append(op.with_operand(2, load(addend)) if addend in places else op)
        inner.operations = read.operations

    def _in_memory(self, block: Block, names: Iterable[str]) -> dict[str, tuple[str, int]]:
        """Stores vector constants in tables on the stack: name -> (pointer to a table of its type, number of its entry)."""
        of_type: dict[str, list[str]] = {}
        for name in names:
            of_type.setdefault(self.constants[name].types, []).append(name)
        places: dict[str, tuple[str, int]] = {}
        for kind, entries in of_type.items():
            lanes, el = kind.removeprefix("vector<").removesuffix(">").split("x")
            table_type = f"memref<{len(entries) * int(lanes)}x{el}>"
            table = self.local(table_type)
            address = self.put(
                block, "memref.extract_aligned_pointer_as_index", (table,), f"{table_type} -> index"
            )
            word = self.put(block, "arith.index_cast", (address,), "index to i64")
            pointer = self.put(block, "llvm.inttoptr", (word,), "i64 to !llvm.ptr")
            for number, name in enumerate(entries):
                place = self.index(number * int(lanes))
                block.add("vector.store", (name, table, place), f"{table_type}, {kind}")
                places[name] = pointer, number
        return places

    def when(self, block: Block, condition: str, fill, otherwise=None) -> None:
        """scf.if without results."""
        inner, other = Block(block), Block(block)
        fill(inner)
        if otherwise is not None:
            otherwise(other)  # both before any line of theirs: they may place code in `block`
        block.add("scf.if", (condition,), regions=(inner, *([other] if other.operations else ())))

    def when_all(self, block: Block, conditions: list[str], fill) -> None:
        """scf.if where all of these hold; without any, what `fill` appends."""
        if not conditions:
            fill(block)
            return
        test = conditions[0]
        for condition in conditions[1:]:
            test = self.put(block, "arith.andi", (test, condition), "i1")
        self.when(block, test, fill)

    def either(
        self, block: Block, condition: str, inner: Block, x: Ssa, other: Block, y: Ssa
    ) -> str:
        """scf.if whose result is x, made in `inner`, where the condition holds, and y, made in `other`, else."""
        name = self.name()
        for region, outcome in ((inner, x), (other, y)):
            region.add("scf.yield", (outcome.name,), outcome.type)
        block.add(
            "scf.if", (condition,), "", f" %s -> ({x.type})", regions=(inner, other), result=name
        )
        return name


def _chooses(op: Operation) -> bool:
    """Whether a vector constant as its last operand chooses instructions: shifts, divisors, masks of 64-bit factors."""
    if op.name.startswith(("arith.sh", "arith.div")):
        return op.types.startswith("vector<")
    return op.name == "arith.andi" and op.types.startswith("vector<") and op.types.endswith("xi64>")
