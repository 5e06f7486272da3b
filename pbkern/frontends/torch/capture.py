"""Graph of ATen operators -> ClosedJaxpr, by the table of operators.

Types of results are Torch's, node by node. Numbers that the graph is called with become constants;
tensors are inputs, parameters among them. A graph that draws random numbers has one input more, the
seed. Results that are arguments stay those, and results that are views of arguments or of other results stay views: Torch makes
of their strides what the caller gets.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.extend import core as jex
from torch._subclasses.fake_tensor import unset_fake_temporarily

from pbkern.core.errors import UnsupportedOp
from pbkern.core.jaxprs.walks import atoms, leading_to
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.rounding import rounded
from pbkern.dsl.primitives import in_range

from . import aten, shapes
from .aten.randomness import NAMES as RANDOM
from .aten.table import Call, arguments_of, as_type, check_numbers, name_of
from .dtypes import NUMPY, numpy_dtype
from .layouts import Order, inverse, order_of

SHORT = (torch.float16, torch.bfloat16)
SEED = jax.ShapeDtypeStruct((), np.dtype(np.int64))


class NotCompiled(UnsupportedOp):
    """A node that the table has a rule for, but not with these arguments.

    Attributes:
      node: the node of the graph.
    """

    node: torch.fx.Node | None = None


@dataclass(frozen=True)
class ResultPlace:
    """A result of a graph that is one of its jaxpr's, by number.

    Attributes:
      permuted: the order of dimensions in which the result has them.
      shape: the result's, if it has dimensions of one element more.
    """

    number: int
    permuted: Order | None = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class GraphArgument:
    """A result of a graph that is one of its arguments, by number."""

    number: int


@dataclass(frozen=True)
class ResultView:
    """A result of a graph that is a view of an argument or of another result.

    Attributes:
      source: of which it is a view.
      steps: Torch's operators of views, each a function of the tensor before.
    """

    source: GraphArgument | ResultPlace
    steps: tuple[Callable[[Any], Any], ...]


@dataclass(frozen=True)
class CapturedGraph:
    """A graph as a jaxpr.

    Attributes:
      jaxpr: of the tensors among the graph's arguments, and the seed if it draws random numbers.
      results: per result of the graph a place, an argument, a view, or what else it is: None or a number.
      orders: per tensor among the arguments, the order of dimensions in which the jaxpr takes it.
      draws: whether it takes a seed.
      checks: the checks of ranges in the jaxpr, in order.
      donated: per tensor among the arguments, whether kernels may write its new elements, one of the first results, over it.
    """

    jaxpr: jex.ClosedJaxpr
    results: tuple[Any, ...]
    orders: tuple[Order | None, ...]
    draws: bool
    checks: tuple[in_range.Check, ...] = ()
    donated: tuple[bool, ...] = ()


CPU = torch.device("cpu")


def is_supported(node: torch.fx.Node, device: torch.device = CPU) -> bool:
    """Whether the table has a node's operator, and its tensors are on the device."""
    if node.op != "call_function":
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return _is_python(node.target)
    if not all(_has_kernels(value, device) for value in _values(node)) or shapes.depends_on_data(
        node
    ):
        return False
    return aten.rule_of(node.target) is not None or _is_number(node)


# Functions of numbers in graphs whose shapes are symbols, beside those of operator and math.
OF_NUMBERS = (
    min,
    max,
    torch.sym_max,
    torch.sym_min,
    torch.sym_float,
    torch.sym_int,
    torch.sym_not,
    torch.sym_ite,
    torch.sym_sum,
)


def _is_python(target: Any) -> bool:
    """Whether a function is one of Python's own, of numbers or lists."""
    return getattr(target, "__module__", "") in ("_operator", "math") or target in OF_NUMBERS


def _is_number(node: torch.fx.Node) -> bool:
    """Whether a node asks for a number of a shape, such as aten::sym_size."""
    return name_of(node.target) in (
        "aten::sym_size",
        "aten::sym_numel",
        "aten::sym_stride",
        "aten::sym_storage_offset",
    )


def _has_kernels(tensor: torch.Tensor, device: torch.device) -> bool:
    return (
        tensor.dtype in NUMPY
        and tensor.device == device
        and tensor.layout is torch.strided
        and not tensor.is_quantized
    )


def _values(node: torch.fx.Node) -> list[torch.Tensor]:
    """Tensors that a node makes and reads."""
    values = [source.meta.get("val") for source in (node, *node.all_input_nodes)]
    flat = [
        leaf for entry in values for leaf in (entry if isinstance(entry, list | tuple) else [entry])
    ]
    return [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]


