"""memory_analysis against programs whose memory is known; calls that get none."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

import pbkern
from pbkern.core import config

F32 = 4


def types(*shapes, dtype=jnp.float32):
    return tuple(jax.ShapeDtypeStruct(s, dtype) for s in shapes)


def test_an_elementwise_function_needs_its_arrays_and_no_temporaries():
    m = pbkern.jit(lambda x, y: (jnp.sin(x) * y, x.sum(1))).memory_analysis(
        *types((256, 128), (256, 128))
    )
    assert m.argument_size_in_bytes == 2 * 256 * 128 * F32
    # XLA's output size includes the table of pointers of the tuple of results.
    assert 0 <= m.output_size_in_bytes - (256 * 128 + 256) * F32 <= 64
    assert m.alias_size_in_bytes == 0
    # So do its temporaries: of the results of the call, to which an empty one belongs (pbkern/_jax.py).
    assert 0 <= m.temp_size_in_bytes - m.arena_size_in_bytes <= 64
    assert m.arena_size_in_bytes < 256 * 128 * F32 / 4
    assert m.generated_code_size_in_bytes > 500


def test_results_have_the_element_sizes_of_their_types():
    m = pbkern.jit(lambda x: x.astype(jnp.int8)).memory_analysis(*types((1000,)))
    assert (m.argument_size_in_bytes, m.output_size_in_bytes) == (4000, 1000)


def test_values_between_kernels_are_in_the_arena():
    """Three products in a row, as kernels of their own: two values lie between, and each is as large as a result."""
    f = pbkern.jit(
        lambda x, w: ((x @ w) @ w) @ w, compile_options={"polyblocks_disable_affine_fusion": True}
    )
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

    found = [
        pbkern.jit(kernel(n)).memory_analysis(*types((4096, 512))).arena_size_in_bytes
        for n in (1, 2)
    ]
    assert found[0] >= 64 * 512 * F32
    assert found[1] == 2 * found[0]


def test_donated_arguments_are_aliased():
    args = types((1 << 16,))
    f = lambda x: x * 2 + 1
    plain, donated = (
        pbkern.jit(f, **kw).memory_analysis(*args) for kw in ({}, {"donate_argnums": 0})
    )
    assert (plain.alias_size_in_bytes, donated.alias_size_in_bytes) == (0, (1 << 16) * F32)


def test_what_xla_keeps_is_counted_among_the_temporaries():
    f = pbkern.jit(lambda x: jnp.abs(jnp.fft.rfft(jnp.sin(x) + 1)) * 2)
    args = types((256, 256))
    assert f.explain(*args).left
    m = f.memory_analysis(*args)
    assert m.temp_size_in_bytes - m.arena_size_in_bytes >= 256 * 256 * F32


def test_nothing_runs_and_types_will_do(capfd):
    f = pbkern.jit(lambda x: x + 1)
    assert "peak" in str(f.memory_analysis(*types((64,))))
    assert not capfd.readouterr().err
    np.testing.assert_array_equal(f(jnp.ones(64)), np.full(64, 2.0))


NO_MEMORY = """
import resource
import jax, jax.numpy as jnp, numpy as np, pbkern
from pbkern.api import pipeline

def f(x):
    table = x[:, None] * x[None]
    return jnp.sort(table, axis=0).sum(1)  # needs the table

large, small = np.ones(9000, "f"), np.ones(30, "f")
decorated = pbkern.jit(f)
decorated.lower(large).compile()
build, options = decorated.build((large,), {})
(program,) = pipeline.compile_programs(build, options).compiled.values()
np.testing.assert_allclose(decorated(small), np.full(30, 30))
pages, (_, hard) = int(open("/proc/self/statm").read().split()[0]), resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (200 << 20), hard))
for call in (lambda: decorated(large).block_until_ready(), lambda: program(large)) * 2:
    try:
        call()
    except Exception as e:
        print(type(e).__name__, str(e).splitlines()[0])
    np.testing.assert_allclose(decorated(small), np.full(30, 30))
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
np.testing.assert_allclose(decorated(large), np.full(9000, 9000))
"""


def test_a_call_without_memory_for_temporaries_names_the_array_and_the_process_goes_on():
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 4, lines
    assert [line.split()[0] for line in lines] == ["JaxRuntimeError", "MemoryError"] * 2, lines
    for line in lines:
        assert "out of memory: `f` needs 32" in line
        assert "float32[9000,9000] (324.0 MB), which kernel `f_" in line
