"""Small models, forward and backward: one graph each way, nothing left to Torch, as exact as eager Torch; steps of AdamW."""

import copy

import pytest

torch = pytest.importorskip("torch")

import pbkern  # noqa: E402

from .comparing import check_gradients  # noqa: E402
from .models import models  # noqa: E402

MODELS = models()


@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward_graphs(name):
    module, args = MODELS[name]
    module = copy.deepcopy(module)
    fast = pbkern.polyblocks_jit_torch(copy.deepcopy(module))
    check_gradients(fast, module, *args)
    graphs = fast.explain(*[a.requires_grad_() if a.is_floating_point() else a for a in args]).graphs
    assert [(g.number, g.kind, g.in_torch) for g in graphs] == [(0, "forward", ()), (0, "backward", ())]


@pytest.mark.parametrize("name", ["resnet", "gpt"])
def test_inference_has_one_graph(name):
    module, args = MODELS[name]
    module = copy.deepcopy(module).eval()
    fast = pbkern.polyblocks_jit_torch(module, compile_options={"strict_target": name != "gpt"})
    with torch.no_grad():
        torch.testing.assert_close(fast(*args), module(*args), rtol=1e-4, atol=1e-5)
    assert [(g.kind, g.in_torch) for g in fast.explain(*args).graphs][0] == ("inference", ())