def unsupported(graph: torch.fx.Graph, device: torch.device = CPU) -> list[torch.fx.Node]:
    """Nodes that the table lacks, or that work elsewhere."""
    return [node for node in graph.nodes if not is_supported(node, device)]


def described(node: torch.fx.Node) -> str:
    """An operator and the user's line."""
    lines = [
        frame.strip()
        for frame in (node.stack_trace or "").splitlines()
        if frame.strip().startswith("File ")
    ]
    at = ""
    if lines:
        file, line, *_ = lines[-1].removeprefix("File ").split(", ")
        at = f" at {file.strip(chr(34))}:{line.removeprefix('line ')}"
    return f"{name_of(node.target) or node.target}{at}"


def capture(
    module: torch.fx.GraphModule,
    arguments: Sequence[Any],
    strided: bool = True,
    checked: bool = True,
    rounds: bool = False,
    views: bool = True,
    shared: bool = False,
    updated: tuple[int, ...] = (),
) -> CapturedGraph:
    """The jaxpr of a graph called with arguments like these, which may be fake. Raises NotCompiled.

    strided: tensors come, and results go, in the orders of dimensions that Torch has in memory;
    else all are row-major. checked: whether indices and divisors are checked. rounds: whether each
    operator rounds its 16-bit results. views: whether results that are views of arguments or of other
    results stay views; else the jaxpr makes arrays of them. shared: whether those that are views of a
    value that is no result share its memory, too; AOTAutograd sees to that where gradients are taken. updated: numbers of
    arguments whose new elements the last results are (updates.py).
    """
    module = shapes.concrete(module, arguments)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    returned = _returned(module)
    results = dict.fromkeys(node for node in returned if isinstance(node, torch.fx.Node))
    written = [placeholders[number] for number in updated]
    unchanged = [node for node in placeholders if node not in written]
    computed = [node for node in results if node not in unchanged]
    in_place = _in_place(returned, placeholders, updated, strided)
    sources = _views([n for n in computed if n not in in_place], unchanged, shared) if views else {}
    viewed = (source for source, _ in sources.values() if source not in unchanged)
    stored = dict.fromkeys(
        [*in_place, *(node for node in computed if node not in sources), *viewed]
    )
    places: dict[torch.fx.Node, Any] = {}
    steps: dict[torch.fx.Node, tuple[Callable[[Any], Any], ...]] = {}
    checks: list[in_range.Check] = []
    draws = any(name_of(node.target) in RANDOM for node in module.graph.nodes)
    values = [
        placeholder.meta["val"]
        for placeholder, argument in zip(placeholders, arguments)
        if isinstance(argument, torch.Tensor)
    ]
    orders = tuple(order_of(value) if strided else None for value in values)

    def run(*arrays: Any) -> list:
        tensors = (
            array if order is None else jax.numpy.transpose(array, inverse(order))
            for array, order in zip(arrays, orders)
        )
        env = {
            placeholder: next(tensors) if isinstance(argument, torch.Tensor) else argument
            for placeholder, argument in zip(placeholders, arguments)
        }
        checks.clear()
        _Interpreter(
            module, arrays[-1] if draws else None, checks if checked else None, rounds
        ).fill(env)
        for node, (_, chain) in sources.items():
            steps[node] = tuple(_step(view, env) for view in chain)
        outputs, places_of_outputs = _outputs(env, stored, strided)
        places.update(places_of_outputs)
        return outputs

    types = [_in_memory(value, order) for value, order in zip(values, orders)]
    with jax.enable_x64(True):
        jaxpr = jax.make_jaxpr(run)(*types, *([SEED] if draws else []))
    apart = {node: place for node, place in places.items() if node not in in_place}
    jaxpr = _views_apart(jaxpr, apart) if strided else jaxpr
    places |= apart
    places |= {
        placeholder: GraphArgument(k)
        for k, placeholder in enumerate(placeholders)
        if placeholder not in written
    }
    places |= {
        node: ResultView(places[source], steps[node]) for node, (source, _) in sources.items()
    }
    return CapturedGraph(
        jaxpr,
        tuple(places[node] if isinstance(node, torch.fx.Node) else node for node in returned),
        orders,
        draws,
        tuple(checks),
        _donated(
            jaxpr,
            [placeholders[k] for k, x in enumerate(arguments) if isinstance(x, torch.Tensor)],
            in_place,
            checks,
        ),
    )


