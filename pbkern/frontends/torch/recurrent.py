"""nn.LSTM, nn.GRU and nn.RNN: one loop per layer and direction, where Torch's own decompositions write out every step.

TorchDynamo captures a call of torch.lstm and the like, where torch._dynamo.config.allow_rnn is set.
`in_loops` replaces it by the functions here: products with the whole input, and an operator of our
own for the loop over time, with a gradient. The table has both as lax.scan (aten/loops.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

STATE = "Tensor gates, Tensor hidden, Tensor cell, Tensor weight, Tensor bias, bool reverse"
FORWARD = f"recur(str kind, {STATE}) -> (Tensor, Tensor, Tensor)"
BACKWARD = f"recur_backward(str kind, Tensor gy, Tensor gh, Tensor gc, {STATE}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
Tensor = torch.Tensor


def step(
    kind: str, tensor: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """(hidden, cell) after one step; tensor: what the input contributes to the gates.

    Gates lie in Torch's order.
    """
    recurrent = F.linear(hidden, weight, bias)
    if kind == "gru":
        (r, z, n), (own_r, own_z, own_n) = tensor.chunk(3, -1), recurrent.chunk(3, -1)
        z, n = torch.sigmoid(z + own_z), torch.tanh(n + torch.sigmoid(r + own_r) * own_n)
        return n + z * (hidden - n), cell
    if kind == "lstm":
        i, f, g, o = (tensor + recurrent).chunk(4, -1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(cell), cell
    return (torch.tanh if kind == "tanh" else torch.relu)(tensor + recurrent), cell


def _in_torch(
    kind: str,
    gates: Tensor,
    hidden: Tensor,
    cell: Tensor,
    weight: Tensor,
    bias: Tensor,
    reverse: bool,
):
    """The operator where it runs in Torch: gates [time, batch, gates], h and c [batch, size] -> (h of all steps, h, c)."""
    outputs: list[Any] = [None] * len(gates)
    hidden, cell = hidden.clone(), cell.clone()
    for time in range(len(gates))[:: -1 if reverse else 1]:
        hidden, cell = step(kind, gates[time], hidden, cell, weight, bias)
        outputs[time] = hidden
    return (
        (torch.stack(outputs) if outputs else gates.new_empty(0, *hidden.shape)),
        hidden.clone(),
        cell.clone(),
    )


def _backward_in_torch(kind: str, gy: Tensor, gh: Tensor, gc: Tensor, *state: Any):
    with torch.enable_grad():
        tensors = gates, hidden, cell, weight, bias = [
            x.detach().requires_grad_() for x in state[:-1]
        ]
        outputs = _in_torch(kind, gates, hidden, cell, weight, bias, state[-1])
    gradients = torch.autograd.grad(outputs, tensors, (gy, gh, gc), allow_unused=True)
    return tuple(
        torch.zeros_like(tensor) if gradient is None else gradient
        for gradient, tensor in zip(gradients, tensors)
    )


@functools.cache
def operators() -> tuple[Any, Any]:
    """(the loop, its gradient), defined once."""
    library = torch.library.Library("pbkern", "FRAGMENT")
    _kept.append(library)
    library.define(FORWARD)
    library.define(BACKWARD)
    library.impl("recur", _in_torch, "CPU")
    library.impl("recur_backward", _backward_in_torch, "CPU")

    def fake(kind: str, gates: Tensor, tensor: Tensor, cell: Tensor, *_: Any):
        return (
            gates.new_empty(gates.shape[0], *tensor.shape),
            torch.empty_like(tensor),
            torch.empty_like(cell),
        )

    def fake_backward(kind: str, gy: Tensor, gh: Tensor, gc: Tensor, *state: Any):
        return tuple(torch.empty_like(x) for x in state[:-1])

    torch.library.register_fake("pbkern::recur", fake, lib=library)
    torch.library.register_fake("pbkern::recur_backward", fake_backward, lib=library)
    backward = torch.ops.pbkern.recur_backward.default

    def keep(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.kind, *tensors, ctx.reverse = inputs
        ctx.save_for_backward(*tensors)

    def gradient(ctx: Any, *given: Tensor):
        return None, *backward(ctx.kind, *given, *ctx.saved_tensors, ctx.reverse), None

    torch.library.register_autograd("pbkern::recur", gradient, setup_context=keep, lib=library)
    return torch.ops.pbkern.recur.default, backward


_kept: list[Any] = []  # a library's operators go with it


def _layers(
    kind: str,
    x: Tensor,
    hidden: Tensor,
    cell: Tensor,
    weights: Sequence[Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    both: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """All layers and directions: x [time, batch, features], hidden and cell [layers * directions, batch, size]."""
    if torch.is_autocast_enabled("cpu"):
        config = biases, layers, dropout, train, both, batch_first
        return _layers_in_autocast(kind, x, hidden, cell, weights, *config)
    loop, _ = operators()
    x = x.transpose(0, 1) if batch_first else x
    directions, per = 2 if both else 1, 4 if biases else 2
    last = []
    for layer in range(layers):
        outputs = []
        for axis in range(directions):
            index = layer * directions + axis
            wide, weight, *bias = weights[index * per : (index + 1) * per]
            gates = F.linear(x, wide, bias[0] if biases else None)
            y, *state = loop(
                kind,
                gates,
                hidden[index],
                cell[index],
                weight,
                bias[1] if biases else weight.new_zeros(len(weight)),
                axis == 1,
            )
            outputs.append(y)
            last.append(state)
        x = torch.cat(outputs, -1) if both else outputs[0]
        if dropout and train and layer + 1 < layers:
            x = F.dropout(x, dropout)
    hidden, cell = map(torch.stack, zip(*last))
    return x.transpose(0, 1) if batch_first else x, hidden, cell


def _layers_in_autocast(
    kind: str, x: Tensor, hidden: Tensor, cell: Tensor, weights: Sequence[Tensor], *config: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Layers in the types of Torch's: LSTMs and plain ones in autocast's, while a GRU's products meet a state in its own."""
    dtype = torch.get_autocast_dtype("cpu")
    if kind == "gru":
        dtype = torch.promote_types(dtype, hidden.dtype)
    with torch.autocast("cpu", enabled=False):
        cast = lambda tensor: tensor if tensor.dtype == torch.float64 else tensor.to(dtype)
        return _layers(kind, cast(x), cast(hidden), cast(cell), list(map(cast, weights)), *config)


