"""Numbers of a kernel's source become expressions of its block sizes, or stay numbers."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pbkern
from pbkern.dsl.kernel import BlockSize, BlockSizes
from pbkern.dsl.printer import same_kernel

SHAPE = (96, 80)


def turned(rows, columns, body):
    """A kernel over blocks of an array, with `body` (rows, columns, block) -> block."""
    block = pbkern.BlockSpec((rows, columns), lambda i, j: (i, j))

    @pbkern.kernel(
        grid=(pbkern.cdiv(SHAPE[0], rows), pbkern.cdiv(SHAPE[1], columns)),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(SHAPE, "float32"),
        in_types=[jax.ShapeDtypeStruct(SHAPE, "float32")],
    )
    def kernel(x, o):
        o[...] = body(rows, columns, x[...])

    return kernel.trace()


def sized(body, rows=16, columns=20):
    sizes = {
        "ROWS": BlockSize(rows, SHAPE[0], "rows of a block"),
        "COLUMNS": BlockSize(columns, SHAPE[1], "columns of a block"),
    }
    at = lambda given: turned(given["ROWS"], given["COLUMNS"], body)
    return dataclasses.replace(turned(rows, columns, body), sizes=BlockSizes(sizes, at))


def reversed_in_blocks(rows, columns, x):
    flat = lax.reshape(x, (rows * columns,))
    padded = lax.pad(flat, jnp.float32(0), [(3, 2 * columns, 0)])
    return lax.reshape(lax.rev(padded[3 : 3 + rows * columns], (0,)), (rows, columns))


@pytest.mark.parametrize("other", [(16, 20), (48, 40), (96, 80), (7, 9), (1, 1)])
def test_products_and_offsets_of_sizes(other):
    kernel = sized(reversed_in_blocks)
    text = kernel.source()
    assert "ROWS = 16  # rows of a block, of 96\nROWS_GRID = pbkern.cdiv(96, ROWS)\n" in text
    for expression in ("(ROWS * COLUMNS,)", "2 * COLUMNS", "ROWS * COLUMNS + 3", "(ROWS, COLUMNS)"):
        assert expression in text
    rebuilt = pbkern.rebuild(text, ROWS=other[0], COLUMNS=other[1])
    assert same_kernel(rebuilt, turned(*other, reversed_in_blocks))


def test_a_float_that_is_a_size_keeps_the_size_a_number():
    def scaled(rows, columns, x):
        return x * jnp.float32(columns)

    text = sized(scaled).source()
    assert "ROWS = 16" in text
    assert "COLUMNS" not in text
    assert same_kernel(pbkern.rebuild(text, ROWS=48), turned(48, 20, scaled))


def test_numbers_that_follow_otherwise_leave_the_text_as_it_is():
    def squares(rows, columns, x):
        return x + jnp.float32(0) * lax.iota(jnp.float32, rows**2)[0]

    kernel = sized(squares)
    text = kernel.source()
    assert "lax.iota(jnp.float32, 256)" in text
    assert not re.search(r"\bROWS\b", text)
    assert same_kernel(pbkern.rebuild(text), kernel)


def test_a_size_by_which_the_body_itself_changes_is_not_a_constant():
    def other_body(rows, columns, x):
        return x if rows == 16 else -x

    text = sized(other_body).source()
    assert "COLUMNS = 20" in text
    assert not re.search(r"\bROWS\b", text)
    assert same_kernel(pbkern.rebuild(text, COLUMNS=10), turned(16, 10, other_body))


def test_sizes_that_no_kernel_has_are_not_tried():
    def refused(rows, columns, x):
        if (rows, columns) != (16, 20):
            raise ValueError("no such blocks")
        return x

    kernel = sized(refused)
    assert "ROWS" not in kernel.source()
    assert same_kernel(pbkern.rebuild(kernel.source()), kernel)
