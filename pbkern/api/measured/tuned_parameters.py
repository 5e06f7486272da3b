"""Search of a kernel's parameters with measured times: arguments of what makes it, and fields of CompilerParams.

The default is measured first, then what an earlier search found, then the others: cheapest first by
the cost model, with one of a random order after every MODELLED of them. Each candidate's results are
compared with the default's. The faster ones are measured again, with alternating calls, until few
are left. These are measured beside the default, and what is not faster in each part of that
comparison does not replace it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

import jax

from pbkern.api.measured.measure import (
    MIN_CALLS,
    alternating,
    compared,
    drawn,
    first_difference,
    kernel_call,
    least_seconds,
    typical_seconds,
)
from pbkern.core import config
from pbkern.core.errors import OptionError, PbkernError, shown
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.options import CompileOptions, nearest
from pbkern.core.process import disk_cache
from pbkern.dsl.kernel import Kernel
from pbkern.dsl.specs import definition_line
from pbkern.dsl.trace import KernelFunction
from pbkern.fuse.cost.hand_written import predicted_seconds
from pbkern.targets import get_target

KIND = "tuned_parameters"
# Candidates of the model's order before each candidate of the random order.
MODELLED = 3
# Candidates that the model prices, of a random choice: making a kernel takes a part of a compilation.
MOST_PRICED = 48
# Candidates that are measured again beside the default.
MEASURED_AGAIN = 4
# The part of the budget for trying candidates; the rest is for the finalists.
SEARCH_SHARE = 0.75
# The part of the budget in which one candidate is measured.
MEASURED_SHARE = 0.01
# Seconds in which one candidate is measured at most, however large the budget is.
MOST_CANDIDATE_SECONDS = 0.1
# A candidate whose first calls take so many times as long as the best is measured no further.
HOPELESS = 2.0
# A candidate whose time is so many times that of the best is not measured again.
FAR_BEHIND = 4.0
# The part of the time that is left in which candidates are measured again before half of them are dropped.
ROUND_SHARE = 0.3
# The most time of a finalist that replaces the default, relative to the default's.
GAIN = 0.99

Point = tuple[tuple[str, Any], ...]  # (parameter, value) in the order of the space


@dataclass(frozen=True)
class Candidate:
    """One point of a space: its parameters, seconds of a call, or why it was refused."""

    parameters: Mapping[str, Any]
    seconds: float | None = None
    why: str = ""


@dataclass(frozen=True)
class ParameterTuning:
    """Results of `tune` over a space of parameters.

    Attributes:
      name: the kernel's.
      best: parameters of the fastest candidate; those of the default where nothing is faster.
      kernel: the kernel with them, callable.
      before, after: seconds of a call with the default and with `best`, of alternating calls.
      candidates: what was tried, in order.
      space_size: candidates that there are.
      remembered: whether an earlier search, perhaps of another process, had found `best` already.
      seconds: that the search took.
      paste: source of `best`.
    """

    name: str
    best: Mapping[str, Any]
    kernel: Any
    before: float
    after: float
    candidates: tuple[Candidate, ...]
    space_size: int
    remembered: bool
    seconds: float
    paste: str

    @property
    def improved(self) -> bool:
        return self.after < self.before

    def __str__(self) -> str:
        if self.space_size < 2:
            return (
                f"{self.name}: nothing to vary. space={{'ROWS': [16, 32, 64]}} gives values of parameters of the "
                "function that makes the kernel, or of fields of its CompilerParams"
            )
        refused = sum(candidate.seconds is None for candidate in self.candidates)
        told = "found before" if self.remembered else "tuned"
        gain = f"{self.before * 1e6:.1f} us by default, {self.after * 1e6:.1f} us {told}"
        tried = f"{len(self.candidates)} of {self.space_size} candidates, {refused} refused"
        return f"{self.name}: {gain}; {tried}; {self.seconds:.1f} s\n  {self.paste}"


def tune_parameters(
    maker: Callable, args: tuple, space: Mapping[str, Sequence], budget: float, seed: int
) -> ParameterTuning:
    """Searches a space; see `tune`."""
    begin = time.monotonic()
    making = Making.of(maker, space)
    points = making.points(space)
    operands = tuple(drawn(args)) or None
    default = making.default(points[0], operands)
    if isinstance(default, Kernel) and operands is None:
        operands = tuple(drawn([_struct(type_) for type_ in default.in_types]))
    name = getattr(default, "name", making.name)
    if len(points) < 2:
        seconds = time.monotonic() - begin
        return ParameterTuning(
            name, {}, default, math.nan, math.nan, (), len(points), False, seconds, ""
        )
    search = _Search(making, points, operands or (), begin, budget, seed)
    return search.run(name, default, _Memory(making, default, operands or ()))


def _struct(type_) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(type_.shape, type_.dtype)


@dataclass(frozen=True)
class Making:
    """The function that makes a kernel of parameters, and which of them are fields of CompilerParams.

    Attributes:
      maker: keyword arguments -> kernel, or a kernel.
      defaults: values that the maker has for parameters of the space; None: its own, whatever it is.
      fields: parameters of the space that are fields of the target's CompilerParams.
      traced: kernels by the maker's arguments: those that differ in fields alone are traced once.
    """

    maker: Any
    name: str
    defaults: Mapping[str, Any]
    fields: frozenset[str]
    options: CompileOptions
    traced: dict[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, maker: Any, space: Mapping[str, Sequence]) -> Making:
        """Raises OptionError for a parameter that nothing has, or that has no values."""
        options = CompileOptions.from_dict({"target": config.current().target})
        is_kernel = isinstance(maker, (Kernel, KernelFunction))
        if not isinstance(space, Mapping) or not all(isinstance(name, str) for name in space):
            raise OptionError(
                "a space gives values of parameters by their names",
                why=f"space={shown(space)}",
                hint='space={"ROWS": [16, 32, 64]}',
            )
        if not callable(maker):
            raise OptionError(
                "what is tuned with a space is no kernel, and no function that makes one",
                why=f"given {shown(maker)}",
                hint="pbkern.tune(make, *arrays, space={...})",
            )
        parameters = {} if is_kernel else dict(inspect.signature(maker).parameters)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        known = {field.name for field in dataclasses.fields(_params_class(options))}
        fields = {name for name in space if name not in parameters and name in known}
        for name, values in space.items():
            if name not in parameters and name not in known and not takes_any:
                raise OptionError(
                    f"nothing has the parameter `{name}`",
                    why=f"the maker takes {', '.join(parameters) or 'none'}; fields of CompilerParams are "
                    f"{', '.join(sorted(known))}",
                    hint=nearest(name, [*parameters, *known]),
                )
            if isinstance(values, str) or not isinstance(values, Sequence) or not values:
                raise OptionError(
                    f"the parameter `{name}` has no values", why=f"{values!r}", hint="[16, 32, 64]"
                )
            if not all(isinstance(value, Hashable) for value in values):
                raise OptionError(
                    f"values of the parameter `{name}` cannot be told apart",
                    why=f"{shown(values)}: lists, arrays and dictionaries have no hash",
                    hint="tuples in place of lists, or names of what the maker looks up",
                )
        defaults = {
            name: parameters[name].default if name in parameters else None
            for name in space
            if name not in parameters or parameters[name].default is not inspect.Parameter.empty
        }
        called = getattr(maker, "func", maker)  # of functools.partial
        title = str(getattr(called, "__name__", None) or getattr(called, "name", "make"))
        return cls(maker, title, defaults, frozenset(fields), options)

    def points(self, space: Mapping[str, Sequence]) -> list[Point]:
        """The default, then all other points: what the maker has where it says nothing, else the first value."""
        default = tuple(
            (name, self.defaults.get(name, values[0])) for name, values in space.items()
        )
        values = [
            list(dict.fromkeys([base, *values] if base is None else values))
            for (name, base), values in zip(default, space.values())
        ]
        points = (tuple(zip(space, chosen)) for chosen in itertools.product(*values))
        return list(dict.fromkeys([default, *points]))

    def default(self, point: Point, operands: Sequence | None) -> Any:
        """The kernel of the default, as `kernel`. Raises OptionError where the maker fails without a message of ours."""
        try:
            return self.kernel(point, operands)
        except PbkernError:
            raise
        except Exception as error:
            values = ", ".join(f"{name}={shown(value)}" for name, value in point)
            said = next(iter(str(error).splitlines()), "")
            raise OptionError(
                "the default, with which others are compared, cannot be made",
                at=definition_line(self.maker),
                why=f"{values or self.name}: {type(error).__name__}: {said}",
                hint="the maker's own values, and the first of a parameter that has none, must make a kernel",
            ) from error

    def kernel(self, point: Point, operands: Sequence | None) -> Any:
        """The kernel of a point, or what else the maker makes: a function of arrays."""
        given = [(name, value) for name, value in point if value is not None]
        arguments = {name: value for name, value in given if name not in self.fields}
        kernel = self.traced.get(repr(arguments))
        if kernel is None:
            is_kernel = isinstance(self.maker, (Kernel, KernelFunction))
            kernel = self.maker if is_kernel else self.maker(**arguments)
            if isinstance(kernel, KernelFunction):
                kernel = kernel.trace(*(operands or ()))
            self.traced[repr(arguments)] = kernel
        fields = {name: value for name, value in given if name in self.fields}
        if not fields:
            return kernel
        if not isinstance(kernel, Kernel):
            raise OptionError(
                "fields of CompilerParams are those of a kernel", why=f"the maker makes {kernel!r}"
            )
        target = self.options.target
        params = kernel.compiler_params.get(target) or _params_class(self.options)()
        changed = {**kernel.compiler_params, target: params.replace(**fields)}
        return dataclasses.replace(kernel, compiler_params=changed, sizes=None)

    def call(self, kernel: Any) -> Callable:
        """The kernel, compiled at its first call."""
        return kernel_call(kernel, self.options) if isinstance(kernel, Kernel) else jax.jit(kernel)

    def paste(self, point: Point) -> str:
        """Source of a point."""
        given = [(name, f"{name}={value!r}") for name, value in point if value is not None]
        arguments = [text for name, text in given if name not in self.fields]
        fields = [text for name, text in given if name in self.fields]
        called = [f"{self.name}({', '.join(arguments)})"] if arguments else []
        params = f"compiler_params=pbkern.{self.options.target}.CompilerParams({', '.join(fields)})"
        return ", ".join([*called, *([params] if fields else [])]) or self.name


def _params_class(options: CompileOptions) -> type:
    return type(get_target(options.target).fused_params((), options)[options.target])


class _Memory:
    """Results of searches on disk, by the default kernel, its shapes, and the machine."""

    def __init__(self, making: Making, default: Any, operands: Sequence):
        target = get_target(making.options.target)
        shapes = [(tuple(x.shape), str(x.dtype)) for x in jax.tree.leaves(operands)]
        what = default.content if isinstance(default, Kernel) else inspect.getsource(making.maker)
        self.store = disk_cache.current()
        self.key = disk_cache.digest(
            (repr(what), shapes, config.num_threads(), target.identity(), sorted(making.fields))
        )

    def recall(self, points: Sequence[Point]) -> tuple[Point | None, bool]:
        """(the point that was best, whether all of these points had been tried)."""
        payload = self.store.get(KIND, self.key) if self.store is not None else None
        if payload is None:
            return None, False
        earlier = json.loads(payload)
        named = {repr(point): point for point in points}
        return named.get(earlier["best"]), set(named) <= set(earlier["tried"])

    def remember(self, best: Point, tried: Sequence[Point]) -> None:
        if self.store is not None:
            payload = {"best": repr(best), "tried": list(map(repr, tried))}
            self.store.put(KIND, self.key, json.dumps(payload).encode())


@dataclass
class _Search:
    making: Making
    points: list[Point]
    operands: tuple
    begin: float
    budget: float
    seed: int
    times: dict[Point, float] = field(default_factory=dict)
    calls: dict[Point, Callable] = field(default_factory=dict)
    candidates: list[Candidate] = field(default_factory=list)
    want: list = field(default_factory=list)

    def run(self, name: str, default: Any, memory: _Memory) -> ParameterTuning:
        known, complete = memory.recall(self.points)
        base = self.points[0]
        self.attempt(base, default)
        if not self.times:
            raise OptionError("the default cannot run", why=self.candidates[0].why)
        if known is not None and known != base:
            self.attempt(known)
        end = self.begin + self.budget * SEARCH_SHARE
        for point in () if complete else self.order():
            if time.monotonic() > end:
                break
            if point != known:
                self.attempt(point)
        best, before, after = self.final()
        tried = [tuple(candidate.parameters.items()) for candidate in self.candidates]
        memory.remember(best, self.points if complete else tried)
        return ParameterTuning(
            name,
            {key: value for key, value in best if value is not None},
            self.making.kernel(best, self.operands),
            before,
            after,
            tuple(self.candidates),
            len(self.points),
            known is not None and best == known,
            time.monotonic() - self.begin,
            self.making.paste(best),
        )

    def order(self) -> Iterator[Point]:
        """The other points: the model's order, and a random one between."""
        costs = get_target(self.making.options.target).costs()
        shuffled = random.Random(self.seed).sample(self.points[1:], len(self.points) - 1)

        def price(point: Point) -> float:
            try:
                kernel = self.making.kernel(point, self.operands)
            except Exception:  # reported when the candidate's turn comes
                return math.inf
            return predicted_seconds(kernel, costs) if isinstance(kernel, Kernel) else 0.0

        modelled = iter(sorted(shuffled[:MOST_PRICED], key=price))
        mixed = (
            point
            for explored in reversed(shuffled)
            for point in (*itertools.islice(modelled, MODELLED), explored)
        )
        yield from dict.fromkeys(mixed)

    def attempt(self, point: Point, kernel: Any = None) -> None:
        """Measures a candidate whose results are the default's; what fails is reported and left out."""
        try:
            candidate = self.making.kernel(point, self.operands) if kernel is None else kernel
            run = functools.partial(self.making.call(candidate), *self.operands)
            results = jax.tree.leaves(jax.block_until_ready(run()))
        except Exception as error:
            self.report(point, why=f"{type(error).__name__}: {str(error).splitlines()[0]}")
            return
        if not self.want:
            self.want = results
        for number, (result, expected) in enumerate(zip(results, self.want, strict=True)):
            difference = first_difference(result, expected)
            if difference is not None:
                self.report(point, why=f"output {number} {difference}")
                return
        (first,) = least_seconds([run], 0.0)
        pause = min(self.budget * MEASURED_SHARE, MOST_CANDIDATE_SECONDS)
        hopeless = self.times and first > HOPELESS * min(self.times.values())
        enough = hopeless or first * MIN_CALLS > pause
        self.times[point] = first if enough else min(first, *least_seconds([run], pause))
        self.calls[point] = run
        self.report(point, self.times[point])

    def report(self, point: Point, seconds: float | None = None, why: str = "") -> None:
        self.candidates.append(Candidate(dict(point), seconds, why))
        shown = f"{seconds * 1e6:.1f} us" if seconds is not None else f"refused, {why}"
        values = ", ".join(f"{name}={value!r}" for name, value in point if value is not None)
        print(
            f"[{len(self.candidates)}/{len(self.points)}] {values or 'default'}: {shown}",
            flush=True,
        )

    def final(self) -> tuple[Point, float, float]:
        """(best, seconds of the default, seconds of the best), of the fastest few and the default again."""
        base = self.points[0]
        ranked = [base, *self.fastest(base)]
        seconds, faster = compared([self.calls[point] for point in ranked], self.left(), GAIN)
        best = min((n for n in range(len(ranked)) if n == 0 or faster[n]), key=seconds.__getitem__)
        return ranked[best], seconds[0], seconds[best]

    def left(self) -> float:
        return max(self.begin + self.budget - time.monotonic(), 0.0)

    def fastest(self, base: Point) -> list[Point]:
        """The fastest few beside the default: the faster half is measured again, with alternating calls, until few are left.

        One after the other, what else runs on the machine decides.
        """
        limit = FAR_BEHIND * min(self.times.values())
        points = [point for point in self.times if point != base and self.times[point] <= limit]
        points.sort(key=self.times.__getitem__)
        while len(points) > MEASURED_AGAIN:
            calls = [self.calls[point] for point in points]
            again = alternating(calls, self.left() * ROUND_SHARE)
            self.times |= zip(points, typical_seconds(again))
            points.sort(key=self.times.__getitem__)
            points = points[: max(len(points) // 2, MEASURED_AGAIN)]
        return points
