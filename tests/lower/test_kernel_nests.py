"""KernelNests mean what their kernel means: as they are built, after each of the shared passes, and at every kind of edge."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core.errors import UnsupportedOp
from pbkern.core.passes import Pass, watched
from pbkern.lower.build_options import BuildOptions
from pbkern.lower.grid import block_shift
from pbkern.lower.kernel_nests import kernel_nests
from pbkern.lower.passes.shared import SHARED_PASSES
from pbkern.targets.backend import lowered
from pbkern.targets.cpu.lower_options import LowerOptions
from pbkern.targets.cpu.passes import CPU_PASSES
from pbkern.targets.simt.options import ThreadOptions
from pbkern.targets.simt.passes import THREAD_PASSES
from tests.dsl import test_kernels
from tests.native.test_bodies import HANDWRITTEN, agree, random_kernel
from tests.targets import stub
from tests.test_golden import FUNCTIONS

PLAIN = BuildOptions()


def draw(kernel, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 5, t.shape).astype(t.dtype) for t in kernel.in_types]


def check(kernel, *arrays, options=PLAIN, passes=SHARED_PASSES) -> None:
    """The nests of each stage, as they are built and after each pass, give what the interpreter gives."""
    for k in kernel.stages:
        want = pbkern.interpret(k, *arrays)
        nests = kernel_nests(k, options)
        for p in (None, *passes):
            nests = nests if p is None else nests.after((p,))
            nests.verify()
            for got, expected in zip(nests.interpret(*arrays), want):
                agree(got, expected, expected.dtype)
        arrays = (*want, *arrays[len(k.inputs) :])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_of_golden_functions(name):
    f, *args = FUNCTIONS[name]
    if name == "mean_of_squares":
        args = [jax.ShapeDtypeStruct((64, 33), "f")]
    for kernel in pbkern.jit(f).kernels(*args):
        check(kernel, *draw(kernel))


@pytest.mark.sampled(15)
@pytest.mark.parametrize("seed", range(60))
def test_random_bodies(seed):
    kernel, _dtype = random_kernel(seed)
    check(kernel, *draw(kernel, seed), options=LowerOptions() if seed % 2 else PLAIN)


# What targets run over nests -> options and passes.
TARGETS = {
    "cpu": (LowerOptions(avx512=True, vnni=True, bf16_pairs=True), (*SHARED_PASSES, *CPU_PASSES)),
    "threads": (ThreadOptions(), (*SHARED_PASSES, *THREAD_PASSES)),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_golden_functions_after_the_passes_of_targets(name, target):
    f, *args = FUNCTIONS[name]
    if name == "mean_of_squares":
        args = [jax.ShapeDtypeStruct((64, 33), "f")]
    options, passes = TARGETS[target]
    for kernel in pbkern.jit(f).kernels(*args):
        check(kernel, *draw(kernel), options=options, passes=passes)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("seed", range(40))
def test_random_bodies_after_the_passes_of_targets(seed, target):
    kernel, _dtype = random_kernel(seed)
    options, passes = TARGETS[target]
    check(kernel, *draw(kernel, seed), options=options, passes=passes)


@pytest.mark.parametrize("orientation", ["ab", "aTb", "abT"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "bfloat16", "float32"])
def test_products_after_the_passes_of_the_cpu(dtype, orientation):
    """Packed operands, words of several elements and their instructions keep the meaning of the product."""
    accumulator = jnp.float32 if "float" in dtype else jnp.int32
    left, right = (40, 128), (128, 96)
    if orientation == "aTb":
        left = left[::-1]
    if orientation == "abT":
        right = right[::-1]

    def product(a, b):
        a, b = (a.T if orientation == "aTb" else a), (b.T if orientation == "abT" else b)
        return jnp.dot(a, b, preferred_element_type=accumulator) + 1

    options, passes = TARGETS["cpu"]
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in (left, right)]
    for kernel in pbkern.jit(product).kernels(*arrays):
        check(kernel, *draw(kernel), options=options, passes=passes)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", HANDWRITTEN)
def test_handwritten_kernels(name, monkeypatch):
    """The same tests, other engine."""

    def run(made, *arrays):
        results = stub.run(made.trace(*arrays), *map(np.asarray, arrays))
        return results[0] if len(results) == 1 else results

    monkeypatch.setattr(test_kernels, "run", run)
    getattr(test_kernels, name)()


# Not scatters: those of many updates take minutes, one step of a loop after the other.
NATIVE = ["bodies", "contractions", "edges", "fused", "index_arrays", "last_stages", "sort", "selection", "threads",
          "uniform_scratch", "updates_in_loops", "wide_products"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", NATIVE)
def test_the_tests_of_machine_code_pass_with_nests(name):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "--engine",
        "nests",
        f"tests/native/test_{name}.py",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


# ---- the grid, edges, scratch


def traced(body, grid, in_specs, out_spec, shape, *arrays, **others):
    out = jax.ShapeDtypeStruct(shape, arrays[0].dtype)
    return pbkern.kernel(
        body, grid=grid, in_specs=in_specs, out_specs=out_spec, out_shape=out, **others
    ).trace(*arrays)


def double(x, o):
    o[...] = x[...] * 2


@pytest.mark.parametrize(("rows", "columns"), [(4, 3), (7, 5), (8, 6), (9, 13), (20, 3)])
@pytest.mark.parametrize("may_shift", [False, True])
def test_ragged_blocks(rows, columns, may_shift):
    x = np.arange(rows * columns, dtype="f").reshape(rows, columns)
    spec = pbkern.BlockSpec((4, 3), lambda i, j: (i, j))
    kernel = traced(
        double, (pbkern.cdiv(rows, 4), pbkern.cdiv(columns, 3)), [spec], spec, x.shape, x
    )
    options = BuildOptions(may_shift=may_shift)
    check(kernel, x, options=options)
    nests = kernel_nests(kernel, options)
    shifted = (
        {d for d, (n, size) in enumerate(((rows, 4), (columns, 3))) if n > size and n % size}
        if may_shift
        else set()
    )
    assert set(nests.shifts) == shifted
    assert (
        not nests.ragged
        if may_shift and rows > 4 and columns > 3
        else len(nests.cases) == 2 ** len(nests.ragged)
    )
    assert all(block_shift.symbol(d) in str(nests) for d in shifted)


def test_blocks_of_halos_have_a_case_inside_and_one_with_guards():
    def body(x, o):
        o[...] = jnp.where(pbkern.in_bounds(x, 0)[2:], x[2:], 0) + x[1:-1]

    x = np.arange(40, dtype="f")
    halo = pbkern.BlockSpec((pbkern.Element(10, padding=(1, 1)),), lambda i: (i * 8 - 1,))
    out = pbkern.BlockSpec((8,), lambda i: (i,))
    kernel = traced(body, (5,), [halo], out, x.shape, x)
    check(kernel, x)
    nests = kernel_nests(kernel, PLAIN)
    assert len(nests.cases) == 2
    assert nests.crossing
    assert [nests.case_of({"%g0": i}).variant.guarded for i in range(5)] == [
        True,
        False,
        False,
        False,
        True,
    ]


def test_scratch_is_kept_in_order_and_poisoned_between_parallel_programs():
    def body(x, o, t):
        @pbkern.when(pbkern.program_id(1) == 0)
        def _():
            t[...] = jnp.zeros_like(t)

        t[...] += x[...]
        o[...] = t[...]

    x = np.arange(24, dtype="f").reshape(4, 6)
    spec = pbkern.BlockSpec((2, 2), lambda i, j: (i, j))
    kernel = traced(
        body, (2, 3), [spec], spec, x.shape, x, scratch_shapes=[pbkern.Scratch((2, 2), "f")]
    )
    check(kernel, x)
    assert kernel_nests(kernel, PLAIN).parallel == (0,)

    def leaks(x, o, t):
        @pbkern.when(x[0, 0] < 0)  # never: what scratch holds is not defined
        def _():
            t[...] = x[...]

        o[...] = t[...]
        t[...] = x[...]

    kernel = traced(
        leaks, (2, 3), [spec], spec, x.shape, x, scratch_shapes=[pbkern.Scratch((2, 2), "f")]
    )
    declared = kernel_nests(kernel, BuildOptions(semantics=("parallel", "arbitrary")))
    (got,) = declared.interpret(x)
    assert np.isnan(got[2:, :2]).all()
    assert not np.isnan(got[:, 2:]).any()


def test_index_maps_that_read_operands():
    def body(order, x, o):
        o[...] = x[...] * 2

    order, x = np.array([2, 0, 1], "i4"), np.arange(12, dtype="f").reshape(3, 4)
    grid = pbkern.GridSpec(grid=(3,), in_specs=[pbkern.BlockSpec((1, 4), lambda i, order: (order[i], 0))],
                           out_specs=pbkern.BlockSpec((1, 4), lambda i, order: (i, 0)), num_scalar_prefetch=1)  # fmt: skip
    kernel = pbkern.kernel(body, grid_spec=grid, out_shape=jax.ShapeDtypeStruct((3, 4), "f")).trace(
        order, x
    )
    nests = kernel_nests(kernel, PLAIN)
    assert nests.prologue.statements
    assert "let" in str(nests)
    np.testing.assert_array_equal(nests.interpret(order, x)[0], x[order] * 2)
    check(kernel, order, x)


def test_results_in_place_of_operands():
    def body(x, o):
        o[...] = x[...] + o[...]

    x = np.arange(6, dtype="f")
    kernel = traced(body, (), [pbkern.BlockSpec((6,), lambda: (0,))], pbkern.BlockSpec((6,), lambda: (0,)), (6,), x,
                    input_output_aliases={0: 0})  # fmt: skip
    check(kernel, x)
    assert kernel_nests(kernel, PLAIN).operands[1].aliased == 0


@pytest.mark.parametrize("semantics", [None, ("parallel",), ("arbitrary",)])
def test_grids_without_programs(semantics):
    x = np.arange(3, dtype="f")
    spec = pbkern.BlockSpec((1,), lambda i: (i,))
    kernel = traced(double, (0,), [spec], spec, (3,), x, input_output_aliases={0: 0})
    nests = kernel_nests(kernel, BuildOptions(semantics=semantics))
    nests.verify()
    assert not nests.cases
    np.testing.assert_array_equal(nests.interpret(x)[0], x)


def test_prints_and_checks_reach_the_process(capsys):
    def body(x, o):
        jax.debug.print("first {}", x[0])
        o[...] = x[...]

    x = np.arange(3, dtype="f")
    kernel = traced(
        body,
        (),
        [pbkern.BlockSpec((3,), lambda: (0,))],
        pbkern.BlockSpec((3,), lambda: (0,)),
        (3,),
        x,
    )
    kernel_nests(kernel, PLAIN).interpret(x)
    assert "first 0.0" in capsys.readouterr().out


# ---- what is refused, shown and watched


def test_dtypes_without_a_register_type():
    x = np.zeros(4, "c8")
    spec = pbkern.BlockSpec((4,), lambda: (0,))
    with pytest.raises(UnsupportedOp, match="has a dtype that this target lacks"):
        kernel_nests(traced(double, (), [spec], spec, (4,), x), PLAIN)


def test_passes_are_watched_and_can_be_turned_off():
    x = np.zeros((9, 5), "f")
    spec = pbkern.BlockSpec((4, 5), lambda i: (i, 0))
    nests = kernel_nests(
        traced(double, (3,), [spec], spec, x.shape, x), BuildOptions(may_shift=False)
    )
    never = Pass("never", lambda stmts, context: [], "it is turned off", when=lambda context: False)
    with watched() as runs:
        nests.after((*SHARED_PASSES, never))
    assert [r.name for r in runs] == [p.name for p in SHARED_PASSES] * 2
    assert len({r.of for r in runs}) == 2
    assert all(
        r.stage == "nests" and r.text.startswith("nest [") and r.milliseconds >= 0 for r in runs
    )
    with watched() as runs:
        pass
    assert not runs


def test_names_of_passes_are_their_own():
    from pbkern.fuse.pipeline import FUSE_PASSES
    from pbkern.targets.cpu.passes import CPU_PASSES

    for passes in (FUSE_PASSES, (*SHARED_PASSES, *CPU_PASSES)):
        assert len({p.name for p in passes}) == len(passes)
        assert all(p.why for p in passes)


def test_a_target_that_interprets_runs_whole_programs():
    def f(x, w):
        return jax.lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c @ w), x)

    x, w = (np.random.default_rng(k).normal(size=(6, 6)).astype("f") for k in range(2))
    build, options = pbkern.jit(f).build((x, w), {})
    (program,) = build.programs
    made = lowered(program, stub.StubBackend(), options)
    np.testing.assert_allclose(made(x, w)[0], f(x, w), rtol=1e-5, atol=1e-5)
    assert all("nest [" in k.nests for k in made.kernels.values())
