"""RuleBuilder: what rules ask of the builder of a body.

lower/build.py implements it, and imports the rules, which know it by this protocol alone.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.jax_types import Atom
from pbkern.lower.nest.ir import Expr, Names, Pool, Stmt
from pbkern.lower.values.draft import NestDraft

from .dynamic_strides import Steps
from .items import ControlItem, Item, RefView
from .values import Index, SomeValue, Stored, Value


class RuleBuilder(Protocol):
    """Makers of expressions and values, and the lists that statements and items are appended to.

    Attributes:
      refs: variable of a Ref -> the Ref.
      rows: id of an index array -> how its rows move (affine_index_arrays.py).
      unstored: ids of values that are not stored for it.
    """

    pool: Pool
    names: Names
    stmts: list[Stmt]
    items: list[Item]
    refs: dict[Any, RefView]  # keys: variables of jaxprs, which have no common type
    rows: dict[int, Steps]
    unstored: set[int]

    @property
    def bounds(self) -> dict[str, tuple[int, int]]: ...

    def line(self, eqn) -> str | None: ...

    def op(self, primitive: str, dtype, *args: Expr, params=None) -> Expr: ...

    def const(self, value, dtype) -> Expr: ...

    def select(self, test: Expr, true: Expr, false: Expr) -> Expr: ...

    def clamped(self, expr: Expr, limit: int | None) -> Expr: ...

    def cast(self, value: Value, dtype: np.dtype) -> Value: ...

    def new(self, value: SomeValue) -> SomeValue: ...

    def read(self, env: dict, atom: Atom) -> Value: ...

    def resolve(self, value: Value) -> Value: ...

    def pull(
        self,
        value: Value,
        ix: Index,
        nest: NestDraft | None = None,
        guard: bool = False,
        memo: dict | None = None,
    ) -> Expr: ...

    def index_symbol(self, value: Value, clamp: int | None = None) -> Affine[str]: ...

    def append_control(self, item: ControlItem, results: list[Stored]) -> None: ...

    def gather_expr(
        self, operand: Stored, axes: list[Affine], starts: dict[int, Expr], sizes, fill
    ) -> Expr: ...
