"""Products of warps and copies under way: against NumPy's float64 and integers, and what goes wrong with them."""

import numpy as np
import pytest

import pbkern
from pbkern.errors import InternalError, SimulationError
from pbkern.targets.simt.schedule.instructions import MMA_INSTRUCTIONS

from .registers import run, text

KINDS = {"float16": "f16", "bfloat16": "bf16", "float32": "tf32", "int8": "s8", "uint8": "u8"}
THREADS = 64  # two warps, each with matrices of its own


def words(layout, matrices: list[np.ndarray]) -> list[np.ndarray]:
    """Registers of all lanes: the matrix of each warp, spread by a layout."""
    table = layout.table("lane", "register")
    parts = [matrix[table[..., 0], table[..., 1]] for matrix in matrices]
    return list(np.concatenate(parts).reshape(THREADS, -1).view("u4").T)


@pytest.mark.parametrize("row", MMA_INSTRUCTIONS, ids=lambda row: row.name)
def test_products(row):
    rng = np.random.default_rng(0)
    m, n, k = row.shape
    kind, result = KINDS[row.operands[0].name], "s32" if row.accumulator.kind == "i" else "f32"

    def matrix(shape, dtype):
        whole = rng.integers(-100, 100, shape) if dtype.kind == "i" else rng.standard_normal(shape)
        return whole.astype(dtype)

    firsts, seconds, sums = (
        [matrix(shape, dtype) for _ in range(THREADS // 32)]
        for shape, dtype in (
            ((m, k), row.operands[0]),
            ((k, n), row.operands[1]),
            ((m, n), row.accumulator),
        )
    )
    names, inputs = [], {}
    for side, (layout, matrices) in zip("abc", zip(row.layouts, (firsts, seconds, sums))):
        registers = words(layout, matrices)
        names.append([f"%r{side}{number}" for number in range(len(registers))])
        inputs |= dict(zip(names[-1], registers))
    lists = ["{" + ", ".join(part) + "}" for part in (["%rd0", "%rd1", "%rd2", "%rd3"], *names)]
    operation = (
        f"mma.sync.aligned.m{m}n{n}k{k}.row.col.{result}.{kind}.{kind}.{result} {', '.join(lists)};"
    )
    found = run(operation, inputs, {f"%rd{number}": "u4" for number in range(4)})
    held = np.stack(list(found.values()), -1).view(row.accumulator).reshape(-1, 32, 4)
    table = row.layouts[2].table("lane", "register")
    for warp, (first, second, total) in enumerate(zip(firsts, seconds, sums)):
        read = [row.as_read(operand).astype(np.float64) for operand in (first, second)]
        want = (total + read[0] @ read[1])[table[..., 0], table[..., 1]]
        np.testing.assert_allclose(held[warp], want, rtol=2e-6, atol=2e-6)


def test_other_products_are_refused():
    operation = (
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%d4, %d5}, {%d2}, {%d3}, {%d0, %d1};"
    )
    inputs = {f"%d{number}": np.zeros(32, "u8") for number in range(4)}
    with pytest.raises(InternalError, match="is not simulated"):
        run(operation, inputs, {"%d4": "u8"})


SHARED = ".shared .align 16 .b8 tile[1024];"
FILL = """mul.lo.u32 %r2, %tid_, 4;
mov.u32 %r3, tile;
add.u32 %r2, %r2, %r3;
st.shared.u32 [%r2], %r1;
bar.sync 0;
and.b32 %r4, %tid_, 31;
mul.lo.u32 %r4, %r4, 16;
add.u32 %r4, %r4, %r3;
"""


@pytest.mark.parametrize("turned", [False, True])
def test_matrices_from_shared_memory(turned):
    """Four matrices of eight rows of eight halves: lane l holds elements 2 (l % 4) and the next of row l / 4 of each."""
    rng = np.random.default_rng(0)
    halves = rng.integers(0, 1 << 16, 256).astype("u2")
    trans = ".trans" if turned else ""
    body = FILL + f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%ra, %rb, %rc, %rd}}, [%r4];"
    found = run(body, {"%r1": halves.view("u4")}, {f"%r{n}": "u4" for n in "abcd"}, extra=SHARED)
    lanes = np.arange(32)
    for number, held in enumerate(found.values()):
        matrix = halves[64 * number : 64 * number + 64].reshape(8, 8)
        matrix = matrix.T if turned else matrix
        want = np.stack([matrix[lanes // 4, 2 * (lanes % 4) + side] for side in range(2)], -1)
        np.testing.assert_array_equal(held.reshape(-1, 32)[0], want.astype("u2").view("u4")[:, 0])


COPY = """ld.param.b64 %d1, [p0];
mul.wide.u32 %d2, %tid_, 16;
add.s64 %d1, %d1, %d2;
mul.lo.u32 %r2, %tid_, 16;
mov.u32 %r3, tile;
add.u32 %r2, %r2, %r3;
{size}
cp.async.cg.shared.global [%r2], [%d1], 16, %r6;
{commit}
{wait}
{barrier}
xor.b32 %r4, %r2, {other};
ld.shared.v2.b64 {{%d3, %d4}}, [%r4];
"""
SAME = {
    "size": "mov.u32 %r6, 16;",
    "commit": "cp.async.commit_group;",
    "wait": "cp.async.wait_group 0;",
    "barrier": "bar.sync 0;",
    "other": 16,
}


def copied(**changes) -> tuple[np.ndarray, np.ndarray]:
    """(what 32 lanes read behind a copy, what they copied)."""
    source = np.random.default_rng(0).integers(0, 1 << 62, 64).astype("u8")
    body = COPY.format(**SAME | changes)
    outputs = {"%d3": np.zeros(32, "u8"), "%d4": np.zeros(32, "u8")}
    made = text(body, {"%d7": source}, outputs, SHARED)
    pbkern.simulate_ptx(made, 1, 32, [source, *outputs.values()])
    return np.stack(list(outputs.values()), -1), source.reshape(32, 2)


def test_a_copy_is_there_behind_its_wait():
    found, source = copied()
    np.testing.assert_array_equal(found, source[np.arange(32) ^ 1])


def test_lanes_that_copy_nothing_store_zeros():
    found, source = copied(size="and.b32 %r6, %tid_, 1;\nmul.lo.u32 %r6, %r6, 16;", other=0)
    np.testing.assert_array_equal(found, np.where(np.arange(32)[:, None] % 2, source, 0))


FAULTS = {
    "no wait": ({"wait": ""}, "a copy to these bytes of shared memory is under way"),
    "no commit": ({"commit": ""}, "a copy to these bytes of shared memory is under way"),
    "a group too few": ({"wait": "cp.async.wait_group 1;"}, "a copy to these bytes of shared memory is under way"),
    "no barrier": ({"barrier": ""}, "another thread of its block, with no barrier between"),
    "a second copy": (
        {"commit": "cp.async.commit_group;\ncp.async.cg.shared.global [%r2], [%d1], 16;"},
        "a copy to these bytes of shared memory is under way"),
    "a source outside": ({"size": "add.s64 %d1, %d1, 4096;\nmov.u32 %r6, 16;"}, "byte 4[0-9]* of array 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_copies_are_named(name):
    changes, message = FAULTS[name]
    with pytest.raises(SimulationError, match=message):
        copied(**changes)


def test_the_last_groups_may_be_under_way():
    """A wait for all but one group is enough for the first of two."""
    wait = "cp.async.cg.shared.global [%r2+512], [%d1], 16;\ncp.async.commit_group;\ncp.async.wait_group 1;"
    found, source = copied(wait=wait)
    np.testing.assert_array_equal(found, source[np.arange(32) ^ 1])
