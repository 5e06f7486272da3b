"""What lanes do together or apart: votes, atomics, branches by index, barriers in several places."""

import numpy as np
import pytest

import pbkern
from pbkern.errors import InternalError, SimulationError

from .registers import run, text

RNG = np.random.default_rng(0)


def by_warp(lanes: np.ndarray) -> list[np.ndarray]:
    return [lanes[k : k + 32] for k in range(0, len(lanes), 32)]


def ballot(lanes: np.ndarray) -> np.ndarray:
    """Per lane the bits of its warp."""
    return np.concatenate(
        [np.full(len(w), sum(int(v) << k for k, v in enumerate(w)), "u4") for w in by_warp(lanes)]
    )


VOTES = """setp.ne.u32 %p1, %r1, 0;
vote.sync.ballot.b32 %ra, %p1, -1;
vote.sync.ballot.b32 %rb, !%p1, -1;
vote.sync.any.pred %pc, %p1, -1;
vote.sync.all.pred %pd, %p1, -1;
vote.sync.uni.pred %pe, %p1, -1;
selp.b32 %rc, 1, 0, %pc;
selp.b32 %rd, 1, 0, %pd;
selp.b32 %re, 1, 0, %pe;
activemask.b32 %rf;
mov.u32 %rg, 0;
mov.u32 %rh, 0;
@!%p1 bra $END;
activemask.b32 %rg;
vote.sync.ballot.b32 %rh, %p1, %ra;
$END:
"""


def test_votes():
    """Of warps whose lanes agree, and do not; the last one has 8 lanes."""
    flags = np.concatenate([np.ones(32), np.zeros(32), RNG.integers(0, 2, 32), np.ones(8)]).astype(
        "u4"
    )
    found = run(VOTES, {"%r1": flags}, {f"%r{n}": "u4" for n in "abcdefgh"})
    set_, per = (
        flags != 0,
        lambda f: np.concatenate([np.full(len(w), f(w), "u4") for w in by_warp(flags != 0)]),
    )
    want = [
        ballot(set_),
        ballot(~set_),
        per(np.any),
        per(np.all),
        per(lambda w: w.all() or not w.any()),
        ballot(set_ | True),
        np.where(set_, ballot(set_), 0),
        np.where(set_, ballot(set_), 0),
    ]
    for (name, got), w in zip(found.items(), want):
        np.testing.assert_array_equal(got, w, name)


SHUFFLED = """mov.u32 %ra, %r1;
shfl.sync.up.b32 %ra|%p1, %r1, 3, 0, -1;
shfl.sync.down.b32 %rb|%p2, %r1, 5, 6175, -1;
selp.b32 %rc, 1, 0, %p1;
selp.b32 %rd, 1, 0, %p2;
"""


def test_shuffles_say_which_lanes_had_a_source():
    """Segments of 8 lanes in the second one."""
    x, lane = RNG.integers(0, 99, 64).astype("u4"), np.arange(64)
    found = run(SHUFFLED, {"%r1": x}, {f"%r{n}": "u4" for n in "abcd"})
    up, down = lane % 32 >= 3, lane % 8 + 5 < 8
    want = [
        x[np.where(up, lane - 3, lane)],
        x[np.where(down, np.minimum(lane + 5, 63), lane)],
        up,
        down,
    ]
    for (name, got), w in zip(found.items(), want):
        np.testing.assert_array_equal(got, w, name)