def _in_place(
    returned: Sequence[Any],
    placeholders: Sequence[torch.fx.Node],
    updated: Sequence[int],
    strided: bool,
) -> dict[torch.fx.Node, torch.fx.Node]:
    """New elements, which may take the place of the old ones -> the argument, in the order of arguments.

    They have the type of the argument, and lie in memory as its elements do. No other result is them, or a view of them.
    """
    results = returned[: len(returned) - len(updated)]
    viewed = {source for result in results for source in _sources(result)}
    pairs = {}
    for number, node in sorted(zip(updated, returned[len(results) :]), key=lambda pair: pair[0]):
        argument = placeholders[number]
        is_alone = returned.count(node) == 1 and node not in viewed and argument not in returned
        is_computed = isinstance(node, torch.fx.Node) and node.op == "call_function"
        if is_alone and is_computed and _lie_alike(argument, node, strided):
            pairs[node] = argument
    return pairs


def _sources(result: Any) -> Iterator[torch.fx.Node]:
    """The values of which a result is a view, one of the other."""
    while isinstance(result, torch.fx.Node) and _is_view(result):
        result = result.args[0]
        yield result  # type: ignore[misc]


def _lie_alike(old: torch.fx.Node, new: torch.fx.Node, strided: bool) -> bool:
    x, y = old.meta["val"], new.meta.get("val")
    if not isinstance(y, torch.Tensor) or (x.dtype, x.shape) != (y.dtype, y.shape):
        return False
    return not strided or order_of(x) == order_of(y)


def _donated(
    jaxpr: jex.ClosedJaxpr,
    tensors: Sequence[torch.fx.Node],
    in_place: Mapping[torch.fx.Node, torch.fx.Node],
    checks: Sequence[in_range.Check],
) -> tuple[bool, ...]:
    """Per tensor, whether it may be overwritten.

    Ranges are checked after a call, of operands as they were. Donated operands meet results in their order, so that operands of
    one type are donated all or none.
    """
    eqns = jaxpr.jaxpr.eqns
    checked: set[Any] = set()
    if checks:
        asked = [
            atom for eqn in eqns if eqn.primitive is in_range.in_range_p for atom in atoms(eqn)
        ]
        checked = {*asked, *(atom for eqn in leading_to(eqns, asked) for atom in atoms(eqn))}
    overwritten = {
        node: (_type(var).shape, _type(var).dtype)
        for node, var in zip(tensors, jaxpr.jaxpr.invars)
        if node in in_place.values()
    }
    refused = {
        overwritten.get(node) for node, var in zip(tensors, jaxpr.jaxpr.invars) if var in checked
    }
    return tuple(node in overwritten and overwritten[node] not in refused for node in tensors)


def _returned(module: torch.fx.GraphModule) -> Sequence[Any]:
    """Nodes, and constants, that a graph returns."""
    (output,) = [node for node in module.graph.nodes if node.op == "output"]
    return output.args[0] if isinstance(output.args[0], list | tuple) else [output.args[0]]


def _views(
    computed: Sequence[torch.fx.Node], placeholders: Sequence[torch.fx.Node], shared: bool
) -> dict[torch.fx.Node, tuple[torch.fx.Node, list[torch.fx.Node]]]:
    """Results that are views of an argument or of another result -> it, and the operators of the views in order.

    shared: also of values that are no results, where several results are views of one, or one has all of its elements.
    """
    sources = {
        *(node for node in placeholders if isinstance(node.meta["val"], torch.Tensor)),
        *(node for node in computed if not _is_view(node)),
    }
    views = {}
    for node in computed:
        source, chain = node, []
        while _is_view(source):
            chain.append(source)
            source = source.args[0]  # type: ignore[assignment]
        numbers = (arg for view in chain for arg in view.all_input_nodes[1:])
        is_known = not any(isinstance(arg.meta.get("val"), torch.Tensor) for arg in numbers)
        if chain and is_known:
            views[node] = source, chain[::-1]
    elements: Counter[torch.fx.Node] = Counter()
    for node, (source, _) in views.items():
        value = source.meta.get("val")
        if shared and source.op == "call_function" and isinstance(value, torch.Tensor):
            is_viewed_twice = source in elements
            elements[source] += node.meta["val"].numel()
            if is_viewed_twice or elements[source] >= value.numel():
                sources.add(source)
    return {node: view for node, view in views.items() if view[0] in sources}


