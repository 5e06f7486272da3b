"""TorchDynamo's graphs -> functions of tensors: AOTAutograd's forward and backward ones, and parts that run in Torch.

How a captured jaxpr becomes a function of tensors is the caller's (api/torch_calls.py).
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import field
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from pbkern.core.errors import FallbackWarning, UnsupportedOp
from pbkern.core.lazy_dataclass import dataclass

from . import recurrent, shapes, updates
from .capture import (
    CPU,
    CapturedGraph,
    GraphArgument,
    NotCompiled,
    ResultPlace,
    ResultView,
    capture,
    described,
    is_supported,
    unsupported,
)
from .decompositions import decompositions
from .dtypes import check_tensor, is_sparse
from .partition import partition

# jaxpr, name, device -> what it was compiled to, whose `run` is a function of tensors to a list of new ones.
Compile = Callable[[CapturedGraph, str, torch.device], Any]
# Seeds are drawn below this number: each is a nonnegative int64.
SEED_LIMIT = 2**62


@dataclass
class Graph:
    """One captured graph, in order of capture.

    Attributes:
      number: 0, 1, ... as select_graphs and filter_graphs count; forward and backward of one graph
        share it.
      kind: "forward", "backward" or "inference".
      device: of its tensors.
      in_torch: operators that are not compiled, with lines; one entry for a graph that was not
        chosen.
      compiled: what its parts were compiled to.
      rounds: whether each operator rounds its 16-bit results. checked: whether indices and divisors
        are checked.
    """

    number: int
    kind: str
    device: torch.device = CPU
    in_torch: tuple[str, ...] = ()
    compiled: list[Any] = field(default_factory=list)
    rounds: bool = False
    checked: bool = True

    def kernels(self) -> list[Any]:
        """Kernels of the compiled parts; a part is compiled when it is first called."""
        return [kernel for part in self.compiled for kernel in part.plan().kernels()]

    def left_to_xla(self) -> list[Any]:
        return [x for part in self.compiled for x in part.plan().left_to_xla()]


@dataclass(frozen=True)
class Compilation:
    """The things that all parts of a captured graph are compiled with.

    Attributes:
      name: of the programs that it becomes.
      compile: makes them.
      graph: notes what was compiled, and what runs in Torch.
      strict: whether operators that the table lacks are errors.
    """

    name: str
    compile: Compile
    graph: Graph
    strict: bool


class Runner:
    """A graph whose operators the table has, as a function of a list of arguments.

    It compiles for new shapes and numbers. Unless strict, operators that the table lacks for some of these run in Torch then.
    updated: numbers of arguments whose new elements its last results are (updates.py).
    """

    def __init__(
        self,
        module: torch.fx.GraphModule,
        compilation: Compilation,
        updated: tuple[int, ...] = (),
    ):
        self.module, self.compilation, self.updated = module, compilation, updated
        self.symbolic = shapes.is_symbolic(module)
        self.captured: CapturedGraph | None = None  # of the only shapes, before the first call
        self._made: dict[tuple, Callable[[Sequence[Any]], list[Any]]] = {}
        self._only: Callable[[Sequence[Any]], list[Any]] | None = None
        self._lock = threading.RLock()

    def capture(self, arguments: Sequence[Any]) -> CapturedGraph:
        """Captures the graph for arguments like these, which may be fake. Raises NotCompiled."""
        graph = self.compilation.graph
        return capture(
            self.module,
            arguments,
            checked=graph.checked,
            rounds=graph.rounds,
            shared=graph.kind == "inference",
            updated=self.updated,
        )

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        if self._only is not None:
            return self._only(arguments)
        key = tuple(map(_kind, arguments)) if self.symbolic else ()
        compiled = self._made.get(key)
        return (compiled or self._compiled(key, arguments))(arguments)

    def _compiled(
        self, key: tuple, arguments: Sequence[Any]
    ) -> Callable[[Sequence[Any]], list[Any]]:
        with self._lock:
            if key in self._made:
                return self._made[key]
            try:
                captured = self.captured or self.capture(arguments)
            except NotCompiled:
                module = shapes.concrete(self.module, arguments)
                if self.compilation.strict or not self.symbolic or shapes.is_symbolic(module):
                    raise
                in_parts = _compiled_graph(module, arguments, self.compilation, self.updated)
                several = _returns_several(module)
                run = lambda arguments: [*in_parts(arguments)] if several else [in_parts(arguments)]
                self._made[key] = run
                return run
            self.captured = None
            graph = self.compilation.graph
            compiled = self.compilation.compile(captured, self.compilation.name, graph.device)
            graph.compiled.append(compiled)
            linked = self._made[key] = _linked(captured, compiled.run, arguments, graph.device)
            self._only = None if self.symbolic else linked
            return linked


def _kind(operand: Any) -> Any:
    return (
        (operand.shape, operand.stride(), operand.dtype, operand.is_conj(), operand.is_neg())
        if isinstance(operand, torch.Tensor)
        else operand
    )


def _linked(
    captured: CapturedGraph, call: Callable, arguments: Sequence[Any], device: torch.device
) -> Callable[[Sequence[Any]], list[Any]]:
    """The function of a graph's arguments that `call` is of its tensors."""
    tensors = [k for k, argument in enumerate(arguments) if isinstance(argument, torch.Tensor)]
    everything = len(tensors) == len(arguments) and not captured.draws and not any(captured.orders)
    if everything and captured.results == tuple(map(ResultPlace, range(len(captured.results)))):
        return call

    def run(arguments: Sequence[Any]) -> list[Any]:
        given = [
            arguments[tensor] if order is None else arguments[tensor].permute(order)
            for tensor, order in zip(tensors, captured.orders)
        ]
        if captured.draws:
            given.append(torch.randint(0, SEED_LIMIT, (), dtype=torch.int64, device=device))
        outputs = call(given)
        return [_result(result, outputs, arguments) for result in captured.results]

    return run


