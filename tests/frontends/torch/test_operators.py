"""Operators by the table beside eager Torch, many in one compiled function: places, reductions, views, pools, products."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

import pbkern  # noqa: E402
from pbkern.frontends.torch.capture import NotCompiled, capture  # noqa: E402
from pbkern.frontends.torch.decompositions import decompositions  # noqa: E402

from .comparing import by_graph, by_table, check_close, graph_of, tensor_of  # noqa: E402

aten = torch.ops.aten


def check_all(cases, *tensors):
    """Each case has eager Torch's results, types and shapes: `cases` gives them by name for tensors."""
    expected = {n: pytree.tree_leaves(r) for n, r in cases(*tensors).items()}
    made = iter(
        by_table(lambda *t: pytree.tree_leaves(list(cases(*t).values())), *tensors, compiled=True)
    )
    wrong = []
    for name, results in expected.items():
        for e in results:
            m = tensor_of(next(made))
            try:
                assert (m.dtype, m.shape) == (e.dtype, e.shape), (
                    m.dtype,
                    e.dtype,
                    m.shape,
                    e.shape,
                )
                check_close(m, e)
            except AssertionError as error:
                wrong.append((name, str(error)))
    assert not wrong, "\n".join(map(str, wrong))
    assert next(made, None) is None


def refused(f, *tensors) -> str:
    with pytest.raises(NotCompiled) as error:
        capture(graph_of(f, *tensors), tensors)
    return str(error.value)


def test_elements_at_computed_places():
    def cases(x, i, j, rows, mask, n):
        zero = x[0, 0]
        return {
            "index": x[i],
            "index of two": x[i, j],
            "index of the last": x[:, j],
            "put": x.index_put((i,), rows),
            "put added": x.index_put(
                (torch.cat([i, i]),), torch.cat([rows, rows]), accumulate=True
            ),
            "put where": x.index_put((mask,), torch.tensor(7.0)),
            "added where": x.index_put((mask,), torch.tensor(7.0), accumulate=True),
            "rows put where": x.index_put((mask[:, 0],), torch.tensor(-7.0)),
            "booleans added": mask.index_put((i,), mask[:3], accumulate=True),
            "gather": (x.gather(0, n[:2, :3]), x.gather(-1, n)),
            "gather of one": (zero.gather(0, n[0, :3] * 0), x.gather(0, n[:0])),
            "select": (x.index_select(0, i), x.index_select(1, j), zero.index_select(0, i[:1] * 0)),
            "add": (
                x.index_add(0, i, rows, alpha=2),
                x.index_add(-1, n[0], x[:, 0:1] * x, alpha=0.5),
            ),
            "add to one": (
                zero.index_add(0, i[:1] * 0, zero),
                n[0, 0].index_add(0, i[:1] * 0, n[1, 2], alpha=3),
            ),
            "copy": (
                x.index_copy(0, i, rows),
                x.index_copy(1, j[:2], x[:, :2] * 2),
                zero.index_copy(0, i[:1] * 0, rows[0, 0]),
            ),
            "bucketize": (
                torch.bucketize(x, x[0].abs().cumsum(0)),
                torch.bucketize(n, n[0].abs().cumsum(0), right=True),
            ),
            "searchsorted": (
                torch.searchsorted(x[0].abs().cumsum(0), x, out_int32=True),
                torch.searchsorted(n[0].cumsum(0), n, side="right"),
            ),
        }

    x, rows = torch.randn(5, 4), torch.randn(3, 4)
    n = torch.tensor([[3, 0, 1, 2], [0, 0, 3, 1], [2, 2, 2, 2], [1, 3, 0, 0], [3, 3, 1, 0]])
    check_all(cases, x, torch.tensor([4, 0, 2]), torch.tensor([1, 3, 0]), rows, x > 0.3, n)


