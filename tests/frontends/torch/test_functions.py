"""Functions, methods and modules of PyTorch, forward and backward, beside eager Torch in float64."""

import copy
import pickle
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

import pbkern  # noqa: E402
from pbkern.api import torch_functions  # noqa: E402

from .comparing import check_gradients  # noqa: E402

BLUR = [0.0625, 0.25, 0.375, 0.25, 0.0625]


def blur(img):
    kernel = torch.tensor(BLUR, device=img.device).float()
    x = img.view(3, 1, *img.shape[1:])
    x = F.conv2d(x, kernel.view(1, 1, 1, 5))
    return F.conv2d(x, kernel.view(1, 1, 5, 1)).view(3, img.shape[1] - 4, img.shape[2] - 4)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(17, 33), nn.GELU(), nn.Linear(33, 5))


def test_a_blur_is_one_kernel():
    img = torch.rand(3, 45, 67)
    fast = pbkern.polyblocks_jit_torch(compile_options={"target": "cpu"})(blur)
    torch.testing.assert_close(fast(img), blur(img), rtol=1e-6, atol=1e-6)
    (graph,) = fast.explain(img).graphs
    assert (
        graph.number,
        graph.kind,
        len(graph.kernels()),
        graph.left_to_xla(),
        graph.in_torch,
    ) == (0, "inference", 1, [], ())


def test_a_module_has_one_forward_and_one_backward_graph():
    module, x = mlp(), torch.rand(7, 17)
    fast = pbkern.polyblocks_jit_torch(module)
    check_gradients(fast, module, x)
    found = fast.explain(x.requires_grad_()).graphs
    assert [(g.number, g.kind, g.in_torch) for g in found] == [
        (0, "forward", ()),
        (0, "backward", ()),
    ]
    assert next(iter(fast.parameters())) is module[0].weight
    assert isinstance(fast, nn.Module)


def test_parameters_are_inputs():
    module, x = mlp(), torch.rand(7, 17)
    fast = pbkern.polyblocks_jit_torch(module)
    fast(x)
    with torch.no_grad():
        module[0].weight.mul_(2)
    torch.testing.assert_close(fast(x), module(x))


def test_torch_compile_has_the_backend():
    """The entry point that torch.compile(backend="pbkern") looks up is this function."""
    project = Path(pbkern.__file__).parents[1] / "pyproject.toml"
    points = tomllib.loads(project.read_text())["project"]["entry-points"]["torch_dynamo_backends"]
    assert points == {"pbkern": "pbkern.api.torch_functions:compile_fx"}
    module, x = mlp(), torch.rand(7, 17)
    fast = torch.compile(
        module, backend=torch_functions.compile_fx, options={"strict_target": True}
    )
    check_gradients(fast, module, x)


def test_torch_compile_finds_the_backend_by_name():
    if "pbkern" not in torch._dynamo.list_backends(()):
        pytest.skip("pbkern is not installed with its entry points")
    fast = torch.compile(blur, backend="pbkern")
    img = torch.rand(3, 21, 34)
    torch.testing.assert_close(fast(img), blur(img), rtol=1e-6, atol=1e-6)


def test_a_method_is_bound():
    class Scaled:
        def __init__(self, by):
            self.by = by

        @pbkern.polyblocks_jit_torch
        def of(self, x):
            """Scales."""
            return x * self.by

    x = torch.rand(4, 3)
    torch.testing.assert_close(Scaled(3.0).of(x), x * 3)
    torch.testing.assert_close(Scaled(4.0).of(x), x * 4)
    assert "1 kernel(s)" in str(Scaled(5.0).of.explain(x))
    assert Scaled.of.__doc__ == "Scales."


def test_a_module_and_its_copy_are_independent():
    module = mlp()
    fast = pbkern.polyblocks_jit_torch(copy.deepcopy(module))
    with torch.no_grad():
        next(fast.parameters()).zero_()
    assert module[0].weight.abs().sum() > 0


@pbkern.polyblocks_jit_torch
def doubled(x):
    return x * 2