@pytest.mark.parametrize(("kind", "by", "source"), [
    ("bfly", 37, lambda lane: lane ^ 5), ("idx", 35, lambda lane: lane // 32 * 32 + 3),
    ("down", 34, lambda lane: np.where(lane % 32 < 30, lane + 2, lane)),
    ("up", 0xFFFFFFE1, lambda lane: np.where(lane % 32 >= 1, lane - 1, lane)),
])  # fmt: skip
def test_shuffles_take_five_bits_of_their_operand(kind, by, source):
    x, last = RNG.integers(0, 99, 64).astype("u4"), 0 if kind == "up" else 31
    for operand, inputs in ((str(by), {}), ("%r2", {"%r2": np.full(64, by, "u4")})):
        found = run(
            f"shfl.sync.{kind}.b32 %ra, %r1, {operand}, {last}, -1;",
            {"%r1": x} | inputs,
            {"%ra": "u4"},
        )
        np.testing.assert_array_equal(found["%ra"], x[source(np.arange(64))])


ATOMICS = """ld.param.b64 %d9, [p0];
atom.global.add.u32 %ra, [%d9], %r1;
atom.global.max.s32 %rb, [%d9+4], %r1;
red.global.min.u32 [%d9+8], %r1;
atom.global.and.b32 %rc, [%d9+12], %r1;
atom.global.xor.b32 %rd, [%d9+16], %r1;
atom.global.cas.b32 %re, [%d9+20], %rm, %r1;
setp.gt.u32 %p1, %r1, 4000000000;
@%p1 atom.global.exch.b32 %rf, [%d9+24], %r1;
setp.gt.u32 %p2, %rm, 100;
@%p2 red.global.or.b32 [%d9+28], %r1;
"""


def test_atomics_return_what_was_there():
    x = RNG.integers(0, 4_000_000_000, 48).astype("u4")
    x[[5, 30]] = 4_100_000_001, 4_200_000_002
    x[0], m = 7, np.array([7] * 3 + [900] * 45, "u4")
    cells = np.array([3, 0, 4_294_967_295, 4_294_967_295, 0, 7, 11, 13], "u4")
    body, names = "mov.u32 %rf, 0;\n" + ATOMICS, "abcdef"
    held = np.concatenate([cells, np.zeros(40, "u4")])  # the kernel's first array
    found = run(body, {"%rq": held, "%r1": x, "%rm": m}, {f"%r{n}": "u4" for n in names})
    memory = [int(c) for c in cells]
    want = {n: [] for n in names}
    steps = {
        "a": (0, lambda old, v: (old + v) % 2**32),
        "c": (3, lambda old, v: old & v),
        "d": (4, lambda old, v: old ^ v),
    }
    for v, compared in zip(x.tolist(), m.tolist()):
        for n, (k, f) in steps.items():
            want[n].append(memory[k])
            memory[k] = f(memory[k], v)
        want["b"].append(memory[1])
        memory[1] = max(memory[1], v, key=lambda n: n - 2**32 if n >= 2**31 else n)
        want["e"].append(memory[5])
        memory[5] = v if memory[5] == compared else memory[5]
        want["f"].append(memory[6] if v > 4_000_000_000 else 0)
        memory[6] = v if v > 4_000_000_000 else memory[6]
    for n, got in zip(names, found.values()):
        np.testing.assert_array_equal(got, np.array(want[n], "u4"), n)
    memory[2] = int(x.min())
    memory[7] |= int(np.bitwise_or.reduce(x[m > 100]))
    np.testing.assert_array_equal(held[:8], np.array(memory, "u4"))


INDEXED = """ts: .branchtargets $A, $B, $C;
{
.reg .b32 %inner;
mov.u32 %inner, 1000;
add.u32 %rb, %inner, 1;
}
brx.idx %r1, ts;
$A: mov.u32 %ra, 10;
bra $END;
$B: mov.u32 %ra, 20;
bra $END;
$C: mov.u32 %ra, 30;
$END:
add.u32 %ra, %ra, %rb;
"""


def test_branches_by_index():
    index = RNG.integers(0, 3, 40).astype("u4")
    found = run(INDEXED, {"%r1": index}, {"%ra": "u4"})
    np.testing.assert_array_equal(found["%ra"], 1011 + 10 * index)
    index[7] = 3
    with pytest.raises(SimulationError, match="an index of a branch is behind its list of targets"):
        run(INDEXED, {"%r1": index}, {"%ra": "u4"})


SHARED = ".shared .align 16 .b8 s[512];"
PLACES = """mov.u64 %d1, s;
mul.wide.u32 %d2, %rt, 4;
add.s64 %d3, %d1, %d2;
st.shared.b32 [%d3], %r1;
setp.lt.u32 %p1, %rt, 32;
@%p1 bra $FIRST;
bar.sync 0;
bra $READ;
$FIRST: bar.sync 0;
$READ:
xor.b32 %r2, %rt, 32;
mul.wide.u32 %d2, %r2, 4;
add.s64 %d3, %d1, %d2;
ld.shared.b32 %ra, [%d3];
"""
T64 = np.arange(64, dtype="u4")


def test_warps_meet_at_barriers_in_two_places():
    x = RNG.integers(0, 99, 64).astype("u4")
    found = run(PLACES, {"%r1": x, "%rt": T64}, {"%ra": "u4"}, extra=SHARED)
    np.testing.assert_array_equal(found["%ra"], x[T64 ^ 32])


LATE = """mov.u32 %r9, %ctaid.x;
mov.u64 %d1, s;
mul.wide.u32 %d2, %rt, 4;
add.s64 %d3, %d1, %d2;
st.shared.b32 [%d3], %r1;
setp.lt.u32 %p1, %rt, 32;
setp.eq.u32 %p2, %r9, 0;
or.pred %p3, %p1, %p2;
@!%p3 bra $LATER;
$MEET: bar.sync 0;
xor.b32 %r2, %rt, 32;
mul.wide.u32 %d2, %r2, 4;
add.s64 %d3, %d1, %d2;
ld.shared.b32 %ra, [%d3];
bra $END;
$LATER: add.u32 %r1, %r1, 500;
st.shared.b32 [%d3], %r1;
bra $MEET;
$END:
setp.ne.u32 %p4, %r9, {block};
@%p4 ret;
"""


def test_blocks_go_on_while_others_wait_for_their_warps():
    """The second block's last warp takes a longer way to the barrier. Results of one block at a time."""
    x = RNG.integers(0, 99, 64).astype("u4")
    for block in (0, 1):
        found = run(
            LATE.format(block=block), {"%r1": x, "%rt": T64}, {"%ra": "u4"}, extra=SHARED, blocks=2
        )
        there = x + np.where((T64 >= 32) & (block == 1), 500, 0)
        np.testing.assert_array_equal(found["%ra"], there[T64 ^ 32])


STUCK = "setp.ge.u32 %p1, %rt, 32;\n"
FAILS = {
    "a barrier for some": (STUCK + "@%p1 bra $L;\nbar.sync 1, 32;\n$L:\n", "deadlock", "barriers for a part of the threads"),
    "two barriers": (STUCK + "@%p1 bra $L;\nbar.sync 1;\nbra $M;\n$L: bar.sync 2;\n$M:\n", "deadlock",
                     "32 threads of block 0 wait here for 32 others, of which thread 32 waits at line"),
    "a trap": (STUCK + "@%p1 trap;\n", "bounds", "the kernel stops itself"),
    "an error before a place where others wait": (
        "setp.ge.u32 %p1, %rt, 16;\nld.param.b64 %d1, [p0];\nbra $START;\n$BACK: ld.global.b32 %r1, [%d1+4096];\n"
        "$START: @%p1 bra $LATE;\nshfl.sync.bfly.b32 %r2, %rt, 1, 31, -1;\nbra $END;\n$LATE: bra $BACK;\n$END:\n",
        "bounds", "of array 0"),
    "a lane that there is not": ("shfl.sync.idx.b32 %r1, %rt, 31, 31, -1;\n", "divergence",
                                 "a thread that the block does not have"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILS)
def test_what_cannot_go_on(name):
    body, kind, why = FAILS[name]
    with pytest.raises(SimulationError, match=why) as e:
        run(body, {"%rt": T64[: 40 if name == "a lane that there is not" else 64]}, {})
    assert e.value.kind == kind


def test_lanes_without_work_touch_nothing():
    """Loads and stores that no lane runs; scalars as arguments; a grid without blocks."""
    body = ("setp.gt.u32 %p1, %rt, 99;\nld.param.b64 %d1, [p0];\nld.param.b32 %r2, [p1];\nmov.u32 %ra, 5;\n"
            "@%p1 ld.global.b32 %ra, [%d1+-4];\n@%p1 st.global.b32 [%d1+-4], %ra;\n"
            "@%p1 atom.global.add.u32 %ra, [%d1+-4], %ra;\n"
            "add.u32 %ra, %ra, %r2;\n")  # fmt: skip
    made = text(body, {"%rt": T64, "%rs": T64}, {"%ra": T64}).replace("[p1];\nmul", "[p0];\nmul")
    out = np.zeros(64, "u4")
    counts = pbkern.simulate_ptx(made, 1, 64, [T64, np.int32(-3), out])
    np.testing.assert_array_equal(out, np.full(64, 2))
    assert counts.global_bytes == 3 * 64 * 4
    assert pbkern.simulate_ptx(made, 0, 64, [T64, np.int32(-3), out]).instructions == 0


@pytest.mark.parametrize(("change", "why"), [
    (("(.param .u64 p0", "(.param p0"), "a parameter of a kernel was not understood"),
    ((".visible", ".const .align 4 .b8 table[16];\n.visible"), "a variable `table` in const memory"),
    (("mov.u32 %tid_", "??? %tid_"), "an instruction of PTX was not understood"),
])  # fmt: skip
def test_texts_that_are_not_understood(change, why):
    with pytest.raises(InternalError, match=why):
        pbkern.simulate_ptx(text("", {"%r1": T64}, {}).replace(*change), 1, 64, [T64])


# The end of a loop's body stands before its head, as compilers place it; lanes with %p1 skip a part of the body.
LATCH_FIRST = """setp.ne.u32 %p1, %r1, 0;
mov.u32 %ra, 0;
mov.u32 %rb, 0xffffffff;
mov.u32 %rc, 0;
bra $BODY;
$LATCH:
activemask.b32 %rm;
and.b32 %rb, %rb, %rm;
add.u32 %ra, %ra, 1;
setp.lt.u32 %p2, %ra, 3;
@!%p2 bra $END;
$BODY:
@%p1 bra $LATCH;
add.u32 %rc, %rc, 1;
bra $LATCH;
$END:
"""


def test_lanes_that_skip_a_part_of_a_loop_meet_at_its_end():
    flags = RNG.integers(0, 2, 64).astype("u4")
    results = run(LATCH_FIRST, {"%r1": flags}, {f"%r{n}": "u4" for n in "abc"})
    trips, together, parts = results.values()
    np.testing.assert_array_equal(trips, 3)
    np.testing.assert_array_equal(together, 0xFFFFFFFF)
    np.testing.assert_array_equal(parts, np.where(flags != 0, 0, 3))
