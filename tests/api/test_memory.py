"""memory_analysis against programs whose memory is known."""

import jax
import jax.numpy as jnp
import numpy as np

import pbkern
from pbkern.core import config

F32 = 4


def types(*shapes, dtype=jnp.float32):
    return tuple(jax.ShapeDtypeStruct(s, dtype) for s in shapes)


def test_an_elementwise_function_needs_its_arrays_and_no_temporaries():
    m = pbkern.jit(lambda x, y: (jnp.sin(x) * y, x.sum(1))).memory_analysis(*types((256, 128), (256, 128)))
    assert m.argument_size_in_bytes == 2 * 256 * 128 * F32
    # XLA's output size includes the table of pointers of the tuple of results.
    assert 0 <= m.output_size_in_bytes - (256 * 128 + 256) * F32 <= 64
    assert m.alias_size_in_bytes == 0
    # So do its temporaries: of the results of the call, to which an empty one belongs (pbkern/_jax.py).
    assert 0 <= m.temp_size_in_bytes - m.arena_size_in_bytes <= 64 and m.arena_size_in_bytes < 256 * 128 * F32 / 4
    assert m.generated_code_size_in_bytes > 500


def test_results_have_the_element_sizes_of_their_types():
    m = pbkern.jit(lambda x: x.astype(jnp.int8)).memory_analysis(*types((1000,)))
    assert (m.argument_size_in_bytes, m.output_size_in_bytes) == (4000, 1000)


def test_values_between_kernels_are_in_the_arena():
    """Three products in a row, as kernels of their own: two values lie between, and each is as large as a result."""
    f = pbkern.jit(lambda x, w: ((x @ w) @ w) @ w, compile_options={"polyblocks_disable_affine_fusion": True})
    args = types((256, 256), (256, 256))
    one = 256 * 256 * F32
    assert len(f.kernels(*args)) == 3
    with config.override(num_threads=1):
        alone = pbkern.jit(lambda x, w: x @ w).memory_analysis(*args).arena_size_in_bytes
        together = f.memory_analysis(*args)
    assert 2 * one <= together.arena_size_in_bytes <= 2 * one + alone
    assert together.peak_memory_in_bytes == 3 * one + together.temp_size_in_bytes


def test_scratch_counts_once_per_thread():
    def body(x_ref, o_ref, s_ref):
        s_ref[...] = x_ref[...] * 2
        o_ref[...] = s_ref[...].sum(0, keepdims=True) + s_ref[...]

    def kernel(threads):
        params = pbkern.cpu.CompilerParams(dimension_semantics=("parallel",), num_threads=threads)
        rows = pbkern.BlockSpec((64, 512), lambda i: (i, 0))
        return pbkern.kernel(
            body, out_shape=jax.ShapeDtypeStruct((4096, 512), "float32"), grid=(64,), in_specs=[rows], out_specs=rows,
            scratch_shapes=[pbkern.Scratch((64, 512), "float32", scoped=True)], compiler_params=params,
        )  # fmt: skip

    found = [pbkern.jit(kernel(n)).memory_analysis(*types((4096, 512))).arena_size_in_bytes for n in (1, 2)]
    assert found[0] >= 64 * 512 * F32
    assert found[1] == 2 * found[0]


def test_donated_arguments_are_aliased():
    args = types((1 << 16,))
    f = lambda x: x * 2 + 1
    plain, donated = (pbkern.jit(f, **kw).memory_analysis(*args) for kw in ({}, {"donate_argnums": 0}))
    assert (plain.alias_size_in_bytes, donated.alias_size_in_bytes) == (0, (1 << 16) * F32)


def test_what_xla_keeps_is_counted_among_the_temporaries():
    f = pbkern.jit(lambda x: jnp.abs(jnp.fft.rfft(jnp.sin(x) + 1)) * 2)
    args = types((256, 256))
    assert f.explain(*args).left
    m = f.memory_analysis(*args)
    assert m.temp_size_in_bytes - m.arena_size_in_bytes >= 256 * 256 * F32


def test_nothing_runs_and_types_will_do(capfd):
    f = pbkern.jit(lambda x: x + 1)
    assert "peak" in str(f.memory_analysis(*types((64,)))) and not capfd.readouterr().err
    np.testing.assert_array_equal(f(jnp.ones(64)), np.full(64, 2.0))
