"""Small models, forward and backward: one graph each way, nothing left to Torch, as exact as eager Torch; steps of AdamW."""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import pbkern  # noqa: E402
from pbkern.frontends.torch import recurrent  # noqa: E402

from .comparing import check_gradients  # noqa: E402
from .models import Recurrent, models  # noqa: E402

MODELS = models()


DEFAULT = ("resnet", "convnext", "bags")


def some(names, default):
    """Parameters of which some are slow tests."""
    return [n if n in default else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", some(MODELS, DEFAULT))
def test_forward_and_backward_graphs(name):
    module, args = MODELS[name]
    module = copy.deepcopy(module)
    fast = pbkern.polyblocks_jit_torch(copy.deepcopy(module))
    check_gradients(fast, module, *args)
    graphs = fast.explain(
        *[a.requires_grad_() if a.is_floating_point() else a for a in args]
    ).graphs
    assert [(g.number, g.kind, g.in_torch) for g in graphs] == [
        (0, "forward", ()),
        (0, "backward", ()),
    ]


@pytest.mark.parametrize("name", some(["resnet", "gpt"], ["resnet"]))
def test_inference_has_one_graph(name):
    module, args = MODELS[name]
    module = copy.deepcopy(module).eval()
    fast = pbkern.polyblocks_jit_torch(module, compile_options={"strict_target": name != "gpt"})
    with torch.no_grad():
        torch.testing.assert_close(fast(*args), module(*args), rtol=1e-4, atol=1e-5)
    assert next((g.kind, g.in_torch) for g in fast.explain(*args).graphs) == ("inference", ())


LAYERS = {
    "lstm": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "lstm without biases": (nn.LSTM, {"bias": False}),
    "gru": (nn.GRU, {"bidirectional": True}),
    "relu": (nn.RNN, {"nonlinearity": "relu", "num_layers": 2, "batch_first": True}),
    "tanh": (nn.RNN, {}),
}


@pytest.mark.parametrize("name", some(LAYERS, ["lstm without biases", "gru"]))
def test_recurrent_layers_are_loops(name):
    kind, config = LAYERS[name]
    module, x = Recurrent(kind, **config), torch.rand(3, 4, 5)
    fast = pbkern.polyblocks_jit_torch(module)
    check_gradients(fast, module, x)
    graphs = fast.explain(x.requires_grad_()).graphs
    assert [(g.kind, g.in_torch) for g in graphs] == [("forward", ()), ("backward", ())]
    loops = [e for e in graphs[0].compiled[0].jaxpr.jaxpr.eqns if e.primitive.name == "scan"]
    assert len(loops) == config.get("num_layers", 1) * (1 + config.get("bidirectional", False))


@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers_that_run_in_torch(name):
    """The operators of our own have the same numbers in Torch, where a graph is not compiled as a whole."""
    kind, config = LAYERS[name]
    module, x = Recurrent(kind, **config), torch.rand(3, 4, 5)
    recurrent.operators()
    double, wide = copy.deepcopy(module).double(), x.double()
    functions = {nn.LSTM: recurrent.lstm, nn.GRU: recurrent.gru}
    f = functions.get(kind, recurrent.rnn_relu if name == "relu" else recurrent.rnn_tanh)
    layer, weights = double.layers, list(double.layers.parameters())
    sides = layer.num_layers * (2 if layer.bidirectional else 1)
    h = torch.rand(sides, 3 if layer.batch_first else 4, 7, dtype=torch.float64)
    state = (h, h + 1) if kind is nn.LSTM else h
    made = f(
        wide,
        state,
        weights,
        layer.bias,
        layer.num_layers,
        0.0,
        True,
        layer.bidirectional,
        layer.batch_first,
    )
    y, last = layer(wide, state)
    expected = [y, *(last if isinstance(last, tuple) else [last])]
    torch.testing.assert_close(list(made), expected)
    ours = torch.autograd.grad(sum(t.sin().sum() for t in made), weights)
    torch.testing.assert_close(
        ours, torch.autograd.grad(sum(t.sin().sum() for t in expected), weights)
    )


class Step(torch.nn.Module):
    """A model and the loss to be made smaller."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args):
        result = self.model(*args)
        return result[1] if isinstance(result, tuple) else (result - 0.5).pow(2).mean()


@pytest.mark.parametrize(
    ("name", "compiled_step"), [("bags", True), pytest.param("gpt", True, marks=pytest.mark.slow)]
)
def test_twenty_steps_of_adamw(name, compiled_step):
    module, args = MODELS[name]
    losses = []
    for fast in (False, True):
        torch.manual_seed(0)
        model = Step(copy.deepcopy(module))
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        loss_of = pbkern.polyblocks_jit_torch(model) if fast else model
        step = (
            pbkern.polyblocks_jit_torch(optimiser.step)
            if fast and compiled_step
            else optimiser.step
        )
        losses.append([])
        for _ in range(20):
            optimiser.zero_grad()
            loss = loss_of(*args)
            loss.backward()
            step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
