"""Long elementwise operations of one kernel's text: written where they stand, or as calls where there are many of a kind.

A sine is 300 lines at every vector of every point. Behind the first MOST_IN_PLACE, sines call a
function from vectors to a vector: text, and time of compilation, then grow with the number of
operations and not with their length. The first ones stay as they are, so that ordinary kernels hold
no calls, and LLVM interleaves their vectors.
"""

from __future__ import annotations

from collections import defaultdict

from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.math import elementwise
from pbkern.lower.math.elementwise import EqnInfo
from pbkern.lower.mlir import operation, range_reports
from pbkern.lower.mlir.ops import Builder, Ssa
from pbkern.lower.mlir.text import Text
from pbkern.lower.nest.ir import Expr, Op

# Operations of a kind that are written where they stand; later ones call a function. Source: not
# recorded.
MOST_IN_PLACE = 4
# Fewest lines of an operation that is worth a call. Source: not recorded.
SHORTEST_CALLED = 40


@dataclass(frozen=True)
class MathFunction:
    """A function that a kernel calls. body: the lines that make `result` of `arguments`; calls: what these call."""

    name: str
    arguments: tuple[Ssa, ...]
    body: tuple[str, ...]
    result: Ssa
    calls: frozenset[str]

    @property
    def types(self) -> str:
        return f"({', '.join(argument.type for argument in self.arguments)}) -> {self.result.type}"

    @property
    def declaration(self) -> str:
        return f"func.func private @{self.name}{self.types}"

    def text(self, attributes: str) -> str:
        arguments = ", ".join(f"{argument.name}: {argument.type}" for argument in self.arguments)
        head = f"func.func @{self.name}({arguments}) -> {self.result.type} {attributes} {{"
        return "\n".join([head, *self.body, f"return {self.result.name} : {self.result.type}", "}"])


class MathFunctions:
    """Writes one kernel's elementwise operations. called: the functions that it calls; their names start with the kernel's."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.called: list[MathFunction] = []
        self._called: dict[tuple, MathFunction] = {}
        self._written: defaultdict[tuple, dict[int, Expr]] = defaultdict(
            dict
        )  # by id, kept so that it stays theirs

    def emit(self, b: Builder, expr: Op, args: list[Ssa]) -> Ssa:
        """The operation's result, of operands that all have b's lanes."""
        info = expr.info
        key = self._key(b, info, args)
        if len(self._written[key]) < MOST_IN_PLACE or id(expr) in self._written[key]:
            counted = _Counted(b)
            result = elementwise.RULES.lookup(info.primitive)(counted.builder, info, *args)
            if counted.lines >= SHORTEST_CALLED:
                self._written[key][id(expr)] = expr
            return result
        if key not in self._called:
            self._called[key] = _function(
                f"{self.kernel}_{info.primitive}{len(self.called)}", b, info, args
            )
            self.called.append(self._called[key])
        function = self._called[key]
        passed = tuple(arg.name for arg in args if b.number(arg) is None)
        syntax = operation.call_syntax(function.name, len(passed))
        name = b.emit(operation.CALL, passed, function.types, syntax)
        return function.result._replace(name=name)

    def _key(self, b: Builder, info: EqnInfo, args: list[Ssa]) -> tuple:
        operands = tuple((arg.type, repr(b.number(arg))) for arg in args)
        return (
            info.primitive,
            str(info.params),
            info.in_dtypes,
            info.out_dtype,
            b.lanes,
            b.contract,
            b.approx,
            operands,
        )


class _Counted:
    """A builder that counts the lines it writes."""

    def __init__(self, b: Builder):
        self.lines, self._emit = 0, b.emit
        self.builder = b.with_emit(self._count)

    def _count(self, *parts, **attributes) -> str:
        self.lines += operation.Operation(*parts, **attributes).size
        return self._emit(*parts, **attributes)


def _function(name: str, b: Builder, info: EqnInfo, args: list[Ssa]) -> MathFunction:
    """The operation as a function of the operands that are no constants."""
    text = Text(approx=b.approx, contract=b.contract, math=b.math)
    inner = text.builder(text.top, b.lanes)
    values = [
        arg._replace(name=f"%a{k}") if b.number(arg) is None else inner.c(b.number(arg), arg.el)
        for k, arg in enumerate(args)
    ]
    result = elementwise.RULES.lookup(info.primitive)(inner, info, *values)
    text.top.report()
    arguments = tuple(value for value, arg in zip(values, args) if b.number(arg) is None)
    constants, at_end = range_reports.definitions(text.constants.values())
    body = (*constants, *operation.lines(text.top.operations), *at_end)
    calls = operation.called(text.top.operations) | range_reports.calls(at_end)
    return MathFunction(name, arguments, body, result, calls)
