"""Copies that a device makes by itself: their texts, their meaning, and that faults of pipelines are found and named."""

import numpy as np
import pytest

from pbkern.core.errors import InternalError
from pbkern.lower.build_options import BuildOptions
from pbkern.lower.nest import effects, interpret
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.effects import Effects
from pbkern.lower.nest.ir import AsyncCopy, Wait, every
from pbkern.lower.nest.parse import Dialect, parse, program_text
from pbkern.lower.nest.verify import verify
from pbkern.targets.simt.schedule.instructions import MATRIX_INSTRUCTIONS

from .same_program import difference

DIALECT = Dialect(instructions=MATRIX_INSTRUCTIONS)
# A product of 10 elements of depth in steps of 4, whose operands are copied two steps ahead.
PIPELINE = """\
%a0: float32[3,10]
%a1: float32[10,4]
%a2: float32[3,4]
%t0: float32[3,4] scratch
%t2: float32[3,3,4] scratch shared swizzle 12>>2 circular
%t3: float32[3,4,4] scratch shared circular
nest [i<3, j<4]
  %t0[i, j] = 0.0
for %s0 < 2:
  async:
    nest [i<3, k<4]
      %t2[%s0, i, k] = select_n((0 <= 4*%s0 + k < 10), 0.0, %a0[i, 4*%s0 + k]?)
    nest [k<4, j<4]
      %t3[%s0, k, j] = select_n((0 <= 4*%s0 + k < 10), 0.0, %a1[4*%s0 + k, j]?)
for %o1 < 3:
  wait 1
  async:
    nest [i<3, k<4]
      %t2[%o1 + 2, i, k] = select_n((0 <= 4*%o1 + k + 8 < 10), 0.0, %a0[i, 4*%o1 + k + 8]?)
    nest [k<4, j<4]
      %t3[%o1 + 2, k, j] = select_n((0 <= 4*%o1 + k + 8 < 10), 0.0, %a1[4*%o1 + k + 8, j]?)
  nest [i<3, j<4, k<4*]
    acc0 dot= %t2[%o1, i, k], %t3[%o1, k, j]
    %t0[i, j] = add(%t0[i, j], acc0)  (after)
wait 0
nest [i<3, j<4]
  %a2[i, j] = max(%t0[i, j], 0.0)
"""
# A tile of sums in registers of the threads that compute it.
BY_INSTRUCTION = """\
%a0: float32[16,8]
%t0: bfloat16[16,16] scratch shared
%t1: bfloat16[16,8] scratch shared
%t2: float32[16,8] scratch registers by mma.m16n8k16.bf16 1x1
%t3: float32[16] scratch registers by mma.m16n8k16.bf16 1x1
nest [i<16, j<8] by mma.m16n8k16.bf16 1x1
  %t2[i, j] = 0.0
nest [i<16, j<8, k<16*] by mma.m16n8k16.bf16 1x1
  acc0:float32 dot= %t0[i, k], %t1[k, j]
  %t2[i, j] = add(%t2[i, j], acc0)  (after)
nest [i<16, j<8*] by mma.m16n8k16.bf16 1x1
  acc0 max= %t2[i, j]
  %t3[i] = acc0  (after)
nest [i<16, j<8] by mma.m16n8k16.bf16 1x1
  %a0[i, j] = sub(%t2[i, j], %t3[i])
"""


def program(text: str):
    return parse(text, NestContext(BuildOptions()), DIALECT)


def run(text: str) -> np.ndarray:
    """The result of a pipeline, whose difference to the product is returned."""
    made, rng = program(text), np.random.default_rng(0)
    verify(made.statements)
    buffers = [made.buffers[f"%a{k}"] for k in range(3)]
    first, second = (rng.standard_normal(buf.shape).astype(np.float32) for buf in buffers[:2])
    memory = interpret.NestMemory(
        {buf: array.reshape(-1) for buf, array in zip(buffers, (first, second))}
    )
    memory.arrays[buffers[2]] = np.full(buffers[2].size, np.nan, np.float32)
    interpret.run(made.statements, memory, {}, lambda *_: None)
    memory.copies.check_end()
    want = np.maximum(first.astype(np.float64) @ second, 0)
    return np.abs(memory.read(buffers[2]) - want).max()


