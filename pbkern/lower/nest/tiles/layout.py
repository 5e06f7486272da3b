"""Layouts: which element of a tile a register of a lane of a warp holds, and where a swizzled tile keeps it.

A layout is linear over bits: each bit of an input moves the element by a fixed vector, and the vectors of all set bits are
joined by exclusive or.

    accumulator of mma.m16n8   register: (0,1) (8,0)   lane: (0,2) (0,4) (1,0) (2,0) (4,0)
    register 3 = 0b11, lane 5 = 0b00101     ->     (0,1) ^ (8,0) ^ (0,2) ^ (1,0)  =  row 9, column 3

One class describes fragments of matrix instructions, tiles made of many of them, addresses that lanes send, and the order of
elements in memory; composing two of them converts between them. Sizes are powers of two.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass

Vector = tuple[int, ...]
T = TypeVar("T", int, np.ndarray)

# Bytes of one row of all banks of a GPU's shared memory: 32 banks of 4 bytes.
# Source: CUDA C++ Programming Guide, shared memory; AMD CDNA 3 ISA, LDS.
BANK_ROW_BYTES = 128


def _joined(vectors: Iterable[Vector], axes: int) -> Vector:
    return functools.reduce(lambda x, y: tuple(map(operator.xor, x, y)), vectors, (0,) * axes)


@dataclass(frozen=True)
class Layout:
    """(register, lane, warp, step) -> (row, column), or any other named inputs -> numbers.

    inputs: (name, vector of each of its bits, the lowest first). axes: numbers of an element's place.
    """

    inputs: tuple[tuple[str, tuple[Vector, ...]], ...]
    axes: int = 2

    @staticmethod
    def of(axes: int = 2, **inputs: Iterable[Vector]) -> Layout:
        return Layout(tuple((name, tuple(vectors)) for name, vectors in inputs.items()), axes)

    def vectors(self, name: str) -> tuple[Vector, ...]:
        """The vector of each bit of an input; none for an input that the layout lacks."""
        return dict(self.inputs).get(name, ())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.inputs)

    def size(self, name: str) -> int:
        """Values of an input."""
        return 1 << len(self.vectors(name))

    def place(self, **values: int) -> Vector:
        """The element's place; inputs that are left out are 0."""
        bits = (
            vector
            for name, value in values.items()
            for bit, vector in enumerate(self.vectors(name))
            if value >> bit & 1
        )
        return _joined(bits, self.axes)

    def with_bits(self, name: str, *vectors: Vector) -> Layout:
        """The layout with further bits of an input, above those that it has."""
        inputs = dict(self.inputs)
        inputs[name] = (*self.vectors(name), *vectors)
        return Layout(tuple(inputs.items()), self.axes)

    def only(self, *names: str) -> Layout:
        """The layout of some inputs, the others being 0."""
        return Layout(tuple(entry for entry in self.inputs if entry[0] in names), self.axes)

    def along(self, axes: Sequence[int]) -> Layout:
        """The layout of an array that has only some axes of the tile; bits that do not move its elements stay."""
        inputs = tuple(
            (name, tuple(tuple(vector[axis] for axis in axes) for vector in vectors))
            for name, vectors in self.inputs
        )
        return Layout(inputs, len(axes))

    def then(self, outer: Layout, *names: str) -> Layout:
        """The composition: places of this layout are values of the outer one's inputs, in the order of `names`."""
        inputs = tuple(
            (name, tuple(outer.place(**dict(zip(names, vector))) for vector in vectors))
            for name, vectors in self.inputs
        )
        return Layout(inputs, outer.axes)

    def inverse(self) -> Layout:
        """Place -> inputs: `place(**{"0": row, "1": column})` gives a value of each of `names`, in their order.

        An element that several inputs hold comes from the one whose extra bits are 0. Raises ValueError where some place
        within the layout's shape has no input.
        """
        sources: dict[Vector, Vector] = {}  # places whose highest bits differ -> inputs
        for at, (_, vectors) in enumerate(self.inputs):
            for bit, vector in enumerate(vectors):
                source = tuple(1 << bit if k == at else 0 for k in range(len(self.inputs)))
                place, source = _reduced(vector, source, sources)
                if any(place):
                    sources[place] = source
        units = tuple(
            (
                str(axis),
                tuple(
                    _reduced(unit, (0,) * len(self.inputs), sources)
                    for unit in steps(size, 1, axis, self.axes)
                ),
            )
            for axis, size in enumerate(self.shape)
        )
        if any(any(rest) for _, solved in units for rest, _ in solved):
            raise ValueError(f"some places of {self.shape} are held by no input of {self}")
        inputs = tuple((axis, tuple(source for _, source in solved)) for axis, solved in units)
        return Layout(inputs, len(self.inputs))

    def converted(self, other: Layout) -> Layout:
        """The conversion of a tile: inputs of the other layout -> those of this one that hold the same element."""
        return other.then(self.inverse(), *map(str, range(self.axes)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Places per axis."""
        every = [vector for _, vectors in self.inputs for vector in vectors]
        return tuple(
            1 << functools.reduce(operator.or_, (vector[axis] for vector in every), 0).bit_length()
            for axis in range(self.axes)
        )

    def table(self, *names: str) -> np.ndarray:
        """Places of all values of these inputs: [values of the first, of the second, ..., axes]."""
        values = itertools.product(*(range(self.size(name)) for name in names))
        places = [self.place(**dict(zip(names, value))) for value in values]
        return np.array(places).reshape(*map(self.size, names), self.axes)

    @property
    def copies(self) -> int:
        """Inputs that hold each element: 1 where the layout is one to one."""
        every = [vector for _, vectors in self.inputs for vector in vectors]
        return 1 << (len(every) - _rank(every))

    def affine(self, **values: int) -> tuple[Affine, ...]:
        """The element's place as sums over bits of the inputs that are not given (`bit_symbol`).

        Sums are exclusive ors where no two vectors share a bit of an axis, as in fragments and their tiles.
        """
        places: list[Affine] = [Affine((), number) for number in self.place(**values)]
        for name, vectors in self.inputs:
            for axis in range(self.axes if name not in values else 0):
                for low, high in _runs([vector[axis] for vector in vectors]):
                    symbol = bit_symbol(name, low, high)
                    places[axis] += Affine.symbol(symbol, vectors[low][axis])
        return tuple(places)

    def flat(self, strides: Sequence[int]) -> Layout:
        """Places in a row-major array: strides are powers of two, so that sums are exclusive ors."""
        inputs = tuple(
            (name, tuple((sum(map(operator.mul, vector, strides)),) for vector in vectors))
            for name, vectors in self.inputs
        )
        return Layout(inputs, 1)

    def unfolded(self, sizes: Sequence[Sequence[int]]) -> Layout:
        """The layout with several axes in place of each one: powers of two, the last of them the fastest."""
        inputs = tuple(
            (
                name,
                tuple(
                    tuple(
                        number // math.prod(axes[at + 1 :]) % size
                        for number, axes in zip(vector, sizes)
                        for at, size in enumerate(axes)
                    )
                    for vector in vectors
                ),
            )
            for name, vectors in self.inputs
        )
        return Layout(inputs, sum(map(len, sizes)))

    def bank_ways(self, nbytes: int) -> int:
        """The factor by which an access takes longer than one without bank conflicts.

        The layout gives the first byte of each lane's access of `nbytes`; as many lanes as fill a row of all banks are
        served together.
        """
        lanes = self.vectors("lane")[: (BANK_ROW_BYTES // nbytes).bit_length() - 1]
        rows = [(byte // nbytes,) for (byte,) in lanes]
        banks = [(row % (BANK_ROW_BYTES // nbytes),) for (row,) in rows]
        return 1 << (_rank(rows) - _rank(banks))

    def __str__(self) -> str:
        return "; ".join(
            f"{name}: {' '.join(','.join(map(str, vector)) for vector in vectors)}"
            for name, vectors in self.inputs
        )


def steps(size: int, unit: int, axis: int, axes: int = 2) -> tuple[Vector, ...]:
    """Vectors that repeat a unit along an axis up to a size: unit, 2 * unit, ...

    Raises ValueError unless the size is the unit times a power of two.
    """
    count = size // unit
    if count * unit != size or count & (count - 1) or not count:
        raise ValueError(f"{size} is not {unit} times a power of two")
    return tuple(
        tuple(unit << bit if at == axis else 0 for at in range(axes))
        for bit in range(count.bit_length() - 1)
    )


def bit_symbol(name: str, low: int, high: int) -> str:
    """Symbol of an affine place for bits low .. high - 1 of an input."""
    return f"{name}[{low}:{high}]"


def bits_of_symbol(symbol: str) -> tuple[str, int, int]:
    """(input, low, high) of `bit_symbol`."""
    name, _, bits = symbol.removesuffix("]").partition("[")
    low, high = bits.split(":")
    return name, int(low), int(high)


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Longest runs of bits, first and behind the last one, whose numbers double from one to the next; those of 0 left out."""
    runs: list[tuple[int, int]] = []
    for bit, number in enumerate(numbers):
        if runs and runs[-1][1] == bit and number == 2 * numbers[bit - 1]:
            runs[-1] = (runs[-1][0], bit + 1)
        elif number:
            runs.append((bit, bit + 1))
    return runs


def _key(vector: Vector) -> tuple[int, int]:
    """(first axis that is not 0, its highest bit): what Gaussian elimination clears."""
    axis = next(at for at, number in enumerate(vector) if number)
    return axis, vector[axis].bit_length()


def _reduced(
    vector: Vector, source: Vector, sources: Mapping[Vector, Vector]
) -> tuple[Vector, Vector]:
    """(what is left of a vector when known ones are taken off, the source that gives what was taken off)."""
    by_key = {_key(place): (place, from_) for place, from_ in sources.items()}
    while any(vector) and (known := by_key.get(_key(vector))):
        vector = _joined((vector, known[0]), len(vector))
        source = _joined((source, known[1]), len(source))
    return vector, source


def _rank(vectors: Iterable[Vector]) -> int:
    """Dimensions of the space that vectors of bits span."""
    known: dict[Vector, Vector] = {}
    for vector in vectors:
        rest, _ = _reduced(vector, (), known)
        if any(rest):
            known[rest] = ()
    return len(known)


@dataclass(frozen=True)
class Panels:
    """place in a row-major tile -> place where its columns are cut into panels, which follow one another.

    Rows of a panel have `width` elements; all three numbers are powers of two.
    """

    rows: int
    columns: int
    width: int

    def __call__(self, place: T) -> T:
        row, column = place // self.columns, place % self.columns
        return (
            column // self.width * (self.rows * self.width) + row * self.width + column % self.width
        )

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}/{self.width}"


@dataclass(frozen=True)
class Swizzle:
    """place -> place ^ (place >> shift & mask), in elements of a tile, whose columns may be cut into panels first.

    It is linear over bits. Chunks of a row trade places by bits of the row's number, such that equal chunks of neighbouring
    rows lie in different banks.
    """

    mask: int
    shift: int
    panels: Panels | None = None

    @staticmethod
    def of_rows(row: int, chunk: int, bank_row: int) -> Swizzle | None:
        """The one of rows of `row` elements that are read in chunks, where `bank_row` elements fill all banks."""
        chunks = min(row, bank_row) // chunk
        if chunks < 2:
            return None
        bits = chunk.bit_length() - 1
        return Swizzle((chunks - 1) << bits, max(row, bank_row).bit_length() - 1 - bits)

    def __call__(self, place: T) -> T:
        place = self.panels(place) if self.panels else place
        return place ^ (place >> self.shift & self.mask)

    @property
    def window(self) -> int:
        """Multiples of this may be added behind the swizzle as well: it reads no bit from here on."""
        return 1 << (self.mask << self.shift).bit_length()

    def __str__(self) -> str:
        return f"{self.mask}>>{self.shift}" + (f" panels {self.panels}" if self.panels else "")