def test_decorated_functions_and_modules_are_copied_and_pickled():
    assert pickle.loads(pickle.dumps(doubled)) is doubled
    assert copy.deepcopy(doubled) is doubled
    x = torch.rand(3, 17)
    remade = pickle.loads(pickle.dumps(pbkern.polyblocks_jit_torch(F.relu)))
    torch.testing.assert_close(remade(x - 0.5), F.relu(x - 0.5))
    module = pbkern.polyblocks_jit_torch(mlp())
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(other(x), module(x))
        assert other.explain(x).graphs
        assert next(other.parameters()) is not next(module.parameters())


def test_options_act():
    f = lambda x: (x.exp() + 1).sum(1)
    x = torch.rand(5, 7)
    plain, apart = (
        pbkern.polyblocks_jit_torch(f, compile_options=o)
        for o in ({}, {"polyblocks_disable_affine_fusion": True})
    )
    torch.testing.assert_close(plain(x), apart(x))
    count = lambda fast: len(fast.explain(x).graphs[0].kernels())
    assert count(plain) == 1 < count(apart)
    halves = pbkern.polyblocks_jit_torch(
        lambda a, b: a @ b, compile_options={"mm_conv_precision_mode": "fp16"}
    )
    a = torch.rand(9, 9) + 1 / 3
    exact = (a.half().double() @ a.half().double()).half().float()
    torch.testing.assert_close(halves(a, a), exact, rtol=1e-3, atol=0)
    assert not torch.allclose(halves(a, a), a @ a, rtol=1e-5)


def test_modes_of_a_decorated_module():
    fast = pbkern.polyblocks_jit_torch(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    x = torch.rand(3, 4)
    assert fast.eval() is fast
    torch.testing.assert_close(fast(x), F.linear(x, *fast.parameters()))
    zeros = (fast.train()(torch.rand(100, 4)) == 0).double().mean()
    assert 0.3 < zeros < 0.7
    assert {k.removeprefix("_orig_mod.") for k in fast.state_dict()} == {"0.weight", "0.bias"}


def test_backward_again_with_the_graph_retained():
    x = torch.randn(5, 7, requires_grad=True)
    y = pbkern.polyblocks_jit_torch(lambda x: (x.exp() * x).softmax(-1))(x)
    first, second = (torch.autograd.grad(y[0, 0], x, retain_graph=True)[0] for _ in range(2))
    expected = torch.autograd.grad((x.exp() * x).softmax(-1)[0, 0], x)[0]
    torch.testing.assert_close(first, expected)
    assert torch.equal(first, second)


def test_many_modules_of_a_class():
    """Each has TorchDynamo's limit of graphs for itself: beyond it, functions run in Torch without a word."""
    x = torch.rand(3)
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        fast = pbkern.polyblocks_jit_torch(nn.Sigmoid())
        with torch.no_grad():
            torch.testing.assert_close(fast(x), x.sigmoid())
        assert len(fast.explain(x).graphs) == 2  # with gradients enabled, and without


@pytest.mark.parametrize("of_module", [False, True])
def test_threads_that_call_first_share_what_is_compiled(of_module):
    """One compilation per kind of arguments; TorchDynamo would make one per thread, and give up after eight."""
    threads = 12
    f = (
        torch.nn.Sequential(torch.nn.Softplus(), torch.nn.Tanh())
        if of_module
        else lambda x: torch.tanh(x * 3).sum(-1)
    )
    fast, barrier = pbkern.polyblocks_jit_torch(f), threading.Barrier(threads)
    graphs = fast.__dict__["graphs"]

    def call(number):
        barrier.wait()
        for size in (7, 9, 12):
            x = torch.rand(3, size)
            torch.testing.assert_close(fast(x), f(x))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(call, range(threads)))
    assert len(graphs) == 2  # of one size, and of any


