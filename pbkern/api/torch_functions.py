"""polyblocks_jit_torch, polymage_jit_torch, and the backend "pbkern" of torch.compile.

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

from pbkern.core.errors import OptionError, PbkernError, TargetError
from pbkern.core.options import CompileOptions, check_for_backend, check_for_torch

from .decorators import merged, named_once


def polyblocks_jit_torch(fn: Any = None, *, compile_options: Any = None, runtime_args: Any = None) -> Any:
    """Compiles a PyTorch function, method or nn.Module when it is called; a decorator, with or without arguments.

    TorchDynamo captures graphs, AOTAutograd makes a forward and a backward one of each; both become kernels. What the table
    of operators lacks runs in Torch between them. What it returns has beside the function's own attributes

      .explain(*args)         makes a call, and shows the graphs captured so far: kernels, what runs in Torch or XLA, with lines

    Args:
      compile_options: dictionary of options, see pbkern.CompileOptions; `torch_polyblocks_select_graphs` and
        `torch_polyblocks_filter_graphs` choose graphs by number, in order of capture.
      runtime_args: an older name of compile_options.
    Raises OptionError for options that mean nothing here; TargetError where Torch is not installed. A call raises UnsupportedOp
    for tensors that kernels cannot read, and with strict_target for operators that are not compiled.
    """
    compile_options = named_once(compile_options, runtime_args)
    if fn is None:
        return functools.partial(polyblocks_jit_torch, compile_options=compile_options)
    options = CompileOptions.from_dict(merged(compile_options, {}))
    check_for_torch(options)
    torch = _torch()
    if isinstance(fn, type) or not callable(fn):
        raise OptionError("polyblocks_jit_torch compiles a function, a method or an nn.Module", why=f"given {fn!r}",
                          hint="decorate `forward`, or the module that a class makes")  # fmt: skip
    return _module(fn, options) if isinstance(fn, torch.nn.Module) else TorchFunction(fn, options)


def polymage_jit_torch(fn: Any = None, *, compile_options: Any = None, runtime_args: Any = None) -> Any:
    """Runs a PyTorch function or module on the backend that compile_options["execution_backend"] names, to compare them.

    "std": Torch, operator by operator. "polyblocks", the default: polyblocks_jit_torch. Torch has no "xla".
    Raises OptionError for options that the backend cannot obey.
    """
    compile_options = named_once(compile_options, runtime_args)
    if fn is None:
        return functools.partial(polymage_jit_torch, compile_options=compile_options)
    options = CompileOptions.from_dict(compile_options)
    if options.execution_backend == "xla":
        raise OptionError("functions of PyTorch have no execution_backend 'xla'", why="XLA takes none of them by itself",
                          hint="'std' or 'polyblocks'")  # fmt: skip
    if options.execution_backend == "std":
        check_for_torch(dataclasses.replace(options, execution_backend="polyblocks"))
        check_for_backend(options)
        return fn
    return polyblocks_jit_torch(fn, compile_options=options.differing())


@dataclass(frozen=True)
class TorchExplanation:
    """What became of a function's graphs. `graphs`: in order of capture; its text is a line per graph and kernel."""

    graphs: tuple[Any, ...]

    def __str__(self) -> str:
        lines = []
        for g in self.graphs:
            kernels, left = g.kernels(), g.left_to_xla()
            lines.append(f"graph {g.number} ({g.kind}): {len(kernels)} kernel(s), {len(left)} operation(s) left to XLA, "
                         f"{len(g.in_torch)} run in Torch")  # fmt: skip
            lines += [f"  kernel {k.name}: grid {list(k.grid)}" for k in kernels]
            lines += [f"  XLA: {x.op}{f' at {x.at}' if x.at else ''}: {x.why}" for x in left]
            lines += [f"  Torch: {what}" for what in g.in_torch]
        return "\n".join(lines)


class TorchFunction:
    """A decorated function: called like it, with its attributes."""

    def __init__(self, fn: Any, options: CompileOptions):
        self.__wrapped__ = fn
        self.options = options
        self.graphs: list[Any] = []
        torch = _torch()
        self._compiled = torch.compile(fn, backend=_backend(options, self.graphs))
        self._check, self._failed = _argument_check(), torch._dynamo.exc.BackendCompilerFailed
        functools.update_wrapper(self, fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._check(args, kwargs)
        try:
            return self._compiled(*args, **kwargs)
        except self._failed as e:
            raise _own_error(e) from None

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        bound = functools.partial(self, instance)
        bound.explain = functools.partial(self.explain, instance)  # type: ignore[attr-defined]
        return bound

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __repr__(self) -> str:
        return f"<pbkern.polyblocks_jit_torch of {self.__wrapped__!r}>"

    def explain(self, *args: Any, **kwargs: Any) -> TorchExplanation:
        """All graphs that were captured, those of a call with these arguments among them, which is made."""
        return _explained(self, self.graphs, args, kwargs)


def _module(module: Any, options: CompileOptions) -> Any:
    """A compiled nn.Module, which shares parameters and state with the one it is made of."""
    graphs: list[Any] = []
    compiled = _torch().compile(module, backend=_backend(options, graphs))
    compiled.__dict__["explain"] = lambda *args, **kwargs: _explained(compiled, graphs, args, kwargs)
    return compiled


def _explained(call: Callable, graphs: list[Any], args: tuple, kwargs: dict) -> TorchExplanation:
    call(*args, **kwargs)
    return TorchExplanation(tuple(graphs))


def _own_error(error: Any) -> Exception:
    """What pbkern raised while TorchDynamo called it, or else Torch's error."""
    return error.inner_exception if isinstance(error.inner_exception, PbkernError) else error


def compile_fx(module: Any, inputs: Any, *, options: Any = None, **_: Any) -> Any:
    """The backend "pbkern" of torch.compile, with compile options as `torch.compile(..., options={...})`."""
    found = CompileOptions.from_dict(merged(options, {}))
    check_for_torch(found)
    return _backend(found, _numbered(options))(module, inputs)


_graphs: dict[int, tuple[Any, list[Any]]] = {}


def _numbered(options: Any) -> list[Any]:
    """The graphs that were captured with this dictionary of options, which belongs to one call of torch.compile."""
    if options is None:
        return []
    return _graphs.setdefault(id(options), (options, []))[1]


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise TargetError("PyTorch is not installed", why="polyblocks_jit_torch compiles its functions",
                          hint="pip install 'pbkern[torch]'") from None  # fmt: skip
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


def _argument_check() -> Callable[[tuple, dict], None]:
    """f(args, kwargs): raises UnsupportedOp for tensors that kernels cannot read, which Torch would run by itself."""
    from pbkern.frontends.torch.dtypes import check_tensor

    torch = _torch()
    tensor, strided = torch.Tensor, torch.strided

    def check(args: tuple, kwargs: dict) -> None:
        for name, value in (*enumerate(args), *kwargs.items()) if kwargs else enumerate(args):
            if isinstance(value, tensor) and not (value.is_cpu and value.layout is strided and not value.is_quantized):
                check_tensor(value, f"argument {name}" if isinstance(name, int) else f"argument `{name}`")

    return check
