"""Contractions by tiles (AMX): machine code and the interpreter of nests against float64."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core.process import recursion
from pbkern.targets import backend
from pbkern.targets.cpu.backend import CpuBackend
from pbkern.targets.cpu.passes import CPU_PASSES
from tests.arrays import array
from tests.lowered import programs_of
from tests.native import amx
from tests.targets import stub

SUMS = {"bfloat16": jnp.float32, "int8": jnp.int32, "uint8": jnp.int32}
FORMS = ("mk,kn->mn", "mk,nk->mn", "km,kn->mn", "km,nk->mn")
runs = pytest.mark.skipif(not amx.can_run(), reason="there is neither AMX nor a C compiler")


def drawn(form, sizes, dtype, second=None, seed=0):
    """Operands of an einsum."""
    rng, operands = np.random.default_rng(seed), []
    for letters, kind in zip(form.split("->")[0].split(","), (dtype, second or dtype)):
        shape = [sizes[letter] for letter in letters]
        if kind == "bfloat16":
            operands.append(array(rng.standard_normal(shape), kind))
        else:
            info = np.iinfo(kind)
            operands.append(array(rng.integers(info.min, info.max + 1, shape), kind))
    return operands


def einsum(form, out):
    return lambda *operands: jnp.einsum(form, *operands, preferred_element_type=out)


def exact(form, operands):
    return np.einsum(form, *(np.asarray(operand, np.float64) for operand in operands))


def check(got, want, exactly):
    if exactly:
        np.testing.assert_array_equal(np.asarray(got, np.int64), want.astype(np.int64))
    else:
        scale = np.abs(want).max()
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=2e-6 * scale)


def lowered_for_tiles(f, *operands):
    """Lowered programs of a function for a machine with tiles."""
    machine = CpuBackend(amx.machine())
    with recursion.headroom():
        programs = programs_of(f, *operands)
        return [backend.lowered(program, machine, pbkern.CompileOptions()) for program in programs]


def interpreted(f, *operands):
    """Results of a function whose nests the interpreter runs, after all passes for a machine with tiles."""
    (program,) = programs_of(f, *operands)
    (kernel,) = {id(launch.kernel): launch.kernel for launch in program.launches}.values()
    options = CpuBackend(amx.machine()).build_options(kernel, pbkern.CompileOptions())
    return stub.run(
        program, *map(np.asarray, operands), backend=stub.StubBackend(CPU_PASSES, options)
    )


@runs
@pytest.mark.parametrize("dtype", SUMS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "sizes",
    [
        (32, 64, 32),
        (256, 256, 256),
        (77, 131, 53),
        (200, 1000, 70),
        (64, 2049, 48),
        (40, 5000, 520),
    ],
)
def test_products_are_right(sizes, form, dtype):
    operands = drawn(form, dict(zip("mkn", sizes)), dtype)
    with amx.tiles() as counts:
        got = pbkern.jit(einsum(form, SUMS[dtype]))(*operands)
        done = counts()
    check(got, exact(form, operands), dtype != "bfloat16")
    if done:
        m, k, n = sizes
        word = 2 if dtype == "bfloat16" else 4
        rows, columns, depth = -(-m // 16), -(-n // 16), -(-k // (16 * word))
        assert done["products"] >= rows * columns * depth
        assert done["products"] <= 1.3 * (rows + 1) * (columns + 1) * depth


@runs
@pytest.mark.parametrize("types", [("int8", "uint8"), ("uint8", "int8")])
def test_bytes_with_and_without_sign(types):
    operands = drawn("mk,kn->mn", {"m": 40, "k": 70, "n": 50}, *types)
    with amx.tiles():
        f = lambda a, b: jnp.matmul(a.astype(jnp.int32), b.astype(jnp.int32))
        got = pbkern.jit(f)(*operands)
    check(got, exact("mk,kn->mn", operands), True)


@hypothesis.settings(deadline=None, max_examples=25)
@hypothesis.given(
    st.tuples(st.integers(16, 50), st.integers(30, 150), st.integers(13, 50)),
    st.sampled_from(FORMS),
    st.sampled_from(sorted(SUMS)),
)
def test_nests_mean_the_product(sizes, form, dtype):
    operands = drawn(form, dict(zip("mkn", sizes)), dtype)
    (got,) = interpreted(einsum(form, SUMS[dtype]), *operands)
    check(got, exact(form, operands), dtype != "bfloat16")


def layer(x, w, bias):
    """A cast before the product, and operations behind it, which store narrow results."""
    total = jnp.matmul(x.astype(jnp.bfloat16), w, preferred_element_type=jnp.float32)
    return jax.nn.relu(total + bias).astype(jnp.bfloat16)


def test_casts_before_and_operations_behind():
    rng = np.random.default_rng(0)
    x, bias = rng.standard_normal((70, 130)).astype("f4"), rng.standard_normal(90).astype("f4")
    w = array(rng.standard_normal((130, 90)), "bfloat16")
    rounded = np.asarray(array(x, "bfloat16"), np.float64)
    want = np.maximum(rounded @ np.asarray(w, np.float64) + bias, 0)
    for got in interpreted(layer, x, w, bias):
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=8e-3, atol=1e-2)
    if amx.can_run():
        with amx.tiles() as counts:
            got = pbkern.jit(layer)(x, w, bias)
            assert amx.is_here() or counts()["products"] > 0
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=8e-3, atol=1e-2)


@pytest.mark.parametrize("form", ["bmk,bkn->bmn", "bmk,kn->bmn", "bhmk,bhnk->bhmn"])
def test_batches(form):
    sizes = {"b": 3, "h": 2, "m": 40, "k": 66, "n": 33}
    operands = drawn(form, sizes, "bfloat16")
    f = einsum(form, jnp.float32)
    want = exact(form, operands)
    (got,) = interpreted(f, *operands)
    check(got, want, False)
    if amx.can_run():
        with amx.tiles():
            check(pbkern.jit(f)(*operands), want, False)


@pytest.mark.parametrize(("stride", "channels"), [(1, 32), (2, 32), (1, 48), (1, 35)])
def test_convolutions(stride, channels):
    """Windows of channels that are contiguous: rows of images are rows of tiles."""
    rng = np.random.default_rng(0)
    x = array(rng.standard_normal((2, 18, 18, channels)), "bfloat16")
    w = array(rng.standard_normal((3, 3, channels, 40)), "bfloat16")

    def f(x, w, out=jnp.float32):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, w, (stride, stride), "SAME", dimension_numbers=dims, preferred_element_type=out
        )

    with jax.enable_x64(True):
        wide = [np.asarray(operand, np.float64) for operand in (x, w)]
        want = np.asarray(f(*wide, out=jnp.float64))
    if amx.can_run():
        with amx.tiles() as counts:
            got = pbkern.jit(f)(x, w)
            assert amx.is_here() or counts()["products"] > 0
        check(got, want, False)


@runs
def test_loops_of_tiles_beside_scalar_loops():
    """LLVM optimises the whole function: it would unroll these loops, and forget to configure registers that it then uses."""
    rng = np.random.default_rng(0)
    x = array(rng.standard_normal((2, 24, 9, 32)), "bfloat16")
    w = array(rng.standard_normal((32, 24, 3, 5)), "bfloat16")
    f = lambda x, w: jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", preferred_element_type=jnp.float32
    )
    with jax.enable_x64(True):
        wide = [np.asarray(operand, np.float64) for operand in (x, w)]
        want = np.asarray(jax.lax.conv_general_dilated(*wide, (1, 1), "SAME"))
    with amx.tiles() as counts:
        got = pbkern.jit(f)(x, w)
        assert amx.is_here() or counts()["products"] > 0
    check(got, want, False)


def test_text_names_the_instruction_and_its_dimensions():
    shapes = [jax.ShapeDtypeStruct((256, 256), "bfloat16")] * 2
    (program,) = lowered_for_tiles(einsum("mk,kn->mn", jnp.float32), *shapes)
    (kernel,) = program.lowered
    assert "dot by tdpbf16ps=" in kernel.nests
    assert "instruction_dims=" in kernel.nests
    assert kernel.text.count("tdpbf16ps") == 4  # tiles of a step
    assert kernel.text.count("tilestored64") == 4  # no tile goes to memory but results


@pytest.mark.parametrize(
    "sizes", [(8, 512, 512), (64, 8, 64), (64, 512, 1), (0, 64, 64), (64, 0, 64)]
)
def test_products_that_would_leave_tiles_empty_use_none(sizes):
    shapes = [
        jax.ShapeDtypeStruct(
            tuple(dict(zip("mkn", sizes))[letter] for letter in letters), "bfloat16"
        )
        for letters in ("mk", "kn")
    ]
    for program in lowered_for_tiles(einsum("mk,kn->mn", jnp.float32), *shapes):
        assert "tdpbf16ps" not in str([kernel.nests for kernel in program.lowered])


def test_without_permission_there_are_no_tiles():
    without = dataclasses.replace(amx.machine(), amx_bf16=False, amx_int8=False)
    shapes = [jax.ShapeDtypeStruct((256, 256), "bfloat16")] * 2
    with recursion.headroom():
        (program,) = programs_of(einsum("mk,kn->mn", jnp.float32), *shapes)
        nests = backend.lowered(program, CpuBackend(without), pbkern.CompileOptions()).lowered
    assert "tdp" not in str([kernel.nests for kernel in nests])
