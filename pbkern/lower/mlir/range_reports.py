"""Reports of numbers that are out of their range (dsl/primitives/in_range.py): collected by loops, looked at behind them.

    %7 = scf.for ... iter_args(%wrong = %none) {
      ... %found = arith.ori %wrong, %mask ...      one operation per vector, no branch, no store
    }
    the function's word on the stack is set where %7 has a sign
    ... at the function's end, a set word is a call of REPORT

Of vectors, elements below zero say that a number is out of its range; a scalar is a boolean, or the number of those that are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .value import Value

# What machine code calls where a number is out of its range; and the two words on a function's stack of which the second is
# set there, and the first elsewhere.
REPORT = "_mlir_ciface_pbk_report"
WORDS = "memref.alloca() {alignment = 64 : i64} : memref<2xi64> // reports"

Emit = Callable[[str], str]


def kinds(found: Sequence[Value]) -> list[tuple[str, int]]:
    """(element type, lanes) of what a loop carries for these: one value for all of a kind."""
    return list(dict.fromkeys((v.el, v.lanes) if v.lanes else ("i64", 0) for v in found))


def none(kind: tuple[str, int], const: Emit) -> Value:
    """Nothing was found yet."""
    el, lanes = kind
    zero = Value("", el, lanes)
    return zero._replace(name=const(f"arith.constant {'dense<0>' if lanes else '0'} : {zero.type}"))


def joined(before: Value, found: Sequence[Value], emit: Emit) -> Value:
    """`before` and what of `found` is of its kind."""
    for v in found:
        if v.lanes and (v.el, v.lanes) == (before.el, before.lanes):
            before = before._replace(name=emit(f"arith.ori {before.name}, {v.name} : {before.type}"))
        elif not v.lanes and not before.lanes:
            # A count, not a disjunction: x86 compares and adds the carry, two instructions.
            count = v.name if v.el == "i64" else emit(f"arith.extui {v.name} : i1 to i64")
            before = before._replace(name=emit(f"arith.addi {before.name}, {count} : i64"))
    return before


def written(found: Sequence[Value], emit: Emit, const: Emit) -> str:
    """The last lines of a block with these reports: the function's word is set if one of them says so. No branch: that would
    keep loops around the block from holding constants in registers."""
    tests = [_is_any(joined(none(kind, const), found, emit), kind, emit, const) for kind in kinds(found)]
    some = tests[0]
    for test in tests[1:]:
        some = emit(f"arith.ori {some}, {test} : i1")
    place = emit(f"arith.index_castui {some} : i1 to index")
    return f"memref.store {const('arith.constant 1 : i64')}, {const(WORDS)}[{place}] : memref<2xi64>"


def _is_any(found: Value, kind: tuple[str, int], emit: Emit, const: Emit) -> str:
    zero = none(kind, const).name
    if not found.lanes:
        return emit(f"arith.cmpi ne, {found.name}, {zero} : i64")
    signs = found._replace(name=emit(f"arith.cmpi slt, {found.name}, {zero} : {found.type}"), el="i1")
    return emit(f"vector.reduction <or>, {signs.name} : {signs.type} into i1")


def reporting(lines: Sequence[str]) -> list[str]:
    """Lines of a function with reports, with the word cleared before them and looked at before the return."""
    at = next(k for k, line in enumerate(lines) if line.endswith(WORDS))
    words, kind = lines[at].partition(" =")[0], "memref<2xi64>"
    start = ["%reports_none = arith.constant 0 : i64", "%reports_second = arith.constant 1 : index",
             f"memref.store %reports_none, {words}[%reports_second] : {kind}"]  # fmt: skip
    end = [f"%reports_some = memref.load {words}[%reports_second] : {kind}",
           "%reports_any = arith.cmpi ne, %reports_some, %reports_none : i64",
           "scf.if %reports_any {", f"func.call @{REPORT}() : () -> ()", "}"]  # fmt: skip
    last = max(k for k, line in enumerate(lines) if line.startswith("return"))
    return [*lines[: at + 1], *start, *lines[at + 1 : last], *end, *lines[last:]]