def lstm(
    tensor: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor], *config: Any
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, cell = state
    return _layers("lstm", tensor, hidden, cell, weights, *config)


def gru(
    tensor: Tensor, hidden: Tensor, weights: Sequence[Tensor], *config: Any
) -> tuple[Tensor, Tensor]:
    return _layers("gru", tensor, hidden, hidden, weights, *config)[:2]


def rnn_tanh(
    tensor: Tensor, hidden: Tensor, weights: Sequence[Tensor], *config: Any
) -> tuple[Tensor, Tensor]:
    return _layers("tanh", tensor, hidden, hidden, weights, *config)[:2]


def rnn_relu(
    tensor: Tensor, hidden: Tensor, weights: Sequence[Tensor], *config: Any
) -> tuple[Tensor, Tensor]:
    return _layers("relu", tensor, hidden, hidden, weights, *config)[:2]


REPLACED: dict[Any, Callable] = {
    torch.lstm: lstm,
    torch.gru: gru,
    torch.rnn_tanh: rnn_tanh,
    torch.rnn_relu: rnn_relu,
}


def in_loops(module: torch.fx.GraphModule) -> None:
    """Replaces recurrent layers of a graph of TorchDynamo's.

    Packed sequences, and LSTMs with projections, stay as they are.
    """
    has_loops = False
    for node in module.graph.nodes:
        if (
            node.op == "call_function"
            and node.target in REPLACED
            and not node.kwargs
            and len(node.args) == 9
        ):
            _, state, weights, biases, layers, _, _, both, _ = node.args
            padded = isinstance(state, list | tuple) == (node.target is torch.lstm) and isinstance(
                weights, list | tuple
            )
            if padded and len(weights) == layers * (2 if both else 1) * (4 if biases else 2):
                node.target, has_loops = REPLACED[node.target], True
    if has_loops:
        module.recompile()
