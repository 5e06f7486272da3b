"""Long elementwise operations of one kernel's text: written where they stand, or as calls where there are many of a kind.

A sine is 300 lines at every vector of every point. Behind the first MOST_IN_PLACE, sines call a
function from vectors to a vector: text, and time of compilation, then grow with the number of
operations and not with their length. The first ones stay as they are, so that ordinary kernels hold
no calls, and LLVM interleaves their vectors. What a function does for rare arguments, such as sines
of large numbers, is most of its text, and few programs run it: nests of few points call it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.math import elementwise
from pbkern.lower.math.elementwise import EqnInfo
from pbkern.lower.mlir import operation, range_reports
from pbkern.lower.mlir.ops import Builder, Emit, Ssa
from pbkern.lower.mlir.text import Text
from pbkern.lower.nest.ir import Expr, Op

# Operations of a kind that are written where they stand; later ones call a function. Source: not
# recorded.
MOST_IN_PLACE = 4
# Fewest lines of an operation that is worth a call. Source: not recorded.
SHORTEST_CALLED = 40
# Points of a nest from which rare arguments are looked after in place. Around a call no constant stays in a register: a sine
# times a cosine takes 1.06 times as long (Zen 4), and a kernel of ten operations half as long to compile.
MANY_POINTS = 16384
# By this, LLVM saves registers around a call where the call stands, off the usual path.
COLD = 'passthrough = ["cold", "noinline"]'


@dataclass(frozen=True)
class MathFunction:
    """A function that a kernel calls.

    body: the lines that make `result` of `arguments`; lines: how many of them are no constants; calls: what they call.
    """

    name: str
    arguments: tuple[Ssa, ...]
    body: tuple[str, ...]
    result: Ssa
    lines: int
    calls: frozenset[str]
    is_rare: bool = False

    @property
    def types(self) -> str:
        return f"({', '.join(argument.type for argument in self.arguments)}) -> {self.result.type}"

    @property
    def declaration(self) -> str:
        cold = f" attributes {{{COLD}}}" if self.is_rare else ""
        return f"func.func private @{self.name}{self.types}{cold}"

    def text(self, attribute: str) -> str:
        """The function with this attribute."""
        arguments = ", ".join(f"{argument.name}: {argument.type}" for argument in self.arguments)
        listed = f"{attribute}, {COLD}" if self.is_rare else attribute
        head = (
            f"func.func @{self.name}({arguments}) -> {self.result.type} attributes {{{listed}}} {{"
        )
        return "\n".join([head, *self.body, f"return {self.result.name} : {self.result.type}", "}"])


class MathFunctions:
    """Writes one kernel's elementwise operations.

    Attributes:
      called: the functions that it calls; their names start with the kernel's.
      points: of the nest that is being written, in all programs together.
    """

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.called: list[MathFunction] = []
        self.points = 0
        self._rare_lines = 0  # that calls have spared
        self._called: dict[tuple, MathFunction] = {}
        self._written: defaultdict[tuple, dict[int, Expr]] = defaultdict(
            dict
        )  # by id, kept so that it stays theirs

    def emit(self, b: Builder, expr: Op, args: list[Ssa]) -> Ssa:
        """The operation's result, of operands that all have b's lanes."""
        info = expr.info
        rule = elementwise.RULES.lookup(info.primitive)

        def compute(builder: Builder, *operands: Ssa) -> Ssa:
            return rule(builder, info, *operands)

        key = self._key(b, info, args)
        if len(self._written[key]) < MOST_IN_PLACE or id(expr) in self._written[key]:
            counted, before = _Counted(b.emit), self._rare_lines
            result = compute(b.with_emit(counted.emit), *args)
            if counted.lines + self._rare_lines - before >= SHORTEST_CALLED:
                self._written[key][id(expr)] = expr
            return result
        if key not in self._called:
            self._add(key, _function(self._new_name(info.primitive), b, compute, args))
        return _call(b, self._called[key], args)

    def call_rare(
        self, b: Builder, slow: Callable[..., Ssa], operands: tuple[Ssa, ...], lanes_apart: bool
    ) -> Ssa:
        """slow(b, *operands), as a call where it is long; equal ones call one function.

        lanes_apart: the function takes one lane after the other. LLVM makes dozens of instructions of a vector's product of
        64 bits. Lane by lane, object code of ten operations with two sines takes 42 ms and not 51 (Zen 3). What a call with
        large arguments takes was not measured.
        """
        if self.points >= MANY_POINTS:
            return slow(b, *operands)
        compute = (lambda b, *xs: b.lane_by_lane(slow, *xs)) if lanes_apart else slow
        function = _function(self._new_name("rare"), b, compute, operands, is_rare=True)
        if function.lines < SHORTEST_CALLED:
            return slow(b, *operands)
        self._rare_lines += function.lines
        key = ("rare", function.body, function.types)
        if key not in self._called:
            self._add(key, function)
        return _call(b, self._called[key], operands)

    def _new_name(self, kind: str) -> str:
        return f"{self.kernel}_{kind}{len(self.called)}"

    def _add(self, key: tuple, function: MathFunction) -> None:
        self._called[key] = function
        self.called.append(function)

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
    """Counts the lines that pass it on their way to `emit`."""

    def __init__(self, emit: Emit):
        self.lines, self._emit = 0, emit

    def emit(self, *parts, **attributes) -> str:
        self.lines += operation.Operation(*parts, **attributes).size
        return self._emit(*parts, **attributes)


def _function(
    name: str,
    b: Builder,
    compute: Callable[..., Ssa],
    operands: Sequence[Ssa],
    *,
    is_rare: bool = False,
) -> MathFunction:
    """compute(builder, *operands) as a function of the operands that are no constants."""
    text = Text(approx=b.approx, contract=b.contract, math=b.math)
    inner = text.builder(text.top, b.lanes)
    values = [
        x._replace(name=f"%a{k}") if b.number(x) is None else inner.c(b.number(x), x.el)
        for k, x in enumerate(operands)
    ]
    result = compute(inner, *values)
    lines = sum(op.size for op in text.top.operations)
    text.top.report()
    arguments = tuple(value for value, x in zip(values, operands) if b.number(x) is None)
    constants, at_end = range_reports.definitions(text.constants.values())
    body = (*constants, *operation.lines(text.top.operations), *at_end)
    calls = operation.called(text.top.operations) | range_reports.calls(at_end)
    return MathFunction(name, arguments, body, result, lines, calls, is_rare)


def _call(b: Builder, function: MathFunction, operands: Sequence[Ssa]) -> Ssa:
    passed = tuple(x.name for x in operands if b.number(x) is None)
    syntax = operation.call_syntax(function.name, len(passed))
    return function.result._replace(name=b.emit(operation.CALL, passed, function.types, syntax))