def _is_view(node: torch.fx.Node) -> bool:
    """Whether a node is an operator of Torch whose result shares memory with its first argument, or one of its results."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], torch.fx.Node):
        return False
    if node.target is operator.getitem:
        return _is_view(node.args[0])
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _step(view: torch.fx.Node, env: Mapping[torch.fx.Node, Any]) -> Callable[[Any], Any]:
    """The operator of a view as a function of the tensor that it is a view of."""
    args, kwargs = torch.fx.map_arg((view.args[1:], view.kwargs), lambda number: env[number])
    target: Callable = view.target  # type: ignore[assignment]
    return lambda tensor: target(tensor, *args, **kwargs)


def _in_memory(value: torch.Tensor, order: Sequence[int] | None) -> jax.ShapeDtypeStruct:
    """The type of a tensor's elements in the order of dimensions that they have in memory."""
    lying = value if order is None else value.permute(tuple(order))
    return jax.ShapeDtypeStruct(tuple(map(int, lying.shape)), numpy_dtype(lying.dtype))


def _outputs(
    env: Mapping[torch.fx.Node, Any], nodes: Iterable[torch.fx.Node], strided: bool
) -> tuple[list[Any], dict[torch.fx.Node, Any]]:
    """(arrays that the jaxpr returns; result -> its place among them, or its value if it is no array)."""
    outputs: list[Any] = []
    places: dict[torch.fx.Node, Any] = {}
    for node in nodes:
        if not hasattr(env[node], "dtype"):
            places[node] = env[node]
            continue
        order = order_of(node.meta["val"]) if strided else None
        places[node] = ResultPlace(len(outputs), None if order is None else inverse(order))
        outputs.append(env[node] if order is None else jax.numpy.transpose(env[node], order))
    return outputs, places


def _views_apart(closed: jex.ClosedJaxpr, numbers: dict[torch.fx.Node, Any]) -> jex.ClosedJaxpr:
    """The jaxpr with results as they were before Torch gave them dimensions of one element.

    A kernel can then store what it reduced, and use it.
    """
    outs: list[Any] = list(closed.jaxpr.outvars)
    before: dict[Any, Any] = {
        eqn.outvars[0]: eqn.invars[0]
        for eqn in closed.jaxpr.eqns
        if eqn.primitive.name == "broadcast_in_dim"
    }
    for n, place in numbers.items():
        if not isinstance(place, ResultPlace) or place.permuted is not None:
            continue
        view = outs[place.number]
        x = None if isinstance(view, jex.Literal) else before.get(view)
        if (
            isinstance(x, jex.Var)
            and x not in closed.jaxpr.invars
            and _type(x).size == _type(view).size
        ):
            outs[place.number] = x
            numbers[n] = dataclasses.replace(place, shape=_type(view).shape)
    return jex.ClosedJaxpr(closed.jaxpr.replace(outvars=outs), closed.consts)


def _type(var: jex.Var) -> Any:
    return var.aval


