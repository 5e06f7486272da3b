"""NestContext: what passes over nests may ask for: fresh names, interned expressions, scratch, the target's options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.lower.build_options import BuildOptions
from pbkern.lower.math.elementwise import EqnInfo

from .edit.collapse_dims import Aliases
from .ir import Buf, Expr, Names, Nest, Op, Pool, Stmt, nodes

BOOL = np.dtype(bool)
INT32 = np.dtype(np.int32)
UINT32 = np.dtype(np.uint32)
# The greatest value of an int32.
INT32_MAX = 2**31 - 1
Options = TypeVar("Options", bound=BuildOptions)


@dataclass(frozen=True)
class NestPolicy:
    """Answers of a target to passes that every target may run; these are of one that says nothing of vectors and caches.

    Attributes:
      step_bytes: bytes of neighbouring elements that are computed together.
      near_bytes: of the nearest cache.
      row_bytes: of the longest row that later passes copy near, where several statements read it.
      mask_strip: elements of a masked dimension that are left out together.
    """

    step_bytes: int = 0
    near_bytes: int = 0
    row_bytes: int = 0
    mask_strip: int = 64

    def vector_dimension(self, nest: Nest) -> str | None:
        """The dimension whose neighbouring elements are computed together."""
        return None

    def lanes(self, nest: Nest, dim: str | None = None) -> int:
        """Elements of the widest type of a nest that are computed together, along a dimension if that matters."""
        return 1

    def is_far(self, buf: Buf) -> bool:
        """Whether a buffer comes from memory or the last-level cache."""
        return False

    def prefetching(self, nest: Nest, ahead: Mapping[Buf, int]) -> Nest:
        """The nest, which asks for elements of root buffers so far ahead of what it loads."""
        return nest

    def keeps_in_registers(self, stmt: Stmt) -> bool:
        """Whether it is a loop that keeps scratch in registers, which branches inside would end."""
        return False

    def cycles(self, nest: Nest, far_cycles: float) -> float:
        """Cycles of a nest that shares values between neighbouring points, if a vector from or to afar takes `far_cycles`."""
        return 0.0

    def overwriting(self, nest: Nest, buffers: frozenset[Buf]) -> Nest:
        """The nest, which stores to root buffers over what it has loaded."""
        return nest

    def loads_ahead(self, nest: Nest) -> bool:
        """Whether a nest has loaded all that it overwrites before it stores there."""
        return False


class NestContext(Generic[Options]):
    """Belongs to the statements of one body, from which no expression goes to another's.

    Attributes:
      options: the target's; the shared passes read of it what BuildOptions has.
      policy: the target's answers about nests.
      pool, names: where expressions and names of this body come from.
      bounds: (smallest, largest) value of symbols that are known: grid indices, counters, Lets.
      persistent: scratch whose contents outlive the statements.
      fresh: those of them that every program overwrites before it reads them.
      aliases: buffers under other shapes.
      programs: that run the statements.
    """

    def __init__(self, options: Options, names: Names | None = None):
        self.options = options
        policy = options.policy
        assert policy is None or isinstance(policy, NestPolicy), policy
        self.policy = policy or NestPolicy()
        self.pool, self.names = Pool(), names or Names()
        self.bounds: dict[str, tuple[int, int]] = {}
        self.persistent: frozenset[Buf] = frozenset()
        self.fresh: frozenset[Buf] = frozenset()
        self.aliases = Aliases()
        self.programs = 1
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
