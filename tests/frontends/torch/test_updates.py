"""Functions that change their arguments: values are Torch's, and small changes are made in place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pbkern


def append(cache, row, count):
    """A cache of rows, as of keys: one is written, and a number counts."""
    cache.index_copy_(1, count, row)
    count.add_(1)
    return (cache * 2).sum(1)


def write_row(x, v, i):
    x[:, 3] = v
    return x


def old_and_new(x, v, i):
    before = x.clone()
    x.add_(v[:, None])
    return before, x[0]


def exchange(x, v, i):
    before = x.clone()
    x.copy_(x.flip(0))
    v.copy_(before[:, 0])
    return x + before


def in_turn(x, v, i):
    v.mul_(2)
    x.add_(v[:, None])
    return (x * v[:, None]).sum()


def rows(x, v, i):
    x[:, i] = 0.0
    return x.sum(), x[1:3]


def view_before(x, v, i):
    view = x[:, 3:5]
    x[:, 0].copy_(v)
    return view.sum(), view


def of_a_view(x, v, i):
    x[1:, 2:].add_(1)
    return x.sum()


def unknown_operator(x, v, i):
    """An operator that the table lacks, between changes."""
    x.index_copy_(1, i, v[:, None])
    y = torch.histc(x, 4)
    v.add_(y[0])
    return y


FUNCTIONS = [
    write_row,
    old_and_new,
    exchange,
    in_turn,
    rows,
    view_before,
    of_a_view,
    unknown_operator,
]


def arguments(transposed=False):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 64, 8, generator=generator)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if transposed else x
    return x, torch.randn(5, 8, generator=generator), torch.tensor([2])


def same(f, compiled, args):
    """Calls twice, and compares results and arguments."""
    wanted, given = ([arg.clone() for arg in args] for _ in range(2))
    for _ in range(2):
        with torch.no_grad():
            want, got = f(*wanted), compiled(*given)
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(given, wanted)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("f", FUNCTIONS)
def test_equals_torch(f, transposed):
    x, v, i = arguments(transposed)
    same(
        f,
        pbkern.polyblocks_jit_torch(f),
        (x, v, i)
        if f not in (unknown_operator,)
        else (x[..., 0].contiguous(), v[:, 0].contiguous(), i),
    )


compiled_append = pbkern.polyblocks_jit_torch(append)


@given(count=st.integers(0, 62), rows=st.just(5))
def test_a_cache_grows(count, rows):
    x, v, _ = arguments()
    same(append, compiled_append, (x, v[:, None], torch.tensor([count])))


def test_is_written_in_place():
    x, v, i = arguments()
    with torch.no_grad():
        compiled_append(x, v[:, None], i)
    (part,) = compiled_append.graphs[-1].compiled
    assert any(compiled.signature.shared for compiled in part.build.compiled.values())
    assert part.report().as_dict()["bytes_moved"] < 1.5 * x.nbytes  # it is read once, by the sum


@pytest.mark.parametrize("start", [0, 1, 5, 16])
def test_arguments_that_begin_anywhere(start):
    """Results are stored by whole cache lines; what begins within one is copied."""
    f = lambda x, i, v: x.index_copy_(0, i, v).sum()
    compiled = torch.compile(f, backend="pbkern")
    memory = torch.arange(1000.0)
    wanted, given = (memory.clone()[start : start + 500] for _ in range(2))
    for _ in range(2):
        args = torch.tensor([7]), torch.ones(1)
        torch.testing.assert_close(compiled(given, *args), f(wanted, *args))
    torch.testing.assert_close(given, wanted)


def test_places_that_are_wrong():
    f = pbkern.polyblocks_jit_torch(lambda x, i: x.index_fill_(0, i, 3.0).sum())
    x = torch.zeros(1000)
    assert f(x, torch.tensor([1])) == 3
    with pytest.raises(IndexError, match="1000 is out of range"):
        f(x, torch.tensor([1000]))
    assert x.sum() == 3


def test_a_place_that_changes():
    """The index is checked as it was before the call."""
    f = pbkern.polyblocks_jit_torch(append)
    x, v, _ = arguments()
    count = torch.tensor([63])
    f(x, v[:, None], count)
    assert count.item() == 64
    with pytest.raises(IndexError, match="64 is out of range"):
        f(x, v[:, None], count)


def test_buffers_under_gradients():
    model = torch.nn.BatchNorm1d(8)
    other = torch.nn.BatchNorm1d(8)
    compiled = torch.compile(other, backend="pbkern")
    for seed in range(3):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
        model(x).square().sum().backward()
        compiled(x).square().sum().backward()
    torch.testing.assert_close(other.running_var, model.running_var)
    torch.testing.assert_close(other.weight.grad, model.weight.grad)
    model.eval(), other.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


def test_steps_of_an_optimizer():
    def step(weights, gradients, moments):
        for w, g, m in zip(weights, gradients, moments):
            m.mul_(0.9).add_(g, alpha=0.1)
            w.sub_(m, alpha=0.01)

    def drawn():
        generator = torch.Generator().manual_seed(0)
        return [[torch.randn(7, 9, generator=generator) for _ in range(3)] for _ in range(3)]

    wanted, given = drawn(), drawn()
    compiled = pbkern.polyblocks_jit_torch(step)
    for _ in range(2):
        step(*wanted)
        compiled(*given)
    torch.testing.assert_close(given, wanted)
