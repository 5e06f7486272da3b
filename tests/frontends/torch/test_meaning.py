"""What a compiled function means is what it means in eager Torch: views, mutation, modes, randomness, graph breaks, shapes."""

from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import pbkern  # noqa: E402

from .comparing import check_table  # noqa: E402

jit = pbkern.polyblocks_jit_torch


def same(made, expected):
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_inputs_of_any_strides():
    f = lambda x: (x * 2 + 1).sum(0)
    fast, x = jit(f), torch.rand(6, 10)
    for view in (
        x.t(),
        x[::2, 1::3],
        x.flip(0),
        x[:, :1].expand(6, 4),
        x[1],
        x.as_strided((3, 3), (1, 2)),
        x[:0],
        x[0, 0],
    ):
        same(fast(view), f(view))


def test_conjugated_and_negated_inputs():
    f = lambda x: (x * 2 + 1, x.real, x.imag * 3)
    fast, x = jit(f), torch.randn(5, 3, dtype=torch.complex64)
    for view in (x, x.conj(), x.t().conj()):
        same(fast(view), f(view))
    g = lambda x: x * 2 + 1
    assert x.conj().imag.is_neg()
    same(jit(g)(x.conj().imag), g(x.conj().imag))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.conj() + x.exp(),
        torch.tanh,
        torch.sigmoid,
        lambda x: x.cumprod(0),
        lambda x: F.conv1d(x[None, None], x[None, None, :3]),
    ],
    ids=["products", "tanh", "sigmoid", "cumprod", "convolution"],
)
def test_complex_gradients(function):
    f = lambda x: function(x).abs().sum()
    x = torch.randn(7, dtype=torch.complex64, requires_grad=True)
    expected = torch.autograd.grad(f(x), x)[0]
    torch.testing.assert_close(torch.autograd.grad(jit(f)(x), x)[0], expected, rtol=1e-4, atol=1e-5)


def test_results_that_are_views_share_memory():
    f = lambda x: (x.t(), x[1:], x.view(-1))
    x = torch.rand(4, 5)
    views = jit(f)(x)
    same(views, f(x))
    x.zero_()
    assert all(v.count_nonzero() == 0 for v in views)


def test_results_that_are_not_views_do_not():
    f = lambda x: (x.clone(), x + 0, x.contiguous() * 1)
    x = torch.rand(4, 5)
    made = jit(f)(x)
    kept = [m.clone() for m in made]
    x.zero_()
    same(list(made), kept)


def _transposed_twice(x):
    y = x.t() * 2
    return y, y.t(), y[1:], y.t().view(-1)


def _strided_again(x):
    y = x.t() * 2
    return y.as_strided((3, 2), (1, 2)), y[0], y[1]


def _written_through_a_view(x):
    y = x.t() * 2
    y.t().view(-1)[3] = 7
    return (y,)


@pytest.mark.parametrize("f", [_transposed_twice, _strided_again, _written_through_a_view])
def test_results_have_torchs_strides(f):
    x = torch.rand(4, 5)
    made, expected = jit(f)(x), f(x)
    same(made, expected)
    assert made[0].stride() == expected[0].stride()


def test_channels_last():
    conv, x = (
        nn.Conv2d(3, 4, 3),
        torch.rand(2, 3, 8, 7).contiguous(memory_format=torch.channels_last),
    )

    def f(x):
        y = conv(x).relu()
        return y, y.permute(0, 2, 3, 1).view(-1), y[:, 1:], y.flatten(2)

    fast = jit(f)
    made, expected = fast(x), f(x)
    same(made, expected)
    assert [m.stride() for m in made] == [e.stride() for e in expected]
    conv.to(memory_format=torch.channels_last)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    (ga,), (gb,) = (
        torch.autograd.grad(sum((t * t).sum() for t in g(y)), y) for g, y in ((fast, a), (f, b))
    )
    same(ga, gb)


def test_arguments_that_are_written_to():
    def f(x, y):
        x.add_(1)
        y[1:, ::2] = x[1:, ::2] * 2
        y.t()[0].mul_(3)
        return x.sum()

    x, y = torch.rand(4, 6), torch.rand(4, 6)
    a, b = x.clone(), y.clone()
    same(jit(f)(x, y), f(a, b))
    same([x, y], [a, b])


