"""parse(program_text(statements)) is the same program, for statements of every kind and for those of whole kernels."""

from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from benchmarks import snapshot
from pbkern.core.errors import InternalError
from pbkern.core.passes import run_passes
from pbkern.lower.build_options import BuildOptions
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.parse import parse, program_text
from pbkern.targets.cpu.schedule.nest_schedule import CPU_DIALECT
from tests.lowered import lowered, on
from tests.native.test_bodies import random_kernel

from .same_program import difference


def again(text: str):
    return parse(text, NestContext(BuildOptions()), CPU_DIALECT)


def check(statements) -> None:
    text = program_text(statements)
    program = again(text)
    assert difference(tuple(statements), tuple(program.statements)) is None, text
    assert program_text(program.statements) == text


class Checked:
    """Checks statements before and after the passes over nests, each text once."""

    def __init__(self):
        self.texts = set()

    def run_passes(self, stage, passes, value, *context, **others):
        self.see(value)
        result = run_passes(stage, passes, value, *context, **others)
        self.see(result)
        return result

    def see(self, statements) -> None:
        text = program_text(statements)
        if text not in self.texts:
            self.texts.add(text)
            check(statements)

    def __enter__(self):
        self.patch = mock.patch("pbkern.lower.kernel_nests.run_passes", self.run_passes)
        self.patch.start()
        return self

    def __exit__(self, *raised):
        self.patch.stop()


PROGRAM = """\
%a0: float32[8,3]
%a1: int32[8]
%a2: bfloat16[8,3]
%a3: bool[8]
%t0: float32[8,3] scratch step 1
%t1: int32[24] scratch of %t0
%t2: int64[8] scratch
%t3: float32[2,8] scratch
%t4: float32[2,8] scratch
let %s0 = max(%a1[0], 3)
let %s1 = convert_element_type:int32(lt(%a0[0, 0], -0.5))
case %s1 == 0:
case %s1 == 1:
  nest [d0<8, d1<3*]
    acc0 sum= %a0[d0, d1]
    acc1:int32 argmax= %a0[d0, d1], (d1)
    %t2[d0] = convert_element_type:int64(acc1)  (after)
    %a0[d0, 0] = add(acc0, 2.0)  (after)  if (0 <= -1*%s0 + d0 < 4)
for %i0 < 4:
  nest [d0<8, d1<3]
    v0 = exp(%a0[d0, d1 - 1]?)
    v1 = select_n(%a3[d0], v0, (v0 at d0 + 1))
    %t0[d0, d1] = mul(v1, v1)
    %a2[d0, d1]? = convert_element_type:bfloat16(%a0[gather clamp(0, %a1[d0], %s0), %i0 + 2*d1 - 1])
for %i1 < %s0:
  prefetch 16 of %a0[8*%i1 + 8, 0]
  nest [d0<3*1, d1<8*0] ordered
    acc0 maxnum= %a0[d1, d0]
    %a0[d1, d0] = acc0
while %s2:
    let %s2 = lt:bool(%t1[0], 7)
do:
  nest []
    %t1[0] = add(%t1[0], 1)
sort %t3, %t4 by 1, first 5
trace 3: %t3, %a1
nest [d0<8] prefetch %a0 + 64 over %a0 schedule(lanes=8, vector='d0', unroll=2, jam={'d1': 4}, order=('d1', 'd0'))
  v0 = integer_pow(convert_element_type:float32(2.5:bfloat16), y=3)
  %a0[d0, 0] = add(add(v0, v0), 0x7fc00001:float32)
  %t2[d0] = add((d0 + 5):int64, 7:int64)
  %a3[d0] = and(True, is_finite(mul(inf, %a0[d0, 0])))
"""


def test_a_program_with_every_kind_of_statement():
    program = again(PROGRAM)
    text = program_text(program.statements)
    body = PROGRAM[PROGRAM.index("let %s0") :]
    assert text[text.index("let %s0") :] + "\n" == body.replace("lt:bool(", "lt(")
    check(program.statements)
    assert {str(buf) for buf in program.buffers.values()} == set(PROGRAM.splitlines()[:9])


def test_constants_keep_their_bits():
    values = [np.float32(0.1), np.float32(-0.0), np.float64(1e-300), np.float16(1 / 3), np.int8(-128), np.uint64(2**64 - 1),
              np.bool_(True), ml_dtypes.bfloat16(3.14), ml_dtypes.float8_e4m3fn(0.3), ml_dtypes.int4(-7), np.float32("-inf"),
              np.float32("nan"), np.array(0xFFC00007, np.uint32).view(np.float32)[()]]  # fmt: skip
    for value in values:
        context = NestContext(BuildOptions())
        constant = context.pool.const(np.asarray(value).dtype, value)
        statements = again(f"let %s0 = {constant}").statements
        assert statements[0].value.value.tobytes() == value.tobytes(), value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loop d0<4", "is no statement"),
        ("nest [d0<4] lanes 4", None),
        ("%a: float32[4]\nnest [d0<4]\n  %a[d0] = add(%a[d0], ", "expected"),
        ("%a: float32[4]\nnest [d0<4]\n  %a[d0] = 1.0 2.0", "is left of"),
        ("while %p:\n    let %p = True\nlet %q = True", "has no `do:`"),
        ("%a: float32[4]\nnest [d0=4]\n  %a[d0] = 1.0", "'d0=4' is no dimension"),
    ],
)
def test_what_is_no_program_is_named(text, message):
    if message is None:
        with pytest.raises(InternalError, match="belongs to a target"):
            parse(text, NestContext(BuildOptions()))
        return
    with pytest.raises(InternalError, match=message):
        again(text)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(40))
def test_random_kernels(seed):
    kernel, _ = random_kernel(seed)
    with Checked() as checked:
        lowered(kernel)
    assert len(checked.texts) > 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bench", "survey", "examples"])
def test_all_nests_of_the_benchmarks(kind):
    with Checked() as checked, on():
        for _, function, args, kwargs, wide in getattr(snapshot, kind)():
            with snapshot.jax.enable_x64(wide):
                snapshot.texts_of(function, tuple(map(snapshot._argument, args)), kwargs, False)
    assert len(checked.texts) > {"bench": 50, "survey": 50, "examples": 5}[kind]
