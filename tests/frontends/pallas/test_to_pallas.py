"""Kernels written here, handed to JAX's Pallas: its interpreters, and its compiler for TPUs by cross-lowering."""

import dataclasses
import os
import pathlib
import runpy
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import pbkern
from pbkern.core.errors import OptionError, TargetError, UnsupportedOp
from tests.dsl.differentiable_kernels import BS, CASES, numbers, s

INTERPRETERS = {
    "plain": {"interpret": True},
    "tpu blocks": {"target": "tpu", "interpret": True},
    "tpu memory": {"target": "tpu", "interpret": pltpu.InterpretParams()},
}


def for_tpu(function, *args) -> str:
    """StableHLO of a function that is lowered for TPUs."""
    return jax.export.export(jax.jit(function), platforms=["tpu"])(*args).mlir_module()


def call_params(function, *args) -> dict:
    """Parameters of the pallas_call of a function."""
    traced = jax.make_jaxpr(function)(*args)
    return next(eqn.params for eqn in traced.jaxpr.eqns if eqn.primitive.name == "pallas_call")


def close(got, want):
    for result, expected in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("interpreter", INTERPRETERS)
@pytest.mark.parametrize("name", CASES)
def test_interpreters_of_jax_run_kernels(name, interpreter):
    # One case adds what is outside of an array to a sum, times zero: NaN in JAX's interpreter.
    case = CASES[name](size=40) if name == "masked_edges" else CASES[name]()
    run = case.kernel.to_pallas(**INTERPRETERS[interpreter])
    close(run(*case.operands), case.plain(*case.operands))


@pytest.mark.parametrize("name", CASES)
def test_kernels_lower_for_tpus(name):
    case = CASES[name]()
    text = for_tpu(case.kernel.to_pallas(target="tpu"), *case.operands)
    assert text.count("stablehlo.custom_call @tpu_custom_call") == len(case.traced().stages)


