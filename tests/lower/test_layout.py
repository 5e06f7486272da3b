"""Layouts: rows of the tables against the instructions as the vendors' manuals word them, and what layouts say of memory."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbkern.lower.nest.tiles.layout import Layout, Swizzle, bits_of_symbol, steps
from pbkern.lower.nest.tiles.tiling import Tiling
from pbkern.targets.cpu.schedule.instructions import INSTRUCTIONS
from pbkern.targets.simt.schedule.instructions import (
    MATRIX_INSTRUCTIONS,
    MMA_BF16,
    MMA_S8,
    MMA_TF32,
    MMA_U8,
)

LANE = np.arange(32)
GROUP, THREAD = LANE // 4, LANE % 4
ROWS = {**INSTRUCTIONS, **MATRIX_INSTRUCTIONS}
# Lanes that hold an element of the operands and of the results, where that is not one.
HOLDERS = {"wmma": (2, 2, 1), "fma": (8, 4, 1)}


@pytest.mark.parametrize("name", ROWS)
def test_every_element_of_an_operand_has_one_holder(name):
    row = ROWS[name]
    m, n, k = row.shape
    for number, (layout, shape) in enumerate(zip(row.layouts, ((m, k), (k, n), (m, n)))):
        assert layout.shape == shape
        assert layout.copies == HOLDERS.get(name.partition(".")[0], (1, 1, 1))[number]
        places = layout.table(*layout.names).reshape(-1, 2)
        assert {tuple(place) for place in places} == set(itertools.product(*map(range, shape)))


@pytest.mark.parametrize("name", ROWS)
def test_the_meaning_of_a_row_is_the_product(name):
    row, rng = ROWS[name], np.random.default_rng(0)
    m, n, k = row.shape
    first, second = (
        rng.integers(0 if dtype.kind == "u" else -4, 5, shape).astype(dtype)
        for dtype, shape in zip(row.operands, ((m, k), (k, n)))
    )
    sums = rng.integers(-9, 9, (m, n)).astype(row.accumulator)
    want = sums.astype(np.int64) + first.astype(np.int64) @ second.astype(np.int64)
    found = row.meaning(sums, first, second)
    assert found.dtype == row.accumulator
    np.testing.assert_array_equal(found.astype(np.int64), want)


def test_tf32_reads_19_bits():
    """Source: PTX ISA 8.7, section 9.7.14.1: 8 bits of exponent and 10 of the fraction, which hold 1 + 2^-10 and not 2^-11."""
    values = np.array([1 + 2**-10, 1 + 2**-11, -1 - 2**-10 - 2**-13], np.float32)
    np.testing.assert_array_equal(MMA_TF32.as_read(values), [1 + 2**-10, 1, -1 - 2**-10])


def fragment(layout: Layout, register: int) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = layout.table("lane", "register")[:, register].T
    return rows, columns


@pytest.mark.parametrize(
    ("row", "each"),
    [(MMA_BF16, 2), (MMA_S8, 4), (MMA_U8, 4), (MMA_TF32, 1)],
    ids=lambda x: getattr(x, "name", ""),
)
def test_fragments_are_those_of_the_ptx_manual(row, each):
    """Figures of m16n8k16 (.f16, .bf16), m16n8k32 (.s8) and m16n8k8 (.tf32) in section 9.7.14.5.

    A: element i of a lane is in row lane / 4, and 8 further in words 1 and 3; in column each * (lane % 4) + i % each, and
    4 * each further in words 2 and 3. B: likewise with words 0 and 1. C: row lane / 4 (+ 8), column 2 * (lane % 4) + i % 2.
    """
    first, second, sums = row.layouts
    for i in range(4 * each):
        rows, columns = fragment(first, i)
        word = i // each
        np.testing.assert_array_equal(rows, GROUP + 8 * (word % 2))
        np.testing.assert_array_equal(columns, each * THREAD + i % each + 4 * each * (word // 2))
    for i in range(2 * each):
        depths, columns = fragment(second, i)
        np.testing.assert_array_equal(depths, each * THREAD + i % each + 4 * each * (i // each))
        np.testing.assert_array_equal(columns, GROUP)
    for i in range(4):
        rows, columns = fragment(sums, i)
        np.testing.assert_array_equal(rows, GROUP + 8 * (i // 2))
        np.testing.assert_array_equal(columns, 2 * THREAD + i % 2)


# Fragments of other devices, with the formula of their manual: (lane, register) -> (row, column).
LANE6 = np.arange(64)
OTHERS = {
    # AMD CDNA 3 ISA, matrix arithmetic instructions, V_MFMA_F32_16X16X16_F16: registers of four rows.
    "mfma 16x16x16 accumulator": (
        Layout.of(register=[(1, 0), (2, 0)], lane=[*steps(16, 1, 1), (4, 0), (8, 0)]),
        lambda lane, i: (4 * (lane // 16) + i, lane % 16),
        1,
    ),
    "mfma 16x16x16 first": (
        Layout.of(register=[(0, 1), (0, 2)], lane=[*steps(16, 1, 0), (0, 4), (0, 8)]),
        lambda lane, i: (lane % 16, 4 * (lane // 16) + i),
        1,
    ),
    # AMD RDNA 3 ISA, V_WMMA_F32_16X16X16_F16: lanes 16 to 31 repeat the operands; rows of results alternate.
    "wmma 16x16x16 accumulator": (
        Layout.of(register=steps(16, 2, 0), lane=[*steps(16, 1, 1), (1, 0)]),
        lambda lane, i: (2 * i + lane // 16, lane % 16),
        1,
    ),
    "wmma 16x16x16 first": (
        Layout.of(register=steps(16, 1, 1), lane=[*steps(16, 1, 0), (0, 0)]),
        lambda lane, i: (lane % 16, i),
        2,
    ),
    # Intel 64 SDM, TDPBF16PS: row r of the second tile holds, for each column, elements 2r and 2r + 1 of the depth.
    "tdpbf16ps second": (
        Layout.of(register=[(1, 0), *steps(16, 1, 1), *steps(32, 2, 0)]),
        lambda lane, i: (2 * (i // 32) + i % 2, i % 32 // 2),
        1,
    ),
    # Intel 64 SDM, TDPBSSD: four bytes of the depth side by side.
    "tdpbssd second": (
        Layout.of(register=[(1, 0), (2, 0), *steps(16, 1, 1), *steps(64, 4, 0)]),
        lambda lane, i: (4 * (i // 64) + i % 4, i % 64 // 4),
        1,
    ),
    # PTX ISA 8.7, accumulator of wgmma.m64nNk16: warps have 16 rows each, columns repeat those of mma.
    "wgmma m64n64 accumulator": (
        MMA_BF16.layouts[2].with_bits("register", *steps(64, 8, 1)).with_bits("warp", *steps(64, 16, 0)),
        None,
        1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_layouts_hold_the_fragments_of_other_devices(name):
    layout, formula, copies = OTHERS[name]
    places = layout.table(*layout.names).reshape(-1, 2)
    held, counts = np.unique(places, axis=0, return_counts=True)
    assert len(held) == np.prod(layout.shape)
    assert set(counts) == {copies}
    assert layout.copies == copies
    if formula is None:
        return
    for lane in range(layout.size("lane")):
        for register in range(layout.size("register")):
            assert layout.place(lane=lane, register=register) == formula(lane, register)


BITS = st.permutations([(0, 1), (0, 2), (0, 4), (1, 0), (2, 0), (4, 0), (8, 0)])


@st.composite
def tiles(draw) -> Layout:
    """Layouts of 16 x 8 tiles, some vectors of which are mixed."""
    vectors = list(draw(BITS))
    for at in range(1, len(vectors)):
        if draw(st.booleans()):
            vectors[at] = tuple(np.bitwise_xor(vectors[at], vectors[at - 1]).tolist())
    cuts = sorted(draw(st.tuples(st.integers(0, 7), st.integers(0, 7))))
    return Layout.of(
        register=vectors[: cuts[0]], lane=vectors[cuts[0] : cuts[1]], warp=vectors[cuts[1] :]
    )


@given(tiles())
def test_an_inverse_finds_the_holder_of_each_element(layout):
    assert layout.copies == 1
    inverse = layout.inverse()
    for row, column in itertools.product(range(16), range(8)):
        holder = dict(zip(layout.names, inverse.place(**{"0": row, "1": column})))
        assert layout.place(**holder) == (row, column)


@given(tiles(), tiles())
def test_conversions_round_trip(layout, other):
    there, back = layout.converted(other), other.converted(layout)
    names = layout.names
    for source in itertools.product(*(range(other.size(name)) for name in other.names)):
        holder = there.place(**dict(zip(other.names, source)))
        assert layout.place(**dict(zip(names, holder))) == other.place(
            **dict(zip(other.names, source))
        )
        assert back.place(**dict(zip(names, holder))) == source


def test_an_element_without_a_holder_is_said():
    with pytest.raises(ValueError, match=r"some places of \(1, 4\) are held by no input"):
        Layout.of(register=[(0, 3)]).inverse()
    with pytest.raises(ValueError, match="24 is not 4 times a power of two"):
        steps(24, 4, 0)


@given(tiles(), st.integers(0, 127))
def test_affine_places_are_sums_of_bits(layout, number):
    values = {}
    for name in layout.names:
        values[name], number = number % layout.size(name), number // layout.size(name)

    def bits(symbol: str) -> int:
        name, low, high = bits_of_symbol(symbol)
        return values[name] >> low & ((1 << high - low) - 1)

    # Sums are exclusive ors only where no two vectors share a bit, as in fragments of instructions.
    every = [vector for _, vectors in layout.inputs for vector in vectors]
    plain = all(
        sum(bin(v[axis]).count("1") for v in every) == bits_ for axis, bits_ in ((0, 4), (1, 3))
    )
    if plain:
        places = layout.affine()
        assert tuple(
            place.evaluate({s: bits(s) for s in place.symbols}) for place in places
        ) == layout.place(**values)


@pytest.mark.parametrize("warps", [(2, 2), (4, 1), (1, 2)])
@pytest.mark.parametrize(
    ("row", "shape"), [(MMA_BF16, (64, 64, 32)), (MMA_TF32, (64, 32, 16)), (MMA_S8, (64, 16, 64))]
)
def test_a_tile_is_made_of_its_instructions(row, shape, warps):
    """Operands of each instruction, gathered by the tiling's layouts, give the product of the tiles."""
    tiling, rng = Tiling(row, warps), np.random.default_rng(0)
    rows, columns, depth = shape
    assert tiling.fits(shape)
    whole = [
        rng.integers(-4, 5, size).astype(t)
        for size, t in zip(((rows, depth), (depth, columns)), row.operands)
    ]
    layouts = tiling.first(rows, depth), tiling.second(depth, columns), tiling.sums(rows, columns)
    down, right, steps_ = tiling.repeats(shape)
    found = np.full((rows, columns), -1, np.int64)
    each = [layout.size("register") for layout in row.layouts]
    for warp in range(warps[0] * warps[1]):
        for m, n in itertools.product(range(down), range(right)):
            total = np.zeros(row.shape[:2], row.accumulator)
            for step in range(steps_):
                parts = []
                for side, number in ((0, m), (1, n)):
                    own = row.layouts[side]
                    part = np.zeros(own.shape, row.operands[side])
                    for lane, register in itertools.product(range(32), range(each[side])):
                        at = layouts[side].place(
                            register=number * each[side] + register, lane=lane, warp=warp, step=step
                        )
                        part[own.place(register=register, lane=lane)] = whole[side][at]
                    parts.append(part)
                total = row.meaning(total, *parts)
            for lane, register in itertools.product(range(32), range(each[2])):
                at = layouts[2].place(
                    register=(m * right + n) * each[2] + register, lane=lane, warp=warp
                )
                assert found[at] == -1
                found[at] = total[row.layouts[2].place(register=register, lane=lane)]
    np.testing.assert_array_equal(found, whole[0].astype(np.int64) @ whole[1].astype(np.int64))


