"""Kernels for AMD GPUs without one: every function becomes a code object; what is missing is said."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core import config
from pbkern.core.options import CompileOptions
from pbkern.errors import InternalError, OptionError, ScheduleError, TargetError
from pbkern.targets import get_target
from pbkern.targets.amdgpu import compile as codegen
from pbkern.targets.amdgpu import driver
from pbkern.targets.amdgpu.devices import KINDS
from pbkern.targets.amdgpu.target import AmdgpuTarget
from tests.nvgpu.test_kernels import DTYPES, FUNCTIONS

GPU = {"target": "amdgpu"}


def has_lld() -> bool:
    try:
        return bool(codegen.lld())
    except TargetError:
        return False


needs_lld = pytest.mark.skipif(not has_lld(), reason="there is no lld: pip install ziglang")


def codes(f, *types, device=None):
    """Code of a function's kernels."""
    build, _ = pbkern.jit(f, compile_options=GPU).build(types, {})
    options = CompileOptions(target="amdgpu", device=device)
    return [
        c
        for p in build.plan.programs()
        for c in get_target("amdgpu").compile(p, options).distinct()
    ]


def types(shapes):
    return [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]


@pytest.mark.sampled(3)
@needs_lld
@pytest.mark.parametrize(
    "name",
    [n if k % 4 == 0 else pytest.param(n, marks=pytest.mark.slow) for k, n in enumerate(FUNCTIONS)],
)
@pytest.mark.parametrize("architecture", KINDS)
def test_functions_become_code_objects(name, architecture):
    f, shapes = FUNCTIONS[name]
    made = codes(f, *types(shapes), device=architecture)
    assert made
    for code in made:
        a = code.assembled
        assert a.image[:4] == b"\x7fELF"
        assert a.spill_bytes == 0
        assert 0 < a.registers <= 256
        assert f"amdgcn-amd-amdhsa--{architecture}" in a.text
        assert f".amdhsa_kernel {code.function.name}" in a.text


@needs_lld
@pytest.mark.parametrize(
    "dtype",
    [
        d if d in ("bfloat16", "int8", "bool") else pytest.param(d, marks=pytest.mark.slow)
        for d in DTYPES
    ],
)
def test_every_dtype(dtype):
    with jax.enable_x64(True):
        t = jax.ShapeDtypeStruct((7, 40), jnp.dtype(dtype))
        for code in codes(
            lambda x: (x ^ x[::-1] if dtype == "bool" else x * x + x[::-1], x.max(1)), t
        ):
            assert code.assembled.image


@needs_lld
@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize(("f", "shape"), [
    (jax.grad(lambda x: jnp.arctan(x * x) * x), ()), (lambda x: jax.nn.softmax(x * 3, -1), (1, 1)),
    (jax.grad(lambda x: (x * jax.nn.silu(x[5])).sum()), (131,)), (lambda x: (x - x[0] * x[0]) * x[0] * x[0], (40,)),
], ids=["scalar", "one element", "one of many", "product"])  # fmt: skip
def test_values_that_are_the_same_in_all_lanes_are_rounded(f, shape, architecture):
    made = codes(f, *types([shape]), device=architecture)
    assert made
    assert all(
        c.assembled.image and not re.search(r"call .*arithmetic\.fence", c.llvm) for c in made
    )


@needs_lld
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_product_that_several_read_is_rounded_for_each(dtype):
    """It stays a product: with the sums that read it, it does not become fused multiply-adds."""

    def f(x, y):
        product = x * y
        return product, product + x, product - y

    with jax.enable_x64(True):
        build, _ = pbkern.jit(f, compile_options=GPU).build(
            [jax.ShapeDtypeStruct((70,), jnp.dtype(dtype))] * 2, {}
        )
        made = [
            c
            for p in build.plan.programs()
            for c in get_target("amdgpu")
            .compile(p, CompileOptions(target="amdgpu", device="gfx90a"))
            .distinct()
        ]
    text = "".join(c.assembled.text for c in made)
    assert "v_mul_f" in text
    assert not re.search(r"v_(fma|fmac|mad|mac)_f", text)
    assert (
        "v_fma"
        in codes(lambda x: x * x + x[::-1], *types([(70,)]), device="gfx90a")[0].assembled.text
    )


@needs_lld
def test_wavefronts_of_64_threads_exchange_at_six_distances_and_of_32_at_five():
    for architecture, count in (("gfx942", 6), ("gfx1100", 5)):
        (code,) = codes(lambda x: x.sum(), *types([(100, 100)]), device=architecture)
        assert len(re.findall(r"rocdl\.ds_bpermute", code.function.text)) == count


@needs_lld
def test_barriers_order_memory():
    (code,) = codes(lambda x: jnp.sort(x, -1), *types([(3, 50)]))
    assert "rocdl.s.barrier" in code.function.text
    text = re.sub(r"\s*\.loc[^\n]*", "", code.assembled.text)
    assert (
        len(re.findall(r"s_waitcnt [^\n]*lgkmcnt\(0\)[^\n]*\s*s_barrier", text)) > 3
    )  # stores to LDS have arrived


@needs_lld
def test_calls_of_functions_that_no_device_has_are_errors():
    ir = "declare float @sinf(float)\ndefine amdgpu_kernel void @k(ptr %p) {\n%x = load float, ptr %p\n" \
         "%y = call float @sinf(float %x)\nstore float %y, ptr %p\nret void\n}"  # fmt: skip
    with pytest.raises(InternalError, match="does not link"):
        codegen.assemble(ir, KINDS["gfx942"])


