"""The interpreter of nests, statement by statement."""

import numpy as np
import pytest

from pbkern.core.affine import Affine
from pbkern.core.errors import InternalError
from pbkern.lower.build_options import BuildOptions
from pbkern.lower.nest import interpret, reductions
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.interpret import NestMemory
from pbkern.lower.nest.ir import (
    Buf,
    For,
    If,
    Let,
    Nest,
    Prefetch,
    Reduction,
    Sort,
    Store,
    Trace,
    While,
)
from pbkern.targets.cpu.schedule.instructions import INSTRUCTIONS

F32, I32, BOOL = np.dtype("f"), np.dtype("i4"), np.dtype(bool)
I, J, K = (Affine.symbol(s) for s in "ijk")


class Small:
    """Buffers with contents, and what makes expressions."""

    def __init__(self, **arrays: np.ndarray):
        self.context = NestContext(BuildOptions())
        self.bufs = {n: Buf(f"%{n}", a.shape, a.dtype) for n, a in arrays.items()}
        self.memory = NestMemory({self.bufs[n]: a.reshape(-1).copy() for n, a in arrays.items()})
        self.traced: list = []

    def load(self, name: str, *index: Affine, guard: bool = False):
        return self.context.pool.load(self.bufs[name].dtype, self.bufs[name], index, guard)

    def index(self, a: Affine, dtype=I32):
        return self.context.pool.index(dtype, a)

    def const(self, value, dtype=F32):
        return self.context.const(value, dtype)

    def acc(self, k: int = 0, dtype=F32):
        return self.context.pool.accumulator(dtype, k)

    def write(self, name: str, index: tuple, value, **others) -> Store:
        return Store(self.bufs[name], index, value, **others)

    def run(self, *stmts, **symbols) -> dict[str, int]:
        interpret.run(
            stmts, self.memory, symbols, lambda site, values: self.traced.append((site, values))
        )
        return symbols

    def __getitem__(self, name: str) -> np.ndarray:
        return self.memory.read(self.bufs[name])


def numbers(*shape, dtype="f"):
    return np.random.default_rng(sum(shape)).integers(-9, 9, shape).astype(dtype)


def test_elementwise_at_moved_places():
    s = Small(x=numbers(6, 5), y=np.zeros((4, 5), "f"))
    value = s.context.op("mul", F32, s.load("x", I + 2, J), s.const(2.0))
    s.run(Nest({"i": 4, "j": 5}, stores=(s.write("y", (I, J), value),)))
    np.testing.assert_array_equal(s["y"], s["x"][2:] * 2)


def test_a_point_that_reads_what_another_stores_takes_its_turn():
    s = Small(x=numbers(9))
    total = s.context.op("add", F32, s.load("x", I), s.load("x", I + 1))
    before = s["x"]
    s.run(Nest({"i": 8}, stores=(s.write("x", (I + 1,), total),)))
    np.testing.assert_array_equal(s["x"], np.cumsum(before))


def test_a_point_reads_before_it_stores():
    s = Small(x=numbers(4), y=np.zeros(4, "f"))
    new = s.context.op("add", F32, s.load("x", I), s.const(1.0))
    before = s["x"]
    s.run(Nest({"i": 4}, stores=(s.write("x", (I,), new), s.write("y", (I,), new))))
    np.testing.assert_array_equal(s["y"], before + 1)


def test_the_last_of_several_stores_to_one_place_stays():
    s = Small(x=numbers(3, 5), y=np.zeros(3, "f"))
    s.run(Nest({"j": 5, "i": 3}, stores=(s.write("y", (I,), s.load("x", I, J)),)))
    np.testing.assert_array_equal(s["y"], s["x"][:, -1])


def test_guards_drop_stores_and_poison_loads():
    s = Small(x=numbers(4), y=np.zeros(4, "f"))
    s.run(Nest({"i": 6}, stores=(s.write("y", (I - 1,), s.load("x", I, guard=True), guard=True),)))
    np.testing.assert_array_equal(s["y"], [*s["x"][1:], np.nan])


def test_masks_and_ranges():
    s = Small(x=numbers(8), y=np.zeros(8, "f"))
    inside = s.context.pool.in_range(I, 2, 5)
    s.run(Nest({"i": 8}, stores=(s.write("y", (I,), s.load("x", I), mask=inside),)))
    np.testing.assert_array_equal(
        s["y"], np.where((np.arange(8) >= 2) & (np.arange(8) < 5), s["x"], 0)
    )


