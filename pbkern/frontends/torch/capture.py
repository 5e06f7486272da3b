"""Graph of ATen operators -> ClosedJaxpr, by the table of operators.

Types of results are Torch's, node by node. Numbers that the graph is called with become constants; tensors are inputs, parameters
among them. A graph that draws random numbers has one input more, the seed.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from jax.extend import core as jex

from pbkern.core.errors import PbkernError, UnsupportedOp

from . import aten
from .aten.randomness import NAMES as RANDOM
from .aten.table import Call, name_of
from .dtypes import numpy_dtype

SEED = jax.ShapeDtypeStruct((), np.dtype(np.int64))


@dataclass(frozen=True)
class Captured:
    """A graph as a jaxpr.

    Attributes:
      jaxpr: of the tensors among the graph's inputs, and the seed if it draws random numbers.
      results: per result of the graph, its number among the jaxpr's, or what else it is: None or a number.
      draws: whether it takes a seed.
    """

    jaxpr: jex.ClosedJaxpr
    results: tuple[Any, ...]
    draws: bool


@dataclass(frozen=True)
class Place:
    """The number of a tensor among a jaxpr's results."""

    number: int


def is_supported(node: torch.fx.Node) -> bool:
    """Whether the table has what a node of a graph does."""
    if node.op != "call_function":
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem or getattr(node.target, "__module__", "") in ("_operator", "math")
    return aten.rule_of(node.target) is not None and all(map(_has_kernels, _values(node)))


def _has_kernels(v: torch.Tensor) -> bool:
    try:
        numpy_dtype(v.dtype)
    except UnsupportedOp:
        return False
    return v.device.type == "cpu" and v.layout is torch.strided


def _values(node: torch.fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    return [v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, torch.Tensor)]


def unsupported(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Nodes that the table lacks."""
    return [n for n in graph.nodes if not is_supported(n)]


def described(node: torch.fx.Node) -> str:
    """An operator and the user's line."""
    lines = [x.strip() for x in (node.stack_trace or "").splitlines() if x.strip().startswith("File ")]
    at = ""
    if lines:
        file, line, *_ = lines[-1].removeprefix("File ").split(", ")
        at = f" at {file.strip(chr(34))}:{line.removeprefix('line ')}"
    return f"{name_of(node.target) or node.target}{at}"


def capture(module: torch.fx.GraphModule, arguments: Sequence[Any]) -> Captured:
    """The jaxpr of a graph called with arguments like these. Raises UnsupportedOp with all operators that the table lacks."""
    missing = unsupported(module.graph)
    if missing:
        raise UnsupportedOp(f"{len(missing)} operators are not compiled", why=", ".join(dict.fromkeys(map(described, missing))),
                            hint="without strict_target they run in Torch")  # fmt: skip
    draws = any(name_of(n.target) in RANDOM for n in module.graph.nodes)
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    types = [jax.ShapeDtypeStruct(tuple(map(int, t.shape)), numpy_dtype(t.dtype)) for t in tensors]
    results: list[Any] = []

    def run(*arrays):
        interpreter = _Interpreter(module, arrays[-1] if draws else None)
        left = iter(arrays)
        made = interpreter.run(*[next(left) if isinstance(a, torch.Tensor) else a for a in arguments],
                               enable_io_processing=False)  # fmt: skip
        made = made if isinstance(made, list | tuple) else [made]
        kept = [x for x in made if hasattr(x, "aval") or isinstance(x, np.ndarray)]
        places = iter(range(len(kept)))
        results[:] = [Place(next(places)) if hasattr(x, "aval") or isinstance(x, np.ndarray) else x for x in made]
        return kept

    with jax.enable_x64(True):
        jaxpr = jax.make_jaxpr(run)(*types, *([SEED] if draws else []))
    return Captured(jaxpr, tuple(results), draws)


class _Interpreter(torch.fx.Interpreter):
    """Runs a graph on JAX's arrays."""

    def __init__(self, module: torch.fx.GraphModule, seed: Any):
        super().__init__(module)
        self._key, self._drawn = None if seed is None else jax.random.key(seed), 0
        self._node: torch.fx.Node | None = None

    def next_key(self):
        self._drawn += 1
        assert self._key is not None
        return jax.random.fold_in(self._key, self._drawn)

    def run_node(self, node: torch.fx.Node) -> Any:
        self._node = node
        try:
            return super().run_node(node)
        except PbkernError:
            raise
        except Exception as e:
            raise UnsupportedOp(f"`{described(node)}` is not compiled with these arguments", why=f"{type(e).__name__}: {e}",
                                hint="without strict_target it runs in Torch") from e  # fmt: skip

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        rule = aten.rule_of(target)
        if rule is None:
            return target(*args, **kwargs)
        assert self._node is not None
        kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "layout", "pin_memory")}
        value = self._node.meta.get("val")
        call = self._call(target, value)
        made = rule(call, *args, **kwargs)
        if isinstance(value, torch.Tensor):
            return _typed(made, value)
        if isinstance(value, list | tuple):
            return [_typed(m, v) if isinstance(v, torch.Tensor) else m for m, v in zip(made, value)]
        return made

    def _call(self, target: Any, value: Any) -> Call:
        assert self._node is not None
        values = value if isinstance(value, list | tuple) else [value]
        tensors = [v if isinstance(v, torch.Tensor) else None for v in values]
        used = {u.args[1] for u in self._node.users if u.target is operator.getitem} if isinstance(value, list | tuple) else {0}
        return Call(
            name_of(target) or "", tuple(None if t is None else numpy_dtype(t.dtype) for t in tensors),
            tuple(None if t is None else tuple(map(int, t.shape)) for t in tensors), frozenset(used), self._promoted(),
            self.next_key,
        )  # fmt: skip

    def _promoted(self) -> np.dtype | None:
        """The type in which Torch compares two arguments."""
        assert self._node is not None
        values = [a.meta.get("val") if isinstance(a, torch.fx.Node) else a for a in self._node.args]
        values = [v for v in values if isinstance(v, torch.Tensor | bool | int | float)]
        if not any(isinstance(v, torch.Tensor) for v in values):
            return None
        return numpy_dtype(torch.result_type(*values[:2]) if len(values) > 1 else values[0].dtype)

    def get_attr(self, target: str, args: tuple, kwargs: dict) -> Any:
        value = super().get_attr(target, args, kwargs)
        return np.asarray(value.detach().resolve_conj().resolve_neg()) if isinstance(value, torch.Tensor) else value


def _typed(made: Any, value: torch.Tensor) -> Any:
    """A result with the type that Torch gives it."""
    if made is None:
        return None
    dtype = numpy_dtype(value.dtype)
    made = jax.numpy.asarray(made, dtype) if not hasattr(made, "astype") else made
    return made if made.dtype == dtype else made.astype(dtype)


__all__ = ["Captured", "Place", "capture", "described", "is_supported", "unsupported"]
