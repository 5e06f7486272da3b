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


class Step(torch.nn.Module):
    """A model and the loss to be made smaller."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args):
        result = self.model(*args)
        return result[1] if isinstance(result, tuple) else (result - 0.5).pow(2).mean()


@pytest.mark.parametrize("name, compiled_step", [("bags", True), pytest.param("gpt", True, marks=pytest.mark.slow)])
def test_twenty_steps_of_adamw(name, compiled_step):
    module, args = MODELS[name]
    losses = []
    for fast in (False, True):
        torch.manual_seed(0)
        model = Step(copy.deepcopy(module))
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        loss_of = pbkern.polyblocks_jit_torch(model) if fast else model
        step = pbkern.polyblocks_jit_torch(optimiser.step) if fast and compiled_step else optimiser.step
        losses.append([])
        for _ in range(20):
            optimiser.zero_grad()
            loss = loss_of(*args)
            loss.backward()
            step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
