"""`tune(f, *args, budget=seconds)`: schedules searched with measured times, and kept for later compilations.

Each fused kernel is tried alone, on random operands of its sizes: first other blocks, cheapest
first by the model, then the target's variations (prefetched steps, threads) of the best. Every
candidate's results are compared with the model's choice. The best few are measured twice more, with
alternating calls, and have to gain both times. At last the whole function runs with all that was
chosen beside the function as it was, likewise: what is not faster then is not kept.

Fusion itself is not searched: which operations share a kernel stays the cost model's decision.
Groups of the function and their candidates are fuse/emit/choices.py; what was found is kept by
api/measured/tuned_choices.py.
"""

from __future__ import annotations

import functools
import math
import numbers
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from pbkern import _jax, fuse
from pbkern.core.errors import OptionError, PbkernError, shown
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.options import CompileOptions
from pbkern.dsl.kernel import Kernel
from pbkern.dsl.trace import KernelFunction
from pbkern.targets import get_target

from . import decorators, pipeline
from .measured import tuned_choices
from .measured.measure import agree, compared, drawn, kernel_call, least_seconds, random_operands
from .measured.tuned_parameters import ParameterTuning, tune_parameters

if TYPE_CHECKING:
    from pbkern.fuse import Choice
    from pbkern.fuse.graph import Node

# Candidates of blocks per kernel that are measured. Source: not recorded.
MOST_CANDIDATES = 16
# Best candidates that are measured again. Source: not recorded.
FINALISTS = 3
# The most time of a candidate that is taken, relative to the model's choice. Source: not recorded.
CANDIDATE_GAIN = 0.97
# The most time of the whole function with the new choices, relative to the time before. Source: not
# recorded.
WHOLE_GAIN = 0.99
# The part of the time budget for measuring kernels. Source: not recorded.
KERNELS_SHARE = 0.75
# The part of the time budget for measuring the whole function at the end. Source: not recorded.
WHOLE_SHARE = 0.2
# The part of a kernel's remaining time for measuring one candidate. Source: not recorded.
CANDIDATE_SHARE = 0.03
FINAL_PAUSES = 2  # a finalist is measured for so many times as long as a candidate


@dataclass(frozen=True)
class TunedKernel:
    """One kernel alone: seconds with the model's choice and with `choice`; candidates tried, and refused for results."""

    name: str
    choice: Choice
    before: float
    after: float
    tried: int
    differing: int = 0

    def __str__(self) -> str:
        gain = f"{self.before * 1e6:.1f} us" + (
            f" before, {self.after * 1e6:.1f} us" if self.choice != fuse.Choice() else ""
        )
        refused = f", {self.differing} with other results" if self.differing else ""
        return f"{self.name}: {self.choice}; {gain}; {self.tried} candidate(s){refused}"


@dataclass(frozen=True)
class Tuning:
    """Results of `tune`.

    Attributes:
      kernels: each fused kernel alone. A kernel that the budget did not reach has tried 0
        candidates.
      before, after: seconds of the whole function, least of alternating calls, with the model's
        choices and with the kernels' best.
      improved: whether the kernels' best are now the function's; otherwise the model's choices stay.
      seconds: that tuning took.
    """

    name: str
    kernels: tuple[TunedKernel, ...]
    before: float
    after: float
    improved: bool
    seconds: float

    def __str__(self) -> str:
        if not self.kernels:
            return f"{self.name}: nothing to vary: fusion made no kernel; space= varies kernels written by hand"
        better = any(kernel.choice != fuse.Choice() for kernel in self.kernels)
        why = "not faster as a whole" if better else "nothing better"
        verdict = "kept" if self.improved else f"{why}: the model's choices stay"
        times = f"{self.before * 1e3:.3f} ms" + (
            f" before, {self.after * 1e3:.3f} ms tuned" if better else ""
        )
        head = f"{self.name}: {times}, {verdict}; {self.seconds:.1f} s"
        return "\n".join([head, *(f"  {kernel}" for kernel in self.kernels)])


