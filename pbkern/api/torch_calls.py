"""Results of polyblocks_jit_torch: functions and modules that TorchDynamo captures for the backend made here."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import BackendCompilerFailed

from pbkern.core import config
from pbkern.core.errors import FallbackWarning, PbkernError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.options import CompileOptions
from pbkern.core.process.pickle_by_name import PickledByName
from pbkern.core.process.public_names import PublicNames
from pbkern.frontends.torch import graphs as captured
from pbkern.frontends.torch.capture import CapturedGraph
from pbkern.frontends.torch.dtypes import check_tensor, is_sparse
from pbkern.frontends.torch.first_calls import FirstCalls
from pbkern.frontends.torch.memory import CudaDevice, CudaMemory, SimulatedDevice, TorchMemory

from .decorators import name_of
from .direct_plan import DirectPlan
from .report import page

if TYPE_CHECKING:
    from .report.report import Report


@dataclass(frozen=True)
class TorchExplanation:
    """Report on a function's graphs: `str()` is its text, `as_dict()` its values, `html()` a page.

    The text has a line per graph and kernel; values and page have a report for each compiled part of a
    graph, like those of `explain` on functions of JAX.

    graphs: in order of capture. sparse: a sparse argument of calls that ran in Torch, if there was
    one. name: the function's.
    """

    graphs: tuple[captured.Graph, ...]
    sparse: tuple[str, ...] = ()
    name: str = "function"

    def as_dict(self) -> dict[str, Any]:
        """The report as values that JSON has."""
        return self._values(lambda report: report.as_dict())

    def html(self, stages: Sequence[str] | None = None) -> str:
        """The report as a page of HTML with all graphs: one file that loads nothing.

        Args:
          stages: forms of each kernel that the page shows, as of `explain` on functions of JAX.
        Raises OptionError for a stage that the target does not have.
        """
        reports: list[dict[str, Any]] = []

        def numbered(report: Report) -> int:
            reports.append(report.contents(stages))
            return len(reports) - 1

        return page.page(reports, self._values(numbered))

    def _repr_html_(self) -> str:
        """The page in a notebook, with the kernels' source and without code."""
        return page.in_frame(self.html(stages=page.SOURCE_ALONE))

    def _values(self, of_report: Callable[[Report], Any]) -> dict[str, Any]:
        return {
            "name": self.name,
            "notes": self._notes(),
            "graphs": [
                {
                    "number": graph.number,
                    "kind": graph.kind,
                    "in_torch": list(graph.in_torch),
                    "parts": [of_report(part.report()) for part in graph.compiled],
                }
                for graph in self.graphs
            ],
        }

    def _notes(self) -> list[str]:
        return [f"calls with sparse arguments run in Torch: {what}" for what in self.sparse]

    def __str__(self) -> str:
        lines = self._notes()
        for graph in self.graphs:
            kernels, left = graph.kernels(), graph.left_to_xla()
            lines.append(
                f"graph {graph.number} ({graph.kind}): {len(kernels)} kernel(s), {len(left)} operation(s) left to XLA, "
                f"{len(graph.in_torch)} run in Torch"
            )
            lines += [f"  kernel {kernel.name}: grid {list(kernel.grid)}" for kernel in kernels]
            lines += [f"  XLA: {x.op}{f' at {x.at}' if x.at else ''}: {x.why}" for x in left]
            lines += [f"  Torch: {what}" for what in graph.in_torch]
        return "\n".join(lines)


