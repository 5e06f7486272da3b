"""Results that are written past the caches: the same values, whatever the shape leaves at the ends of rows."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.api.pipeline import kernel_program
from pbkern.targets.cpu.codegen.compile import compile_program
from pbkern.targets.cpu.lower_options import LowerOptions
from pbkern.targets.cpu.machines.detect import detected_machine
from pbkern.targets.cpu.machines.machine import WIDE_VECTORS, Vectors
from tests.lowered import TABLE, lowered


@pytest.mark.parametrize("shape", [(64, 256), (7, 100), (5, 33), (16, 16), (3, 1000), (9, 80)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64, jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("vectors", [WIDE_VECTORS, Vectors(256, 16)])
def test_streamed_result(shape, dtype, vectors):
    with jax.enable_x64(True):
        x = np.asarray(np.random.default_rng(1).integers(-9, 9, shape), dtype)
        (kernel,) = pbkern.jit(lambda x: x * 2 + 1).kernels(jnp.asarray(x))
        compiled = compile_program(
            kernel_program(kernel),
            options_of=lambda k: LowerOptions(stream_bytes=0, vectors=vectors),
        )
        (got,) = compiled(x)
    np.testing.assert_array_equal(got, x * 2 + 1)


def by_slices(x):
    return x[:, 1:-1] * 2 + x[:, :-2]


def blurred(x):
    rows = x[:-2] + x[1:-1] * 2 + x[2:]
    return rows[:, :-2] - rows[:, 1:-1] * 2 + rows[:, 2:]


def turned(x):
    return x[1:, 3:].T * 2


def two_results(x):
    return x[:, 1:] + x[:, :-1], x[:, 1:] - x[:, :-1]


@pytest.mark.skipif(detected_machine().vector_bits < 512, reason="needs AVX-512")
@pytest.mark.parametrize(
    "shape", [(6, 1100), (9, 1541), (13, 2000), (5, 642), (11, 200), (1541, 70)]
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.float64, jnp.bfloat16])
@pytest.mark.parametrize("f", [by_slices, blurred, two_results, turned])
def test_lines_of_rows_that_begin_anywhere(f, shape, dtype):
    with jax.enable_x64(True):
        x = np.asarray(np.random.default_rng(1).integers(-9, 9, shape), dtype)
        (kernel,) = pbkern.jit(f).kernels(jnp.asarray(x))
        compiled = compile_program(
            kernel_program(kernel), options_of=lambda k: LowerOptions(stream_bytes=0, avx512=True)
        )
        got, want = compiled(x), f(x.astype(np.float64))
    for result, expected in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        np.testing.assert_array_equal(result.astype(np.float64), expected)


def test_only_whole_lines_of_such_rows_go_past_the_caches():
    rows = TABLE.l3_bytes // 2 // 8192
    wide = jax.ShapeDtypeStruct((rows, 2046), jnp.float32)
    stored = text(by_slices, wide)
    assert "vpermi2var.ps" in stored
    assert "nontemporal" in stored
    short = text(by_slices, jax.ShapeDtypeStruct((rows * 64, 38), jnp.float32))
    assert "nontemporal" not in short


def test_ends_of_rows_touch_no_line_past_the_caches():
    """A masked store over two lines asks for both of them, and the other one goes past the caches."""
    rows = TABLE.l3_bytes // 2 // 8192
    stored = text(by_slices, jax.ShapeDtypeStruct((rows, 2 + 2049), jnp.float32))
    starts_of_lines = set(re.findall(r"(%\w+) = arith.subi", stored))
    places = re.findall(r"vector.maskedstore \S+\[(%\w+)\]", stored)
    assert len(places) == 2
    assert starts_of_lines.issuperset(places)


def test_blocks_that_begin_at_lines_wherever_the_last_one_is_moved():
    """The last of three blocks of 128 rows by 64 columns begins at column 80 of 144: lines are whole, no masks are needed."""
    rows = TABLE.l3_bytes // 2 // 144 // 4 // 128 * 128
    blocks = pbkern.BlockSpec((128, 64), lambda i, j: (i, j))
    array = jax.ShapeDtypeStruct((rows, 144), jnp.float32)

    def doubled(x, y):
        y[...] = x[...] * 2

    kernel = pbkern.kernel(
        doubled,
        grid=(rows // 128, 3),
        in_specs=[blocks],
        out_specs=[blocks],
        in_types=[array],
        out_shape=[array],
    )
    stored = text(lambda x: kernel(x)[0], array)
    assert "nontemporal" in stored
    assert "maskedstore" not in stored


def text(f, *args) -> str:
    return lowered(f, *args, stage="mlir")


def test_large_results_only():
    large = jax.ShapeDtypeStruct((TABLE.l3_bytes // 16384 + 64, 4096), jnp.float32)
    assert "nontemporal" in text(lambda x: x + 1, large)
    assert "nontemporal" not in text(lambda x: x + 1, jnp.zeros((64, 4096)))
    assert "nontemporal" not in text(lambda x: x.sum(1), large)


def test_results_that_hold_partial_sums_stay():
    """A deep product adds to its result run by run; a shallow one stores each element once."""
    rows = TABLE.l3_bytes // 2 // 8192
    left, right = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, 9000), (9000, 2048)))
    assert "add(%a2[" in lowered(jnp.matmul, left, right)
    assert "nontemporal" not in text(jnp.matmul, left, right)
    shallow = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, 512), (512, 2048))]
    assert "nontemporal" in text(jnp.matmul, *shallow)


def test_what_the_cache_holds_with_its_operands_stays():
    rows = TABLE.l3_bytes // 2 // 16384
    column, row = (jax.ShapeDtypeStruct((n,), jnp.float32) for n in (rows, 4096))
    assert "nontemporal" not in text(jnp.outer, column, row)
    assert "nontemporal" in text(lambda x: x + 1, jax.ShapeDtypeStruct((rows, 4096), jnp.float32))


def test_results_of_kernels_with_scratch_unless_they_are_read_again():
    """Of two kernels that put rows aside, one adds to what it has stored."""
    blocks = pbkern.BlockSpec((16, 4096), lambda i: (i, 0))
    array = jax.ShapeDtypeStruct((TABLE.l3_bytes // 16384 + 64, 4096), jnp.float32)

    def made(body):
        types = {
            "in_types": [array],
            "out_shape": [array],
            "scratch_shapes": [jax.ShapeDtypeStruct((16, 4096), jnp.float32)],
        }
        return pbkern.kernel(
            body, grid=(array.shape[0] // 16,), in_specs=[blocks], out_specs=[blocks], **types
        )

    def stores(x, y, rows):
        rows[...] = x[...] + 1
        y[...] = rows[...] * 2

    def adds(x, y, rows):
        rows[...] = x[...] + 1
        y[...] = rows[...] * 2
        y[1:] += rows[:-1]

    assert "nontemporal" in text(made(stores), array)
    assert "nontemporal" not in text(made(adds), array)