@_jax.hides_own_frames
def tune(
    function: Callable,
    *args: Any,
    budget: float = 30.0,
    space: Mapping[str, Sequence] | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> Tuning | ParameterTuning:
    """Searches schedules of f's kernels for arguments like these, prints what it chose, and keeps it.

    Later compilations of the same program, in this process and in others on the same kind of
    machine, use what was found; `pbkern cache clear` forgets it. A result is never kept that was
    measured to be slower than the default.

    With a `space`, `function` makes a kernel of named parameters, and their values are searched,
    each checked against the default. Candidates that fail are left out. What is found is kept by
    kernel, shapes and machine: a later search starts from it.

    Args:
      function: a function decorated with pbkern.jit, or a plain one; with a space, a function that
        returns a kernel, or a kernel, of which only CompilerParams vary.
      *args: its arguments; with a space, those of the kernel. Types in place of arrays stand for
        random arrays; give arrays where values decide how long the function takes.
      budget: seconds that the search may take, about; compiling a candidate is not interrupted.
      space: name -> values of a parameter of `function`, or of a field of the target's
        CompilerParams: {"ROWS": [16, 32, 64], "num_threads": [1, 2]}.
      seed: of the order in which candidates are tried that the cost model does not favour.
      **kwargs: its named arguments, in the same way.
    Raises OptionError for a budget that is not above 0, and for parameters that nothing has.

    Examples:
      >>> tuning = pbkern.tune(lambda x: x * 2, jnp.ones(1 << 16), budget=0.1)  # doctest: +ELLIPSIS
      <lambda>: ...
      >>> tuning.after > 0  # seconds of a call
      True
      >>> def doubled(ROWS=8):
      ...     rows = pbkern.BlockSpec((ROWS, 128), lambda i: (i, 0))
      ...     return pbkern.kernel(
      ...         lambda x, o: o.__setitem__(..., 2 * x[...]), grid=(pbkern.cdiv(64, ROWS),),
      ...         in_specs=[rows], out_specs=rows, out_shape=jax.ShapeDtypeStruct((64, 128), "float32"),
      ...     )
      >>> tuning = pbkern.tune(doubled, jnp.ones((64, 128)), space={"ROWS": [8, 64]}, budget=0.1)  # doctest: +ELLIPSIS
      [1/2] ROWS=8: ...
      >>> tuning.best["ROWS"] in (8, 64)
      True
    """
    if not (isinstance(budget, numbers.Real) and budget > 0):
        raise OptionError(
            "the budget of tuning must be positive",
            why=f"budget={shown(budget)}",
            hint="30: seconds",
        )
    if space is not None or isinstance(function, (Kernel, KernelFunction)):
        if kwargs:
            why = f"given {', '.join(kwargs)}"
            raise OptionError("kernels have no named arguments", why=why, hint="space={...}")
        searched = tune_parameters(function, args, space or {}, budget, seed)
        print(searched)
        return searched
    begin = time.monotonic()
    jitted: Any = function if hasattr(function, "explain") else decorators.jit(function)
    args, kwargs = drawn((args, kwargs))
    jaxpr, name, options = jitted.call_of(*args, **kwargs)
    with tuned_choices.trial(()):
        groups = pipeline.current_plan(jaxpr, name, options).groups()
    if not groups:
        untuned = Tuning(name, (), math.nan, math.nan, False, time.monotonic() - begin)
        print(untuned)
        return untuned
    tuned = _tune_kernels(groups, options, begin + budget * KERNELS_SHARE)
    chosen = tuple(tuned.choice for tuned in tuned)
    both = [jitted.undonated() for _ in range(2)]
    before, after, faster = _whole(both, (args, kwargs), ((), chosen), budget * WHOLE_SHARE)
    gains = faster and any(choice != fuse.Choice() for choice in chosen)
    tuned_choices.remember(jaxpr, options, chosen if gains else (fuse.Choice(),) * len(chosen))
    jitted.clear_cache()  # what was compiled before is compiled again
    result = Tuning(name, tuple(tuned), before, after, gains, time.monotonic() - begin)
    print(result)
    return result


# --- kernels
# --------------------------------------------------------------------------------------------------------


def _tune_kernels(nodes: list[Node], options: CompileOptions, end: float) -> list[TunedKernel]:
    """One result per group. Time is given in proportion to what the model thinks each kernel takes."""
    results: dict[int, TunedKernel] = {}
    waiting = sorted(nodes, key=lambda untuned: -untuned.seconds)
    while waiting:
        node = waiting.pop(0)
        share = node.seconds / max(
            node.seconds + sum(untuned.seconds for untuned in waiting), 1e-12
        )
        now = time.monotonic()
        results[id(node)] = _TuneSearch(node, options, now + max(end - now, 0.0) * share).run()
    return [results[id(tuned_node)] for tuned_node in nodes]


@dataclass
class _TuneSearch:
    """Search of one kernel's choice, until `end`."""

    node: Node
    options: CompileOptions
    end: float
    tried: int = 0
    differing: int = 0
    times: dict[Choice, float] = field(default_factory=dict)
    calls: dict[Choice, Callable] = field(default_factory=dict)

    def run(self) -> TunedKernel:
        self.target = get_target(self.options.target)
        self.pause = max(0.005, CANDIDATE_SHARE * (self.end - time.monotonic()))
        self.last = self.end - self.pause * FINAL_PAUSES * (
            FINALISTS + 1
        )  # the rest is for the finalists
        default = self.kernel(fuse.Choice())
        self.operands = random_operands(default.in_types)
        self.want = [
            np.asarray(result) for result in kernel_call(default, self.options)(*self.operands)
        ]
        self.measure(fuse.Choice())
        for choice in fuse.choices.candidates(self.node, self.target.costs(), MOST_CANDIDATES)[1:]:
            self.attempt(choice)
        for choice in self.variations():
            self.attempt(choice)
        best, before, after = self.final()
        return TunedKernel(self.node.kernel, best, before, after, self.tried, self.differing)

    def kernel(self, choice: Choice):
        def params_for(semantics, **chosen):
            return self.target.fused_params(semantics, self.options, **chosen)

        return fuse.choices.kernel_at(self.node, choice, self.target.costs(), params_for)

    def attempt(self, choice: Choice) -> None:
        """Measures a candidate, if there is time, and its results are those of the model's choice."""
        if time.monotonic() > self.last or choice in self.times:
            return
        self.tried += 1
        try:
            same = self.agrees(choice)
        except PbkernError:  # cannot be lowered with these blocks
            return
        if same:
            self.measure(choice)
        else:
            self.differing += 1

    def agrees(self, choice: Choice) -> bool:
        run = kernel_call(self.kernel(choice), self.options)
        self.calls[choice] = lambda: run(*self.operands)
        return all(map(agree, self.calls[choice](), self.want))

    def measure(self, choice: Choice) -> None:
        if choice not in self.calls:
            self.agrees(choice)
        (self.times[choice],) = least_seconds([self.calls[choice]], self.pause)

    def variations(self) -> Iterator[Choice]:
        """Varies the best choice so far, one field at a time; each field starts from the best of those before."""
        for name, values in self.target.variations():
            for value in values:
                best = min(self.times, key=self.times.__getitem__)
                other_params = tuple(param for param in best.params if param[0] != name)
                yield fuse.Choice(best.blocks, tuple(sorted((*other_params, (name, value)))))

    def final(self) -> tuple[Choice, float, float]:
        """(best, seconds of the default, seconds of the best): the fastest few again, calls alternating with the default's."""
        ranked = sorted(
            (choice for choice in self.times if choice != fuse.Choice()), key=self.times.__getitem__
        )[:FINALISTS]
        ranked = [fuse.Choice(), *ranked]
        seconds, faster = compared(
            [self.calls[choice] for choice in ranked],
            self.pause * FINAL_PAUSES * len(ranked),
            CANDIDATE_GAIN,
        )
        best = min((n for n in range(len(ranked)) if n == 0 or faster[n]), key=seconds.__getitem__)
        return ranked[best], seconds[0], seconds[best]


# --- the whole function
# ---------------------------------------------------------------------------------------------


def _whole(
    both: list[Callable], arguments: tuple, chosen: tuple, seconds: float
) -> tuple[float, float, bool]:
    """(seconds of the first, of the second, whether that is faster with equal results): one function, two sets of choices."""
    args, kwargs = arguments
    results = []
    for f, choice in zip(both, chosen):
        with tuned_choices.trial(choice):
            results.append(jax.tree.leaves(f(*args, **kwargs)))  # compiled here
    same = all(map(agree, *results))
    times, faster = compared(
        [functools.partial(f, *args, **kwargs) for f in both], seconds, WHOLE_GAIN
    )
    return times[0], times[1], same and faster[1]