@pytest.mark.parametrize("masked", [False, True])
def test_accesses_outside_are_errors(masked):
    s = Small(x=numbers(4), y=np.zeros(4, "f"))
    with pytest.raises(InternalError, match="a load of %x: float32\\[4\\] outside it"):
        s.run(Nest({"i": 4}, stores=(s.write("y", (I,), s.load("x", I + 1)),)))
    mask = s.context.pool.in_range(I, 0, 3) if masked else None
    store = Nest({"i": 4}, stores=(s.write("y", (I + 1,), s.const(1.0), mask=mask),))
    if masked:  # nobody stores outside
        s.run(store)
        np.testing.assert_array_equal(s["y"], [0, 1, 1, 1])
    else:
        with pytest.raises(InternalError, match="a store to %y: float32\\[4\\] outside it"):
            s.run(store)


def test_operands_without_contents_are_errors():
    s = Small(y=np.zeros(1, "f"))
    s.bufs["z"] = Buf("%z", (1,), F32)
    with pytest.raises(InternalError, match="has no contents"):
        s.run(Nest({"i": 1}, stores=(s.write("y", (I,), s.load("z", I)),)))


def test_scratch_is_poison_before_it_is_written():
    s = Small(y=np.zeros(3, "f"))
    s.bufs["t"] = Buf("%t", (3,), F32, arena=True)
    s.run(Nest({"i": 2}, stores=(s.write("t", (I,), s.const(1.0)),)))
    s.run(Nest({"i": 3}, stores=(s.write("y", (I,), s.load("t", I)),)))
    np.testing.assert_array_equal(s["y"], [1, 1, np.nan])


def test_gathers_are_clamped_and_values_are_moved():
    s = Small(
        x=numbers(4, 3), p=np.array([-5, 1, 9], "i4"), y=np.zeros((3, 3), "f"), z=np.zeros(2, "f")
    )
    row = s.context.pool.gather(F32, s.bufs["x"], (None, J), (s.load("p", I),))
    s.run(Nest({"i": 3, "j": 3}, stores=(s.write("y", (I, J), row),)))
    np.testing.assert_array_equal(s["y"], s["x"][[0, 1, 3]])
    far = s.context.pool.shifted(F32, (("i", 2),), (s.load("x", I, Affine()),))
    s.run(Nest({"i": 2}, stores=(s.write("z", (I,), far),)))
    np.testing.assert_array_equal(s["z"], s["x"][2:, 0])


def test_views_under_other_types_and_shapes_share_memory():
    s = Small(x=numbers(2, 6), y=np.zeros((4, 3), "f"))
    s.bufs["r"] = Buf("%r", (4, 3), I32, storage=s.bufs["x"])
    s.bufs["q"] = Buf("%q", (4, 3), I32, storage=s.bufs["y"])
    s.run(Nest({"i": 4, "j": 3}, stores=(s.write("q", (I, J), s.load("r", I, J)),)))
    np.testing.assert_array_equal(s["y"], s["x"].reshape(4, 3))


# ---- reductions

SUMS = {
    "sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min, "maxnum": np.nanmax,
    "logaddexp": np.logaddexp.reduce, "argmax": np.argmax, "argmin": np.argmin,
}  # fmt: skip


@pytest.mark.parametrize("op", SUMS)
@pytest.mark.parametrize("nan", [False, True])
def test_reductions(op, nan):
    x = numbers(5, 7) / 4
    x[2, 3] = np.nan if nan else x[2, 3]
    search = op.startswith("arg")
    s = Small(x=x, y=np.zeros(5, I32 if search else F32))
    dtype = I32 if search else F32
    args = (s.load("x", I, K), s.index(K)) if search else (s.load("x", I, K),)
    s.run(
        Nest(
            {"i": 5, "k": 7},
            ("k",),
            (Reduction(op, args, dtype),),
            (s.write("y", (I,), s.acc(dtype=dtype), inner=False),),
        )
    )
    want = np.array([SUMS[op](row.astype("d")) for row in x])
    np.testing.assert_allclose(s["y"], want, rtol=1e-6)