# (tutorial, its kernel, names of its operands there or arrays, what the kernel computes in plain NumPy and JAX)
TUTORIALS = [
    ("01_first_kernel", "scale_rows", ("x", "scale"), lambda x, scale: x * scale),
    ("01_first_kernel", "column_sums", ("x",), lambda x: x.sum(0, keepdims=True)),
    ("05_attention", "flash", ("q", "k", "v"), lambda q, k, v: jax.nn.softmax(
        q @ np.swapaxes(k, 1, 2) / np.sqrt(q.shape[-1])) @ v),
    ("14_gradient_of_a_kernel", "running_product", ("y",), lambda y: np.cumprod(y, 0)),
    ("14_gradient_of_a_kernel", "power", (np.array([3], np.int32), np.full(8, 1.5, np.float32)), lambda n, x: x**4),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("interpreter", INTERPRETERS)
@pytest.mark.parametrize(("tutorial", "name", "operands", "plain"), TUTORIALS)
def test_kernels_of_tutorials(tutorial, name, operands, plain, interpreter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = pathlib.Path(__file__).parents[3] / "tutorials"
    names = runpy.run_path(str(folder / f"{tutorial}.py"))
    arrays = [names[x] if isinstance(x, str) else x for x in operands]
    close(names[name].to_pallas(**INTERPRETERS[interpreter])(*arrays), plain(*arrays))
    assert "tpu_custom_call" in for_tpu(names[name].to_pallas(target="tpu"), *arrays)


def test_fused_kernels_are_handed_on():
    f = pbkern.jit(lambda a, b: jax.nn.gelu(a @ b))
    a, b = numbers(64, 64), numbers(64, 64, seed=1)
    (kernel,) = f.kernels(a, b)
    for options in INTERPRETERS.values():
        close(kernel.to_pallas(**options)(a, b), [jax.nn.gelu(a @ b)])


@pytest.mark.parametrize("interpreter", INTERPRETERS)
@pytest.mark.parametrize("first", [1.0, -1.0])
def test_a_number_that_a_value_leaves_unwritten(interpreter, first):
    @pbkern.kernel(out_shape=s())
    def chosen(x, o):
        @pbkern.when(x[0] > 0)
        def _():
            o[...] = x[1] + x[0]

    got = chosen.to_pallas(**INTERPRETERS[interpreter])(np.array([first, 5], np.float32))
    close(got, 6.0 if first > 0 else 0.0)


@pytest.mark.parametrize("interpreter", INTERPRETERS)
def test_columns(interpreter):
    """Single columns, at places that are known or not, and every second column."""

    @pbkern.kernel(out_shape=[s(8, 4), s(8, 4)])
    def columns(at, x, o, halves):
        o[...] = jnp.zeros_like(o)
        o[:, 1] = x[:, at[0]]
        o[2, at[1]] += x[3, at[0]]
        halves[...] = x[:, 1:9:2]

    at, x = np.array([5, 3], np.int32), numbers(8, 9)
    want = np.zeros((8, 4), np.float32)
    want[:, 1] = x[:, 5]
    want[2, 3] += x[3, 5]
    close(columns.to_pallas(**INTERPRETERS[interpreter])(at, x), [want, x[:, 1:9:2]])
    assert "tpu_custom_call" in for_tpu(columns.to_pallas(target="tpu"), at, x)


COMPILE = """
import sys
import jax
from jax.experimental import topologies
from tests.dsl.differentiable_kernels import CASES

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
sharding = jax.sharding.SingleDeviceSharding(devices[0])
for name, make in CASES.items():
    case = make()
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in case.operands]
    jax.jit(case.kernel.to_pallas(target="tpu")).lower(*types).compile()
    print(name)
"""
# libtpu asks a machine of Google's for these where they are not given.
NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0",
    "JAX_PLATFORMS": "cpu",
}  # fmt: skip


@pytest.mark.slow
def test_kernels_compile_for_a_tpu_without_one():
    """The compiler behind the lowering, which refuses more than the lowering does."""
    pytest.importorskip("libtpu")
    root = pathlib.Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=root, env=os.environ | NO_TPU, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.split() == list(CASES), done.stderr


def test_a_traced_kernel_returns_a_list():
    case = CASES["softmax"]()
    (result,) = case.traced().to_pallas(interpret=True)(*case.operands)
    close(result, case.plain(*case.operands))


@pytest.mark.parametrize("interpreter", INTERPRETERS)
def test_squeezed_dimensions_and_blocks_that_are_cut_apart(interpreter):
    """Blocks (None, 4, 3) of [5, 10, 8]: no size is a TPU's, and both ends are ragged."""
    tile = BS((None, 4, 3), lambda i, j, k: (i, j, k))

    @pbkern.kernel(grid=(5, 3, 3), in_specs=[tile], out_specs=tile, out_shape=s(5, 10, 8))
    def scaled(x, o):
        o[...] = x[...] * (1 + pbkern.program_id(0)).astype(jnp.float32)

    x = numbers(5, 10, 8)
    close(scaled.to_pallas(**INTERPRETERS[interpreter])(x), x * np.arange(1, 6)[:, None, None])


@pytest.mark.parametrize("interpreter", INTERPRETERS)
def test_dynamic_grids_and_rows_that_no_program_visits(interpreter):
    row = BS((1, 8), lambda i: (i, 0))

    @pbkern.kernel(
        grid=(6,), in_specs=[row, BS()], out_specs=row, out_shape=s(6, 8), dynamic_grid={0: 1}
    )
    def first_rows(x, count, o):
        o[...] = x[...] + count[...].astype(jnp.float32)

    x = numbers(6, 8)
    got = first_rows.to_pallas(**INTERPRETERS[interpreter])(x, jnp.int32(4))
    close(got, np.concatenate([x[:4] + 4, np.zeros((2, 8))]))


@pytest.mark.parametrize("interpreter", INTERPRETERS)
def test_results_that_a_value_leaves_unwritten_are_zero(interpreter):
    tile = BS((8, 8), lambda i: (i, 0))

    @pbkern.kernel(grid=(3,), in_specs=[tile], out_specs=tile, out_shape=s(24, 8))
    def positive(x, o):
        @pbkern.when(x[0, 0] > 0)
        def _():
            o[...] = x[...]

    x = numbers(24, 8)
    blocks = x.reshape(3, 8, 8)
    want = np.where(blocks[:, :1, :1] > 0, blocks, 0).reshape(24, 8)
    assert 0 < (blocks[:, 0, 0] > 0).sum() < 3
    close(positive.to_pallas(**INTERPRETERS[interpreter])(x), want)


@pytest.mark.parametrize("interpreter", INTERPRETERS)
def test_a_shared_block_that_programs_add_to(interpreter):
    """The first program with a block finds what its operand held."""

    def body(x, total, o):
        o[...] += x[...]

    kernel = pbkern.kernel(
        body, grid=(3, 4), in_specs=[BS((8, 128), lambda i, k: (i * 4 + k, 0)), BS((8, 128), lambda i, k: (i, 0))],
        out_specs=BS((8, 128), lambda i, k: (i, 0)), out_shape=s(24, 128), input_output_aliases={1: 0},
    )  # fmt: skip
    x, total = numbers(96, 128), numbers(24, 128, seed=1)
    got = kernel.to_pallas(**INTERPRETERS[interpreter])(x, total)
    close(got, total + x.reshape(3, 4, 8, 128).sum(1).reshape(24, 128))


@pytest.mark.parametrize("interpreter", INTERPRETERS)
def test_windows_with_padding(interpreter):
    """Elements outside are not read: the body masks them."""
    halo = BS((pbkern.Element(10, (1, 9)),), lambda i: (i * 8 - 1,))

    @pbkern.kernel(grid=(5,), in_specs=[halo], out_specs=BS((8,), lambda i: (i,)), out_shape=s(37))
    def sums(x, o):
        values = jnp.where(pbkern.in_bounds(x, 0), x[...], 0)
        o[...] = values[:8] + values[1:9] + values[2:]

    x = numbers(37)
    padded = np.pad(x, 1)
    close(sums.to_pallas(**INTERPRETERS[interpreter])(x), padded[:-2] + x + padded[2:])


@pytest.mark.parametrize("interpreter", INTERPRETERS)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_scans_and_running_sums(interpreter, is_reversed):
    @pbkern.kernel(out_shape=[s(6, 8), s(6, 8)])
    def steps(x, sums, products):
        sums[...] = jax.lax.cumsum(x[...], 0, reverse=is_reversed)

        def step(carry, row):
            carry = carry * row
            return carry, carry + 1

        products[...] = jax.lax.scan(step, jnp.ones(8), x[...], reverse=is_reversed)[1]

    x = numbers(6, 8)
    along = x[::-1] if is_reversed else x
    want = [np.cumsum(along, 0), np.cumprod(along, 0) + 1]
    want = [values[::-1] if is_reversed else values for values in want]
    run = steps.to_pallas(**INTERPRETERS[interpreter])
    close(run(x), want)
    assert "tpu_custom_call" in for_tpu(steps.to_pallas(target="tpu"), x)


def test_compiler_params_reach_jax():
    params = pbkern.tpu.CompilerParams(
        dimension_semantics=("parallel", pltpu.ARBITRARY), vmem_limit_bytes=2**20, has_side_effects=True,
        flags={"xla_example": True}, disable_bounds_checks=True,
    )  # fmt: skip
    tile = BS((8, 128), lambda i, j: (i, j))
    kernel = pbkern.kernel(
        lambda x, o: o.__setitem__(..., x[...]), grid=(2, 2), in_specs=[tile], out_specs=tile,
        out_shape=s(16, 256), compiler_params=params, name="copied",
    )  # fmt: skip
    given = call_params(kernel.to_pallas(target="tpu"), numbers(16, 256))["compiler_params"]
    assert given == pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=2**20, has_side_effects=True,
        flags={"xla_example": True}, disable_bounds_checks=True,
    )  # fmt: skip


