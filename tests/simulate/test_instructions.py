"""Single instructions that kernels need rarely: pairs of halves."""

import ml_dtypes
import numpy as np
import pytest

import pbkern
from pbkern.errors import SimulationError

HEAD = """.version 8.6
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p0, .param .u64 p1, .param .u64 p2)
{
.reg .b32 %r<20>; .reg .b64 %rd<20>;
ld.param.b64 %rd1, [p0];
ld.param.b64 %rd2, [p1];
ld.param.b64 %rd3, [p2];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd4, %r1, 4;
add.s64 %rd5, %rd1, %rd4;
add.s64 %rd6, %rd2, %rd4;
add.s64 %rd7, %rd3, %rd4;
ld.global.b32 %r2, [%rd5];
ld.global.b32 %r3, [%rd6];
"""


def run(instruction: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    out = np.zeros(32, np.uint32)
    text = f"{HEAD}{instruction} %r4, %r2, %r3;\nst.global.b32 [%rd7], %r4;\nret;\n}}\n"
    pbkern.simulate_ptx(text, 1, 32, [x.view(np.uint32), y.view(np.uint32), out])
    return out


@pytest.mark.parametrize(("kind", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_two_floats_become_halves_of_a_word(kind, dtype):
    x, y = np.random.default_rng(0).normal(size=(2, 32)).astype("f4")
    halves = run(f"cvt.rn.{kind}x2.f32", x, y).view(dtype).reshape(32, 2)
    np.testing.assert_array_equal(halves[:, 0], y.astype(dtype))
    np.testing.assert_array_equal(halves[:, 1], x.astype(dtype))


@pytest.mark.parametrize(("instruction", "dtype", "f"), [
    ("add.s16x2", np.int16, lambda a, b: a + b), ("min.s16x2", np.int16, np.minimum), ("max.u16x2", np.uint16, np.maximum),
    ("add.rn.f16x2", np.float16, lambda a, b: a + b),
])  # fmt: skip
def test_operations_on_halves(instruction, dtype, f):
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1 << 16, (2, 64)).astype(np.uint16).view(dtype)
    x, y = bits if dtype != np.float16 else rng.normal(size=(2, 64)).astype(dtype)
    np.testing.assert_array_equal(
        run(instruction, np.ascontiguousarray(x), np.ascontiguousarray(y)).view(dtype), f(x, y)
    )


CHOICE = """setp.lt.u32 %p1, %r1, 11;
selp.b64 %rd8, %rd5, %rd6, %p1;
ld.global.b32 %r4, [%rd8];
selp.b64 %rd9, %rd6, %rd7, %p1;
st.global.b32 [%rd9], %r4;
mov.b64 %rd10, s;
add.s64 %rd11, %rd10, %rd4;
add.u32 %r5, %r2, 100;
st.shared.b32 [%rd11], %r5;
cvta.shared.u64 %rd12, %rd11;
selp.b64 %rd13, %rd12, %rd7, %p1;
ld.b32 %r6, [%rd13];
add.u32 %r6, %r6, 1;
st.b32 [%rd13], %r6;
ld.shared.b32 %r7, [%rd11];
st.global.b32 [%rd5], %r7;
ret;
}
"""


@pytest.mark.parametrize(
    ("size", "space"),
    [(1, "generic"), (2, "generic"), (4, "generic"), (1, "shared"), (2, "shared::cta")],
)
def test_threads_store_to_elements_of_their_own_however_small(size, space):
    """Each its own part of what another access, an address or the array's type, would call one element."""
    shared = "" if space == "generic" else f".{space}"
    to_generic = "cvta.shared.u64 %rd11, %rd11;" if space == "generic" else ""
    text = (
        HEAD.replace("{\n", "{\n.shared .align 16 .b8 s[64];\n", 1)
        + f"""mov.u64 %rd11, s;
{to_generic}
mul.wide.u32 %rd4, %r1, {size};
add.s64 %rd11, %rd11, %rd4;
add.s64 %rd7, %rd3, %rd4;
st{shared}.b{8 * size} [%rd11], %r2;
ld{shared}.b{8 * size} %r4, [%rd11];
st.global.b{8 * size} [%rd7], %r4;
ret;
}}
"""
    )
    x, out = np.arange(100, 116, dtype=np.uint32), np.zeros(16, np.uint32)
    pbkern.simulate_ptx(text, 1, 16, [x, x, out])
    np.testing.assert_array_equal(out.view(f"u{size}")[:16], np.arange(100, 116))
    race = text.replace(
        f"mul.wide.u32 %rd4, %r1, {size};", f"and.b32 %r1, %r1, 7; mul.wide.u32 %rd4, %r1, {size};"
    )
    with pytest.raises(SimulationError, match="threads race"):
        pbkern.simulate_ptx(race, 1, 16, [x, x, out])


def test_lanes_that_choose_between_arrays_and_memories():
    """Compilers make one access of two branches: each lane goes to its own array, or to shared memory."""
    head = HEAD.replace(
        ".reg .b32 %r<20>;", ".reg .pred %p<4>; .reg .b32 %r<20>; .shared .align 16 .b8 s[128];"
    )
    lane = np.arange(32)
    x, y, out = (np.arange(32, dtype=np.uint32) + k for k in (1000, 2000, 3000))
    pbkern.simulate_ptx(head + CHOICE, 1, 32, [x, y, out])
    chosen = np.where(lane < 11, 1000 + lane, 2000 + lane)
    np.testing.assert_array_equal(y, np.where(lane < 11, chosen, 2000 + lane))
    np.testing.assert_array_equal(out, np.where(lane < 11, 3000 + lane, chosen + 1))
    np.testing.assert_array_equal(x, np.where(lane < 11, 1000 + lane + 101, 1000 + lane + 100))


LOCALS = """mov.b64 %rd10, depot;
cvta.local.u64 %rd11, %rd10;
add.u32 %r5, %r2, 100;
st.b32 [%rd11], %r5;
st.local.b32 [%rd10+4], %r2;
setp.lt.u32 %p1, %r1, 11;
selp.b64 %rd12, %rd11, %rd6, %p1;
ld.b32 %r4, [%rd12];
ld.b32 %r6, [%rd11+4];
cvta.to.local.u64 %rd13, %rd11;
ld.local.b32 %r7, [%rd13];
add.u32 %r4, %r4, %r6;
add.u32 %r4, %r4, %r7;
st.global.b32 [%rd7], %r4;
ret;
}
"""


def test_every_lane_has_local_memory_of_its_own():
    """Which generic addresses reach as well."""
    head = HEAD.replace(
        ".reg .b32 %r<20>;", ".reg .pred %p<4>; .reg .b32 %r<20>; .local .align 8 .b8 depot[8];"
    )
    lane = np.arange(32)
    x, y, out = (np.arange(32, dtype=np.uint32) + k for k in (1000, 2000, 3000))
    pbkern.simulate_ptx(head + LOCALS, 1, 32, [x, y, out])
    first, second = 1000 + lane + 100, 1000 + lane
    np.testing.assert_array_equal(out, np.where(lane < 11, first, 2000 + lane) + first + second)


@pytest.mark.parametrize(("kind", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
@pytest.mark.parametrize(
    ("code", "f"),
    [
        ("add.rn.f32.{0} %r4, %rs1, %r3;", lambda a, c: a + c),
        ("sub.rn.f32.{0} %r4, %rs1, %r3;", lambda a, c: a - c),
        ("fma.rn.f32.{0} %r4, %rs1, %rs2, %r3;", lambda a, c: a * a + c),
    ],
)
def test_operands_of_16_bits_are_widened(kind, dtype, code, f):
    """sm_100 and later: mixed precision floating point instructions."""
    half, y = (np.random.default_rng(2).normal(size=(2, 32)) * 8).astype("f4")
    half = half.astype(dtype)
    x, out = half.view(np.uint16).astype(np.uint32), np.zeros(32, np.uint32)
    moves = ".reg .b16 %rs<3>;\ncvt.u16.u32 %rs1, %r2;\nmov.b16 %rs2, %rs1;\n"
    text = f"{HEAD}{moves}{code.format(kind)}\nst.global.b32 [%rd7], %r4;\nret;\n}}\n"
    pbkern.simulate_ptx(text, 1, 32, [x, y.view(np.uint32), out])
    np.testing.assert_array_equal(out.view(np.float32), f(half.astype("f4"), y))


def test_two_types_that_no_rule_knows_are_refused():
    x = np.zeros(32, np.float32)
    with pytest.raises(pbkern.errors.InternalError, match=r"mul\.rn\.f32\.f16"):
        run("mul.rn.f32.f16", x, x)


HALF_WRITTEN = """.shared .align 16 .b8 s[64];
setp.ne.u32 %p1, %r1, 0;
@%p1 bra $over;
st.shared.b32 [s], %r2;
st.shared.b32 [s+8], %r3;
$over:
bar.sync 0;
ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [s];
add.u32 %r8, %r4, {used};
st.global.b32 [%rd7], %r8;
ret;
}}
"""


def test_elements_of_a_wide_load_that_nothing_uses_may_be_unwritten():
    x, y = np.arange(32, dtype=np.uint32) + 3, np.arange(32, dtype=np.uint32) + 90
    out = np.zeros(32, np.uint32)
    head = HEAD.replace(".reg .b32", ".reg .pred %p<2>; .reg .b32")
    pbkern.simulate_ptx(head + HALF_WRITTEN.format(used="%r6"), 1, 32, [x, y, out])
    np.testing.assert_array_equal(out, x[0] + y[0])
    with pytest.raises(SimulationError, match="before it is written"):
        pbkern.simulate_ptx(head + HALF_WRITTEN.format(used="%r5"), 1, 32, [x, y, out])