def test_scattered_elements():
    modes = ("sum", "prod", "mean", "amax", "amin")

    def cases(x, at, values, whole, flags):
        return {
            "set": (x.scatter(0, at[:1], values), x.scatter(1, at[:, :1], 2.5)),
            "reduced": (torch.scatter(x, 0, at, 0.5, reduce="add"), x.scatter(1, at, 3.0, reduce="multiply")),
            "scatter_add": (x.scatter_add(1, at, values), flags.long().scatter_add(0, at, at)),
            "nothing": (x.scatter(0, at[:0], values), x.scatter_add(1, at[:, :0], values)),
            "one": x[0, 0].scatter_add(0, at[0, :1] * 0, values[0, :1]),
            "booleans": flags.scatter_reduce(0, at, flags[:3, :3], "sum"),
        } | {
            f"{mode}, {own}": (x.scatter_reduce(1, at, values, mode, include_self=own),
                               whole.scatter_reduce(0, at, at + 2, mode, include_self=own))
            for mode in modes for own in (True, False)
        }  # fmt: skip

    at = torch.tensor([[2, 0, 2], [1, 1, 0], [3, 3, 3]])
    x, values = torch.randn(4, 5), torch.randn(3, 4)
    check_all(cases, x, at, values, torch.randint(-9, 9, (4, 5)), x > 0)


def test_embeddings_and_their_gradients():
    def bag(weight, index, offsets, by=None, **how):
        return F.embedding_bag(index, weight, offsets, per_sample_weights=by, **how)

    def cases(weight, index, offsets, by, g):
        back = lambda **how: torch.func.grad(lambda w: (bag(w, index, offsets, **how) * g).sum())(
            weight
        )
        rows = g[:2, None, :] * weight[index[:6]].view(2, 3, -1)
        return {
            "embedding": F.embedding(index.view(2, -1), weight),
            "padding": aten.embedding_dense_backward(
                rows, index[:6].view(2, 3), len(weight), 2, False
            ),
            "scaled": aten.embedding_dense_backward(
                rows, index[:6].view(2, 3), len(weight), -1, True
            ),
            "sums": (bag(weight, index, offsets, mode="sum"), back(mode="sum")),
            "means": (bag(weight, index, offsets, mode="mean"), back(mode="mean")),
            "without padding": (
                bag(weight, index, offsets, mode="mean", padding_idx=2),
                back(mode="mean", padding_idx=2),
            ),
            "weighted": (bag(weight, index, offsets, by, mode="sum"), back(mode="sum", by=by)),
            "last offset": bag(
                weight,
                index,
                torch.cat([offsets, offsets[-1:] + 2]),
                mode="sum",
                include_last_offset=True,
            ),
        }

    index, offsets = torch.tensor([3, 2, 2, 0, 5, 2, 1, 3]), torch.tensor([0, 3, 3, 6])
    weight = torch.randn(6, 5)
    check_all(cases, weight, index, offsets, torch.rand(8), torch.randn(4, 5))
    assert "max" in refused(lambda w, i, o: bag(w, i, o, mode="max"), weight, index, offsets)
    assert "several sequences" in refused(torch.searchsorted, weight.sort().values, weight)


def test_reductions_along_dimensions():
    inf = float("inf")

    def cases(x, n, one, flags):
        return {
            "sums": (
                x.sum(),
                x.sum((0, -1)),
                n.sum(1, keepdim=True),
                flags.sum(),
                x.sum(1, dtype=torch.float64),
                one.sum(0),
            ),
            "means": (x.mean(), x.mean((0, 2), keepdim=True), n.mean(1, dtype=torch.float64)),
            "products": (x.prod(), x.prod(1), n.prod(2), one.prod(0)),
            "extremes": (
                x.amax((0, 1)),
                x.amin(2, keepdim=True),
                x.max(),
                n.min(),
                x.max(1),
                n.min(-1, keepdim=True),
            ),
            "of two": (torch.max(x, x.flip(0)), torch.min(n, n.flip(1))),
            "of one": (
                one.max(0),
                one.min(-1),
                one.argmax(0),
                one.argmin(),
                one.median(0),
                one.sort(0),
                one.topk(1),
            ),
            "places": (x.argmax(), x.argmin(1), n.argmax(0, keepdim=True), n.argmin()),
            "truth": (flags.any(), flags.all(1), n.any(2), x.all(0)),
            "logsumexp": (x.logsumexp(1), x.logsumexp((0, 2), keepdim=True), n.logsumexp(0)),
            "variances": (
                x.var(),
                x.var(1, correction=0),
                x.std((0, 1)),
                torch.var_mean(x, 2, keepdim=True),
            ),
            "norms": [torch.linalg.vector_norm(x, p, 1) for p in (2, 1, 3.5, 0, inf, -inf)],
            "cumulative": (
                x.cumsum(1),
                n.cumsum(-1),
                x.cumprod(0),
                one.cumsum(0),
                x.logcumsumexp(2),
                one.logcumsumexp(0),
            ),
            "sorts": (x.sort(1), x.sort(-1, descending=True), torch.sort(n, dim=0, stable=True)),
            "greatest": (x.topk(2, 1), x.topk(3, -1, largest=False)),
            "medians": (x.median(), x.median(1), n[:, 0].median(), x.median(-1, keepdim=True)),
        }

    x = torch.randn(4, 3, 6)
    check_all(cases, x, torch.randint(-9, 9, (4, 3, 6)), torch.tensor(2.5), x > -1)
    assert "real" in refused(lambda x: x.logcumsumexp(0), torch.randn(3, dtype=torch.complex64))


