"""Scratch in registers: no shared memory and no barrier where each thread reads only what it has stored itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.errors import SimulationError
from pbkern.targets.nvgpu import ptxas


def params(*semantics, **others):
    return pbkern.nvgpu.CompilerParams(dimension_semantics=semantics, **others)


def matmul(blocks, sizes, dtype=jnp.float32, warps=None):
    """A sum in scratch along a sequential dimension; blocks need not divide the sizes."""
    (bm, bn, bk), (m, n, k) = blocks, sizes

    @pbkern.kernel(
        grid=(-(-m // bm), -(-n // bn), -(-k // bk)),
        in_specs=[pbkern.BlockSpec((bm, bk), lambda i, j, k: (i, k)), pbkern.BlockSpec((bk, bn), lambda i, j, k: (k, j))],
        out_specs=pbkern.BlockSpec((bm, bn), lambda i, j, k: (i, j)), out_shape=jax.ShapeDtypeStruct((m, n), dtype),
        scratch_shapes=[pbkern.Scratch((bm, bn), dtype)],
        compiler_params=params("parallel", "parallel", "sequential", num_warps=warps),
    )  # fmt: skip
    def multiply(a, b, out, total):
        @pbkern.when(pbkern.program_id(2) == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        inside = pbkern.in_bounds(a, 1)
        total[...] += jnp.where(inside, a[...], 0) @ jnp.where(inside[:, None], b[...], 0)

        @pbkern.when(pbkern.program_id(2) == pbkern.num_programs(2) - 1)
        def _():
            out[...] = total[...]

    return multiply


def shared_bytes(text: str) -> int:
    """Of a block, static."""
    return sum(
        int(row.split("[")[1].split("]")[0])
        for row in text.splitlines()
        if ".shared" in row and ".b8" in row
    )


@pytest.mark.parametrize(("blocks", "sizes", "dtype", "warps", "operands"), [
    ((32, 32, 16), (64, 64, 64), "float32", None, 2048),
    ((32, 32, 32), (70, 50, 100), "float32", None, 8192),
    ((32, 64, 8), (64, 128, 20), "float64", 8, 12800),
    ((16, 32, 16), (40, 61, 40), "int32", 2, 2816),
])  # fmt: skip
def test_sums_along_a_sequential_dimension_stay_in_registers(blocks, sizes, dtype, warps, operands):
    with jax.enable_x64(dtype == "float64"):
        rng = np.random.default_rng(0)
        a, b = (
            rng.integers(-9, 9, s).astype(dtype)
            for s in ((sizes[0], sizes[2]), (sizes[2], sizes[1]))
        )
        found = pbkern.simulate(matmul(blocks, sizes, jnp.dtype(dtype), warps), a, b)
    np.testing.assert_array_equal(found.results[0], a @ b)
    assert shared_bytes(found.ptx[0]) <= operands  # copies of blocks of the operands alone
    assert ".local" not in found.ptx[0]
    if ptxas.find():
        assert ptxas.assemble(found.ptx[0], "sm_90a").spill_bytes == 0


def test_what_lies_in_registers_needs_no_barrier():
    spec = pbkern.BlockSpec((1, 300), lambda i, k: (k, i))

    @pbkern.kernel(
        grid=(2, 5),
        in_specs=[spec],
        out_specs=pbkern.BlockSpec((1, 300), lambda i, k: (0, i)),
        out_shape=jax.ShapeDtypeStruct((1, 600), jnp.float32),
        scratch_shapes=[pbkern.Scratch((1, 300), jnp.float32)],
        compiler_params=params("parallel", "sequential"),
    )
    def geometric(x, o, t):
        @pbkern.when(pbkern.program_id(1) == 0)
        def _():
            t[...] = jnp.ones_like(t)

        t[...] = t[...] * 0.5 + x[...]

        @pbkern.when(pbkern.program_id(1) == 4)
        def _():
            o[...] = t[...]

    x = np.random.default_rng(0).standard_normal((5, 600)).astype("f4")
    want = np.ones(600)
    for row in x.astype("f8"):
        want = want * 0.5 + row
    found = pbkern.simulate(geometric, x)
    np.testing.assert_allclose(found.results[0][0], want, rtol=1e-5)
    assert found.counts.shared_accesses == 0
    assert ".shared" not in found.ptx[0]
    assert (
        found.counts.barriers == 2
    )  # once a block: the result may have been stored by the step before


def test_a_scalar_that_a_loop_turns_on_is_computed_by_every_thread():
    """While with a trip count that depends on data: the counter and the test need no memory; sums over the block do."""

    @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((200,), jnp.int32))
    def collatz(x, o):
        def step(state):
            n, count = state
            return jnp.where(n % 2 == 0, n // 2, 3 * n + 1), count + 1

        n = jnp.max(x[...])
        _, count = jax.lax.while_loop(lambda s: s[0] != 1, step, (n, jnp.int32(0)))
        o[...] = x[...] + count

    x = np.arange(200, dtype=np.int32) % 28
    found = pbkern.simulate(collatz, x)
    np.testing.assert_array_equal(found.results[0], x + 111)  # 27 takes 111 steps
    assert found.counts.barriers <= 2


def test_long_rows_exchange_only_through_the_slots_of_reductions():
    x = np.random.default_rng(0).standard_normal((3, 5000)).astype("f4")
    spec = pbkern.BlockSpec((1, 5000), lambda i: (i, 0))

    @pbkern.kernel(
        grid=(3,),
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct((3, 5000), jnp.float32),
    )
    def centred(x, o):
        o[...] = x[...] - x[...].mean(-1, keepdims=True)

    found = pbkern.simulate(centred, x)
    np.testing.assert_allclose(
        found.results[0], x - x.mean(-1, keepdims=True, dtype="f8"), atol=1e-5
    )
    assert (
        found.counts.barriers == 3 * 3
    )  # a block: the copy is there; warps have stored; slots are free again


def neighbours(store_first):
    """Reads elements of other threads, or before anything is stored: memory of the block."""

    @pbkern.kernel(
        grid=(2,),
        out_shape=jax.ShapeDtypeStruct((256,), jnp.float32),
        scratch_shapes=[pbkern.Scratch((256,), jnp.float32)],
        compiler_params=params("sequential"),
    )
    def kernel(x, o, t):
        @pbkern.when(store_first | (x[0] > 0))
        def _():
            t[...] = x[...] * 2

        o[...] = t[...][::-1] if store_first else t[...] + 1
        t[...] = x[...]

    return kernel


def test_what_other_threads_read_lies_in_shared_memory():
    x = np.random.default_rng(0).standard_normal(256).astype("f4")
    found = pbkern.simulate(neighbours(True), x)
    np.testing.assert_array_equal(found.results[0], 2 * x[::-1])
    assert found.counts.shared_accesses > 0
    assert shared_bytes(found.ptx[0]) == 1024


def test_reads_before_the_first_store_are_found():
    with pytest.raises(SimulationError) as e:
        pbkern.simulate(neighbours(False), np.zeros(256, np.float32))
    assert e.value.kind == "uninitialised"