def test_semantics_of_another_target_are_taken():
    case = CASES["matmul"]()
    given = call_params(case.kernel.to_pallas(target="tpu"), *case.operands)["compiler_params"]
    assert given.dimension_semantics == ("parallel", "parallel", "arbitrary")


def test_there_is_a_parameter_for_each_of_jax():
    own = {field.name: field.default for field in dataclasses.fields(pbkern.tpu.CompilerParams)}
    for field in dataclasses.fields(pltpu.CompilerParams):
        assert own[field.name] == field.default or field.name == "needs_layout_passes"


@pytest.mark.parametrize(("fields", "message"), [
    ({"dimension_semantics": ("sequential",)}, "dimension_semantics"),
    ({"vmem_limit_bytes": 0}, "vmem_limit_bytes"),
    ({"kernel_type": "gpu"}, "kernel_type"),
    ({"has_side_effects": 2}, "has_side_effects"),
    ({"flags": "a"}, "flags"),
    ({"vmem_limit": 1}, "has no field"),
])  # fmt: skip
def test_bad_parameters_are_named(fields, message):
    with pytest.raises(OptionError, match=message):
        pbkern.tpu.CompilerParams(**fields)


def refusal(body, match, **options):
    """Text of the error with which a kernel for TPUs is refused; its place is a line of this file."""
    with pytest.raises(UnsupportedOp, match=match) as caught:
        kernel = pbkern.kernel(body, **({"out_shape": s(8, 128)} | options))
        for_tpu(kernel.to_pallas(target="tpu"), numbers(8, 128))
    assert "test_to_pallas.py" in str(caught.value)
    return str(caught.value)