def replaced(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("text", [PIPELINE, BY_INSTRUCTION])
def test_texts_are_read_back(text):
    made = program(text)
    written = program_text(made.statements)
    assert sorted(written.splitlines()) == sorted(text.splitlines()), "buffers are in another order"
    again = program(written)
    assert difference(tuple(made.statements), tuple(again.statements)) is None
    verify(made.statements)


def test_a_pipeline_computes_the_product():
    assert run(PIPELINE) < 1e-5


FAULTS = {
    "no wait": ([("  wait 1\n", "")], "a load of %t2 while a copy to there is under way, which has not been waited for"),
    "a wait for one group too few": (
        [("wait 1", "wait 2")], "a load of %t2 while a copy to there is under way, which has not been waited for"),
    "no wait at the end": ([("\nwait 0", "")], "a copy is under way at the end of its program"),
    "a stage that is overwritten before it is read": (
        [("[%o1 + 2,", "[%o1 + 3,")],
        "a load of %t2 while a copy to there is under way, which overwrites it before it is read"),
    "a stage too few": (
        [("float32[3,3,4] scratch", "float32[2,3,4] scratch")],
        "a load of %t2 while a copy to there is under way, which overwrites it before it is read"),
    "no zeros behind the end": (
        [("select_n((0 <= 4*%o1 + k + 8 < 10), 0.0, %a0[i, 4*%o1 + k + 8]?)", "%a0[i, 4*%o1 + k + 8]?")],
        "a copy reads outside of %a0, where it has to store zeros"),
    "a test for another end": (
        [("(0 <= 4*%s0 + k < 10), 0.0, %a1", "(0 <= 4*%s0 + k < 11), 0.0, %a1"),
         ("(0 <= 4*%o1 + k + 8 < 10), 0.0, %a1", "(0 <= 4*%o1 + k + 8 < 11), 0.0, %a1")],
        "a copy reads outside of %a1, where it has to store zeros"),
    "a source that changes": (
        [("wait 0\n", ""), ("  wait 1\n  async", "  wait 1\n  nest [i<3, k<10]\n    %a0[i, k] = mul(%a0[i, k], 2.0)\n  async")],
        "the source of a copy is changed while it is under way"),
    "two copies to one stage": (
        [("[%s0, i, k]", "[0, i, k]")], "two copies to one place of %t2 are under way"),
    "a store where a copy goes": (
        [("  wait 1\n", "  nest [k<4]\n    %t3[%o1 + 1, 0, k] = 0.0\n  wait 1\n")],
        "a store to %t3 while a copy to there is under way, which has not been waited for"),
    "a copy that computes": ([("= select_n((0 <= 4*%s0 + k < 10), 0.0, %a0[i, 4*%s0 + k]?)", "= mul(%a0[i, k], 2.0)")],
                             "a copy computes"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_pipelines_are_named(name):
    changes, message = FAULTS[name]
    with pytest.raises(InternalError, match=message):
        run(replaced(PIPELINE, *changes))


T3 = "%t3: float32[16] scratch registers by mma.m16n8k16.bf16"
WRONG = {
    "a tile that does not fit": ([("i<16, j<8]", "i<8, j<8]")], "does not fit mma.m16n8k16.bf16 1x1"),
    "threads that hold other elements": (
        [("= sub(%t2[i, j], %t3[i])", "= sub(%t2[i, j], %t3[j])")], r"threads do not hold %t3 at j"),
    "another tiling": (
        [(T3 + " 1x1", T3 + " 2x1")],
        "threads do not hold %t3"),
    "operands in the other order": ([("%t0[i, k], %t1[k, j]", "%t1[k, j], %t0[i, k]")], "the first operand has no columns"),
    "a second operand in registers": (
        [("%t1: bfloat16[16,8] scratch shared", "%t1: bfloat16[16,8] scratch registers by mma.m16n8k16.bf16 1x1")],
        "the second operand is in registers"),
    "a reduction of rows": (  # the dimensions' order says which are rows
        [("nest [i<16, j<8*]", "nest [j<8*, i<16]")],
        "its dimensions are rows and columns"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_nests_that_their_tiling_does_not_compute(name):
    changes, message = WRONG[name]
    with pytest.raises(InternalError, match=message):
        verify(program(replaced(BY_INSTRUCTION, *changes)).statements)


def test_a_matrix_instruction_reads_what_its_row_says():
    """tf32 reads 10 bits of fractions: the interpreter multiplies what the instruction does."""
    text = """\
%a0: float32[16,8]
%a1: float32[8,8]
%t0: float32[16,8] scratch registers by mma.m16n8k8.tf32 1x1
nest [i<16, j<8, k<8*] by mma.m16n8k8.tf32 1x1
  acc0 dot= %a0[i, k], %a1[k, j]
  %t0[i, j] = acc0  (after)
"""
    made = program(text)
    first, second = (np.full(shape, 1 + 2**-11, np.float32) for shape in ((16, 8), (8, 8)))
    memory = interpret.NestMemory(
        {made.buffers["%a0"]: first.reshape(-1), made.buffers["%a1"]: second.reshape(-1)}
    )
    interpret.run(made.statements, memory, {}, lambda *_: None)
    np.testing.assert_array_equal(memory.read(made.buffers["%t0"]), 8)


def test_copies_and_waits_keep_their_order():
    made = program(PIPELINE)
    copy, wait = (
        next(stmt for stmt in every(made.statements) if isinstance(stmt, kind))
        for kind in (AsyncCopy, Wait)
    )
    last = Effects.of(made.statements[-1])
    assert not Effects.of(copy).commute(Effects.of(wait))
    assert not Effects.of(wait).commute(last)
    assert effects.written([copy]) == {made.buffers["%t2"], made.buffers["%t3"]}
    assert effects.read([copy]) == {made.buffers["%a0"], made.buffers["%a1"]}
