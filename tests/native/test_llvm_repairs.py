"""Operations that LLVM would compile without end or wrongly: they are held in place, and results are right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pbkern import jit
from pbkern.lower.mlir.operation import Operation, Region, for_syntax, lines
from pbkern.targets.llvm.repairs import is_shuffled_without_end, repaired

T = "vector<64xi8>"


def shuffle(x, y, order, kind=T, name="vector.shuffle"):
    return Operation(name, (x, y), f"{kind}, {kind}", f" %s, %s {order}", result="%v")


def test_operands_of_shuffles_of_64_bytes_are_held_within_loops():
    loop = Operation(
        "scf.for",
        ("%i", "%a", "%b", "%c"),
        "",
        for_syntax([]),
        (Region([shuffle("%x", "%y", [0, 64])]),),
        arguments=("%i",),
    )
    assert list(lines(repaired([loop])))[1:-1] == [
        f'%v_of0 = llvm.inline_asm "", "=v,0" %x : ({T}) -> {T}', f'%v_of1 = llvm.inline_asm "", "=v,0" %y : ({T}) -> {T}',
        f"%v = vector.shuffle %v_of0, %v_of1 [0, 64] : {T}, {T}"]  # fmt: skip


def test_an_operand_that_comes_twice_is_held_once():
    found = list(lines(repaired([shuffle("%x", "%x", [1, 0])])))
    assert found[1:] == [f"%v = vector.shuffle %v_of0, %v_of0 [1, 0] : {T}, {T}"]
    assert len(found) == 2


def test_other_operations_stay():
    others = [
        shuffle("%x", "%y", [0, 32], "vector<32xi8>"),
        shuffle("%x", "%y", [0, 64], name="my.op"),
        shuffle("%loop#0", "%loop#1", [0, 64]),
    ]
    assert repaired(others) == others


def test_repeated_bytes_are_right():
    x = np.arange(96, dtype=np.uint8).reshape(8, 12)
    found = jit(lambda x: jnp.repeat(jnp.minimum(x, 3), 2, axis=1))(x)
    np.testing.assert_array_equal(found, np.repeat(np.minimum(x, 3), 2, axis=1))


def test_which_functions_the_optimiser_makes_no_vectors_of():
    assert is_shuffled_without_end(f"%v = vector.load %a[%i] : memref<128xi8>, {T}")
    assert not is_shuffled_without_end("%v = vector.load %a[%i] : memref<128xi8>, vector<32xi8>")


EIGHT = "vector<8xf64>"


def test_a_second_lane_that_a_shuffle_moves_to_the_front_is_held():
    found = list(lines(repaired([shuffle("%x", "%x", [9, 0, 2, 3], EIGHT)])))
    assert found[-2:] == [
        f"%v_moved = vector.shuffle %x, %x [9, 0, 2, 3] : {EIGHT}, {EIGHT}",
        '%v = llvm.inline_asm "", "=v,0" %v_moved : (vector<4xf64>) -> vector<4xf64>',
    ]
    others = [shuffle("%x", "%x", [2, 1, 0], EIGHT), shuffle("%x", "%x", [1, 0], "vector<8xf32>")]
    assert repaired(others) == others


COMPARISONS = [
    lambda x, t: sum((x[:, k] == t).astype(x.dtype) for k in range(x.shape[1])),
    lambda x, t: sum(jnp.where(x[:, k] < t, x[:, k], 1) for k in range(x.shape[1])),
    lambda x, t: jnp.stack([(x[:, 1] == t) * 1.0, (x[:, 0] == t) * 2.0], 1),
    lambda x, t: (jnp.roll(x, 1, 1) == x) * 1.0 + (jnp.roll(x, -1, 1) < x),
    lambda x, t: (x.ravel()[1::2] == x.ravel()[: x.size // 2 * 2 : 2]) * 1.0,
]


@pytest.mark.parametrize("number", range(len(COMPARISONS)))
@pytest.mark.parametrize("rows", [1, 8, 9, 10, 17, 33])
def test_comparisons_of_last_rows(number, rows, rng):
    """Of 9, 17 and 33 rows the last one is a vector of one element, of which comparisons of single lanes are made."""
    f = COMPARISONS[number]
    with jax.enable_x64(True):
        for columns in (2, 4, 6):
            g = jit(f)
            for _ in range(4):
                x, t = rng.integers(0, 3, (rows, columns)) * 1.0, rng.integers(0, 3, rows) * 1.0
                np.testing.assert_array_equal(g(x, t), f(jnp.asarray(x), jnp.asarray(t)))
