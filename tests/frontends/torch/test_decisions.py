"""Decisions of the forward graph, such as which element is the largest, are those that gradients go by."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from pbkern.frontends.torch import graphs  # noqa: E402


def convolved(x, w, b):
    return F.conv2d(x, w, b, padding=1, groups=2)


FUNCTIONS = {
    "largest of normalised rows": lambda *a: F.layer_norm(convolved(*a), (8,)).amax((0, 1)),
    "smallest of normalised rows": lambda *a: F.layer_norm(convolved(*a), (8,)).amin((1, 2)),
    "range": lambda *a: (y := F.layer_norm(convolved(*a), (8,)), y.amax(1) - y.amin(1))[1],
    "largest of all": lambda *a: F.layer_norm(convolved(*a), (6, 8)).max(),
    "scaled by the largest": lambda *a: (y := F.layer_norm(convolved(*a), (8,)), y / y.amax(1, keepdim=True))[1],
    "chosen": lambda *a: (y := F.layer_norm(convolved(*a), (8,)), torch.where(y == y.amax(0), y * 3, y))[1],
    "rounded": lambda *a: (y := F.silu(convolved(*a)) * 2, (y - y.floor()) * y)[1],
}  # fmt: skip


def operands():
    torch.manual_seed(0)
    return torch.randn(2, 6, 5, 7), torch.randn(4, 3, 2, 2), torch.randn(4)


def gradients(f, tensors):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    f(*leaves).sum().backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_follow_the_decisions_of_the_forward_graph(name):
    f, tensors = FUNCTIONS[name], operands()
    torch._dynamo.reset()
    got = gradients(torch.compile(f, backend="pbkern"), tensors)
    wanted = gradients(f, [tensor.double() for tensor in tensors])
    for one, other in zip(got, wanted):
        largest = float(other.abs().max())
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-4 * max(largest, 1))


def kept(monkeypatch, f, tensors):
    """Types of what the forward graph keeps for the backward one, beside its operands and results."""
    types, partition = [], graphs.partition

    def recorded(*args, **options):
        forward, backward = partition(*args, **options)
        results = forward.graph.output_node().args[0]
        own = results[: options["num_fwd_outputs"]]
        types.extend(
            node.meta["val"].dtype
            for node in results[options["num_fwd_outputs"] :]
            if node.op != "placeholder" and node not in own
        )
        return forward, backward

    monkeypatch.setattr(graphs, "partition", recorded)
    torch._dynamo.reset()
    gradients(torch.compile(f, backend="pbkern"), tensors)
    return sorted(types, key=str)


def test_the_comparison_is_kept(monkeypatch):
    f = FUNCTIONS["largest of normalised rows"]
    assert kept(monkeypatch, f, operands()) == [torch.bool, torch.float32]


def test_comparisons_with_fixed_numbers_and_with_kept_values_are_made_again(monkeypatch):
    f = lambda *a: F.relu(convolved(*a) * 2 + 1) ** 2
    assert kept(monkeypatch, f, operands()) == [torch.float32]
    f = lambda *a: (y := convolved(*a), y * y * y.amax((0, 1)))[1]
    assert torch.bool not in kept(monkeypatch, f, operands())
