"""Which decorator takes which compile options, as a table: an option that means nothing to a decorator raises OptionError."""

from __future__ import annotations

from collections.abc import Callable

from pbkern.core.lazy_dataclass import dataclass

from .errors import OptionError, TargetError
from .options import CompileOptions

GPU_ONLY = ("polyblocks_gpu_no_tensor_core", "device_one_time_load")
AOT_ONLY = (
    "aot",
    "aot_name",
    "device",
    "on_gpu_tensors",
    "user_device_memory",
    "openmp",
    "num_threads",
    "weights",
    "weights_argnums",
    "weights_argnames",
)
TORCH_ONLY = ("torch_polyblocks_select_graphs", "torch_polyblocks_filter_graphs")
ARGUMENT_OPTIONS = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
WEIGHTS_OPTIONS = ("weights_argnums", "weights_argnames")
# What can act on a function that other backends run: op by op, every argument is known, and none is
# given up.
OTHER_BACKENDS = {"std": ("static_argnums", "static_argnames"), "xla": ARGUMENT_OPTIONS}


@dataclass(frozen=True)
class Refusal:
    """Options that mean nothing to a decorator.

    Attributes:
      concerns: their purpose.
      hint: a remedy.
      unless: all options -> whether they give these a meaning.
    """

    names: tuple[str, ...]
    concerns: str
    hint: str
    unless: Callable[[CompileOptions], bool] = lambda options: False


@dataclass(frozen=True)
class Decorator:
    """refusals: in the order of their messages; check: raises for values that do not fit each other, or the target."""

    refusals: tuple[Refusal, ...]
    check: Callable[[CompileOptions], None] = lambda options: None


def _on_gpu(options: CompileOptions) -> bool:
    return options.target != "cpu"


def _check_graphs(options: CompileOptions) -> None:
    selected, filtered = (
        options.torch_polyblocks_select_graphs,
        options.torch_polyblocks_filter_graphs,
    )
    for number in (*selected, *filtered):
        if number < 0:
            raise OptionError(
                f"there is no graph {number}",
                why=f"select {selected}, filter {filtered}",
                hint="graphs are 0, 1, ... in order of capture",
            )
    for number in sorted({*selected} & {*filtered}):
        raise OptionError(
            f"graph {number} is selected and left out",
            why=f"select {selected}, filter {filtered}",
            hint="name it in one of the two",
        )
    if options.target == "amdgpu":
        raise OptionError(
            f"functions of PyTorch are not compiled for target {options.target!r}",
            why="tensors of ROCm have not been tried",
            hint="target 'cpu' or 'nvgpu'",
        )


def _check_library(options: CompileOptions) -> None:
    if _on_gpu(options):
        raise TargetError(
            f"libraries for target `{options.target}` are not made yet",
            why="they are made for CPUs",
            hint="compile_options={'target': 'cpu'}",
        )
    if not options.openmp and (options.num_threads or 1) > 1:
        raise OptionError(
            "a library without OpenMP runs on one thread",
            why=f"openmp=False, num_threads={options.num_threads}",
            hint="leave one of them out",
        )


def _backend(decorator: str) -> Refusal:
    return Refusal(
        ("execution_backend",),
        decorator,
        f"{decorator}(compile_options={{'execution_backend': ...}})",
    )


_AOT = (
    "ahead-of-time compilation",
    "polyblocks_aot_jax(compile_options={...})(fn)(*args) makes libraries",
)
_GPU = Refusal(
    GPU_ONLY, "the targets nvgpu and amdgpu", "leave it out: the target is cpu", unless=_on_gpu
)
_ARRAYS = Refusal(
    ARGUMENT_OPTIONS,
    "functions of JAX arrays",
    "leave it out: what is no tensor is a constant already",
)
_JIT = (
    Refusal(("device",), *_AOT, unless=_on_gpu),  # of GPUs it names the one that code is made for
    Refusal(tuple(option for option in AOT_ONLY if option != "device"), *_AOT),
    Refusal(TORCH_ONLY, "the PyTorch front end", "use it with polyblocks_jit_torch"),
    _GPU,
)
DECORATORS = {
    "polyblocks_jit_jax": Decorator((*_JIT, _backend("polymage_jit_jax"))),
    "polyblocks_jit_tf": Decorator((_ARRAYS, *_JIT, _backend("polymage_jit_tf"))),
    "polyblocks_jit_torch": Decorator(
        (
            Refusal(AOT_ONLY, _AOT[0], "leave it out: this decorator compiles just in time"),
            _ARRAYS,
            _GPU,
            _backend("polymage_jit_torch"),
        ),
        _check_graphs,
    ),
    "polyblocks_aot_jax": Decorator(
        (
            Refusal(TORCH_ONLY, "the PyTorch front end", "leave it out"),
            Refusal((*GPU_ONLY, "on_gpu_tensors"), _GPU.concerns, _GPU.hint),
            Refusal(
                ("execution_backend",),
                "polymage_jit_jax",
                "leave it out: libraries hold what pbkern compiles",
            ),
        ),
        _check_library,
    ),
}


def check_for(decorator: str, options: CompileOptions) -> None:
    """Raises OptionError for options that mean nothing to a decorator, unless at their defaults.

    It does so for values that do not fit each other as well. Raises TargetError for targets that
    have no libraries.
    """
    of = DECORATORS[decorator]
    of.check(options)
    for name in options.differing():
        for refusal in of.refusals:
            if name in refusal.names and not refusal.unless(options):
                what = f"compile option `{name}` concerns {refusal.concerns}"
                raise OptionError(what, why="it would have no effect here", hint=refusal.hint)


def check_names_no_arguments(options: CompileOptions, hint: str) -> None:
    """Raises OptionError for options that name arguments of functions of JAX arrays, for other functions."""
    for name in (*ARGUMENT_OPTIONS, *WEIGHTS_OPTIONS):
        if getattr(options, name):
            raise OptionError(
                f"compile option `{name}` concerns functions of JAX arrays",
                why="it would have no effect here",
                hint=hint,
            )


def check_for_backend(options: CompileOptions) -> None:
    """Raises OptionError for options that cannot act on the backend that execution_backend names, unless at their defaults."""
    backend = options.execution_backend
    if backend not in OTHER_BACKENDS:
        return
    for name, value in options.differing().items():
        if name not in ("execution_backend", *OTHER_BACKENDS[backend]):
            raise OptionError(
                f"compile option `{name}` cannot act with execution_backend {backend!r}",
                why=f"{name}={value!r}; "
                f"{'plain JAX runs the function op by op' if backend == 'std' else 'jax.jit compiles the function'}",
                hint="leave it out, or execution_backend 'polyblocks'",
            )
