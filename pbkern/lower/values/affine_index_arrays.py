"""Index arrays that are affine in their position, such as `program_id * block + arange(block)`.

They address runs of elements at a constant distance, as slices do, which are loaded and stored as
vectors and in any order. Kernels in the style of Triton address all memory so. Scalars that only
running the kernel tells may be part of the sum.

Where such a scalar is a stride, as in `row * stride + column`, each row is a run of its own, but
for what dynamic_strides.py calls bends.
"""

from __future__ import annotations

from dataclasses import field

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.addresses import as_affine
from pbkern.lower.nest.conditions.index_tests import Folder, interval
from pbkern.lower.nest.ir import Const, Expr, IndexValue, InRange

from .dynamic_strides import UNKNOWN, Steps, steps_along
from .rule_builder import RuleBuilder
from .scalar_evolution import bounds_of, known
from .values import ZERO, Index, Lazy, Literal, Value, dims_index

# Values looked at per index array: longer arithmetic, as that of random numbers, is not affine.
MOST_VALUES = 64


def along(axis: int) -> str:
    """The symbol that stands for the position along dimension axis of an index array."""
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

    def evaluated(self, builder: RuleBuilder) -> AffineArray:
        """Evaluates the scalars here."""
        symbols = {name: builder.index_symbol(scalar) for name, scalar in self.scalars.items()}
        return AffineArray(self.value.substitute(symbols.get), {}, self.bounds)

    def inside(self, extent: int) -> bool:
        """Whether all elements certainly are in [0, extent)."""
        bounds = interval(self.value, self.bounds)
        return bounds is not None and bounds[0] >= 0 and bounds[1] < extent


def affine_array(
    builder: RuleBuilder, source: Value, mask: Value | None = None
) -> AffineArray | None:
    """An integer array as an affine function of the position; None where it is not known to be one.

    With a mask, which broadcasts to the array's shape, it is right only where that holds.
    """
    finder = _Finder(builder, source.shape)
    if mask is not None:
        at = dims_index([(along(axis), size) for axis, size in enumerate(source.shape)])[
            len(source.shape) - len(mask.shape) :
        ]
        test = finder.element(
            mask, tuple(i if size != 1 else ZERO for i, size in zip(at, mask.shape))
        )
        if test is not None:
            finder.fold.assume(test)
            finder.seen.clear()
    expr = finder.element(
        source, dims_index([(along(axis), size) for axis, size in enumerate(source.shape)])
    )
    value = None if expr is None or expr.dtype.kind not in "iu" else as_affine(expr)
    if value is None:
        return None
    return AffineArray(
        value,
        {name: scalar for name, scalar in finder.scalars.items() if name in value.symbols},
        finder.bounds,
    )


def row_steps(builder: RuleBuilder, value: Value) -> Steps:
    """Describes how an index array moves along its last dimension."""
    value = builder.resolve(value)
    if not isinstance(value, Lazy) or not value.shape or value.dtype.kind not in "iu":
        return UNKNOWN
    if id(value) not in builder.rows:
        finder = _Finder(builder, value.shape)
        expr = finder.element(
            value, dims_index([(along(axis), size) for axis, size in enumerate(value.shape)])
        )
        steps = UNKNOWN if expr is None else steps_along(expr, along(len(value.shape) - 1))
        builder.rows[id(value)] = steps
        if (
            steps.step and steps.choices
        ):  # it is not stored, nor what it is made of: that tells of the choices
            builder.unstored |= {key for key, _ in finder.seen}
    return builder.rows[id(value)]


def are_distinct(arrays: list[AffineArray], shape: tuple[int, ...]) -> bool:
    """Whether no two positions have the same elements in all of `arrays`."""
    left = {axis for axis, size in enumerate(shape) if size > 1}
    for array in arrays:
        reach = 0
        dims = [dimension for dimension in left if array.value.coefficient(along(dimension))]
        for dim in sorted(
            dims, key=lambda dimension: abs(array.value.coefficient(along(dimension)))
        ):
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
                if size > 1 and axis not in dims
            ):
                left -= set(dims)
    return not left


def _positions(shape: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    return {along(axis): (0, max(size - 1, 0)) for axis, size in enumerate(shape)}


@dataclass
class _Finder:
    """Pulls lazy values at an index without deciding anything about them."""

    builder: RuleBuilder
    shape: tuple[int, ...]
    scalars: dict[str, Value] = field(default_factory=dict)
    seen: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bounds = {**self.builder.bounds, **_positions(self.shape)}
        self.fold = Folder(self.builder.pool, self.bounds)

    def element(self, value: Value, ix: Index) -> Expr | None:
        value = self.builder.resolve(value)
        key = (id(value), ix)
        if key not in self.seen:
            if len(self.seen) >= MOST_VALUES:
                return None
            self.seen[key] = None
            self.seen[key] = self._element(value, ix)
        return self.seen[key]

    def _element(self, value: Value, ix: Index) -> Expr | None:
        if isinstance(value, Literal):
            return value.at(self.builder.pool, ix, False)
        if isinstance(value, Lazy):
            elements = [
                self.element(operand, i) for operand, i in zip(value.operands, value.route(ix))
            ]
            operands = [element for element in elements if element is not None]
            if len(operands) == len(elements):
                expr = self.fold(value.combine(self.builder.pool, ix, operands))
                if (
                    isinstance(expr, IndexValue | Const | InRange)
                    or expr.dtype == np.bool_
                    or (value.shape and expr.dtype.kind in "iu")
                ):
                    return expr
        if value.shape == () and value.dtype.kind == "i" and value.dtype.itemsize >= 4:
            name = f"@scalar{len(self.scalars)}"
            self.scalars[name] = value
            scalar = known(self.builder, value)
            if scalar is not None and (bounds := bounds_of(self.builder, scalar)) is not None:
                self.bounds[name] = bounds
            return self.builder.pool.index(value.dtype, Affine.symbol(name))
        return None
