"""What no GPU allows is found in PTX, and named at its line."""

import numpy as np
import pytest

import pbkern
from pbkern.errors import InternalError, KernelError, SimulationError

HEAD = """.version 8.0
.target sm_90a
.address_size 64
.file 1 "model.py"
.visible .entry k(.param .u64 p0, .param .u64 p1)
{
.reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .pred %p<9>;
.shared .align 16 .b8 s[256];
ld.param.b64 %rd1, [p0];
ld.param.b64 %rd2, [p1];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd3, %r1, 4;
add.s64 %rd4, %rd1, %rd3;
ld.global.b32 %r2, [%rd4];
mov.b64 %rd5, s;
add.s64 %rd6, %rd5, %rd3;
add.s64 %rd9, %rd2, %rd3;
.loc 1 7 5
"""
STORE = "st.shared.b32 [%rd6], %r2;\n"
BARRIER = "bar.sync 0;\n"
EXCHANGE = """xor.b32 %r3, %r1, 1;
mul.wide.u32 %rd7, %r3, 4;
add.s64 %rd8, %rd5, %rd7;
ld.shared.b32 %r4, [%rd8];
st.global.b32 [%rd9], %r4;
"""


def only_below(threads: int, inner: str) -> str:
    return f"setp.ge.u32 %p1, %r1, {threads};\n@%p1 bra $L;\n{inner}$L:\n"


def text(body: str) -> str:
    return HEAD + body + "ret;\n}\n"


def run(body: str, threads: int = 64, blocks: int = 1):
    x, y = np.arange(threads, dtype=np.float32), np.zeros(threads, np.float32)
    counts = pbkern.simulate_ptx(text(body), blocks, threads, [x, y])
    return y, counts


def test_neighbours_exchange():
    y, counts = run(STORE + BARRIER + EXCHANGE)
    np.testing.assert_array_equal(y, np.arange(64) ^ 1)
    assert (counts.barriers, counts.global_bytes, counts.sectors, counts.bank_conflicts) == (
        1,
        512,
        16,
        0,
    )


SHUFFLE = "shfl.sync.bfly.b32 %r5, %r2, 16, 31, {};\n"
WRONG = {
    "a barrier removed": (STORE + EXCHANGE, "race", "ld.shared.b32 %r4"),
    "a barrier in a branch": (
        STORE + only_below(16, BARRIER) + EXCHANGE,
        "divergence",
        "bar.sync 0",
    ),
    "a barrier of half of the warps": (STORE + only_below(32, BARRIER), "deadlock", "bar.sync 0"),
    "nothing stored": (BARRIER + EXCHANGE, "uninitialised", "ld.shared.b32 %r4"),
    "behind shared memory": ("st.shared.b32 [%rd6+4], %r2;\n", "bounds", "st.shared.b32 [%rd6+4]"),
    "behind an array": ("st.global.b32 [%rd9+4], %r2;\n", "bounds", "st.global.b32 [%rd9+4]"),
    "before an array": ("ld.global.b32 %r7, [%rd4+-4];\n", "bounds", "ld.global.b32 %r7"),
    "not aligned": ("ld.global.b32 %r7, [%rd1+2];\n", "bounds", "ld.global.b32 %r7"),
    "no array": ("mov.b64 %rd7, 64;\nld.global.b32 %r7, [%rd7];\n", "bounds", "ld.global.b32 %r7"),
    "absent lanes": (only_below(16, SHUFFLE.format(-1)), "divergence", "shfl.sync.bfly"),
    "lanes that are not named": (
        only_below(16, SHUFFLE.format(65535)),
        "divergence",
        "shfl.sync.bfly",
    ),
    "one element for all": ("st.global.b32 [%rd2], %r1;\n", "race", "st.global.b32 [%rd2]"),
    "an unknown register": ("add.s32 %r7, %r8, %r8;\n", "uninitialised", "add.s32 %r7"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_at_its_line(name):
    body, kind, instruction = WRONG[name]
    with pytest.raises(SimulationError) as e:
        run(body)
    line = next(n for n, row in enumerate(text(body).split("\n"), 1) if row.startswith(instruction))
    assert e.value.kind == kind
    assert f"PTX line {line}: {instruction}" in str(e.value)
    assert e.value.at == "model.py:7:5"


def test_registers_are_zeros_where_nothing_is_checked():
    body = "add.s32 %r7, %r8, 5;\nst.global.b32 [%rd9], %r7;\n"
    with pytest.raises(SimulationError, match="register %r8 is read before it is written"):
        run(body)
    y = np.ones(64, np.int32)
    pbkern.simulate_ptx(text(body), 1, 64, [np.zeros(64, np.float32), y], check=False)
    assert (y == 5).all()


def test_blocks_that_store_to_one_element_race():
    with pytest.raises(SimulationError) as e:
        run("st.global.b32 [%rd9], %r2;\n", blocks=2)
    assert e.value.kind == "race"
    assert "blocks wait for no others" in str(e.value)


BY_BLOCK = "mov.u32 %r9, %ctaid.x;\nsetp.eq.u32 %p1, %r9, 0;\n"


@pytest.mark.parametrize(("first", "second", "deed"), [
    ("st.global.b32 [%rd9], %r2", "ld.global.b32 %r7, [%rd9]", "loads what another wrote"),
    ("ld.global.b32 %r7, [%rd9]", "st.global.b32 [%rd9], %r2", "stores what another read"),
])  # fmt: skip
def test_a_block_that_touches_what_another_has_stored_or_stores_what_it_has_read(
    first, second, deed
):
    with pytest.raises(
        SimulationError, match=f"thread 0 of block 1 {deed}: a thread of another block"
    ) as e:
        run(f"{BY_BLOCK}@%p1 {first};\n@!%p1 {second};\n", blocks=2)
    assert e.value.kind == "race"
    assert "blocks wait for no others" in str(e.value)
    run(f"{BY_BLOCK}@%p1 {first};\n@%p1 {second};\n", blocks=2)  # of one block alone


def test_shuffles_among_named_lanes():
    run(only_below(32, SHUFFLE.format(-1)))
    run(only_below(16, "shfl.sync.bfly.b32 %r5, %r2, 8, 31, 65535;\n"))


def test_loops_without_end():
    from pbkern.simulate import machine

    before, machine.MOST_SIMULATED_STEPS = machine.MOST_SIMULATED_STEPS, 1000
    try:
        with pytest.raises(SimulationError, match="does not end"):
            run("$L:\nbra $L;\n")
    finally:
        machine.MOST_SIMULATED_STEPS = before


def test_unknown_instructions_are_named():
    with pytest.raises(InternalError, match=r"`frobnicate.b32` is not simulated"):
        run("frobnicate.b32 %r7, %r1;\n")


def test_arguments_that_do_not_fit():
    x = np.zeros(64, np.float32)
    with pytest.raises(KernelError, match="takes 2 arguments"):
        pbkern.simulate_ptx(text(STORE), 1, 64, [x])
    with pytest.raises(KernelError, match="no contiguous NumPy array"):
        pbkern.simulate_ptx(text(STORE), 1, 64, [x, np.zeros(128, np.float32)[::2]])
    with pytest.raises(KernelError, match="cannot run with 2048 threads"):
        pbkern.simulate_ptx(text(STORE), 1, 2048, [x, x])
    with pytest.raises(InternalError, match="0 kernels"):
        pbkern.simulate_ptx("", 1, 32, [])


def test_what_is_no_function():
    with pytest.raises(KernelError, match="neither a function nor a kernel"):
        pbkern.simulate("k.ptx", np.zeros(3))
