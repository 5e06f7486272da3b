"""Index arrays that are affine in their position, such as `program_id * block + arange(block)`.

They address runs of elements at a constant distance, as slices do, which are loaded and stored as
vectors and in any order. Kernels in the style of Triton address all memory so. Scalars that only
running the kernel tells may be part of the sum.

Where such a scalar is a stride, as in `row * stride + column`, each row is a run of its own, but
for what dynamic_strides.py calls bends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pbkern.core.affine import Affine
from pbkern.lower.nest.index_tests import Folder, interval
from pbkern.lower.nest.ir import Expr

from .dynamic_strides import UNKNOWN, Steps, steps_along
from .scalar_evolution import bounds_of, known
from .values import ZERO, Index, Lazy, Literal, Value, dims_index

# Values looked at per index array: longer arithmetic, as that of random numbers, is not affine.
MOST_VALUES = 64


def along(axis: int) -> str:
    """The symbol that stands for the position along dimension d of an index array."""
    return f"@along{axis}"


@dataclass
class AffineArray:
    """`value` over `along(d)` and the symbols of statements.

    `scalars`: names in it of values not yet evaluated; `bounds` of symbols, where known.
    """

    value: Affine
    scalars: dict[str, Value]
    bounds: dict[str, tuple[int, int]]

    def at(self, ix: Index) -> Affine:
        """The element at a position."""
        places = {along(axis): position for axis, position in enumerate(ix)}
        return self.value.substitute(places.get)

    def evaluated(self, builder) -> AffineArray:
        """Evaluates the scalars here."""
        symbols = {name: builder.index_symbol(scalar) for name, scalar in self.scalars.items()}
        return AffineArray(self.value.substitute(symbols.get), {}, self.bounds)

    def inside(self, extent: int) -> bool:
        """Whether all elements certainly are in [0, extent)."""
        found = interval(self.value, self.bounds)
        return found is not None and found[0] >= 0 and found[1] < extent


def affine_array(builder, v: Value, mask: Value | None = None) -> AffineArray | None:
    """An integer array as an affine function of the position; None where it is not known to be one.

    With a mask, which broadcasts to the array's shape, it is right only where that holds.
    """
    finder = _Finder(builder, v.shape)
    if mask is not None:
        at = dims_index([(along(axis), size) for axis, size in enumerate(v.shape)])[
            len(v.shape) - len(mask.shape) :
        ]
        test = finder.element(
            mask, tuple(i if size != 1 else ZERO for i, size in zip(at, mask.shape))
        )
        if test is not None:
            finder.fold.assume(test)
            finder.seen.clear()
    expr = finder.element(v, dims_index([(along(axis), size) for axis, size in enumerate(v.shape)]))
    if expr is None or expr.kind not in ("index", "const") or expr.dtype.kind not in "iu":
        return None
    value = expr.info if expr.kind == "index" else Affine((), int(expr.info))
    return AffineArray(
        value,
        {name: scalar for name, scalar in finder.scalars.items() if name in value.symbols},
        finder.bounds,
    )


def row_steps(builder, v: Value) -> Steps:
    """Describes how an index array moves along its last dimension."""
    v = builder.resolve(v)
    if not isinstance(v, Lazy) or not v.shape or v.dtype.kind not in "iu":
        return UNKNOWN
    if id(v) not in builder.rows:
        finder = _Finder(builder, v.shape)
        e = finder.element(
            v, dims_index([(along(axis), size) for axis, size in enumerate(v.shape)])
        )
        found = UNKNOWN if e is None else steps_along(e, along(len(v.shape) - 1))
        builder.rows[id(v)] = found
        if (
            found.step and found.choices
        ):  # it is not stored, nor what it is made of: that tells of the choices
            builder.unstored |= {key for key, _ in finder.seen}
    return builder.rows[id(v)]


def are_distinct(arrays: list[AffineArray], shape: tuple[int, ...]) -> bool:
    """Whether no two positions have the same elements in all of `arrays`."""
    left = {axis for axis, size in enumerate(shape) if size > 1}
    for array in arrays:
        reach = 0
        own = [d for d in left if array.value.coefficient(along(d))]
        for dim in sorted(own, key=lambda d: abs(array.value.coefficient(along(d)))):
            step = abs(array.value.coefficient(along(dim)))
            if step <= reach:
                break
            reach += step * (shape[dim] - 1)
        else:
            # Dimensions that other arrays have already told apart add nothing here that could make
            # two elements meet.
            if all(
                not array.value.coefficient(along(axis))
                for axis, size in enumerate(shape)
                if size > 1 and axis not in own
            ):
                left -= set(own)
    return not left


def _positions(shape: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    return {along(axis): (0, max(size - 1, 0)) for axis, size in enumerate(shape)}


@dataclass
class _Finder:
    """Pulls lazy values at an index without deciding anything about them."""

    builder: object
    shape: tuple[int, ...]
    scalars: dict[str, Value] = field(default_factory=dict)
    seen: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bounds = {**self.builder.bounds, **_positions(self.shape)}
        self.fold = Folder(self.builder.pool, self.bounds)

    def element(self, v: Value, ix: Index) -> Expr | None:
        v = self.builder.resolve(v)
        key = (id(v), ix)
        if key not in self.seen:
            if len(self.seen) >= MOST_VALUES:
                return None
            self.seen[key] = None
            self.seen[key] = self._element(v, ix)
        return self.seen[key]

    def _element(self, v: Value, ix: Index) -> Expr | None:
        if isinstance(v, Literal):
            return v.at(self.builder.pool, ix, False)
        if isinstance(v, Lazy):
            operands = [self.element(operand, i) for operand, i in zip(v.operands, v.route(ix))]
            if None not in operands:
                expr = self.fold(v.combine(self.builder.pool, ix, operands))
                if (
                    expr.kind in ("index", "const", "range")
                    or expr.dtype == np.bool_
                    or v.shape
                    and expr.dtype.kind in "iu"
                ):
                    return expr
        if v.shape == () and v.dtype.kind == "i" and v.dtype.itemsize >= 4:
            name = f"@scalar{len(self.scalars)}"
            self.scalars[name] = v
            expr = known(self.builder, v)
            if expr is not None and (found := bounds_of(self.builder, expr)) is not None:
                self.bounds[name] = found
            return self.builder.pool.make("index", v.dtype, Affine.symbol(name))
        return None