def _result(result: Any, outputs: list[torch.Tensor], arguments: Sequence[Any]) -> Any:
    if isinstance(result, ResultPlace):
        tensor = (
            outputs[result.number]
            if result.shape is None
            else outputs[result.number].view(result.shape)
        )
        return tensor if result.permuted is None else tensor.permute(result.permuted)
    if isinstance(result, ResultView):
        tensor = _result(result.source, outputs, arguments)
        for step in result.steps:
            tensor = step(tensor)
        return tensor
    return arguments[result.number] if isinstance(result, GraphArgument) else result


class _Supported(OperatorSupportBase):
    def __init__(self, refused: Collection[str], device: torch.device):
        self.refused, self.device = refused, device

    def is_node_supported(self, submodules: Any, node: torch.fx.Node) -> bool:
        return (
            node.op == "call_function"
            and is_supported(node, self.device)
            and node.name not in self.refused
        )


def compiled_graph(
    module: torch.fx.GraphModule, examples: Sequence[Any], compilation: Compilation
) -> Callable:
    """A boxed function of a graph; operators that the table lacks run in Torch, between compiled parts.

    If strict, it raises UnsupportedOp.
    """
    module, updated = updates.apart(module)
    run = _compiled_graph(module, examples, compilation, updated)
    return _boxed(updates.stored(run, updated)) if updated else run


def _compiled_graph(
    module: torch.fx.GraphModule,
    examples: Sequence[Any],
    compilation: Compilation,
    updated: tuple[int, ...],
) -> Callable:
    graph, strict = compilation.graph, compilation.strict
    missing = unsupported(module.graph, graph.device)
    if missing and strict:
        raise _all_of(missing)
    if not missing:
        whole = Runner(module, compilation, updated)
        try:
            if not whole.symbolic:
                whole.captured = whole.capture(examples)
            return _boxed(whole)
        except NotCompiled:
            if strict:
                raise
    refused: dict[str, str] = {}  # name of a node -> why it is not compiled
    while True:
        parts, failed = _in_parts(module, compilation, refused)
        if failed is None:
            break
        assert failed.node is not None, failed
        assert failed.node.name not in refused, failed
        refused[failed.node.name] = f": {failed.why}"
    supported = _Supported(refused, graph.device)
    in_torch = [
        node
        for node in module.graph.nodes
        if node.op == "call_function" and not supported.is_node_supported({}, node)
    ]
    lines = [described(node) + refused.get(node.name, "") for node in in_torch]
    graph.in_torch = tuple(dict.fromkeys((*graph.in_torch, *lines)))
    return make_boxed_func(parts.forward)