HALF = lambda t: t[: t.shape[0] // 2]
VIEWS = {
    "step": lambda t: HALF(t)[::2],
    "bounds": lambda t: (t[: t.shape[0] - 1 : 2], t.narrow(0, 0, t.shape[0] - 2)[::2]),
    "expand": lambda t: HALF(t).expand(2, -1),
    "column": lambda t: t.view(-1, 2)[:, 0],
    "diagonal": lambda t: t.view(2, -1)[:, : t.shape[0] // 4].diagonal(),
    "conjugate": lambda t: HALF(t * (1 + 2j)).conj(),
    "parts": lambda t: (torch.complex(t, t + 1).chunk(2)[0].real, torch.view_as_real(t * 1j)[:, 1]),
    "of a result": lambda t: (t * 2, (t * 2)[: t.shape[0] // 2][::2]),
    "turned": lambda t: (t.view(2, -1).T, t.view(2, 1, -1).unbind(0), t.view(1, -1).squeeze(0)),
    "written before": lambda t: (t.add_(1), HALF(t)[::2])[1],
    "bits": lambda t: (t + 1).view(torch.int16),
    "bits of parts": lambda t: ((t + 1).view(torch.int32) + 1, (t.to(torch.uint8) > 3).view(torch.uint8)),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", VIEWS)
def test_views_have_torchs_strides_at_every_size(name, dynamic):
    f = VIEWS[name]
    torch._dynamo.reset()
    for g in (
        torch.compile(f, backend="pbkern", dynamic=dynamic),
        pbkern.polyblocks_jit_torch(f),
    ):
        for size in (8, 12, 20):
            x, y = torch.arange(float(size)), torch.arange(float(size))
            got, want = (pytree.tree_leaves(h(given)) for h, given in ((g, x), (f, y)))
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b), (size, a, b)
                if b.untyped_storage().data_ptr() == y.untyped_storage().data_ptr():
                    assert a.stride() == b.stride()
                    assert a.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_views_share_memory_with_their_argument():
    g = torch.compile(
        lambda t: (t[1:].view(-1, 1).expand(-1, 3), t + 1), backend="pbkern", dynamic=True
    )
    for size in (5, 9):
        x = torch.arange(float(size))
        view, _ = g(x)
        x[2] = 100
        assert view[1].tolist() == [100.0] * 3


def test_a_diagonal_of_one_product_beside_another():
    """The gradient chooses between indices by a condition that is known."""

    def f(x, w):
        return torch.outer(x[0], w[:, 0]).diagonal(), torch.mm(x, w)

    args = [torch.rand(4, 2).requires_grad_(), torch.rand(2, 3).requires_grad_()]
    check_gradients(pbkern.polyblocks_jit_torch(f), f, *args)


def turned_and_scaled(x):
    y = x * 2
    z = y.t()
    z.mul_(3)
    return y, z


@pytest.mark.parametrize("f", [
    turned_and_scaled,
    lambda x: (lambda y: (y.narrow(0, 0, 1), y.unsqueeze(0).squeeze(0)))(x * 3),
    lambda x: torch.tanh(x).split(1),
    lambda x: (torch.exp(x)[None].expand(1000, -1, -1),),
    lambda x: (x.t() * 1).reshape(-1).chunk(2),
])  # fmt: skip
def test_views_of_one_value_share_memory(f):
    x = torch.rand(3, 3)
    with torch.no_grad():
        results, expected = torch.compile(f, backend="pbkern")(x), f(x)
    assert len({r.untyped_storage().data_ptr() for r in results}) == 1
    for got, want in zip(results, expected, strict=True):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()
        assert got.storage_offset() == want.storage_offset()


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_masks_whose_gradient_has_parts_in_torch():
    f = lambda x: x[x > 0].sin()
    for x in (torch.tensor([[1.0, -1], [2, 3]]), torch.randn(3, 4)):
        given = [x.clone().requires_grad_() for _ in range(2)]
        got, want = (
            torch.autograd.grad(g(y).sum(), y)
            for g, y in zip((torch.compile(f, backend="pbkern"), f), given)
        )
        torch.testing.assert_close(got, want)