class _Interpreter:
    """Runs a graph on JAX's arrays. checks: gets an entry per check of a range; None: nothing is checked."""

    def __init__(
        self,
        module: torch.fx.GraphModule,
        seed: Any,
        checks: list[in_range.Check] | None,
        rounds: bool,
    ):
        self.module, self._checks, self._rounds = module, checks, rounds
        self._key, self._drawn = None if seed is None else jax.random.key(seed), 0

    def next_key(self) -> Any:
        self._drawn += 1
        assert self._key is not None
        return jax.random.fold_in(self._key, self._drawn)

    def fill(self, env: dict[torch.fx.Node, Any]) -> None:
        """Values of all nodes, into env, which has those of the placeholders. Raises NotCompiled."""
        for node in self.module.graph.nodes:
            if node.op == "get_attr":
                env[node] = self._constant(node.target)
            elif node.op == "call_function":
                read = lambda operand: env[operand]
                args, kwargs = (
                    torch.fx.map_arg(node.args, read),
                    torch.fx.map_arg(node.kwargs, read),
                )
                try:
                    env[node] = self._result(node, args, kwargs)
                except Exception as e:
                    raise _not_compiled(node, e) from e

    def _constant(self, name: str) -> np.ndarray:
        value = self.module
        for part in name.split("."):
            value = getattr(value, part)
        return array_of(value)  # type: ignore[arg-type]

    def _result(self, node: torch.fx.Node, args: tuple, kwargs: dict) -> Any:
        value = node.meta.get("val")
        if isinstance(value, int | float | bool) and _is_number(node):
            return value
        rule = aten.rule_of(node.target)
        if rule is None:
            if not _is_python(node.target):
                raise UnsupportedOp("the table has no rule for it")
            return node.target(*args, **kwargs)  # type: ignore[operator]
        placed, named = arguments_of(node.target, args, kwargs)
        call = dataclasses.replace(
            _call(node, self.next_key), in_range=functools.partial(self._in_range, node)
        )
        check_numbers(node.target, placed, named, call.dtypes[0])
        result = rule(call, *placed, **named)
        if isinstance(value, list | tuple):
            return [
                self._typed(result, example) if isinstance(example, torch.Tensor) else result
                for result, example in zip(result, value, strict=True)
            ]
        return self._typed(result, value) if isinstance(value, torch.Tensor) else result

    def _typed(self, untyped: Any, value: torch.Tensor) -> Any:
        result = typed(untyped, value)
        return (
            rounded(result)
            if self._rounds and result is not None and value.dtype in SHORT
            else result
        )

    def _in_range(
        self, node: torch.fx.Node, x: Any, low: int, high: int, number: str = "index"
    ) -> Any:
        """Numbers that are known now are checked now; Torch, which then runs the operator, has an error for wrong ones."""
        if self._checks is None or not x.size:
            return x
        if not isinstance(x, jax.core.Tracer):
            if in_range.outside(np.asarray(x), low, high).any():
                raise UnsupportedOp("a number is out of its range", why=f"[{low}, {high})")
            return x
        checked = in_range.in_range(x, low, high)
        if checked is not x:
            self._checks.append(in_range.Check(described(node), number))
        return checked


def _call(node: torch.fx.Node, next_key: Callable[[], Any]) -> Call:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    tensors = [example if isinstance(example, torch.Tensor) else None for example in values]
    used: set[Any] = (
        {user.args[1] for user in node.users if user.target is operator.getitem}
        if isinstance(value, list | tuple)
        else {0}
    )
    return Call(
        name_of(node.target) or "",
        tuple(None if tensor is None else numpy_dtype(tensor.dtype) for tensor in tensors),
        tuple(None if tensor is None else tuple(map(int, tensor.shape)) for tensor in tensors),
        frozenset(used),
        _promoted(node),
        next_key,
        all(_is_dense(operand.meta.get("val")) for operand in node.all_input_nodes),
    )


def _is_dense(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or (
        value.is_contiguous() and not value.storage_offset()
    )


def _promoted(node: torch.fx.Node) -> np.dtype | None:
    """The type in which Torch compares the first two arguments."""
    values: list[Any] = [
        arg.meta.get("val") if isinstance(arg, torch.fx.Node) else arg for arg in node.args[:2]
    ]
    values = [
        value for value in values if isinstance(value, torch.Tensor | bool | int | float | complex)
    ]
    if not any(isinstance(value, torch.Tensor) for value in values):
        return None
    return numpy_dtype(torch.result_type(*values) if len(values) > 1 else values[0].dtype)


def typed(result: Any, value: torch.Tensor) -> Any:
    """A result with the type that Torch gives it. Raises UnsupportedOp where its shape is another."""
    if result is None:
        return None
    dtype, shape = numpy_dtype(value.dtype), tuple(map(int, value.shape))
    result = result if hasattr(result, "astype") else jax.numpy.asarray(result, dtype)
    if result.shape != shape:
        raise UnsupportedOp(f"its result has shape {result.shape}, Torch's has {shape}")
    return as_type(result, dtype)


def _not_compiled(node: torch.fx.Node, error: Exception) -> NotCompiled:
    why = (
        f"{error.what}; {error.why}"
        if isinstance(error, UnsupportedOp)
        else f"{type(error).__name__}: {error}"
    )
    unsupported = NotCompiled(
        f"`{described(node)}` is not compiled with these arguments",
        why=why.removesuffix("; None"),
        hint="without strict_target it runs in Torch",
    )
    unsupported.node = node
    return unsupported


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """A constant of a graph as an array."""
    with unset_fake_temporarily(), torch.no_grad():
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if tensor.dtype is torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(NUMPY[torch.bfloat16])
        return tensor.numpy()


__all__ = [
    "CPU",
    "CapturedGraph",
    "GraphArgument",
    "NotCompiled",
    "ResultPlace",
    "ResultView",
    "capture",
    "described",
    "is_supported",
    "unsupported",
]