def test_elements_that_move():
    def cases(x, n, v, g):
        return {
            "repeats": (x.repeat(2, 1, 3, 1), x.repeat_interleave(2, 1), x.repeat_interleave(3)),
            "parts": (x.split(3, 1), torch.split(x, [1, 4, 1], -1), x.unbind(1), x.tensor_split(2)),
            "slices": (aten.slice_backward(g, [4, 5, 9], 2, 1, 8, 1), aten.select_backward(g[0], [3, 5, 7], 0, 1)),
            "constant pads": (F.pad(x, (1, 2), value=3.5), F.pad(n, (-1, 2, 0, -2), value=-1)),
            "other pads": [F.pad(g, (2, 1, 1, 2), mode) for mode in ("reflect", "replicate")] + [
                F.pad(g, (-1, 2), "reflect")],
            "rolls": (x.roll(2), x.roll((1, -2), (0, 2)), n.roll(-1, 1)),
            "triangles": (g.tril(), g.triu(1), g.tril(-1), x[0].tril(2)),
            "windows": (x.unfold(1, 2, 2), x.unfold(-1, 3, 1), v[0].unfold(0, 1, 1)),
            "strides": (x.clone().as_strided((3, 2, 3), (1, 6, 2), 4), x.as_strided((2, 5, 6), (30, 6, 1))),
            "strides written": x.as_strided_scatter(v[:6].view(2, 3), (2, 3), (7, 2), 5),
        }  # fmt: skip

    x, g = torch.randn(2, 5, 6), torch.randn(4, 5, 7)
    check_all(cases, x, torch.randint(-9, 9, (2, 5, 6)), torch.randn(8), g)


def test_windows_of_planes():
    def cases(x, y, w, u):
        grad = lambda f, *args: torch.func.grad(lambda a: f(a).square().sum())(*args)
        return {
            "means": (F.avg_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 2, divisor_override=3), F.avg_pool2d(x[0], (2, 3))),
            "maxima": F.max_pool2d(x, 3, 2, 1, return_indices=True),
            "equal maxima": F.max_pool2d(x.round(), 3, 1, return_indices=True),
            "parts": [F.adaptive_avg_pool2d(x, size) for size in ((1, 1), (1, 3), (3, 4), (4, 5), (7, 8))] + [
                F.adaptive_avg_pool2d(x[0], (5, 2))],
            "gradients of parts": grad(lambda a: F.adaptive_avg_pool2d(a, (4, 4)), x),
            "nearest": (F.interpolate(x, (5, 17)), F.interpolate(x, scale_factor=1.7), F.interpolate(y, 11)),
            "convolution": (F.conv2d(x[0], w), F.conv2d(x, w[:, :1], groups=3, padding=1, dilation=2)),
            "convolution back": F.conv_transpose2d(x, w.transpose(0, 1), None, (2, 3), (1, 0), (1, 2)),
            "groups back": F.conv_transpose1d(y, u, groups=3, stride=2, dilation=2),
        }  # fmt: skip

    x, w = torch.randn(2, 3, 7, 8), torch.randn(6, 3, 3, 2)
    check_all(cases, x, torch.randn(2, 3, 6), w, torch.randn(3, 2, 3))


