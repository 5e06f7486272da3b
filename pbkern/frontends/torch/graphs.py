"""TorchDynamo's graphs -> functions of tensors: AOTAutograd's forward and backward graphs, and what runs in Torch between parts.

How a captured jaxpr becomes a function of tensors is the caller's (api/torch_functions.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from .capture import Captured, Place, capture, described, is_supported, unsupported
from .decompositions import decompositions
from .dtypes import check_tensor

# jaxpr, name -> function of tensors that lie one element after the other, to a list of them.
Compile = Callable[[Captured, str], Callable[[list[torch.Tensor]], list[torch.Tensor]]]


@dataclass
class Graph:
    """One captured graph, in order of capture.

    Attributes:
      number: 0, 1, ... as select_graphs and filter_graphs count; forward and backward of one graph share it.
      kind: "forward", "backward" or "inference".
      in_torch: operators that the table lacks, with lines; ("all of it",) for a graph that was not chosen.
      compiled: what its parts were compiled to.
    """

    number: int
    kind: str
    in_torch: tuple[str, ...] = ()
    compiled: list[Any] = field(default_factory=list)


class _Supported(OperatorSupportBase):
    def is_node_supported(self, submodules: Any, node: torch.fx.Node) -> bool:
        return node.op == "call_function" and is_supported(node)


def runner(module: torch.fx.GraphModule, name: str, compile_jaxpr: Compile, graph: Graph) -> Callable:
    """A function of a list of arguments that runs a graph whose operators the table has. It compiles when it is called with new
    types."""
    made: dict[tuple, tuple[Captured, Callable]] = {}

    def run(arguments: Sequence[Any]) -> list[Any]:
        key = tuple((a.shape, a.dtype) if isinstance(a, torch.Tensor) else a for a in arguments)
        found = made.get(key)
        if found is None:
            captured = capture(module, arguments)
            found = made[key] = captured, compile_jaxpr(captured, name)
            graph.compiled.append(found[1])
        captured, call = found
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        if captured.draws:
            tensors.append(torch.randint(0, 2**62, (), dtype=torch.int64))
        results = call(tensors)
        return [results[r.number] if isinstance(r, Place) else r for r in captured.results]

    return run


def compiled_graph(module: torch.fx.GraphModule, name: str, compile_jaxpr: Compile, graph: Graph, strict: bool) -> Callable:
    """A boxed function of a graph; what the table lacks runs in Torch, between compiled parts. Raises UnsupportedOp if strict."""
    missing = unsupported(module.graph)
    graph.in_torch = tuple(dict.fromkeys(map(described, missing)))
    if not missing or strict:
        if missing:
            capture(module, [])  # raises the error that names all of them
        return _boxed(runner(module, name, compile_jaxpr, graph))
    partitioner = CapabilityBasedPartitioner(module, _Supported(), allows_single_node_partition=True)
    parts = partitioner.fuse_partitions(partitioner.propose_partitions())
    for child, part in parts.named_children():
        if child.startswith("fused_"):
            run = runner(part, f"{name}_{child.removeprefix('fused_')}", compile_jaxpr, graph)
            part.forward = _unpacked(run, part)
    return make_boxed_func(parts.forward)


def _unpacked(run: Callable, part: torch.fx.GraphModule) -> Callable:
    output = next(n for n in part.graph.nodes if n.op == "output").args[0]
    several = isinstance(output, list | tuple)

    def forward(*arguments: Any) -> Any:
        results = run(arguments)
        return tuple(results) if several else results[0]

    return forward


def _boxed(run: Callable) -> Callable:
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def backend(compile_jaxpr: Compile, choose: Callable[[int], bool], graphs: list[Graph], strict: bool) -> Callable:
    """A backend for torch.compile. `choose`: number of a graph -> whether it is compiled; `graphs`: what was captured."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def compile_graph(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        number = 1 + max((g.number for g in graphs), default=-1)
        if not choose(number):
            graphs.append(Graph(number, "inference", ("all of it: the graph was not chosen",)))
            return module.forward
        for k, t in enumerate(inputs):
            if isinstance(t, torch.Tensor):
                check_tensor(t, f"input {k} of graph {number}")

        def compiler(kind: str) -> Callable:
            def compile_one(part: torch.fx.GraphModule, _: Sequence[Any]) -> Callable:
                graphs.append(Graph(number, kind))
                return compiled_graph(part, f"graph{number}_{kind}", compile_jaxpr, graphs[-1], strict)

            return compile_one

        with sdpa_kernel(SDPBackend.MATH):
            return aot_autograd(
                fw_compiler=compiler("forward"), bw_compiler=compiler("backward"), inference_compiler=compiler("inference"),
                decompositions=decompositions(),
            )(module, inputs)  # fmt: skip

    return compile_graph
