"""Each mistake in a kernel's definition: the sentence, the line, the values, the way out."""

import inspect
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.core.errors import KernelError, TargetError

F32 = jnp.float32


def s(shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def copy(x_ref, o_ref):
    o_ref[...] = x_ref[...]


COPY_LINE = copy.__code__.co_firstlineno


def message(types, body=copy, **options) -> str:
    with pytest.raises(KernelError) as e:
        pbkern.kernel(body, **{"out_shape": s((16, 8))} | options).trace(*types)
    return str(e.value)


def here(offset: int = 0) -> str:
    frame = inspect.currentframe().f_back
    return f"{__file__}:{frame.f_lineno + offset}:"


X = s((16, 8))
block = pbkern.BlockSpec((8, 8), lambda i: (i, 0))


def test_rank_of_blocks():
    found = message(
        [X], grid=(2,), in_specs=[pbkern.BlockSpec((8,), lambda i: (i,))], out_specs=block
    )
    assert found == (
        "input 0 (`x_ref`) has 1-d blocks but is 2-d\n"
        f"  at   {__file__}:{COPY_LINE}:0 (copy)\n"
        "  why  array float32[16,8], block_shape (8,)\n"
        "  try  one entry per dimension, e.g. (1, 8); None squeezes one"
    )


def test_rank_of_an_index_map():
    spec = pbkern.BlockSpec((8, 8), lambda i: (i,))
    line = here(-1)
    found = message([X], grid=(2,), in_specs=[spec], out_specs=block)
    assert found.startswith(
        "index map of input 0 (`x_ref`) returns 1 indices for 2 dimensions\n  at   " + line
    )
    assert "array float32[16,8], returned (int32[])" in found


def test_arity_of_an_index_map():
    spec = pbkern.BlockSpec((8, 8), lambda i: (i, 0))
    line = here(-1)
    found = message([X], grid=(2, 3), in_specs=[spec], out_specs=block)
    assert found.startswith(
        "index map of input 0 (`x_ref`) does not take 2 grid indices\n  at   " + line
    )
    assert "signature (i)" in found
    assert "try  lambda i, j: ..." in found


@pytest.mark.parametrize("result", ["i / 2", "1.5", "jnp.arange(2)", "i > 0"])
def test_non_integer_indices(result):
    f = eval(f"lambda i: ({result}, 0)", {"jnp": jnp})
    found = message([X], grid=(2,), in_specs=[pbkern.BlockSpec((8, 8), f)], out_specs=block)
    assert "index map of input 0 (`x_ref`) returns a non-integer for dimension 0" in found


def test_block_larger_than_the_array():
    found = message([X], in_specs=[pbkern.BlockSpec((32, 8))])
    assert found.startswith("input 0 (`x_ref`) of kernel `copy` has blocks larger than the array\n")
    assert f"at   {__file__}:{COPY_LINE}:0 (copy)" in found
    assert "array float32[16,8], dimension 0: block 32, extent 16" in found


@pytest.mark.parametrize("size", [0, -4])
def test_block_sizes_below_one(size):
    found = message([X], in_specs=[pbkern.BlockSpec((size, 8))])
    assert "has a block size below 1" in found
    assert f"block {size}, extent 16" in found


def test_blocks_outside_the_array():
    found = message([X], grid=(3,), in_specs=[block], out_specs=block)
    assert "blocks of input 0 (`x_ref`) of kernel `copy` lie outside the array" in found
    assert "dimension 0: starts 0 to 16 with size 8 over grid (3,)" in found
    assert "dimension 0 has 2 blocks of 8" in found


def test_element_blocks_without_padding():
    halo = pbkern.BlockSpec((pbkern.Element(10), 8), lambda i: (i * 8 - 1, 0))
    found = message([X], grid=(2,), in_specs=[halo], out_specs=block)
    assert "try  pbkern.Element(10, padding=(1, 1)), or another index map" in found


def test_block_dimension_of_wrong_kind():
    assert "has a block dimension that is none" in message(
        [X], in_specs=[pbkern.BlockSpec((8.0, 8))]
    )


def test_number_of_specs():
    found = message([X], grid=(2,), in_specs=[block, block], out_specs=block)
    assert found.startswith("in_specs has 2 entries for 1 operands")
    assert "operands float32[16,8]" in found


def test_number_of_refs():
    found = message([X, X])
    assert found.startswith("body of kernel `copy` does not take its 3 Refs")
    assert "2 operands, 1 results, 0 scratch; signature (x_ref, o_ref)" in found


@pytest.mark.parametrize("grid", [(2.0,), (-1,), "ab", (None,)])
def test_bad_grids(grid):
    assert "a grid has a size that is not a non-negative integer" in message([X], grid=grid)


def test_aliases_of_different_types():
    found = message([s((16, 8), jnp.int32)], input_output_aliases={0: 0})
    assert "input 0 and output 0 of kernel `copy` are aliased but differ in type" in found
    assert "input int32[16,8], output float32[16,8]" in found
    assert "aliases an operand or result that it lacks" in message([X], input_output_aliases={1: 0})


def test_dtypes_that_kernels_do_not_take():
    found = message([jax.eval_shape(lambda: jax.random.key(0))], body=lambda k, o: None)
    assert "dtype that kernels do not take" in found


def test_constants_are_operands():
    table = np.arange(8, dtype=np.float32)

    def body(x, o):
        o[...] = x[...] + table

    found = message([X], body=body)
    assert found.startswith("body of kernel `body` uses an array constant")
    assert f"at   {__file__}:{body.__code__.co_firstlineno + 1}:" in found
    assert "constant float32[8]" in found
    assert "pass the array as an operand" in found


def test_a_body_returns_nothing():
    assert "returns a value" in message([X], body=lambda x, o: x[...])


def test_program_id_beyond_the_grid():
    def body(x, o):
        o[...] = x[...] + pbkern.program_id(1).astype(F32)

    found = message([X], body=body, grid=(2,), in_specs=[block], out_specs=block)
    assert "program_id(1) in kernel `body`, whose grid has 1 dimensions" in found
    assert f"at   {__file__}:{body.__code__.co_firstlineno + 1}:" in found


def test_dimension_semantics_fit_the_grid():
    class Params:
        target_name = "nvgpu"
        dimension_semantics = ("parallel",)

    found = message([X], grid=(2, 1), in_specs=None, compiler_params=Params())
    assert "dimension_semantics of kernel `copy` for `nvgpu` does not fit the grid" in found


@pytest.mark.parametrize("size", [1, 64, 256])
def test_reshapes_keep_the_number_of_elements(size):
    def body(x, o):
        o[...] = jnp.full(
            (16, 8),
            lax.reshape_p.bind(x[...], new_sizes=(size,), dimensions=None, sharding=None)[0],
        )

    found = message([X], body=body)
    assert found.startswith(
        f"a reshape in kernel `body` changes the number of elements\n  at   {__file__}:"
    )
    assert f"float32[16,8] has 128, float32[{size}] has {size}" in found


def test_masks_are_bool():
    def body(x, o):
        o[...] = pbkern.load(x, ..., mask=x[...])

    assert "a mask is bool" in message([X], body=body)


def test_calls_on_other_types():
    k = pbkern.kernel(copy, out_shape=X).trace(X)
    with pytest.raises(KernelError, match=r"takes \(float32\[16,8\]\), given \(float32\[4\]\)"):
        pbkern.call_kernel(k, np.zeros(4, np.float32))


def test_source_without_a_kernel():
    with pytest.raises(KernelError, match="the source defines no kernel"):
        pbkern.rebuild("x = 1")


def test_a_platform_without_target():
    from pbkern.dsl import call

    k = pbkern.kernel(copy, out_shape=X).trace(X)
    ctx = SimpleNamespace(module_context=SimpleNamespace(platforms=("metal",)))
    with pytest.raises(TargetError, match="no target compiles kernel `copy` for metal"):
        call._no_target(ctx, kernel=k)