def test_two_arguments_that_share_memory():
    def f(x, y):
        x.mul_(2)
        return y + 1

    x = torch.rand(5)
    a = x.clone()
    same(jit(f)(x, x), f(a, a))
    same(x, a)


def test_writes_to_temporaries_and_lists():
    def f(x):
        parts = [x.clone() for _ in range(3)]
        for k, p in enumerate(parts):
            p[k] = k
        return {"sum": sum(parts), "nested": (parts[0], None, [parts[1], 3])}

    x = torch.rand(4, 3)
    made, expected = jit(f)(x), f(x)
    assert made["nested"][1] is None
    assert made["nested"][2][1] == 3
    same(made["sum"], expected["sum"])
    same(
        [made["nested"][0], made["nested"][2][0]], [expected["nested"][0], expected["nested"][2][0]]
    )


def test_statistics_of_batch_norm():
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, momentum=0.3)) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    fast, x = jit(modules[0]), torch.rand(3, 2, 7, 6)
    for _ in range(2):
        same(fast(x), modules[1](x))
    for a, b in zip(modules[0].buffers(), modules[1].buffers()):
        same(a, b)
    same(fast.eval()(x), modules[1].eval()(x))


def test_dropout_has_the_same_mask_backward():
    f = lambda x: F.dropout(x, 0.3) * 2
    x = torch.ones(2000, requires_grad=True)
    fast = jit(f)
    y = fast(x)
    (g,) = torch.autograd.grad(y.sum(), x)
    same(g, y.detach())
    assert 0.6 < (y != 0).double().mean() < 0.8
    assert y.max().item() == pytest.approx(2 / 0.7)


def test_randomness_depends_on_the_seed_alone():
    def f(x):
        return (
            torch.rand_like(x),
            torch.randn(3),
            torch.randint(0, 9, (50,)),
            torch.bernoulli(x),
            torch.randperm(9),
        )

    fast = jit(f)
    x = torch.rand(100)

    def drawn():
        torch.manual_seed(7)
        return [fast(x), fast(x)]

    (a, b), (c, d) = drawn(), drawn()
    for p, q in zip((*a, *b), (*c, *d)):
        assert torch.equal(p, q)
    assert not torch.equal(a[0], b[0])
    assert sorted(a[4].tolist()) == list(range(9))
    assert a[2].min() >= 0
    assert a[2].max() < 9
    assert a[3].unique().tolist() == [0, 1]
    assert a[1].dtype is torch.float32


def test_checkpoints():
    module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 5))
    f = lambda x: checkpoint(module, x, use_reentrant=False).sum()
    x = torch.rand(3, 5, requires_grad=True)
    torch.manual_seed(0)
    y = jit(f)(x)
    assert torch.autograd.grad(y, x)[0].isfinite().all()
    module.eval()
    same(torch.autograd.grad(jit(f)(x), x), torch.autograd.grad(f(x), x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    module, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)), torch.rand(5, 8)
    fast = jit(module)
    with torch.autocast("cpu", dtype):
        made, expected = fast(x), module(x)
    assert made.dtype is expected.dtype is dtype
    torch.testing.assert_close(made, expected, rtol=0.05, atol=0.05)
    assert fast(x).dtype is torch.float32


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "tanh", "relu"])
@torch._dynamo.config.patch(allow_rnn=True)
def test_recurrent_layers_under_autocast(kind, narrow):
    module = (
        getattr(nn, kind)(4, 5, 2) if kind in ("LSTM", "GRU") else nn.RNN(4, 5, 2, nonlinearity=kind)
    )  # fmt: skip
    x = torch.rand(6, 3, 4).to(torch.bfloat16 if narrow else torch.float32).requires_grad_()
    fast = jit(module)
    if kind == "LSTM" and not narrow and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("eager Torch has no LSTM in bfloat16 on this processor")
    with torch.autocast("cpu"):
        made, expected = (torch.utils._pytree.tree_leaves(f(x)) for f in (fast, module))
    for ours, eager in zip(made, expected, strict=True):
        assert ours.dtype is eager.dtype
        torch.testing.assert_close(ours, eager, rtol=0.05, atol=0.05)
    ((got,), (want,)) = (torch.autograd.grad(out[0].float().sum(), x) for out in (made, expected))
    assert got.dtype is want.dtype
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)