def test_what_pallas_lacks_is_refused_at_the_line():
    def checked(x, o):
        pbkern.check(x[0, 0] > 0, "negative")
        o[...] = x[...]

    def sorts(x, o):
        o[...] = jnp.sort(x[...], 1)

    def gathers(x, o):
        o[...] = x[jnp.arange(8) % 3]

    def masked(x, o):
        start = x[0, 0].astype(jnp.int32)
        o[...] = pbkern.load(x, (pbkern.ds(start, 8),), mask=jnp.arange(8)[:, None] + start < 8)

    refusal(checked, "check_failed")
    refusal(sorts, "`sort` on a TPU")
    refusal(gathers, "arrays of indices")
    refusal(masked, "places that are values")


def test_blocks_that_programs_come_back_to_are_refused():
    def body(x, o):
        @pbkern.when(pbkern.program_id(0) == 0)
        def _():
            o[...] = jnp.zeros_like(o)

        o[...] += x[...]

    whole = BS((8, 64), lambda k, j: (0, j))
    options = {"grid": (2, 2), "in_specs": [whole], "out_specs": whole}
    assert "further in" in refusal(body, "on a TPU", **options)


def test_operands_that_other_programs_write_to_are_refused():
    def body(x, o):
        o[...] = x[...] + 1

    whole = BS((8, 128), lambda k: (0, 0))
    options = {"grid": (2,), "in_specs": [whole], "out_specs": whole, "input_output_aliases": {0: 0}}  # fmt: skip
    refusal(body, "shares memory with a result", **options)


def test_wide_types_are_refused():
    with jax.enable_x64(True):
        kernel = pbkern.kernel(
            lambda x, o: o.__setitem__(..., x[...] * 2),
            out_shape=jax.ShapeDtypeStruct((8,), "float64"),
            name="wide",
        )
        close(kernel.to_pallas(interpret=True)(np.ones(8)), np.full(8, 2.0))
        with pytest.raises(UnsupportedOp, match="float64"):
            kernel.to_pallas(target="tpu")(np.ones(8))


def test_there_is_no_other_target():
    with pytest.raises(OptionError, match="to_pallas for target `cpu`"):
        CASES["softmax"]().traced().to_pallas(target="cpu")


# --- jax.export
# ---------------------------------------------------------------------------------------------------


def test_exports_carry_what_the_interpreter_makes_of_a_kernel():
    case = CASES["matmul"]()
    with pytest.warns(UserWarning, match="`matmul` is exported without its kernels"):
        exported = jax.export.export(jax.jit(case.kernel))(*case.operands)
    again = jax.export.deserialize(exported.serialize())
    close(again.call(*case.operands), case.plain(*case.operands))


@pytest.mark.filterwarnings("ignore:.*is exported without its kernels")
def test_exports_of_decorated_functions_carry_kernels():
    case = CASES["softmax"]()
    f = pbkern.jit(lambda x: case.kernel(x + 1) * 2)
    exported = jax.export.export(jax.jit(f))(*case.operands)
    close(exported.call(*case.operands), 2 * jax.nn.softmax(case.operands[0] + 1))


def test_exports_for_tpus_carry_the_kernel():
    case = CASES["softmax"]()
    assert "tpu_custom_call" in for_tpu(lambda x: case.kernel(x), *case.operands)


def test_kernels_with_checks_are_not_exported():
    @pbkern.kernel(out_shape=s(4))
    def root(x, o):
        pbkern.check((x[...] >= 0).all(), "negative")
        o[...] = jnp.sqrt(x[...])

    with pytest.raises(TargetError, match="cannot be exported"):
        jax.export.export(jax.jit(root))(jnp.ones(4))