def test_tiles_that_do_not_fit():
    tiling = Tiling(MMA_BF16, (2, 2))
    assert tiling.fits((32, 16, 16))
    assert not tiling.fits((16, 16, 16))
    assert not tiling.fits((96, 16, 16)), "three instructions of a warp are no power of two"
    assert not tiling.fits((32, 16, 8))


def test_rows_of_a_tile_are_held_once_for_all_columns():
    layout = Tiling(MMA_BF16, (2, 2)).held((64,))
    assert layout.shape == (64,)
    assert layout.size("register") == 4  # rows g, g + 8, g + 16, g + 24 of 32
    assert layout.copies == 8  # four lanes of a row, two warps side by side


@pytest.mark.parametrize("row", [16, 32, 64, 128, 256])
def test_swizzled_rows_are_read_without_bank_conflicts(row):
    """Eight rows of the same 16 bytes of 2-byte elements, as ldmatrix reads them."""
    swizzle = Swizzle.of_rows(row, 8, 64)
    places = np.arange(64 * row)
    np.testing.assert_array_equal(swizzle(swizzle(places)), places)
    np.testing.assert_array_equal(np.sort(swizzle(places)), places)
    np.testing.assert_array_equal(swizzle(places) % 8, places % 8)  # chunks stay whole
    plain = Layout.of(1, lane=[(2 * row,), (4 * row,), (8 * row,)])
    swizzled = Layout.of(1, lane=[(2 * swizzle(row << bit),) for bit in range(3)])
    assert plain.bank_ways(16) == min(8, row // 8)
    assert swizzled.bank_ways(16) == 1
    for first in range(0, 64, 8):
        for chunk in range(row // 8):
            found = [swizzle((first + at) * row + 8 * chunk) // 8 % 8 for at in range(8)]
            assert len(set(found)) == 8, "counted one by one"
    for constant in range(0, 4 * swizzle.window, swizzle.window):
        np.testing.assert_array_equal(swizzle(places + constant), swizzle(places) + constant)


@given(st.lists(st.integers(0, 1023).map(lambda word: 4 * word), min_size=5, max_size=5))
def test_bank_conflicts_are_those_that_one_counts(vectors):
    layout = Layout.of(1, lane=[(vector,) for vector in vectors])
    words = np.unique(layout.table("lane") // 4)
    assert layout.bank_ways(4) == np.bincount(words % 32).max()


@pytest.mark.parametrize("row", [MMA_BF16, MMA_TF32], ids=lambda row: row.name)
def test_sums_of_one_product_are_the_rows_of_the_next(row):
    """Attention: lanes hold of Q K^T what the next product takes of its first operand, if that has the sums' fragments."""
    tiling = Tiling(row, (4, 1))
    sums, first = tiling.sums(64, 64), tiling.first(64, 64)
    registers = tiling.held_first(64, 64)
    if row is MMA_TF32:  # whose lanes hold neighbours of sums, and every fourth of an operand's row
        assert registers is None
        return
    for step, register, lane, warp in itertools.product(range(4), range(8), (0, 5, 31), range(4)):
        here = sums.place(register=registers[step][register], lane=lane, warp=warp)
        assert here == first.place(register=register, lane=lane, warp=warp, step=step)
    assert Tiling(row, (2, 2)).held_first(64, 64) is None, (
        "warps side by side hold columns of their own"
    )
