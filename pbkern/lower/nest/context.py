"""NestContext: what passes over nests may ask for: fresh names, interned expressions, scratch, the target's options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.lower.build_options import BuildOptions
from pbkern.lower.math.elementwise import EqnInfo

from .edit.collapse_dims import Aliases
from .ir import Buf, Expr, Names, Op, Pool, nodes

BOOL = np.dtype(bool)
INT32 = np.dtype(np.int32)
UINT32 = np.dtype(np.uint32)
# The greatest value of an int32.
INT32_MAX = 2**31 - 1
Options = TypeVar("Options", bound=BuildOptions)


class NestContext(Generic[Options]):
    """Belongs to the statements of one body, from which no expression goes to another's.

    Attributes:
      options: the target's; the shared passes read of it what BuildOptions has.
      pool, names: where expressions and names of this body come from.
      bounds: (smallest, largest) value of symbols that are known: grid indices, counters, Lets.
      kept: scratch whose contents outlive the statements.
      aliases: buffers under other shapes.
    """

    def __init__(self, options: Options, names: Names | None = None):
        self.options = options
        self.pool, self.names = Pool(), names or Names()
        self.bounds: dict[str, tuple[int, int]] = {}
        self.kept: frozenset[Buf] = frozenset()
        self.aliases = Aliases()
        self._infos: dict[tuple, EqnInfo] = {}

    def info(
        self,
        primitive: str,
        out_dtype: Any,
        in_dtypes: Iterable,
        params: Mapping | None = None,
        at: str | None = None,
    ) -> EqnInfo:
        """Facts of an operation, one object for equal ones: expressions are interned by it."""
        params = dict(params or {})
        key = (
            primitive,
            np.dtype(out_dtype),
            tuple(in_dtypes),
            str(sorted(params.items(), key=lambda pair: pair[0])),
        )
        if key not in self._infos:
            self._infos[key] = EqnInfo(primitive, params, tuple(in_dtypes), np.dtype(out_dtype), at)
        return self._infos[key]

    def op(self, primitive: str, dtype: Any, *args: Expr, params: Mapping | None = None) -> Expr:
        return self.pool.op(
            dtype, self.info(primitive, dtype, [arg.dtype for arg in args], params), args
        )

    def const(self, value: Any, dtype: Any) -> Expr:
        return self.pool.const(np.dtype(dtype), np.asarray(value, dtype)[()])

    def select(self, test: Expr, true: Expr, false: Expr) -> Expr:
        return self.op("select_n", true.dtype, test, false, true)

    def clamped(self, expr: Expr, limit: int | None) -> Expr:
        """An integer kept in [0, limit], for use as an index; a bool as 0 or 1; without a limit as it is."""
        if expr.dtype == BOOL:
            expr = self.op("convert_element_type", INT32, expr, params={"new_dtype": INT32})
        if limit is None:
            return expr
        if is_reported_outside(expr, limit):
            # Any place will do for an index that has been reported: one comparison of 32 bits
            # without sign finds one.
            low = self.op("convert_element_type", UINT32, expr, params={"new_dtype": UINT32})
            low = self.op("min", UINT32, low, self.const(limit, UINT32))
            return self.op("convert_element_type", INT32, low, params={"new_dtype": INT32})
        if expr.dtype.kind == "i":
            expr = self.op("max", expr.dtype, expr, self.const(0, expr.dtype))
        limit = min(limit, np.iinfo(expr.dtype).max)
        return self.op("min", expr.dtype, expr, self.const(limit, expr.dtype))

    def new_buffer(self, shape: Sequence[int], dtype: Any, step: int | None = None) -> Buf:
        """Scratch of a program, from here to its last use."""
        return Buf(self.names("%t"), tuple(shape), np.dtype(dtype), arena=True, step=step)


def reports(expr: Expr) -> bool:
    """Whether an expression tells the process about elements, beside its value."""
    return any(
        isinstance(node, Op)
        and (row := ELEMENTWISE.get(node.info.primitive)) is not None
        and row.reports
        for node in nodes([expr])
    )


def is_reported_outside(expr: Expr, limit: int) -> bool:
    """Whether an integer has passed a check by which everything outside [0, limit] is reported.

    The check is dsl/primitives/in_range.py. Conversions to integers that hold [0, limit] may follow.
    """
    while isinstance(expr, Op) and expr.info.primitive == "convert_element_type":
        if expr.dtype.kind not in "iu" or np.iinfo(expr.dtype).max < limit:
            return False
        (expr,) = expr.args
    if not isinstance(expr, Op) or expr.info.primitive != "in_range" or limit > INT32_MAX:
        return False
    return 0 <= expr.info.params["low"] < expr.info.params["high"] <= limit + 1