def test_transformations_of_functions():
    f = lambda x: (x.sin() * x).sum()
    x = torch.rand(4, 3)
    same(jit(torch.func.grad(f))(x), torch.func.grad(f)(x))
    same(jit(torch.func.vmap(f))(x), torch.func.vmap(f)(x))
    same(
        jit(torch.func.jacrev(lambda x: x.sin()))(x[0]), torch.func.jacrev(lambda x: x.sin())(x[0])
    )


def test_an_exported_module():
    module, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.rand(2, 4)
    exported = torch.export.export(module, (x,)).module()
    same(jit(exported)(x), module(x))


def test_shapes_that_change():
    f = lambda x: x.softmax(-1) @ x.t() / x.shape[0]
    fast = jit(f)
    for rows, columns in [(3, 4), (5, 4), (5, 7), (1, 7), (8, 2), (3, 4), (0, 3)]:
        x = torch.rand(rows, columns)
        same(fast(x), f(x))
    x = torch.rand(6, 5, requires_grad=True)
    same(torch.autograd.grad(fast(x).sum(), x), torch.autograd.grad(f(x).sum(), x))


def test_numbers_of_shapes_that_change_are_python_s():
    """Scales of a resize are floats of sizes, which are symbols from the second shape on."""

    def half(x):
        return torch.nn.functional.interpolate(
            x, scale_factor=0.5, mode="bilinear", align_corners=False
        )

    f = pbkern.polyblocks_jit_torch(half)
    for shape in ((1, 2, 12, 8), (1, 2, 64, 30), (1, 2, 7, 48)):
        x = torch.rand(shape)
        torch.testing.assert_close(f(x), half(x))
        assert not any(g.in_torch for g in f.explain(x).graphs)


def test_more_shapes_than_torch_recompiles_for():
    f = lambda x: x * 2 + 1
    fast = jit(f)
    for n in range(2, 20):
        same(fast(torch.ones(n)), torch.full((n,), 3.0))
    assert all(not g.in_torch for g in fast.explain(torch.ones(3)).graphs)


def test_numbers_and_flags():
    def f(x, by, add=0, flip=False):
        y = x * by + add
        return y.flip(0) if flip else y

    fast, x = jit(f), torch.rand(5)
    for by, add, flip in [
        (2, 0, False),
        (2.5, 1, False),
        (3, 1, True),
        (-0.5, 2, True),
        (1e30, 0, False),
    ]:
        same(fast(x, by, add=add, flip=flip), f(x, by, add, flip))


def test_graph_breaks():
    def f(x):
        y = x.sin() + 1
        if y.sum() > 0:
            return y * 2
        return y - 1

    fast, x = jit(f), torch.rand(4)
    same(fast(x), f(x))
    same(fast(x - 100), f(x - 100))
    assert len({g.number for g in fast.explain(x).graphs}) >= 2


def test_what_the_table_lacks_runs_in_torch():
    def f(x):
        y = torch.linalg.qr(x * 2 + 1)[1]
        return (y.abs() + 1).sum(0)

    fast, x = jit(f), torch.rand(4, 4)
    same(fast(x), f(x))
    text = str(fast.explain(x))
    assert "Torch: aten::linalg_qr at" in text
    assert "test_meaning.py" in text
    assert "kernel" in text
    x.requires_grad_()
    same(torch.autograd.grad(fast(x).sum(), x), torch.autograd.grad(f(x).sum(), x))


def test_shapes_that_depend_on_data():
    f = lambda x, counts: torch.repeat_interleave(x + 1, counts, dim=0) * 2
    x = torch.rand(3, 2)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fast = jit(f)
        for counts in (torch.tensor([1, 0, 3]), torch.tensor([2, 2, 2])):
            same(fast(x, counts), f(x, counts))
        assert "aten::repeat_interleave" in str(fast.explain(x, counts))


