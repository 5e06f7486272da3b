"""Code for a CPU by name (PBKERN_MACHINE), compiled just in time: its instructions, its numbers, its entries on disk."""

import itertools
import os
import platform
import re
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import pbkern
from pbkern import config
from pbkern.core.errors import OptionError
from pbkern.core.process import disk_cache
from pbkern.targets import get_target, mlir
from pbkern.targets.cpu.machines import cores, detect, devices
from tests.native.test_product_orientations import FORMS, operands

FMA = """
llvm.func @run(%p: !llvm.ptr) {
  %x = llvm.load %p {alignment = 4 : i64} : !llvm.ptr -> vector<16xf32>
  %y = llvm.intr.fma(%x, %x, %x) : (vector<16xf32>, vector<16xf32>, vector<16xf32>) -> vector<16xf32>
  llvm.store %y, %p {alignment = 4 : i64} : vector<16xf32>, !llvm.ptr
  llvm.return
}"""


def runs_here(name: str) -> bool:
    with config.override(machine=name):
        try:
            return devices.jit_device() is not None
        except OptionError:
            return False


needs_v3 = pytest.mark.skipif(not runs_here("x86-64-v3"), reason="the processor has no AVX2")


def disassembled(code: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".o") as file:
        file.write(code)
        file.flush()
        command = ["objdump", "--disassemble", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@needs_v3
@pytest.mark.parametrize(("name", "register"), [("x86-64-v3", "%ymm"), ("x86-64-v4", "%zmm")])
def test_the_machine_by_name_decides_on_instructions(name, register):
    """Whatever the processor at hand has: this code is not run."""
    module = mlir.parse(FMA)
    mlir.set_processor(module, *devices.device_of(name).processor)
    text = disassembled(mlir.object_code(module, 0, "run", {}))
    function = text.partition("<run>:")[2].partition("\n\n")[0]
    assert register in function
    assert "vfmadd" in function
    assert ("%zmm" in function) == (name == "x86-64-v4")


@needs_v3
def test_numbers_are_right_on_a_machine_by_name(tmp_path):
    """In a process of its own, as users set the variable."""
    names = "softmax", "attention", "conv_bias_relu", "layer_norm", "sorted", "integers", "unsharp", "mlp_gradient"  # fmt: skip
    script = f"""
import jax, numpy as np, pbkern
from tests.aot import programs
assert pbkern.cpu.machine().name == "x86-64-v3" and pbkern.cpu.machine().vector_bits == 256
for name in {names}:
    function, inputs = programs.CASES[name]
    compiled = pbkern.jit(function)
    for a, b in zip(*(jax.tree.leaves(f(*inputs)) for f in (compiled, function)), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * max(np.abs(b).max(), 1.0))
    assert "%zmm" not in compiled.as_text(*inputs, stage="asm")
"""
    environment = {"PBKERN_MACHINE": "x86-64-v3", "PBKERN_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def add(x):
    return x + 1


@needs_v3
def test_entries_of_two_machines_do_not_mix(tmp_path):
    """Neither code nor plans: machines of one instruction set are scheduled for differently."""
    x = np.zeros((8, 64), np.float32)
    entries, identities = [], []
    with config.override(cache_dir=tmp_path, cache=True):
        for name in (None, "x86-64-v3", "haswell", "x86-64-v3"):
            with config.override(machine=name):
                np.testing.assert_array_equal(pbkern.jit(add)(x), x + 1)
                identities.append(get_target("cpu").identity())
                entries.append({path.name for path, _ in disk_cache.current().entries()})
    for before, after in itertools.pairwise(entries[:3]):
        assert sorted(name.partition("-")[0] for name in after - before) == ["code", "plan"]
    assert entries[3] == entries[2]
    assert len(set(identities)) == 3


MASKED = {
    "turned": (lambda x: jnp.roll(x, 3, -1), lambda x: np.roll(x, 3, -1)),
    "padded": (
        lambda x: jnp.pad(x, ((1, 2), (2, 1))) * 2,
        lambda x: np.pad(x, ((1, 2), (2, 1))) * 2,
    ),
    "joined": (
        lambda x: jnp.concatenate([x[:, 2:], -x], -1),
        lambda x: np.concatenate([x[:, 2:], -x], -1),
    ),
    "largest of columns": (lambda x: x.max(0), lambda x: x.max(0)),
    "largest of planes": (
        lambda x: x.reshape(x.shape[0], -1, 2).max((0, 2)),
        lambda x: x.reshape(x.shape[0], -1, 2).max((0, 2)),
    ),
}


@needs_v3
@pytest.mark.parametrize("name", MASKED)
@settings(max_examples=6, deadline=None)
@given(
    rows=st.sampled_from([1, 5, 37, 300]),
    columns=st.sampled_from([4, 18, 70, 1030, 20_000]),
    special=st.booleans(),
)
def test_edges_without_registers_of_masks(name, rows, columns, special):
    """Blocks that reach over ends, and maxima, with NaN and both zeros among the numbers."""
    function, expected = MASKED[name]
    x = np.random.default_rng(rows + columns).standard_normal((rows, columns)).astype("f")
    if special:
        x.flat[:: max(x.size // 7, 1)] = np.nan
        x.flat[1 :: max(x.size // 5, 1)] = -0.0
    with config.override(machine="x86-64-v3"):
        got = np.asarray(pbkern.jit(function)(x))
    np.testing.assert_array_equal(got, expected(x))
    zeros = got == 0
    if "largest" not in name:  # NumPy's maximum of two zeros is either
        np.testing.assert_array_equal(np.signbit(got[zeros]), np.signbit(expected(x)[zeros]))


def stores_of_accumulators(assembly: str) -> list[str]:
    """Stores to the stack in loops of at least twelve multiply-adds."""
    loops = re.split(r"\bj\w+ .*\n", assembly)
    products = [loop for loop in loops if loop.count("vfmadd231ps") >= 12]
    assert products
    stores = [re.search(r"vmovaps %ymm\d+,0x[0-9a-f]+\(%rsp\)", loop) for loop in products]
    return [store[0] for store in stores if store]


@needs_v3
def test_accumulators_that_fill_the_registers_stay_there():
    """LLVM's optimiser, which runs for loops over border columns beside, may not unroll the loop over a window.

    Its steps share what they load.
    """
    x, w = np.ones((4, 64, 28, 28), "f4"), np.ones((64, 64, 3, 3), "f4")

    def convolution(x, w):
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
        )

    with config.override(machine="x86-64-v3"):
        assembly = pbkern.jit(convolution).as_text(x, w, stage="asm")
    assert not stores_of_accumulators(assembly)


@needs_v3
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_copies_that_transpose_leave_the_registers_to_the_product(dtype):
    """Masks of shuffles would stay in registers through the loops of the product, which needs all of them."""
    shape = jax.ShapeDtypeStruct((512, 512), dtype)
    with config.override(machine="x86-64-v3"):
        assembly = pbkern.jit(lambda a, b: a @ b.T).as_text(shape, shape, stage="asm")
    assert "vpshufb" not in assembly
    assert not stores_of_accumulators(assembly)


@needs_v3
@pytest.mark.parametrize("dtype", ["int8", "float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(8, 16), (24, 40), (37, 51)])
def test_squares_of_every_width_are_transposed(dtype, shape):
    with config.override(machine="x86-64-v3"), jax.enable_x64(dtype == "float64"):
        x = jnp.asarray(np.arange(shape[0] * shape[1]).reshape(shape) % 120, dtype)
        np.testing.assert_array_equal(pbkern.jit(lambda x: x.T + x.dtype.type(1))(x), x.T + 1)


def long_chain(x):
    """Sixteen constants, of which seven are coefficients of polynomials."""
    y = jnp.exp(-x * x) * 0.5 + x
    return jnp.tanh(y) * y + jnp.sqrt(jnp.abs(x)) - 1.0


@needs_v3
@pytest.mark.parametrize(
    ("function", "expected", "is_in_memory"),
    [
        (
            long_chain,
            lambda x: np.tanh(y := np.exp(-x * x) * 0.5 + x) * y + np.sqrt(np.abs(x)) - 1,
            True,
        ),
        (jax.nn.softplus, lambda x: np.logaddexp(x, 0), True),
        (jax.nn.sigmoid, lambda x: 1 / (1 + np.exp(-x)), False),
    ],
)
@pytest.mark.parametrize("size", [5, 1003, 70_001])
def test_addends_of_loops_whose_constants_fill_the_registers_are_read_from_memory(
    function, expected, is_in_memory, size
):
    x = np.random.default_rng(size).standard_normal(size).astype("f")
    with config.override(machine="x86-64-v3"):
        compiled = pbkern.jit(function)
        assembly, got = compiled.as_text(x, stage="asm"), np.asarray(compiled(x))
    np.testing.assert_allclose(got, expected(x.astype("f8")), rtol=3e-6, atol=1e-6)
    if size > 100:
        addends = re.findall(r"vfmadd213ps 0x[0-9a-f]+\(%rsp\),%ymm", assembly)
        assert (len(addends) >= 16) == is_in_memory


@needs_v3
def test_addends_of_doubles_and_of_both_types_in_one_loop():
    def f(x, y):
        return jnp.log1p(jnp.exp(x)), jax.nn.softplus(y)

    x, y = (
        np.random.default_rng(n).standard_normal(2003).astype(t) for n, t in enumerate(("f8", "f4"))
    )
    with config.override(machine="x86-64-v3"), jax.enable_x64(True):
        got = pbkern.jit(f)(x, y)
    np.testing.assert_allclose(got[0], np.logaddexp(x, 0), rtol=1e-14)
    np.testing.assert_allclose(got[1], np.logaddexp(y.astype("f8"), 0), rtol=3e-6)


def test_programs_inside_are_not_masked():
    """jnp.roll: no program has both parts inside, but most store inside, and read one."""
    text = pbkern.jit(lambda x: jnp.roll(x, 100)).as_text(np.zeros(2_000_000, "f"), stage="nests")
    inside, *_ = text.split("guarded:\n", 2)[1:]
    assert "?" not in inside


ARM_FLAGS = "Features : fp asimd aes crc32 atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp\n"
X86_FLAGS = "flags : avx2 fma f16c bmi1 bmi2 abm movbe\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("znver9", "did you mean `znver5`?"),
        ("neoverse-n1", "it is not for aarch64-unknown-linux-gnu"),
        ("x86-64-v4", "it lacks avx512f, avx512bw, avx512cd, avx512dq, avx512vl"),
        ("sapphirerapids", "amx-tile, amx-bf16, amx-int8"),
    ],
)
def test_machines_that_do_not_run_here_are_refused_at_the_first_compilation(
    name, message, monkeypatch
):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(devices, "cpuinfo", lambda: X86_FLAGS)
    devices._runnable.cache_clear()
    with config.override(machine=name), pytest.raises(OptionError) as e:
        pbkern.jit(add)(np.zeros(8, np.float32))
    assert message in str(e.value)
    devices._runnable.cache_clear()


def test_the_refusal_names_what_runs(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(devices, "cpuinfo", lambda: X86_FLAGS)
    with pytest.raises(OptionError) as e:
        devices._runnable.__wrapped__("znver4")
    assert "znver3" in e.value.hint
    assert "znver4" not in e.value.hint
    assert "alderlake" not in e.value.hint  # gfni
    assert "neoverse" not in e.value.hint


WIDE_FLAGS = f"{X86_FLAGS.strip()} avx512f avx512bw avx512cd avx512dq avx512vl avx512_bf16"


@pytest.mark.parametrize(
    ("flags", "level", "further"),
    [
        (f"{X86_FLAGS.strip()} sse4a 3dnowprefetch", "x86-64-v3", {"prfchw"}),
        (f"{WIDE_FLAGS} sse4a gfni", "x86-64-v4", {"avx512bf16", "gfni"}),
        (WIDE_FLAGS, None, set()),
        ("flags : avx sse4a", None, set()),
    ],
    ids=["avx2", "avx512", "no sse4a", "no level"],
)
def test_code_for_the_processor_at_hand_has_all_but_sse4a(flags, level, further, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for module in (devices, detect):
        monkeypatch.setattr(module, "cpuinfo", lambda: f"vendor_id : AuthenticAMD\n{flags}\n")
    processor = devices._processor_at_hand.__wrapped__()
    if level is None:
        assert processor is None
    else:
        cpu, tune, sets = processor
        assert cpu == level
        assert tune.startswith("znver")
        assert set(sets) == {*cores.LEVELS[level], *further}


def test_pairs_of_signed_bytes_are_packed_without_sse4a():
    """LLVM may shuffle them by insertq, fifty times as slow while upper halves of registers are in use."""

    def product(x, w):
        return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)

    rng = np.random.default_rng(0)
    x, w = (rng.integers(-128, 128, (rows, 256), np.int8) for rows in (16, 128))
    compiled = pbkern.jit(product)
    assert re.search("insertq|extrq", compiled.as_text(x, w, stage="asm")) is None
    np.testing.assert_array_equal(compiled(x, w), x.astype(np.int32) @ w.T.astype(np.int32))


@needs_v3
@pytest.mark.parametrize(
    ("depth", "columns", "dtype", "along"),
    [
        (3000, 8, "float32", "d1"),
        (2001, 5, "float32", "d1"),
        (3000, 8, "int32", "d1"),
        (512, 8, "float32", "k2"),  # the copy stays in the first cache
        (9000, 8, "float32", "k2"),  # it leaves the second one
        (3000, 2, "float32", "k2"),
        (3000, 8, "float16", "k2"),
    ],
)
def test_few_columns_that_are_far_have_vectors_along_them(depth, columns, dtype, along):
    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in ((10000, depth), (depth, columns))]
    with config.override(machine="x86-64-v3"):
        schedule = pbkern.jit(jnp.matmul).as_text(*shapes, stage="schedule")
    assert re.search(rf"nest \[d0<\d+, d1<{columns}, .*vector='{along}'", schedule)


@needs_v3
@pytest.mark.parametrize(("rows", "depth", "columns"), [(4100, 1101, 8), (5003, 1100, 7)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_products_by_few_columns_that_are_far(rows, depth, columns, dtype):
    rng = np.random.default_rng(depth)
    x, w = (rng.integers(-9, 10, s) for s in ((rows, depth), (depth, columns)))
    with config.override(machine="x86-64-v3"), jax.enable_x64(dtype == "float64"):
        got = pbkern.jit(jnp.matmul)(jnp.asarray(x, dtype), jnp.asarray(w, dtype))
    np.testing.assert_array_equal(got, x @ w)


def test_names_of_arm_machines_run_on_arm(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(devices, "cpuinfo", lambda: ARM_FLAGS)
    device = devices._runnable.__wrapped__("neoverse-n1")
    assert device.machine.note == "PBKERN_MACHINE=neoverse-n1"
    assert device.machine.cores == detect.usable_cores()[0]
    with pytest.raises(OptionError, match="is not for x86_64-unknown-linux-gnu") as e:
        devices._runnable.__wrapped__("znver3")
    assert "neoverse-n1" in e.value.hint
    assert "znver" not in e.value.hint


@needs_v3
@pytest.mark.parametrize(
    ("left", "right", "depth", "runs"),
    [((), 100, 403, True), ((), 60, 1001, True), ((3,), 64, 500, True), ((), 300, 400, False)],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("is_same", [True, False])
def test_runs_of_rows_that_stay_near(left, right, depth, runs, dtype, is_same):
    """Short rows of both operands are read where they are, a few at a time: the last run is a shorter one."""
    rng = np.random.default_rng(depth)
    x, y = rng.standard_normal((2, *left, depth, right))
    y = x if is_same else y[..., : right - 7]
    with config.override(machine="x86-64-v3"), jax.enable_x64(dtype == "float64"):
        arrays = [jnp.asarray(x, dtype)] + ([] if is_same else [jnp.asarray(y, dtype)])

        def product(a, b=None):
            sums = jnp.einsum("...ki,...kj->...ij", a, a if b is None else b)
            return sums, jnp.tanh(sums / 99)

        compiled = pbkern.jit(product)
        nests = compiled.as_text(*arrays, stage="nests")
        got = compiled(*arrays)
    if dtype == "float32" and is_same:
        assert ("%t" not in re.search(r"dot= (.*)", nests)[1]) == runs
    sums = np.einsum(
        "...ki,...kj->...ij", *(np.asarray(a, np.float64) for a in (arrays[0], arrays[-1]))
    )
    atol = {"float32": 2e-4, "float64": 1e-11}[dtype]
    np.testing.assert_allclose(got[0], sums, rtol=2 * atol / 100, atol=atol)
    np.testing.assert_allclose(got[1], np.tanh(sums / 99), rtol=0, atol=atol)


@needs_v3
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("m", "k", "n"), [(1021, 290, 70), (1001, 290, 64), (427, 320, 50)])
def test_strips_of_rows(form, m, k, n):
    """Vectors are parts of lines: copies of strips of rows take panels of columns in turn; 1021 rows end in a part."""
    arrays = operands(form, m, k, n)
    with config.override(machine="x86-64-v3"):
        product = pbkern.jit(lambda a, b: jnp.tanh(jnp.einsum(form, a, b) / 9) + 1)
        nests = product.as_text(*arrays, stage="nests")
        got = product(*arrays)
    nest = next(line for line in nests.splitlines() if "dot=" in line)
    panel = re.search(r"%t\d+\[%i\d+, k\d+, d\d+\]", nest)
    assert panel or not form.startswith("km"), "no panels in turn"
    wide = np.einsum(form, *(np.asarray(a, np.float64) for a in arrays))
    np.testing.assert_allclose(got, np.tanh(wide / 9) + 1, rtol=0, atol=4e-6)
