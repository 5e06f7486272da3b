"""Reports of numbers that are out of their range (dsl/primitives/in_range.py): collected by loops, looked at behind them.

%7 = scf.for ... iter_args(%greatest = %none) {
  ... %found = arith.maxui %greatest, %index ...      one operation per vector, no branch, no store
}
the function's word on the stack is set where %7 is not below the limit
... at the function's end, a set word is a call of REPORT
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .element_types import BITS
from .operation import Emit, Operation
from .value import Ssa

# What machine code calls where a number is out of its range; and the two words on a function's
# stack of which the second is set there, and the first elsewhere.
REPORT = "_mlir_ciface_pbk_report"
WORDS = ("() {alignment = 64 : i64}", "memref<2xi64> // reports", "memref.alloca")
WORDS_TYPE = "memref<2xi64>"


class RangeReport(NamedTuple):
    """Value that says whether a number is out of its range.

    value: a boolean; a count of numbers that are (i64); with a limit, a vector whose elements,
    without sign, must be below it; without one, a vector of integers of which those below zero are
    out of range. halves: elements are lower and upper halves of such of 64 bits.
    """

    value: Ssa
    limit: int = 0
    halves: bool = False

    @property
    def kind(self) -> RangeReport:
        """Value that a loop carries for this one: equal for all of a kind, which have found nothing yet; it has no name."""
        el, lanes = (self.value.el, self.value.lanes) if self.value.lanes else ("i64", 0)
        if self.limit and el == "i64":  # AVX2 has no comparison of 64 bits without sign
            return RangeReport(Ssa("", "i32", 2 * lanes), self.limit, True)
        return RangeReport(Ssa("", el, lanes), self.limit, self.halves)


def is_comparable(el: str, limit: int) -> bool:
    """Whether vectors can be compared with this limit: as 64 bits, whose upper halves must be zero."""
    return limit < 1 << min(BITS[el], 32)


def nothing(reports: Sequence[RangeReport], const: Emit) -> list[RangeReport]:
    """Per kind of report: nothing was found."""
    kinds = dict.fromkeys(report.kind for report in reports)
    return [
        kind._replace(value=kind.value._replace(name=_number(0, kind.value, const)))
        for kind in kinds
    ]


def joined(before: RangeReport, reports: Sequence[RangeReport], emit: Emit) -> RangeReport:
    """`before` and what of `reports` is of its kind."""
    so_far, kind = before.value, before.kind
    for report in reports:
        if report.kind != kind:
            continue
        name, operation = report.value.name, "arith.maxui" if report.limit else "arith.ori"
        if (
            not report.value.lanes
        ):  # a count, not a disjunction: x86 compares and adds the carry, two instructions
            operation = "arith.addi"
            name = emit("arith.extui", (name,), "i1 to i64") if report.value.el == "i1" else name
        elif report.value.el != so_far.el:
            name = emit("vector.bitcast", (name,), f"{report.value.type} to {so_far.type}")
        so_far = so_far._replace(name=emit(operation, (so_far.name, name), so_far.type))
    return before._replace(value=so_far)


def written(reports: Sequence[RangeReport], emit: Emit, const: Emit) -> Operation:
    """The last operation of a block with these reports: the function's word is set if one of them says so.

    No branch: that would keep loops around the block from holding constants in registers.
    """
    some, *rest = (
        _is_any(joined(none, reports, emit), emit, const) for none in nothing(reports, const)
    )
    for test in rest:
        some = emit("arith.ori", (some, test), "i1")
    place = emit("arith.index_castui", (some,), "i1 to index")
    return Operation("memref.store", (const("1", "i64"), const(*WORDS), place), WORDS_TYPE)


def _is_any(report: RangeReport, emit: Emit, const: Emit) -> str:
    """Whether a number was out of its range."""
    value, limit = report.value, report.limit
    if not value.lanes:
        return emit("arith.cmpi", (value.name, _number(0, value, const)), "i64", " ne, %s, %s")
    bound = [limit, 1] * (value.lanes // 2) if report.halves else limit
    predicate = "uge" if limit else "slt"
    operands = (value.name, _number(bound, value, const))
    tests = value._replace(
        name=emit("arith.cmpi", operands, value.type, f" {predicate}, %s, %s"), el="i1"
    )
    return emit("vector.reduction", (tests.name,), f"{tests.type} into i1", " <or>, %s")


def _number(n: int | list[int], like: Ssa, const: Emit) -> str:
    """The name of a constant."""
    return const(f"dense<{n}>" if like.lanes else str(n), like.type)


def calls(at_end: Sequence[str]) -> frozenset[str]:
    """Names of the functions that lines before a function's return call, see `definitions`."""
    return frozenset([REPORT] if at_end else [])


def definitions(constants: Iterable[Operation]) -> tuple[list[str], list[str]]:
    """Lines that define a function's constants, and lines before its return.

    With reports, the word is cleared where it is defined, and looked at before the return.
    """
    start, end = [], []
    for constant in constants:
        start.append(constant.head)
        if (constant.syntax, constant.types, constant.name) == WORDS:
            words = constant.result
            start += [
                "%reports_none = arith.constant 0 : i64",
                "%reports_second = arith.constant 1 : index",
                f"memref.store %reports_none, {words}[%reports_second] : {WORDS_TYPE}",
            ]
            end = [
                f"%reports_some = memref.load {words}[%reports_second] : {WORDS_TYPE}",
                "%reports_any = arith.cmpi ne, %reports_some, %reports_none : i64",
                "scf.if %reports_any {",
                f"func.call @{REPORT}() : () -> ()",
                "}",
            ]
    return start, end