def _in_parts(module: torch.fx.GraphModule, compilation: Compilation, refused: Collection[str]):
    """(the graph as compiled parts and operators of Torch, the error of a node that has to be one of the latter)."""
    copied = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
    partitioner = CapabilityBasedPartitioner(
        copied, _Supported(refused, compilation.graph.device), allows_single_node_partition=True
    )
    parts = partitioner.fuse_partitions(partitioner.propose_partitions())
    compiled = [
        (child, part) for child, part in parts.named_children() if child.startswith("fused_")
    ]
    for child, part in compiled:
        assert isinstance(part, torch.fx.GraphModule)
        name = f"{compilation.name}_{child.removeprefix('fused_')}"
        run = Runner(part, dataclasses.replace(compilation, name=name))
        examples = [node.meta.get("val") for node in part.graph.nodes if node.op == "placeholder"]
        try:
            if not run.symbolic:
                run.captured = run.capture(examples)
        except NotCompiled as e:
            return parts, e
        part.forward = _unpacked(run, part)  # type: ignore[method-assign]
    return parts, None


def _all_of(missing: Sequence[torch.fx.Node]) -> UnsupportedOp:
    listed = list(dict.fromkeys(map(described, missing)))
    return UnsupportedOp(
        f"{len(listed)} operator(s) are not compiled",
        why=", ".join(listed),
        hint="without strict_target they run in Torch",
    )


def _returns_several(module: torch.fx.GraphModule) -> bool:
    """Whether a graph returns a list, and not one value."""
    output = next(node for node in module.graph.nodes if node.op == "output").args[0]
    return isinstance(output, list | tuple)


def _unpacked(run: Callable, part: torch.fx.GraphModule) -> Callable:
    several = _returns_several(part)

    def forward(*arguments: Any) -> Any:
        results = run(arguments)
        return tuple(results) if several else results[0]

    return forward


def _boxed(run: Any) -> Callable:
    run._boxed_call = True
    return run


def backend(
    compile_jaxpr: Compile,
    choose: Callable[[int], bool],
    graphs: list[Graph],
    strict: bool,
    place: str = "cpu",
    rounds: bool = False,
    checked: bool = True,
) -> Callable:
    """A backend for torch.compile.

    choose: number of a graph -> whether it is compiled. graphs: what was captured. place: "cpu" or "cuda", where tensors are.
    rounds: whether each operator rounds its 16-bit results. checked: whether indices and divisors are checked.
    """

    def compile_graph(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        number = 1 + max((graph.number for graph in graphs), default=-1)
        if not choose(number):
            graphs.append(
                Graph(number, "inference", in_torch=("all of it: the graph was not chosen",))
            )
            return module.forward
        tensors = [
            (k, operand) for k, operand in enumerate(inputs) if isinstance(operand, torch.Tensor)
        ]
        sparse = next(((k, operand.layout) for k, operand in tensors if is_sparse(operand)), None)
        if sparse is not None and not strict:
            why = f"input {sparse[0]} is {sparse[1]}, and kernels read dense arrays"
            warnings.warn(f"graph {number} runs in Torch: {why}", FallbackWarning, stacklevel=2)
            graphs.append(Graph(number, "inference", in_torch=(f"all of it: {why}",)))
            return module.forward
        for k, tensor in tensors:
            check_tensor(tensor, f"input {k} of graph {number}", place)
        device = _device(inputs, number, place)
        recurrent.in_loops(module)

        def compiler(kind: str) -> Callable:
            def compile_one(part: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable:
                graphs.append(Graph(number, kind, device, rounds=rounds, checked=checked))
                compilation = Compilation(
                    f"graph{number}_{kind}", compile_jaxpr, graphs[-1], strict
                )
                return compiled_graph(part, examples, compilation)

            return compile_one

        # Where gradients are taken, AOTAutograd stores new elements of arguments itself.
        is_inference = not (torch.is_grad_enabled() and _has_gradients(module, inputs))
        return aot_autograd(
            keep_inference_input_mutations=is_inference,
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler("inference"),
            decompositions=decompositions(),
            partition_fn=partition,
        )(module, inputs)

    return compile_graph


def _has_gradients(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether one of a graph's tensors requires gradients."""
    tensors = (operand for operand in inputs if isinstance(operand, torch.Tensor))
    return any(tensor.requires_grad for tensor in itertools.chain(tensors, module.parameters()))


def _device(inputs: Sequence[Any], number: int, place: str) -> torch.device:
    """The one device of a graph's inputs. Raises UnsupportedOp."""
    devices = list(
        dict.fromkeys(operand.device for operand in inputs if isinstance(operand, torch.Tensor))
    )
    if len(devices) > 1:
        raise UnsupportedOp(
            f"graph {number} has inputs on several devices",
            why=", ".join(map(str, devices)),
            hint="x.to(device): a compiled graph works on one",
        )
    return devices[0] if devices else torch.device(place)
