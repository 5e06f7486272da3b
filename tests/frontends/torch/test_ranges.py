"""Indices out of range and divisors that are zero: a call raises, wherever the number is, and the process goes on."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

import pbkern  # noqa: E402
from pbkern.core.options import CompileOptions  # noqa: E402
from pbkern.errors import DivisionByZero, IndexOutOfRange  # noqa: E402

jit = pbkern.polyblocks_jit_torch
ROWS = 11


def table():
    return torch.arange(ROWS * 3.0).view(ROWS, 3)


# function of (table, indices), and whether indices count from the end as well
INDEXED = {
    "embedding": (lambda x, i: F.embedding(i, x) * 2, False),
    "index": (lambda x, i: x[i] + 1, True),
    "index of the second dimension": (lambda x, i: x.t()[:, i] + 1, True),
    "two indices": (lambda x, i: x[i, i * 0 + 1], True),
    "index_select": (lambda x, i: x.index_select(0, i) - 1, False),
    "gather": (lambda x, i: x.gather(0, i[:, None].expand(-1, 3)) * 3, False),
    "take": (lambda x, i: x[:, 0].contiguous().take(i), True),
    "index_put": (lambda x, i: x.index_put((i,), torch.ones(3)), True),
    "index_put, added": (lambda x, i: x.index_put((i,), torch.ones(3), accumulate=True), True),
    "scatter": (lambda x, i: x.scatter(0, i[:, None], torch.ones(len(i), 1)), False),
    "scatter of a number": (lambda x, i: x.scatter(0, i[:, None], 2.0), False),
    "scatter_add": (lambda x, i: x.scatter_add(0, i[:, None], torch.ones(len(i), 1)), False),
    "scatter_reduce": (lambda x, i: x.scatter_reduce(0, i[:, None], torch.ones(len(i), 1), "amax"), False),
    "index_add": (lambda x, i: x.index_add(0, i, torch.ones(len(i), 3)), False),
    "index_copy": (lambda x, i: x.index_copy(0, i, torch.ones(len(i), 3)), False),
    "embedding_bag": (lambda x, i: F.embedding_bag(i[None], x, mode="sum"), False),
    "cross_entropy": (lambda x, i: F.cross_entropy(x.t().expand(len(i), 3, ROWS)[:, 0], i), False),
    "nll_loss": (lambda x, i: F.nll_loss(x.t().expand(len(i), 3, ROWS)[:, 1], i, reduction="none"), False),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEXED)
def test_an_index_out_of_range(name):
    f, from_end = INDEXED[name]
    fast, good = jit(f), torch.tensor([3, 0, ROWS - 1, 5, 1])
    expected = f(table(), good)
    torch.testing.assert_close(fast(table(), good), expected)
    for bad in (ROWS, 2**40, -ROWS - 1, *(() if from_end else (-1,))):
        wrong = good.clone()
        wrong[3] = bad
        if not (name in ("cross_entropy", "nll_loss") and bad == -100):
            with pytest.raises(
                IndexOutOfRange,
                match=f"index {bad} is out of range in aten::.*\n.*at .*test_ranges.py",
            ):
                fast(table(), wrong)
        torch.testing.assert_close(fast(table(), good), expected)
    if from_end:
        torch.testing.assert_close(fast(table(), good - ROWS), expected)


# function of (number, index) for a number in place of an array of one
OF_NUMBERS = {
    "gather": lambda x, i: x.gather(0, i),
    "gather of a number": lambda x, i: x.gather(0, i[0]),
    "index_select": lambda x, i: x.index_select(0, i),
    "index_add": lambda x, i: x.index_add(0, i, x * 3, alpha=2),
    "index_copy": lambda x, i: x.index_copy(-1, i, x * 3),
}


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_numbers_have_the_index_0(name):
    f, x, i = OF_NUMBERS[name], torch.tensor(2.5), torch.tensor([0])
    fast = jit(f)
    torch.testing.assert_close(fast(x, i), f(x, i))
    with pytest.raises(
        IndexOutOfRange, match=f"index 1 is out of range in aten::{name.split()[0]}"
    ):
        fast(x, i + 1)


REPEATED = {
    "rows": lambda x, i: x[0].expand(ROWS, 3)[i],
    "columns": lambda x, i: x[:, :1].expand(-1, 9).gather(1, i[:, None]) * 2,
    "one of two dimensions": lambda x, i: x[:, :1].expand(-1, 9)[i % 2, i],
}


@pytest.mark.parametrize("name", REPEATED)
def test_an_index_that_decides_nothing(name):
    """What is looked up is the same for all indices, and an index out of range is an error."""
    f, i = REPEATED[name], torch.tensor([4, 0, 8])
    fast = jit(f)
    torch.testing.assert_close(fast(table(), i), f(table(), i))
    for bad in (ROWS, -ROWS - 1):
        with pytest.raises(IndexOutOfRange, match=f"index {bad} is out of range"):
            fast(table(), torch.tensor([0, bad, 1]))


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (1, 3, 6, 6), (2, 2, 4, 4, 6)], ids=str)
def test_places_of_maxima(shape):
    pool, unpool = (
        (F.max_pool2d, F.max_unpool2d) if len(shape) < 5 else (F.max_pool3d, F.max_unpool3d)
    )
    x = torch.randn(shape, requires_grad=True)
    y, places = pool(x, 2, return_indices=True)
    f = lambda y, places: unpool(y, places, 2, output_size=shape) * 2
    fast = jit(f)
    torch.testing.assert_close(fast(y, places), f(y, places))
    gradient = lambda f: torch.autograd.grad((f(y, places) ** 3).sum(), x, retain_graph=True)[0]
    torch.testing.assert_close(gradient(fast), gradient(f))
    wrong = places.clone()
    wrong[(-1,) * wrong.ndim] = y[0, 0].numel() * 10**6
    with pytest.raises(IndexOutOfRange, match="is out of range in aten::max_unpool"):
        fast(y, wrong)


BAGS = torch.tensor([1, 0, 2, 2, 5, 3, 4])
STARTS = [  # where bags start, and what the message says; no message: a result
    ([0, 3], ""),
    ([0, 0], ""),
    ([0, 7], ""),
    ([2, 4], r"first offset 2 .*\n.*\n.*it must be 0"),
    ([0, 8], r"offset 8 .*\n.*\n.*it must be from 0 to 7"),
    ([0, -2], r"offset -2 .*\n.*\n.*it must be from 0 to 7"),
]
BOUNDS = [  # the last one ends the last bag
    ([0, 2, 2, 7], ""),
    ([0, 4, 5, 6], ""),  # an entry is in no bag
    ([1, 2, 3, 7], r"first offset 1 .*\n.*\n.*it must be 0"),
    ([0, 3, 3, 9], r"offset 9 .*\n.*\n.*it must be from 0 to 7"),
    ([0, 6, 3, 7], r"step between offsets -3 .*\n.*\n.*it must be from 0 to 7"),
]


@pytest.mark.parametrize(
    ("cases", "mode", "dtype"),
    [(STARTS, "sum", torch.int64), (BOUNDS, "sum", torch.int32), (STARTS, "mean", torch.int32)],
    ids=("starts", "bounds", "means"),
)
def test_offsets_of_bags(cases, mode, dtype):
    ends = cases is BOUNDS
    f = lambda x, i, o: F.embedding_bag(i, x, o, mode=mode, include_last_offset=ends)
    fast, i = jit(f), BAGS.to(dtype)
    for offsets, message in cases:
        x, o = table().requires_grad_(), torch.tensor(offsets, dtype=dtype)
        if message:
            with pytest.raises(IndexOutOfRange, match=message):
                fast(x, i, o)
            # Eager reads what lies before the indices; one thread of it looks at no step.
            if min(offsets) >= 0 and torch.get_num_threads() > 1:
                with pytest.raises(RuntimeError):
                    f(x, i, o)
            continue
        y = fast(x, i, o)
        torch.testing.assert_close(y, f(x, i, o))
        (given,) = torch.autograd.grad((y**2).sum(), x)
        # Eager has no gradient of entries that are in no bag.
        expected = torch.zeros(ROWS, 3)
        for k, (start, end) in enumerate(itertools.pairwise(offsets if ends else [*offsets, 7])):
            each = 2 * y[k].detach() / (max(end - start, 1) if mode == "mean" else 1)
            expected.index_add_(0, BAGS[start:end], each.expand(end - start, 3))
        torch.testing.assert_close(given, expected)


def test_no_bags():
    f = lambda x, o: F.embedding_bag(BAGS, x, o, mode="sum", include_last_offset=True)
    x = table().requires_grad_()
    y = jit(f)(x, torch.tensor([0]))
    assert y.shape == (0, 3)
    (given,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(given, torch.zeros(ROWS, 3))


def test_entries_behind_the_last_offset_are_in_no_bag():
    """Means as well, for which eager counts them in the last bag without adding their rows."""
    o = torch.tensor([0, 4, 5])
    f = lambda x: F.embedding_bag(BAGS, x, o, mode="mean", include_last_offset=True)
    x, rows = table().requires_grad_(), table()[BAGS]
    y = jit(f)(x)
    torch.testing.assert_close(y, torch.stack([rows[:4].mean(0), rows[4]]))
    (given,) = torch.autograd.grad(y.sum(), x)
    expected = torch.zeros(ROWS, 3).index_add(
        0, BAGS[:5], torch.tensor([0.25] * 4 + [1.0])[:, None].expand(5, 3)
    )
    torch.testing.assert_close(given, expected)


@pytest.mark.parametrize("count", [1, 7, 16, 33, 70_001])
def test_one_wrong_index_at_any_place(count):
    f = lambda x, i: x[i] * 2 + 1
    fast, x = jit(f), torch.rand(ROWS)
    i = torch.randint(0, ROWS, (count,))
    torch.testing.assert_close(fast(x, i), f(x, i))
    for place in {0, count // 2, count - 1}:
        wrong = i.clone()
        wrong[place] = ROWS
        with pytest.raises(IndexOutOfRange, match=f"index {ROWS} is out"):
            fast(x, wrong)
    torch.testing.assert_close(fast(x, i), f(x, i))


DIVISIONS = {
    "floor": lambda x, y: x // y,
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc") + 1,
    "remainder": lambda x, y: x % y,
    "fmod": lambda x, y: torch.fmod(x, y) * 2,
}


TYPES = [torch.int64, torch.int32, torch.int8, torch.uint8, torch.int32]


@pytest.mark.parametrize(("name", "dtype"), list(zip([*DIVISIONS, "floor"], TYPES)), ids=str)
def test_a_divisor_that_is_zero(name, dtype):
    f = DIVISIONS[name]
    fast = jit(f)
    for count in (
        5,
        64,
        1003,
    ):  # whole vectors, and rows that end within one: lanes behind the end are no zeros
        x, y = torch.randint(0, 100, (count,)).to(dtype), torch.randint(1, 9, (count,)).to(dtype)
        before = reports()
        assert torch.equal(fast(x, y), f(x, y))
        assert reports() == before
        y[count // 2] = 0
        with pytest.raises(DivisionByZero, match="integer division by zero in aten::"):
            fast(x, y)
    assert torch.isinf(jit(f)(torch.ones(3), torch.zeros(3))).all() or name != "floor"


def reports():
    from pbkern.targets.host.runtime_symbols import reports

    return reports().value


def test_numbers_that_are_known_raise_the_error_of_torch():
    x, i = torch.tensor([4, 5]), torch.tensor([0, 9])
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        jit(lambda x: x // 0)(x)
    with pytest.raises((RuntimeError, IndexError)):
        jit(lambda x: x + torch.ops.aten.index(x, [torch.tensor([0, 9])]))(x)
    assert issubclass(IndexOutOfRange, IndexError)
    assert issubclass(IndexOutOfRange, RuntimeError)
    with pytest.raises(IndexError):
        jit(lambda x, i: x[i])(x, i)


def test_ignored_targets_are_no_error():
    f = lambda x, t: F.cross_entropy(x, t, ignore_index=-7)
    x, t = torch.rand(4, 5), torch.tensor([1, -7, 4, 0])
    torch.testing.assert_close(jit(f)(x, t), f(x, t))
    padded = lambda x, i: F.embedding(i, x, padding_idx=2)
    torch.testing.assert_close(jit(padded)(x, t.abs() % 4), padded(x, t.abs() % 4))


def test_in_the_backward_pass():
    """The index is right forward, and another one backward: it is written to between the two."""
    x, i = torch.rand(ROWS, 4, requires_grad=True), torch.tensor([1, 2, 3])

    class Lookup(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, i):
            ctx.save_for_backward(i)
            return x.gather(0, i[:, None].expand(-1, 4))

        @staticmethod
        def backward(ctx, g):
            (i,) = ctx.saved_tensors
            return torch.zeros(ROWS, 4).scatter_add(0, (i + ROWS)[:, None].expand(-1, 4), g), None

    y = jit(lambda x, i: Lookup.apply(x, i).sum())(x, i)
    with pytest.raises(
        IndexOutOfRange, match=f"index {ROWS + 1} is out of range in aten::scatter_add"
    ):
        y.backward()


def test_places_that_a_function_computes_are_not_checked():
    def f(x):
        i = torch.arange(5)
        return (
            x[i * 2 % ROWS]
            + x[(i + 3).clamp(max=ROWS - 1)]
            + x.flip(0)[i]
            + x[torch.argmax(x, 0)].sum(0)
        )

    fast, x = jit(f), table()
    torch.testing.assert_close(fast(x), f(x))
    (compiled,) = [c for g in fast.graphs for c in g.compiled]
    assert "in_range" in str(compiled.jaxpr)
    assert "in_range" not in str(compiled.build.fused.jaxpr)


def test_kernels_stay_fused():
    f = lambda x, i: (F.embedding(i, x) * 2 + 1).relu() // 3
    explained = jit(f).explain(table(), torch.tensor([[1, 2], [3, 4]]))
    assert str(explained).count("kernel graph") == 1
    assert "0 operation(s) left to XLA, 0 run in Torch" in str(explained)


def test_what_xla_keeps_and_complex_numbers():
    """Programs between whose kernels XLA works, and those that JAX calls, report as well."""
    f = lambda x, i: torch.linalg.inv(x)[i] * 2
    g = lambda x, i: (x * x.conj())[i].abs()
    x, i = torch.rand(4, 4) + 4 * torch.eye(4), torch.tensor([0, 3])
    z = torch.randn(5, 3, dtype=torch.complex64)
    for h, a in ((f, x), (g, z)):
        torch._dynamo.reset()
        fast = jit(h)
        torch.testing.assert_close(fast(a, i), h(a, i))
        with pytest.raises((IndexOutOfRange, IndexError)):
            fast(a, i + 5)
        torch.testing.assert_close(fast(a, i), h(a, i))


def test_an_index_array_that_xla_works_on():
    import jax

    from pbkern.api.direct_plan import DirectPlan
    from pbkern.dsl.primitives.in_range import Check, in_range
    from pbkern.frontends.torch.memory import TorchMemory

    x, i = torch.rand(5, 5), torch.tensor([3, 1, 9])
    for compiled in (True, False):

        def f(x, i, compiled=compiled):
            made = jax.numpy.linalg.inv(x)
            return [
                made[in_range(i, 0, 5)]
                if compiled
                else jax.lax.linalg.lu(made[in_range(i, 0, 5)])[0]
            ]

        with jax.enable_x64(True):
            jaxpr = jax.make_jaxpr(f)(x.numpy(), i.numpy())
        plan = DirectPlan(
            jaxpr, "f", CompileOptions(), TorchMemory(), [Check("aten::index at here.py:1")]
        )
        plan([x, i % 5])
        with pytest.raises(IndexOutOfRange, match="index 9 is out of range in aten::index"):
            plan([x, i])


def test_a_loop_carries_what_it_has_found():
    """The word that says so is stored once behind a loop of four vectors per step, not in it."""
    import jax

    from pbkern.dsl.primitives.in_range import in_range
    from tests.lowered import lowered

    x, i = torch.rand(4096).numpy(), torch.randint(0, 4096, (4096,), dtype=torch.int32).numpy()
    text = lowered(lambda x, i: x[in_range(i, 0, 4096)], x, jax.numpy.asarray(i), stage="mlir")
    assert "arith.maxui" in text
    stores = [
        line
        for line in text.split("\n")
        if "memref.store" in line and line.endswith("memref<2xi64>")
    ]
    assert len(stores) == 2, stores  # one clears it


def test_threads_get_their_own_errors():
    f = lambda x, i: x[i] * 2
    fast, x = jit(f), torch.rand(ROWS)
    good = torch.randint(0, ROWS, (2000,))
    fast(x, good)

    def call(k):
        i = good.clone()
        if k % 3 == 0:
            i[k] = ROWS + k
        try:
            return torch.equal(fast(x, i), f(x, i))
        except IndexOutOfRange as e:
            return f"index {ROWS + k} " in str(e)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(120)))
