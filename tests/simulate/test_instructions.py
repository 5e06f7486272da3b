"""Single instructions that kernels need rarely: pairs of halves."""

import ml_dtypes
import numpy as np
import pytest

import pbkern

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


@pytest.mark.parametrize("kind, dtype", [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_two_floats_become_halves_of_a_word(kind, dtype):
    x, y = np.random.default_rng(0).normal(size=(2, 32)).astype("f4")
    halves = run(f"cvt.rn.{kind}x2.f32", x, y).view(dtype).reshape(32, 2)
    np.testing.assert_array_equal(halves[:, 0], y.astype(dtype))
    np.testing.assert_array_equal(halves[:, 1], x.astype(dtype))


@pytest.mark.parametrize("instruction, dtype, f", [
    ("add.s16x2", np.int16, lambda a, b: a + b), ("min.s16x2", np.int16, np.minimum), ("max.u16x2", np.uint16, np.maximum),
    ("add.rn.f16x2", np.float16, lambda a, b: a + b),
])  # fmt: skip
def test_operations_on_halves(instruction, dtype, f):
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1 << 16, (2, 64)).astype(np.uint16).view(dtype)
    x, y = bits if dtype != np.float16 else rng.normal(size=(2, 64)).astype(dtype)
    np.testing.assert_array_equal(run(instruction, np.ascontiguousarray(x), np.ascontiguousarray(y)).view(dtype), f(x, y))