@pytest.mark.parametrize(
    ("op", "want"),
    [("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor), ("sum", np.add)],
)
@pytest.mark.parametrize("dtype", ["u1", "i4", "?"])
def test_reductions_of_integers_and_bools(op, want, dtype):
    x = (numbers(4, 9, dtype="i4") & 3).astype(dtype)
    s = Small(x=x, y=np.zeros(4, dtype))
    s.run(
        Nest(
            {"i": 4, "k": 9},
            ("k",),
            (Reduction(op, (s.load("x", I, K),), x.dtype),),
            (s.write("y", (I,), s.acc(dtype=x.dtype), inner=False),),
        )
    )
    np.testing.assert_array_equal(s["y"], want.reduce(x, axis=1, dtype=dtype))


@pytest.mark.parametrize("dtype", ["f", "i4", "i1"])
@pytest.mark.parametrize("depth", [0, 1, 5])
def test_products(dtype, depth):
    """Over two dimensions, one of which neither operand moves along."""
    x, y = numbers(3, depth, dtype=dtype), numbers(depth, 4, dtype=dtype)
    s = Small(x=x, y=y, z=np.ones((3, 4), dtype))
    dot = Reduction("dot", (s.load("x", I, K), s.load("y", K, J)), x.dtype)
    s.run(
        Nest(
            {"i": 3, "j": 4, "k": depth, "l": 2},
            ("k", "l"),
            (dot,),
            (s.write("z", (I, J), s.acc(dtype=x.dtype), inner=False),),
        )
    )
    np.testing.assert_array_equal(s["z"], (2 * (x.astype("i8") @ y.astype("i8"))).astype(dtype))


def test_reductions_start_with_their_identity():
    for op, row in reductions.REDUCTIONS.items():
        if op not in ("dot", "logaddexp", "argmax", "argmin"):
            s = Small(x=np.zeros((2, 0), "i4"), y=np.full(2, 77, "i4"))
            s.run(
                Nest(
                    {"i": 2, "k": 0},
                    ("k",),
                    (Reduction(op, (s.load("x", I, K),), I32),),
                    (s.write("y", (I,), s.acc(dtype=I32), inner=False),),
                )
            )
            np.testing.assert_array_equal(s["y"], [row.identity(I32)] * 2, err_msg=op)


@pytest.mark.parametrize(
    ("op", "want"),
    [("sum", np.add), ("prod", np.multiply), ("max", np.maximum), ("logaddexp", np.logaddexp)],
)
def test_cumulative_operations(op, want):
    s = Small(x=numbers(3, 6) / 4, y=np.zeros((3, 6), "f"))
    s.run(
        Nest(
            {"i": 3, "k": 6},
            ("k",),
            (Reduction(op, (s.load("x", I, K),), F32),),
            (s.write("y", (I, K), s.acc()),),
            ordered=True,
        )
    )
    np.testing.assert_allclose(s["y"], want.accumulate(s["x"].astype("d"), axis=1), rtol=1e-6)


def test_cumulative_sum_in_place_of_what_it_reads():
    s = Small(x=numbers(3, 6))
    before = s["x"]
    s.run(
        Nest(
            {"i": 3, "k": 6},
            ("k",),
            (Reduction("sum", (s.load("x", I, K),), F32),),
            (s.write("x", (I, K), s.acc()),),
            ordered=True,
        )
    )
    np.testing.assert_array_equal(s["x"], before.cumsum(1))


def test_half_precision_is_rounded_where_it_is_stored():
    x = np.array([1.0, 2.0**-9, -1.0], "f").astype("float16")
    s = Small(x=x, y=np.zeros(1, "float16"))
    half = np.dtype("float16")
    one, small, minus = (s.load("x", Affine((), k)) for k in range(3))
    value = s.context.op("add", half, s.context.op("add", half, s.context.op("mul", half, one, s.const(2048, half)), small),
                         s.const(-2048, half))  # fmt: skip
    s.run(Nest({"i": 1}, stores=(s.write("y", (I,), value),)))
    assert s["y"][0] == 2.0**-9
    assert minus is not None


@pytest.mark.parametrize("instruction", INSTRUCTIONS.values(), ids=lambda row: row.name)
def test_products_of_words_mean_what_their_elements_do(instruction):
    rng = np.random.default_rng(3)
    count = instruction.word_elements
    elements = [
        rng.integers(-9, 9, (4, 3 * count)).astype(np.int8).astype(dtype)
        for dtype in instruction.operands
    ]
    words = [array.view(np.int32) for array in elements]
    s = Small(x=words[0], z=words[1], y=np.zeros(4, instruction.accumulator))
    loads = s.load("x", I, K), s.load("z", I, K)
    reduction = Reduction("dot", loads, instruction.accumulator, by=instruction)
    store = s.write("y", (I,), s.acc(dtype=instruction.accumulator), inner=False)
    s.run(Nest({"i": 4, "k": 3}, ("k",), (reduction,), (store,)))
    left, right = (array.astype(np.float64) for array in elements)
    np.testing.assert_array_equal(s["y"].astype(np.float64), (left * right).sum(1))


# ---- control flow


def test_lets_branches_and_loops():
    s = Small(n=np.array([3], "i4"), y=np.zeros(8, "f"))
    at = Affine.symbol("%c")
    loop = For("%c", "%n", (Nest({}, stores=(s.write("y", (at,), s.const(1.0)),)),))
    branch = If(
        "%n", ((), (Nest({}, stores=(s.write("y", (Affine((), 7),), s.const(5.0)),)),))
    )  # 3 is the last branch
    symbols = s.run(Let("%n", s.load("n", Affine())), loop, branch)
    np.testing.assert_array_equal(s["y"], [1, 1, 1, 0, 0, 0, 0, 5])
    assert symbols["%n"] == 3


def test_unsigned_numbers_and_bools_are_indices():
    s = Small(n=np.array([200], "u1"), b=np.array([True]))
    assert s.run(Let("%n", s.load("n", Affine())), Let("%b", s.load("b", Affine()))) == {
        "%n": 200,
        "%b": 1,
    }


@pytest.mark.parametrize(("start", "left"), [(5, 0), (0, 0), (-3, -3)])
def test_whiles(start, left):
    s = Small(n=np.array([start], "i4"))
    positive = s.context.op("gt", BOOL, s.load("n", Affine()), s.const(0, I32))
    less = s.context.op("sub", I32, s.load("n", Affine()), s.const(1, I32))
    s.run(
        While((Let("%p", positive),), "%p", (Nest({}, stores=(s.write("n", (Affine(),), less),)),))
    )
    assert s["n"][0] == left


def test_sorts_are_stable_with_nan_last():
    keys = np.array([[2, np.nan, -0.0, 1, 0.0, -np.nan]], "f")
    s = Small(k=keys, v=np.arange(6, dtype="i4").reshape(1, 6))
    s.run(Sort((s.bufs["k"], s.bufs["v"]), (), 1, 6))
    np.testing.assert_array_equal(s["v"], [[2, 4, 3, 0, 1, 5]])
    np.testing.assert_array_equal(s["k"], keys[:, [2, 4, 3, 0, 1, 5]])


def test_sorts_by_several_keys():
    a, b = numbers(3, 8, dtype="i4") & 1, numbers(3, 8)
    s = Small(a=a, b=b)
    s.run(Sort((s.bufs["a"], s.bufs["b"]), (), 2, 8))
    order = np.lexsort((b, a), axis=-1)
    np.testing.assert_array_equal(s["b"], np.take_along_axis(b, order, -1))


def test_traces_hand_over_contents_and_fetches_do_nothing():
    s = Small(x=numbers(3))
    s.run(Prefetch(s.bufs["x"], (Affine((), 100),), 4), Trace(7, (s.bufs["x"],)))
    ((site, (value,)),) = s.traced
    assert site == 7
    np.testing.assert_array_equal(value, s["x"])


@pytest.mark.parametrize(
    ("dtype", "op"), [(F32, "sum"), (I32, "max"), (BOOL, "max"), (BOOL, "sum")]
)
def test_steps_that_read_what_steps_before_stored(dtype, op):
    s = Small(x=np.eye(3, 6).astype(dtype))
    wanted = np.eye(3, 6).astype(dtype)
    join = np.maximum if op == "max" else np.logical_or if dtype == BOOL else np.add
    for k in range(5):
        wanted[:, k + 1] = join.reduce(wanted[:, : k + 1], axis=1)
    s.run(
        Nest(
            {"i": 3, "k": 5},
            ("k",),
            (Reduction(op, (s.load("x", I, K),), dtype),),
            (s.write("x", (I, K + 1), s.acc(dtype=dtype)),),
            ordered=True,
        )
    )
    np.testing.assert_array_equal(s["x"], wanted)


def test_searches_whose_steps_depend_on_each_other_are_errors():
    s = Small(x=numbers(6))
    with pytest.raises(InternalError, match="a search whose points depend on each other"):
        s.run(
            Nest(
                {"k": 5},
                ("k",),
                (Reduction("argmax", (s.load("x", K), s.index(K)), F32),),
                (s.write("x", (K + 1,), s.acc()),),
                ordered=True,
            )
        )