@needs_lld
def test_stages_of_text():
    f = pbkern.jit(lambda x: x + 1, compile_options=GPU)
    for stage, words in {
        "nests": "nest [",
        "mlir": "rocdl.workitem.id.x",
        "llvm": "amdgpu_kernel",
        "asm": ".amdhsa_kernel",
    }.items():
        assert words in f.as_text(np.zeros(10, "f4"), stage=stage)


@needs_lld
def test_calls_without_a_device_say_what_is_missing():
    """JAX has no platform "rocm" here; where it has, the driver is what is missing."""
    f = pbkern.jit(lambda x: x + 1, compile_options=GPU)
    with pytest.raises(
        TargetError, match="compiled for target `amdgpu` but its arguments are on cpu"
    ) as e:
        f(jnp.zeros(8))
    assert "jax finds no device of platform 'rocm'" in e.value.hint
    assert "stage='asm'" in e.value.hint
    absent = type(
        "Absent", (driver.HipDriver,), {"library_name": "libamdhip64_that_is_not_there.so"}
    )()
    with pytest.raises(TargetError, match="no program can be launched on an AMD GPU") as e:
        absent.open()
    assert "libamdhip64_that_is_not_there" in str(e.value)
    assert "rocminfo" in str(e.value)


def test_without_a_linker_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(codegen.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(codegen.shutil, "which", lambda name: None)
    monkeypatch.setattr(codegen.pathlib.Path, "exists", lambda self: False)
    with pytest.raises(TargetError, match="cannot be linked") as e:
        codegen.lld.__wrapped__()
    assert "pbkern[amd]" in str(e.value)


def test_devices_by_name():
    assert get_target("amdgpu").backend_of("MI300X").kind.architecture == "gfx942"
    with pytest.raises(OptionError, match="there is no AMD device `mi300`"):
        get_target("amdgpu").backend_of("mi300")


def test_params_are_checked_and_printed():
    with pytest.raises(OptionError, match=r"amdgpu.CompilerParams has no field `profile_space`"):
        pbkern.amdgpu.CompilerParams(profile_space=2)
    with pytest.raises(
        OptionError, match=r"amdgpu.CompilerParams field `num_warps` has a bad value"
    ):
        pbkern.amdgpu.CompilerParams(num_warps=5)

    wide = pbkern.amdgpu.CompilerParams(num_warps=32)

    @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((8,), jnp.float32), compiler_params=wide)
    def plus_one(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    made = plus_one.trace(np.zeros(8, np.float32))
    assert "pbkern.amdgpu.CompilerParams(num_warps=32)" in made.source()
    backend = get_target("amdgpu").backend_of("gfx942")
    with pytest.raises(ScheduleError, match="asks for num_warps=32") as e:
        backend.build_options(made, CompileOptions(target="amdgpu"))
    assert "2048 threads of 64" in str(e.value)
    assert "num_warps=16" in str(e.value)
    assert (
        get_target("amdgpu")
        .backend_of("gfx1100")
        .build_options(made, CompileOptions(target="amdgpu"))
        .threads
        == 1024
    )


@needs_lld
def test_another_process_finds_the_code_on_disk(tmp_path, monkeypatch):
    build, _ = pbkern.jit(lambda x: x * 1.875, compile_options=GPU).build(types([(7, 5)]), {})
    (program,) = build.plan.programs()
    with config.override(cache_dir=tmp_path, cache=True):
        made = [
            AmdgpuTarget().compile(program, CompileOptions(target="amdgpu")).distinct()[0]
            for _ in range(2)
        ]
        monkeypatch.setattr(codegen, "assemble", None)  # what is found is not made
        made.append(AmdgpuTarget().compile(program, CompileOptions(target="amdgpu")).distinct()[0])
    assert made[0].image[:4] == b"\x7fELF"
    assert made[0].image == made[1].image == made[2].image
    assert len(list(tmp_path.glob("amdgpu-*.pbk"))) == 1


def test_a_linker_in_path_is_found(monkeypatch, tmp_path):
    (tmp_path / "ld.lld").write_text("")
    monkeypatch.setattr(codegen.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(codegen.shutil, "which", lambda name: str(tmp_path / name))
    assert codegen.lld.__wrapped__() in [
        (str(tmp_path / "ld.lld"),),
        ("/opt/rocm/llvm/bin/ld.lld",),
    ]


@pytest.mark.parametrize("architecture", ["gfx1100", "gfx942"])
def test_places_are_computed_in_each_step_of_a_loop(architecture):
    """Before the loop, those of all programs at the ends of arrays would not fit registers."""

    def product(a, b, c, acc):
        @pbkern.when(pbkern.program_id(2) == 0)
        def _():
            acc[...] = jnp.zeros_like(acc)

        acc[...] += a[...] @ b[...]

        @pbkern.when(pbkern.program_id(2) == 4)
        def _():
            c[...] = jnp.maximum(acc[...], 0)

    params = pbkern.amdgpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "sequential"), num_warps=2
    )
    kernel = pbkern.kernel(
        product,
        grid=(3, 2, 5),
        in_specs=[
            pbkern.BlockSpec((32, 24), lambda i, j, k: (i, k)),
            pbkern.BlockSpec((24, 40), lambda i, j, k: (k, j)),
        ],
        out_specs=[pbkern.BlockSpec((32, 40), lambda i, j, k: (i, j))],
        out_shape=[jax.ShapeDtypeStruct((90, 77), jnp.float32)],
        scratch_shapes=[pbkern.Scratch((32, 40), jnp.float32)],
        compiler_params=params,
    )
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((90, 120), (120, 77))]
    options = {"target": "amdgpu", "device": architecture}
    text = pbkern.jit(lambda a, b: kernel(a, b)[0], compile_options=options).as_text(
        *types, stage="asm"
    )
    (scratch,) = re.findall(r"\.private_segment_fixed_size: (\d+)", text)
    assert int(scratch) == 0
