"""Operators beside eager Torch where inputs hold NaN, infinities, ties, and numbers at the ends of their types."""

import functools
import itertools
import re

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

import pbkern  # noqa: E402

from .comparing import by_table, check_table  # noqa: E402

jit = pbkern.polyblocks_jit_torch
NAN, INF = float("nan"), float("inf")


def planted(shape, dtype=torch.float32):
    """Small whole numbers, so that many are equal, among NaN and both infinities."""
    x, chance = torch.randint(0, 3, shape).to(dtype), torch.rand(shape)
    x[chance < 0.15], x[(chance > 0.3) & (chance < 0.5)], x[chance > 0.65] = NAN, INF, -INF
    return x


def check(f, *tensors):
    """Results and gradients of floating tensors are those of eager Torch."""
    found = []
    for g in (f, jit(f)):
        given = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
        made = g(*given)
        made = made if isinstance(made, tuple) else (made,)
        loss = [
            (m * torch.linspace(1, 2, m.numel()).view(m.shape)).sum()
            for m in made
            if m.requires_grad
        ]
        if loss:
            sum(loss).backward()
        found.append([*(m.detach() for m in made), *(t.grad for t in given)])
    for ours, theirs in zip(found[1], found[0]):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


# The last: windows too large to compare their elements one by one.
POOLS = [
    (2, 2, 0, 1, False),
    (3, 2, 1, 1, False),
    (3, 1, 1, 2, True),
    (2, 3, 1, 1, True),
    (9, 4, 3, 1, False),
]


SHAPES = {1: (2, 3, 23), 2: (3, 13, 19), 3: (1, 2, 9, 11, 10)}
SOME_POOLS = [(1, POOLS[3]), (3, POOLS[1]), *((2, config) for config in POOLS)]


@pytest.mark.parametrize(("n", "config"), SOME_POOLS, ids=str)
def test_max_pools(n, config):
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[n - 1]
    x = planted(SHAPES[n])
    check(lambda x: pool(x, *config), x)
    check_table(lambda x: pool(x, *config, return_indices=True), x)


def test_a_pool_over_the_border_that_holds_no_more_than_minus_infinity():
    x = torch.full((1, 1, 6, 7), -INF)
    check(lambda x: F.max_pool2d(x, 3, 2, 1), x)
    check_table(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), x)


@pytest.mark.parametrize("sizes", [(3, 7), (4, 3), (7, 5), (12, 9)], ids=str)
def test_adaptive_means_of_parts_of_several_lengths(sizes):
    check_table(lambda x: F.adaptive_avg_pool2d(x, sizes), planted((2, 3, 10, 7)))
    check(lambda x: F.adaptive_avg_pool2d(x, sizes), torch.rand(2, 3, 10, 7))


def test_places_among_boundaries_that_are_not_finite():
    """The place of NaN is behind all, also behind boundaries that are NaN. (That of infinity would depend on the search.)"""
    edges = torch.tensor([-INF, -INF, -2.0, -0.0, 0.0, 3.0, 3.0, INF])
    x = torch.tensor([[NAN, INF, -INF, 3.0], [0.0, -0.0, -7.0, 2.5], [1e30, -2.0, 4.0, -1e-30]])
    with_nan, finite = torch.cat([edges, torch.tensor([NAN])]), torch.where(x == INF, NAN, x)
    for right in (False, True):
        for given, sorted_edges in ((x, edges), (finite, with_nan)):
            check_table(functools.partial(torch.bucketize, right=right), given, sorted_edges)
            check_table(functools.partial(torch.searchsorted, right=right), sorted_edges, given)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int32, torch.bfloat16], ids=str
)
def test_median(dtype):
    for shape in ((5, 7), (3, 8), (1, 1), (9,)):
        x = torch.randperm(shape[0] * 8)[: torch.Size(shape).numel()].to(dtype).reshape(shape)
        if dtype.is_floating_point:
            x[0] = NAN
            x.view(-1)[-1] = INF
        for dim in range(x.ndim):
            check_table(functools.partial(torch.median, dim=dim), x)
            check_table(functools.partial(torch.median, dim=dim, keepdim=True), x)
        check_table(lambda x: x.median(), x)
    check_table(lambda x: x.median(0), x[0])


