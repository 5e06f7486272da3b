"""Part of a buffer, or an expression -> a copy of it, from which it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.ir import Buf, Expr, Nest, Pool, Store
from pbkern.lower.nest.tiles.axes import row_major

Index = tuple[Affine, ...]


@dataclass(frozen=True)
class CopySpan:
    """A dimension of a copy: `size` places, `step` apart along an axis of the source."""

    axis: int
    step: int
    size: int


def copied(
    source: Callable[[Index], Expr],
    start: Index,
    spans: Mapping[str, CopySpan],
    buf: Buf,
    arranged: Callable[[Sequence[Affine]], Index],
    at: str | None,
) -> Nest:
    """A nest that stores `source` at all places of spans to a buffer; its dimensions are called as the spans are.

                                             nest [d<10]
        nest [i<8, j<3]                        t[d] = x[d]
          y[i, j] = x[i + j]        ->       nest [i<8, j<3]
                                               y[i, j] = t[i + j]

    `arranged`: where in the copy these places are. To read it in place of the source is legal where nothing stores to the
    source between, and all that is read is a place of the spans.
    """
    index = list(start)
    for name, span in spans.items():
        index[span.axis] += Affine.symbol(name, span.step)
    store = Store(buf, arranged([*map(Affine.symbol, spans)]), source(tuple(index)))
    return Nest({name: span.size for name, span in spans.items()}, stores=(store,), at=at)


def staged(
    nest: Nest, expr: Expr, buf: Buf, axes: Sequence[Sequence[str]], pool: Pool
) -> tuple[Nest, Nest]:
    """(the nest that stores an expression of some of the dimensions, the nest that reads it).

                                              nest [i<8, k<9]
        nest [i<8, j<4, k<9*]                   t[i, k] = f(a[i, k])
          acc0 dot= f(a[i, k]), b[k, j]  ->   nest [i<8, j<4, k<9*]
                                                acc0 dot= t[i, k], b[k, j]

    `axes`: the dimensions along each axis of the buffer, in order. Legal where the nest stores to nothing that the
    expression reads, and the
    expression has no other dimensions of the nest.
    """
    index = tuple(row_major({dim: nest.dims[dim] for dim in dims}) for dims in axes)
    value = pool.load(buf.dtype, buf, index)
    copy = Nest(
        {dim: nest.dims[dim] for dims in axes for dim in dims},
        stores=(Store(buf, index, expr),),
        at=nest.at,
    )
    return copy, nest.mapped(pool.rewriter(lambda node: value if node is expr else None))


@dataclass(frozen=True)
class Box:
    """Places `base` + low .. base + high of a buffer, per axis."""

    base: Index
    low: tuple[int, ...]
    high: tuple[int, ...]

    @staticmethod
    def around(index: Index, dims: Mapping[str, int]) -> Box:
        """The smallest box that holds an index at all points of dimensions; its base is what they do not move."""
        base = [Affine(tuple(term for term in i.terms if term[0] not in dims)) for i in index]
        reach = [(i - fixed).bounds(dims.__getitem__) for i, fixed in zip(index, base)]
        return Box(tuple(base), tuple(low for low, _ in reach), tuple(high for _, high in reach))

    def joined(self, other: Box) -> Box:
        """The smallest box that holds two of one base."""
        low, high = map(min, self.low, other.low), map(max, self.high, other.high)
        return Box(self.base, tuple(low), tuple(high))

    @property
    def start(self) -> Index:
        return tuple(base + low for base, low in zip(self.base, self.low))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(high - low + 1 for low, high in zip(self.low, self.high))

    def within(self, index: Index) -> Index:
        """The place of an index in the box."""
        return tuple(position - start for position, start in zip(index, self.start))

    def copied(
        self,
        source: Callable[[Index], Expr],
        buf: Buf,
        names: Iterable[str],
        at: str | None,
    ) -> Nest:
        """A nest over dimensions of these names that stores all places of the box to a buffer, from its first element on."""
        spans = {
            name: CopySpan(axis, 1, size)
            for axis, (name, size) in enumerate(zip(names, self.shape))
        }
        return copied(source, self.start, spans, buf, tuple, at)
