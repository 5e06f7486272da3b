"""polyblocks_jit_torch, polymage_jit_torch, and the backend "pbkern" of torch.compile.

    @pbkern.polyblocks_jit_torch(compile_options={"target": "cpu"})
    def f(x): ...                                   # a function, a method or an nn.Module

    fast = torch.compile(model, backend="pbkern")

Torch is imported when one of them is used: nothing else of pbkern needs it.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from pbkern import _jax
from pbkern.core.errors import OptionError, TargetError
from pbkern.core.option_uses import check_for
from pbkern.core.options import CompileOptions

from .decorators import merged, named_once


@_jax.hides_own_frames
def polyblocks_jit_torch(
    fn: Any = None, *, compile_options: Any = None, runtime_args: Any = None
) -> Any:
    """Compiles a PyTorch function, method or nn.Module when it is called; a decorator, with or without arguments.

    TorchDynamo captures graphs, AOTAutograd makes a forward and a backward one of each; both become
    kernels. What the table of operators lacks runs in Torch between them. What it returns has
    beside the function's own attributes

      .explain(*args)         makes a call, and shows the graphs captured so far: kernels, what runs in Torch or XLA, with lines

    Args:
      fn: a function, a method or an nn.Module.
      compile_options: dictionary of options, see pbkern.CompileOptions;
        `torch_polyblocks_select_graphs` and `torch_polyblocks_filter_graphs` choose graphs by
        number, in order of capture.
      runtime_args: an older name of compile_options.
    Raises OptionError for options that mean nothing here; TargetError where Torch is not installed.
    A call raises UnsupportedOp for tensors that kernels cannot read, and with strict_target for
    operators that are not compiled.

    Examples:
      >>> import torch
      >>> @pbkern.polyblocks_jit_torch
      ... def twice(x):
      ...     return x * 2
      >>> twice(torch.tensor([1.0, 2.0])).tolist()
      [2.0, 4.0]
    """
    compile_options = named_once(compile_options, runtime_args)
    if fn is None:
        return functools.partial(polyblocks_jit_torch, compile_options=compile_options)
    options = CompileOptions.from_dict(merged(compile_options, {}))
    check_for("polyblocks_jit_torch", options)
    if isinstance(fn, type) or not callable(fn):
        raise OptionError(
            "polyblocks_jit_torch compiles a function, a method or an nn.Module",
            why=f"given {fn!r}",
            hint="decorate `forward`, or the module that a class makes",
        )
    return _calls().compiled(fn, options)


def polymage_jit_torch(
    fn: Any = None, *, compile_options: Any = None, runtime_args: Any = None
) -> Any:
    """Runs a PyTorch function or module on the backend that compile_options["execution_backend"] names, to compare them.

    "std": Torch, operator by operator. "polyblocks", the default: polyblocks_jit_torch. Torch has
    no "xla". Arguments are as of polyblocks_jit_torch. Raises OptionError for options that the backend
    cannot obey.

    Examples:
      >>> import torch
      >>> f = pbkern.polymage_jit_torch(lambda x: x * 2, compile_options={"execution_backend": "std"})
      >>> f(torch.tensor([1.0, 2.0])).tolist()
      [2.0, 4.0]
    """
    compile_options = named_once(compile_options, runtime_args)
    if fn is None:
        return functools.partial(polymage_jit_torch, compile_options=compile_options)
    given = CompileOptions.from_dict(compile_options).differing()
    backend = given.pop("execution_backend", "polyblocks")
    if backend == "xla":
        raise OptionError(
            "functions of PyTorch have no execution_backend 'xla'",
            why="XLA takes none of them by itself",
            hint="'std' or 'polyblocks'",
        )
    if backend == "polyblocks":
        return polyblocks_jit_torch(fn, compile_options=given)
    for name, value in given.items():
        raise OptionError(
            f"compile option `{name}` cannot act with execution_backend 'std'",
            why=f"{name}={value!r}; Torch runs the function operator by operator",
            hint="leave it out, or execution_backend 'polyblocks'",
        )
    return fn


def compile_fx(module: Any, inputs: Any, *, options: Any = None, **_: Any) -> Any:
    """The backend "pbkern" of torch.compile, with compile options as `torch.compile(..., options={...})`."""
    parsed = CompileOptions.from_dict(merged(options, {}))
    check_for("polyblocks_jit_torch", parsed)
    return _calls().backend(parsed, _numbered(options))(module, inputs)


# The version whose torch.compile has the options that torch_calls.py uses.
OLDEST_TORCH = (2, 13)
_graphs: dict[int, tuple[Any, list[Any]]] = {}


def _numbered(options: Any) -> list[Any]:
    """The graphs that were captured with this dictionary of options, which belongs to one call of torch.compile."""
    if options is None:
        return []
    return _graphs.setdefault(id(options), (options, []))[1]


def _calls() -> ModuleType:
    """The module that needs Torch. Raises TargetError where that is not installed, or too old."""
    try:
        import torch
    except ImportError:
        raise TargetError(
            "PyTorch is not installed",
            why="polyblocks_jit_torch compiles its functions",
            hint="pip install 'pbkern[torch]'",
        ) from None
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST_TORCH:
        raise TargetError(
            f"PyTorch {torch.__version__} is too old",
            why=f"its graphs are taken by functions of version {'.'.join(map(str, OLDEST_TORCH))}",
            hint="pip install 'pbkern[torch]'",
        )
    from . import torch_calls

    return torch_calls