def test_the_gradient_of_a_median():
    x = torch.tensor([[3.0, NAN, 1.0, NAN], [2.0, -INF, INF, 0.0]])
    check(lambda x: x.median(1).values, x)
    check(lambda x: x.median(), x[1])


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str
)
def test_powers_of_integers(dtype):
    low = 0 if dtype is torch.uint8 else -3
    x = torch.arange(low, 11).to(dtype)
    y = torch.tensor(
        [0, 1, 2, 5, 31, 32, 63, 64, 65, 100, 127] + ([] if low == 0 else [-1, -2, -7])
    ).to(dtype)
    check_table(lambda x, y: x[:, None] ** y, x, y)
    check_table(lambda x: (x**3, x**64, x**65, x**126), x)
    check_table(lambda x, y: (2**y, 0**y, 1**y), x, y.clamp(min=0))


RANGES = [
    (0.1, -7.9, -4.0),
    (0.9, 7.9, 1.9),
    (-2, 9, 3),
    (5, -6, -1),
    (2.5, 2.5, 1),
    (-3.7, 3.2, 1.0),
]


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.uint8, torch.float32, torch.float64], ids=str
)
def test_ranges(dtype):
    for start, end, step in RANGES:
        if dtype is torch.uint8 and (start < 0 or end < 0):
            continue
        check_range(torch.arange, (start, end, step), dtype)
    for range_ in [
        (-2.0, 3, 8),
        (0, 10, 7),
        (9, -9, 12),
        (3.9, 7.2, 5),
        (4, 5, 1),
        (4, 5, 2),
        (0, 250, 33),
        (1, 1, 4),
    ]:
        if dtype is not torch.uint8 or min(range_) >= 0:
            check_range(torch.linspace, range_, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_ranges_of_sixteen_bits_have_the_steps_of_eager_torch(dtype):
    for numbers in [(1, 2, 41), (-7.9, 10, 29), (3.9, -9, 1001), (0, 250, 300)]:
        made = functools.partial(torch.linspace, *numbers, dtype=dtype)
        check_sum(made, torch.zeros((), dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_ranges_of_sixteen_bits_are_rounded_once(dtype):
    """Eager Torch's results depend on the length of its vectors."""
    for numbers in [(1, 2, 0.03), (-7.9, 10, 0.37), (5, -6, -0.13), (0, 3.5, 0.007)]:
        made = functools.partial(torch.arange, *numbers)
        found = range_of(made, dtype)
        exact = made(dtype=torch.float64)
        error = (found.double() - exact).abs()
        assert (error <= 0.501 * torch.finfo(dtype).eps * exact.abs() + 1e-5).all(), numbers


def range_of(made, dtype):
    return by_table(lambda x: x + made(dtype=dtype), torch.zeros((), dtype=dtype))[0]


def check_sum(made, x):
    """What is made has eager Torch's bits, also where it is added to zero."""
    for compiled in (False, True):
        found = by_table(lambda x: made() + x, x, compiled=compiled)[0]
        assert torch.equal(found, made()), (made, compiled)


def check_range(f, numbers, dtype):
    check_table(lambda x: f(*numbers, dtype=dtype) + x, torch.zeros((), dtype=dtype))


def test_put_and_its_gradient():
    x, v = torch.rand(4, 3), torch.rand(2)
    for index, accumulate in itertools.product(
        (torch.tensor([7, 1]), torch.tensor([[3], [-2]])), (False, True)
    ):
        check(lambda x, v, i=index, added=accumulate: torch.put(x, i, v.view(i.shape), added), x, v)
    check(lambda x, v: torch.put(x, torch.tensor(5), v[0], True), x, v)


ALL_BAGS = itertools.product(
    ("sum", "mean", "max"), (False, True), (False, True), (None, 2), (False, True)
)
BAGS = [
    (m, s, w, p, two)
    for m, s, w, p, two in ALL_BAGS
    if not (w and m != "sum") and not (s and m == "max")
]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "scaled", "weighted", "padding", "two"), BAGS)
def test_bags(mode, scaled, weighted, padding, two):
    check_bag(mode, scaled, weighted, padding, two)


@pytest.mark.parametrize(("mode", "scaled", "weighted", "padding", "two"), [
    ("max", False, False, None, True), ("max", False, False, 2, False), ("sum", True, True, None, True),
    ("mean", True, False, 2, False), ("sum", False, True, None, True),
])  # fmt: skip
def test_some_bags(mode, scaled, weighted, padding, two):
    check_bag(mode, scaled, weighted, padding, two)


def check_bag(mode, scaled, weighted, padding, two):
    i = torch.tensor([1, 1, 2, 4, 0, 4, 5, 2, 2, 1])
    i, offsets = (i.view(2, 5), None) if two else (i, torch.tensor([0, 4, 4, 7]))

    def f(rows, weights):
        return F.embedding_bag(i, rows, offsets, mode=mode, scale_grad_by_freq=scaled, padding_idx=padding,
                               per_sample_weights=weights if weighted else None)  # fmt: skip

    check(f, torch.randn(7, 3), torch.rand(i.shape))


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
            torch.bool)  # fmt: skip