def test_the_gradient_of_a_max_pool_in_torch():
    """The operator that compiled backward graphs have runs in Torch too, where a graph is left to it."""
    decompositions()  # defines it
    x, config = torch.randn(2, 3, 7, 8, requires_grad=True), ([3, 2], [2, 2], [1, 0], [1, 1], True)
    y = F.max_pool2d(x, *config)
    g = torch.randn_like(y)
    made = torch.ops.pbkern.max_pool2d_backward(g, x.detach(), *config)
    torch.testing.assert_close(made, torch.autograd.grad(y, x, g)[0])


def test_products_numbers_and_complex_numbers():
    def cases(x, y, n, z):
        return {
            "sums of products": (
                torch.addmm(x[0], x, y, beta=0, alpha=2),
                torch.addbmm(y[:, :2], x[None] * 2, y[None, :, :2]),
            ),
            "dots": (torch.vdot(z[0], z[1]), torch.dot(x[0], y[:, 0]), torch.mv(x, y[:, 0])),
            "parts": (
                torch.view_as_real(z),
                torch.view_as_complex(torch.view_as_real(z) * 2),
                torch.complex(x, x[0]),
            ),
            "polar": torch.polar(x.abs(), x),
            "isin": (torch.isin(n, n[0]), torch.isin(n, n[1], invert=True)),
            "prims": (torch.ops.prims.div(n, n.new_tensor(-4)), torch.ops.prims.div(x, x + 9)),
            "made": (
                torch.linspace(-1, 2, 7),
                torch.eye(3, 4) * x[0, 0],
                torch.arange(2, 11, 3) + n[0, 0],
                torch.ops.prims.iota(
                    5, start=3, step=-2, dtype=torch.int64, device="cpu", requires_grad=False
                ),
            ),
            "constants": x[0] * torch.tensor([1.5, -2, 0.25, 3], dtype=torch.bfloat16),
        }

    x, y = torch.randn(4, 4), torch.randn(4, 4)
    n = torch.tensor([[1, -1, 7, -9], [3, 1, -1, 2]])
    check_all(cases, x, y, n, torch.randn(2, 3, dtype=torch.complex64))


def test_operators_that_torch_itself_takes_apart():
    """They have rules, for graphs that nobody decomposed, as torch.export makes them."""

    class Module(torch.nn.Module):
        def forward(self, x, y):
            return (torch.outer(x[0], y[1]), F.linear(x, y), F.linear(x, y, y[:, 0]), x.repeat_interleave(2, 1),
                    torch.max(x, y), torch.min(x, y), F.interpolate(x[None, None], scale_factor=(1.5, 2.0)))  # fmt: skip

    tensors = torch.randn(4, 4), torch.randn(4, 4)
    graph = torch.export.export(Module(), tensors).graph_module
    for m, e in zip(by_graph(graph, *tensors, compiled=True), Module()(*tensors), strict=True):
        check_close(tensor_of(m), e)


def test_distributions():
    def drawn(x):
        filled = x.clone().uniform_(2, 5), x.clone().exponential_(4.0), x.clone().normal_(-3, 0.5)
        return *filled, *aten.native_dropout(x, 0.5, False)

    x = torch.zeros(4000)
    uniform, exponential, normal, kept, mask = map(tensor_of, by_table(drawn, x, seed=3))
    assert 2 <= uniform.min() < 2.01
    assert 4.99 < uniform.max() < 5
    assert abs(uniform.mean() - 3.5) < 0.06
    assert exponential.min() >= 0
    assert abs(exponential.mean() - 0.25) < 0.02
    assert abs(exponential.std() - 0.25) < 0.03
    assert abs(normal.mean() + 3) < 0.04
    assert abs(normal.std() - 0.5) < 0.03
    assert torch.equal(kept, x)
    assert mask.dtype is torch.bool
    assert mask.all()
    again, *_ = map(tensor_of, by_table(drawn, x, seed=4))
    assert not torch.equal(again, uniform)


def test_plain_recurrent_layers():
    """Where all of what goes to the second layer is dropped, its states depend on its biases alone."""
    module = torch.nn.RNN(3, 4, num_layers=2, nonlinearity="relu", dropout=1.0)
    fast, x = pbkern.polyblocks_jit_torch(module), torch.randn(5, 2, 3)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), module(x))


def test_attention_with_dropout_of_its_own_is_left_to_torch():
    q = torch.randn(1, 2, 4, 8)
    attend = lambda q: aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.5)[0]
    assert "dropout_p is 0.5" in refused(attend, q)