class TorchFunction(PublicNames, PickledByName):
    """A decorated function: called like it, with its attributes."""

    INTERNAL = frozenset(("remade",))

    def __init__(self, fn: Any, options: CompileOptions):
        self.__wrapped__ = fn
        self.options = options
        self.graphs: list[captured.Graph] = []
        self._sparse: list[str] = []
        self._first = FirstCalls()
        self._compiled = _captured(fn, backend(options, self.graphs))
        functools.update_wrapper(self, fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_for_torch(args, kwargs, self.options, self._sparse):
            return self.__wrapped__(*args, **kwargs)
        try:
            return self._first(self._compiled, args, kwargs)
        except BackendCompilerFailed as e:
            raise _own(e) from None

    def remade(self) -> tuple:
        """Pickles by the user's function, like functions of pbkern.jit."""
        return compiled, (self.__wrapped__, self.options)

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
        self(*args, **kwargs)
        return TorchExplanation(tuple(self.graphs), tuple(self._sparse), name_of(self.__wrapped__))


class TorchModule(OptimizedModule):
    """A decorated module, which shares parameters and state with the one that it is made of."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_for_torch(args, kwargs, self.__dict__["options"], self.__dict__["sparse"]):
            return self._orig_mod(*args, **kwargs)
        try:
            if not self.__dict__["recurrent"]:
                return self.__dict__["first"](super().__call__, args, kwargs)
            with torch._dynamo.config.patch(allow_rnn=True):
                return self.__dict__["first"](super().__call__, args, kwargs)
        except BackendCompilerFailed as e:
            raise _own(e) from None

    def __reduce__(self) -> tuple:
        """Copies are compiled again, of copies of the module."""
        return compiled, (self._orig_mod, self.__dict__["options"])

    def explain(self, *args: Any, **kwargs: Any) -> TorchExplanation:
        """Reports on the graphs, like that of functions."""
        self(*args, **kwargs)
        graphs, sparse = self.__dict__["graphs"], self.__dict__["sparse"]
        return TorchExplanation(tuple(graphs), tuple(sparse), type(self._orig_mod).__name__)


def compiled(fn: Any, options: CompileOptions) -> TorchFunction | TorchModule:
    """A function or module as one that is compiled when it is called."""
    if not isinstance(fn, torch.nn.Module):
        return TorchFunction(fn, options)
    graphs: list[captured.Graph] = []
    module = _captured(fn, backend(options, graphs))
    module.__class__ = TorchModule
    module.__dict__ |= {"graphs": graphs, "options": options, "sparse": [], "first": FirstCalls()}
    module.__dict__["recurrent"] = any(
        isinstance(submodule, torch.nn.RNNBase) for submodule in fn.modules()
    )
    return module


def _captured(fn: Any, with_backend: Callable) -> Any:
    """torch.compile's function or module; TorchDynamo's limit to the number of graphs holds for it alone."""
    compile_one: Any = torch.compile  # its types lack the option
    return compile_one(fn, backend=with_backend, isolate_recompiles=True)


def backend(options: CompileOptions, graphs: list[captured.Graph]) -> Callable:
    """A backend of torch.compile for these options; it notes what it captures in `graphs`."""
    selected, filtered = (
        options.torch_polyblocks_select_graphs,
        options.torch_polyblocks_filter_graphs,
    )

    def choose(number: int) -> bool:
        return (not selected or number in selected) and number not in filtered

    rounds = (
        options.emulate_precision_casts
    )  # by operators of Torch, each of which is several of JAX
    plain = dataclasses.replace(
        options,
        torch_polyblocks_select_graphs=(),
        torch_polyblocks_filter_graphs=(),
        emulate_precision_casts=False,
        polyblocks_disable_unsafe_math_canonicalizations=options.disable_unsafe_math_canonicalizations,
    )

    def compile_jaxpr(graph: CapturedGraph, name: str, device: torch.device) -> DirectPlan:
        memory = _memory(plain.target, device)
        donated = graph.donated if plain.target == "cpu" else ()  # others write to new arrays
        return DirectPlan(graph.jaxpr, name, plain, memory, graph.checks, donated)

    checked = plain.target == "cpu"  # on GPUs, eager Torch has no error at the call, either
    return captured.backend(
        compile_jaxpr, choose, graphs, options.strict_target, _place(options), rounds, checked
    )


def _place(options: CompileOptions) -> str:
    """Torch's name of the place of tensors: the simulator works on those of the CPU."""
    return "cuda" if options.target == "nvgpu" and not config.current().gpu_driver else "cpu"


def _memory(target: str, device: torch.device) -> TorchMemory:
    if target == "cpu":
        return TorchMemory()
    return CudaMemory(device, CudaDevice(device) if device.type == "cuda" else SimulatedDevice())


def _is_for_torch(args: tuple, kwargs: dict, options: CompileOptions, sparse: list[str]) -> bool:
    """Whether Torch runs a call: one with sparse tensors, with one warning for a function, unless strict.

    TorchDynamo would give up the function for all calls. Raises UnsupportedOp for other tensors
    that kernels cannot read.

    sparse: what has been warned of.
    """
    if options.target != "cpu":
        place = _place(options)
        for name, value in (*enumerate(args), *kwargs.items()):
            if isinstance(value, torch.Tensor):
                check_tensor(
                    value,
                    f"argument {name}" if isinstance(name, int) else f"argument `{name}`",
                    place,
                )
        return False
    has_dense, strict = False, options.strict_target
    for name, value in (*enumerate(args), *kwargs.items()) if kwargs else enumerate(args):
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, list | tuple | dict):
                continue
            value = next(filter(is_sparse, _tensors_in(value)), None)
            if value is None:
                continue
        if not (value.is_cpu and value.layout is torch.strided and not value.is_quantized):
            what = f"argument {name}" if isinstance(name, int) else f"argument `{name}`"
            if strict or not is_sparse(value):
                check_tensor(value, what)
            has_dense = True
            if not sparse:
                sparse.append(f"{what} is {value.layout}, and kernels read dense arrays")
                warnings.warn(f"the call runs in Torch: {sparse[0]}", FallbackWarning, stacklevel=3)
    return has_dense


def _tensors_in(container: list | tuple | dict) -> Iterator[torch.Tensor]:
    for value in container.values() if isinstance(container, dict) else container:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple | dict):
            yield from _tensors_in(value)


def _own(error: BackendCompilerFailed) -> Exception:
    """Finds the error that pbkern raised while TorchDynamo called it, or else Torch's error."""
    return error.inner_exception if isinstance(error.inner_exception, PbkernError) else error