def around_the_ends():
    """Numbers at and beyond the ends of integers of every width, between neighbouring integers, NaN and infinities."""
    widths, near = (7, 8, 15, 16, 31, 32, 53, 63, 64, 100), (-129, -1, 0, 0.75, 1, 300)
    ends = [s * (2.0**w + d) for w in widths for s in (1, -1) for d in near]
    found = [
        0.0,
        -0.0,
        0.4,
        -0.4,
        -0.99,
        1.5,
        -2.2,
        44.0,
        9e4,
        -7e9,
        3e38,
        -3e38,
        NAN,
        INF,
        -INF,
        *ends,
    ]
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("to", INTEGERS, ids=str)
def test_floats_out_of_the_range_of_integers(to):
    """A number by itself, in rows whose lengths are no multiple of a vector's, and strided. Beyond 32 bits, eager Torch has two
    ways to uint32, for vectors and for what remains of a row: compiled code has the latter."""
    for dtype in FLOATS:
        x = around_the_ends().to(dtype)
        shaped = x[:, None].expand(-1, 77).contiguous()
        expected = torch.stack([v.to(to) for v in x.unbind()])[:, None].expand(shaped.shape)
        if to is not torch.uint32:
            assert torch.equal(shaped.to(to), expected), "eager Torch differs from itself"
        torch._dynamo.reset()
        made = jit(lambda t: (t.to(to), t[:, ::7].to(to)))(shaped)
        for m, e in zip(made, (expected, expected[:, ::7])):
            assert torch.equal(m, e), (dtype, x[(m != e).any(1)])


def test_conversions_within_other_operators():
    x = torch.tensor([300.0, NAN, -129.5, 7.9, 3e9, -INF])
    i = torch.arange(6, dtype=torch.int8)
    check_table(lambda x, i: i.clone().copy_(x), x, i)
    check_table(lambda x, i: (x * 2).to(torch.int16) + i, x, i)
    check_table(
        lambda x, i: torch.zeros(7, dtype=torch.uint8).slice_scatter(x.to(torch.uint8), 0, 1), x, i
    )


NUMBERS = {
    "clamp": lambda x, v: x.clamp(max=v), "hardtanh": lambda x, v: torch.ops.aten.hardtanh(x, 0, v),
    "masked_fill": lambda x, v: x.masked_fill(x > 0, v),
    "full": lambda x, v: torch.full((3,), v, dtype=x.dtype) + x[0], "pad": lambda x, v: F.pad(x, (1, 1), value=v),
    "alpha": lambda x, v: torch.add(x, x, alpha=v), "power": lambda x, v: x**v,
}  # fmt: skip


TOO_LARGE = [(torch.int8, 300), (torch.uint8, -256), (torch.float16, 7e4), (torch.float32, -1e40)]


@pytest.mark.parametrize(("dtype", "number"), TOO_LARGE, ids=str)
def test_numbers_that_a_type_does_not_hold(dtype, number):
    """Torch runs such an operator, whose error it is."""
    x = torch.tensor([1, 2, 3]).to(dtype)
    for name, f in NUMBERS.items():
        if name == "hardtanh" and number < 0:  # an error of TorchDynamo's
            continue
        torch._dynamo.reset()
        try:
            expected = f(x, number)
        except RuntimeError as e:
            with pytest.raises(RuntimeError, match=re.escape(str(e))):
                jit(f)(x, number)
        else:
            torch.testing.assert_close(jit(f)(x, number), expected)
