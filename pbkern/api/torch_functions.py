"""polyblocks_jit_torch, and the backend "pbkern" of torch.compile.

    @pbkern.polyblocks_jit_torch(compile_options={"target": "cpu"})
    def f(x): ...                                   # a function, a method or an nn.Module

    fast = torch.compile(model, backend="pbkern")

Needs the extra `torch`; nothing else of pbkern imports Torch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pbkern.core.errors import TargetError
from pbkern.core.options import CompileOptions, check_for_torch



def polyblocks_jit_torch(fn: Any = None, *, compile_options: Any = None) -> Any:
    """Compiles a PyTorch function, method or nn.Module when it is called; a decorator, with or without arguments.

    TorchDynamo captures graphs, AOTAutograd makes a forward and a backward one of each; both become kernels. What the table
    of operators lacks runs in Torch between them, and `.explain(*args)` names it.

    Args:
      compile_options: as CompileOptions; `torch_polyblocks_select_graphs` and `torch_polyblocks_filter_graphs` choose graphs by
        number, in order of capture.
    Raises OptionError for options that mean nothing here; TargetError where Torch is not installed.
    """
    if fn is None:
        return functools.partial(polyblocks_jit_torch, compile_options=compile_options)
    options = CompileOptions.of(compile_options)
    check_for_torch(options)
    return TorchFunction(fn, options)


@dataclass(frozen=True)
class TorchExplanation:
    """What became of a function's graphs. `graphs`: in order of capture; its text is a line per graph and kernel."""

    graphs: tuple[Any, ...]

    def __str__(self) -> str:
        lines = []
        for g in self.graphs:
            kernels = [k for p in g.compiled for k in p.build.fused.kernels()]
            left = [x for p in g.compiled for x in p.build.fused.left_to_xla()]
            lines.append(f"graph {g.number} ({g.kind}): {len(kernels)} kernel(s), {len(left)} operation(s) left to XLA, "
                         f"{len(g.in_torch)} run in Torch")  # fmt: skip
            lines += [f"  kernel {k.name}: grid {list(k.grid)}" for k in kernels]
            lines += [f"  XLA: {x.op}{f' at {x.at}' if x.at else ''}: {x.why}" for x in left]
            lines += [f"  Torch: {what}" for what in g.in_torch]
        return "\n".join(lines)


class TorchFunction:
    """A decorated function or module: called like it, with its attributes."""

    def __init__(self, fn: Any, options: CompileOptions):
        torch = _torch()
        self.__wrapped__ = fn
        self.options = options
        self.graphs: list[Any] = []
        self._compiled = torch.compile(fn, backend=_backend(options, self.graphs), dynamic=False)
        if not isinstance(fn, torch.nn.Module):
            functools.update_wrapper(self, fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _check_arguments(args, kwargs)
        return self._compiled(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def explain(self, *args: Any, **kwargs: Any) -> TorchExplanation:
        """Graphs and kernels of a call with these arguments, which is made; what runs in Torch or XLA, with lines."""
        before = len(self.graphs)
        self(*args, **kwargs)
        return TorchExplanation(tuple(self.graphs[before:] or self.graphs))


def compile_fx(module: Any, inputs: Any, *, options: Any = None, **_: Any) -> Any:
    """The backend "pbkern" of torch.compile, with compile options as `torch.compile(..., options={...})`."""
    found = CompileOptions.of(options)
    check_for_torch(found)
    return _backend(found, [])(module, inputs)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise TargetError("PyTorch is not installed", why="polyblocks_jit_torch compiles its functions",
                          hint="pip install 'pbkern[torch]'") from None
    return torch


def _backend(options: CompileOptions, graphs: list[Any]) -> Callable:
    """The backend for these options; it notes what it captures in `graphs`."""
    from pbkern.frontends.torch import graphs as captured

    from .tensor_plan import TensorPlan

    selected, filtered = options.torch_polyblocks_select_graphs, options.torch_polyblocks_filter_graphs

    def choose(number: int) -> bool:
        return (not selected or number in selected) and number not in filtered

    plain = dataclasses.replace(options, torch_polyblocks_select_graphs=(), torch_polyblocks_filter_graphs=())

    def compile_jaxpr(found: Any, name: str) -> TensorPlan:
        return TensorPlan(found.jaxpr, name, plain)

    return captured.backend(compile_jaxpr, choose, graphs, options.strict_target)


def _check_arguments(args: tuple, kwargs: dict) -> None:
    """Raises UnsupportedOp for tensors that kernels cannot read, before Torch looks at them."""
    from pbkern.frontends.torch.dtypes import check_tensor

    torch = _torch()
    for name, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, torch.Tensor):
            check_tensor(value, f"argument {name}" if isinstance(name, int) else f"argument `{name}`")