def test_arguments_that_a_rule_refuses_run_in_torch():
    f = lambda x, mask, values: (x + 1).index_put((mask,), values) * 2
    x, mask = torch.rand(5, 3), torch.tensor([True, False, True, True, False])
    values = torch.rand(3, 3)
    fast = jit(f)
    same(fast(x, mask, values), f(x, mask, values))
    assert "aten::index_put" in str(fast.explain(x, mask, values))
    assert "one value" in str(fast.explain(x, mask, values))


def test_several_threads():
    module = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))
    fast, wrong = jit(module), []

    def work(k):
        x = torch.rand(k + 1, 6)
        for _ in range(5):
            y = fast(x)
            y.sum().backward()
            if not torch.allclose(y, module(x), atol=1e-5):
                wrong.append(k)

    for k in range(3):  # Torch itself cannot trace a gradient while another thread runs one
        work(k)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))  # raises what a thread raised
    assert not wrong


def test_gradient_modes():
    module, x = nn.Linear(3, 2), torch.rand(4, 3)
    fast = jit(module)
    with torch.inference_mode():
        y = fast(x)
        same(y, module(x))
        assert y.is_inference()
    with torch.no_grad():
        assert not fast(x).requires_grad
    assert fast(x).requires_grad
    module.weight.requires_grad_(False)
    fast(x).sum().backward()
    assert module.weight.grad is None
    assert module.bias.grad is not None


@pytest.mark.parametrize("size", [7, 8, 9])
def test_pools_whose_last_window_is_cut(size):
    f = lambda x: (F.max_pool2d(x, 3, 2, 1, ceil_mode=True), F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
                   F.avg_pool2d(x, 2, 3, ceil_mode=True, count_include_pad=False))  # fmt: skip
    x = torch.rand(1, 2, size, 8, requires_grad=True)
    made, expected = jit(f)(x), f(x)
    same(made, expected)
    for m, e in zip(made, expected):
        weights = torch.rand_like(e)
        same(
            torch.autograd.grad((m * weights).sum(), x, retain_graph=True),
            torch.autograd.grad((e * weights).sum(), x),
        )


WINDOWS = [
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 2},
    {"kernel_size": 2, "dilation": 2},
]


@pytest.mark.parametrize("config", WINDOWS, ids=str)
def test_ties_and_nan_in_a_max_pool(config):
    x = torch.randint(0, 3, (2, 2, 9, 8)).float()
    x[0, 0, 3, 3] = float("nan")
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    f = lambda x: F.max_pool2d(x, **config)
    ya, yb = jit(f)(a), f(b)
    weights = torch.rand_like(yb)
    (ya * weights).sum().backward()
    (yb * weights).sum().backward()
    same(ya, yb)
    same(a.grad, b.grad)


def test_a_result_without_tensors():
    fast = jit(lambda x: (x.shape[0], "a", None))
    assert fast(torch.rand(3)) == (3, "a", None)


def test_hooks_and_parameters_that_are_shared():
    linear = nn.Linear(4, 4)
    module, seen = nn.Sequential(linear, nn.Tanh(), linear), []
    x = torch.rand(2, 4, requires_grad=True)
    y = jit(module)(x)
    x.register_hook(lambda g: seen.append(g.clone()))
    y.sum().backward()
    made = linear.weight.grad.clone()
    linear.weight.grad = None
    a = x.detach().clone().requires_grad_()
    module(a).sum().backward()
    same([made, seen[0]], [linear.weight.grad, a.grad])


@pytest.mark.parametrize(("offset", "dims"), [(0, (0, 1)), (2, (0, 2)), (-1, (2, 1))])
def test_diagonals_are_written(offset, dims):
    x, values = torch.rand(4, 3, 5), torch.diagonal(torch.rand(4, 3, 5), offset, *dims)
    check_table(lambda x, v: torch.diagonal_scatter(x, v, offset, *dims), x, values.contiguous())
