"""Partition, Plan -> Explanation: kernels and their ops, what was not fused and why, with prices, and what XLA keeps.

The text begins with what matters: time, the machine's limit, launches, memory, and time per line of
the user's source. Equal kernels and equal refusals are told once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from jax.extend import core as jex

from pbkern._jax import context_of_place, scopes_of_place, user_line
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import atoms
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.host_program import BufferKind, HostProgram
from pbkern.fuse.algebra.contraction_precision import MATRIX_MODE, multiplies_halves
from pbkern.fuse.cost.kinds import DATA_MOVEMENT
from pbkern.fuse.cost.model import Cost, CostModel
from pbkern.fuse.graph import Edge, Node, Partition
from pbkern.fuse.options import FuseOptions
from pbkern.fuse.tiling.hidden_chunks import leaves_out_hidden

from .timeline import Timeline, timeline_of


@dataclass(frozen=True)
class KernelReport:
    """One fused kernel, and the model's figures for one run of it.

    Attributes:
      name: the kernel's.
      grid: number of programs per dimension.
      equations: its operations; of one step, if it has a loop.
      costs: the prices of its operations.
      cost: prediction.
      last_stage: operations of its last stage.
      measured: seconds of one run of the kernel alone; None unless asked for.
      steps: steps of the loop in it.
      chunk_columns: columns that online reductions take at a time; 0 without such reductions.
      leaves_out_hidden: whether it reads no chunk that its mask hides, so that the figures are those of a mask that hides none.
      launches: how often one call launches it, as in a loop; None if that depends on values.
      instructions: matrix instructions that compute its products.
      precision: the mode in which its products are multiplied and added; "" where their types give it.
    """

    name: str
    grid: tuple[int, ...]
    equations: Sequence[jex.JaxprEqn]
    costs: CostModel
    cost: Cost
    last_stage: Sequence[jex.JaxprEqn] = ()
    measured: float | None = None
    steps: int = 1
    chunk_columns: int = 0
    leaves_out_hidden: bool = False
    launches: int | None = 1
    instructions: tuple[str, ...] = ()
    precision: str = ""

    # Deep functions have thousands of operations. A text names those of a few kernels.

    @functools.cached_property
    def ops(self) -> tuple[tuple[str, str | None], ...]:
        """(primitive, line of the user's source) of each operation."""
        return _named(self.equations)

    @functools.cached_property
    def finish(self) -> tuple[tuple[str, str | None], ...]:
        """`ops` of the last stage."""
        return _named(self.last_stage)

    @property
    def contexts(self) -> list[str]:
        """Per operation, what tells it from others of its line (scope, caller)."""
        return list(map(context_of_place, self.equations))

    @property
    def scopes(self) -> list[str]:
        """Per operation, its scopes of jax.named_scope, or ""."""
        return ["/".join(scopes_of_place(eqn)) for eqn in self.equations]

    @functools.cached_property
    def work(self) -> list[float]:
        """Per operation, arithmetic operations as the cost model counts them."""
        return [_work(eqn, self.costs) for eqn in self.equations]

    @property
    def seconds(self) -> float:
        """Seconds of all its launches in one call, measured if they were, else predicted.

        Of one launch if values decide how many there are.
        """
        one = self.cost.seconds if self.measured is None else self.measured
        return one * (1 if self.launches is None else self.launches)

    @property
    def bound(self) -> str:
        """The resource that bounds it: "memory" or "arithmetic"."""
        return "memory" if self.cost.memory >= self.cost.compute else "arithmetic"

    def __str__(self) -> str:
        price, one = self.cost, self.measured or self.cost.seconds
        hidden = " that the mask does not hide" if self.leaves_out_hidden else ""
        steps = (
            f"{self.steps} steps of a loop, "
            if self.steps > 1
            else f"in chunks of {self.chunk_columns} columns{hidden}, "
            if self.chunk_columns
            else ""
        )
        measured = f"{self.measured * 1e6:.1f} us measured, " if self.measured is not None else ""
        head = (
            f"{self.name}: grid {list(self.grid)}, {self._times(one)}{steps}{price.seconds * 1e6:.1f} us predicted, {measured}"
            f"{100 * price.limit / (one or price.limit or 1):.0f} % of the machine's limit, "
            f"{price.bytes_moved / 1e6:.2f} MB, {price.flops / 1e6:.2f} Mflop (x{price.recompute:.2f} recompute), "
            f"{price.working_set // 1024} KB per program"
        )
        products = [f"    products by {name}" for name in self.instructions]
        products += [f"    {self.precision}"] * bool(self.precision)
        last = [f"    last stage: {line}" for line in _by_line(self.finish)]
        lines = _by_line(self.ops, self.contexts)
        return "\n".join([head, *(f"    {line}" for line in lines), *products, *last])

    @property
    def content(self) -> tuple:
        """Equal for kernels of which one stands for all."""
        figures = (round(self.cost.seconds, 9), self.cost.bytes_moved, self.cost.flops)
        return (
            self.grid,
            self.ops,
            self.finish,
            figures,
            self.measured,
            self.steps,
            self.chunk_columns,
            self.launches,
        )

    def as_dict(self) -> dict:
        """The report as values that JSON has."""
        return {
            "name": self.name,
            "grid": list(self.grid),
            "launches": self.launches,
            "predicted_seconds": self.cost.seconds,
            "measured_seconds": self.measured,
            "limit_seconds": self.cost.limit,
            "bound": self.bound,
            "bytes_moved": self.cost.bytes_moved,
            "flops": self.cost.flops,
            "recompute": self.cost.recompute,
            "leaves_out_hidden": self.leaves_out_hidden,
            "instructions": list(self.instructions),
            "operations": [
                {"primitive": name, "at": at, "context": context}
                for (name, at), context in zip(self.ops, self.contexts)
            ],
        }

    def _times(self, seconds: float) -> str:
        if self.launches == 1:
            return ""
        if self.launches is None:
            return "run as often as values say, each time "
        return f"run {self.launches} times in {self.launches * seconds * 1e6:.1f} us, each time "


# Origin of a kernel that a rewrite of the function made (fuse/algebra/grouped_products.py).
GROUPED = "a grouped product"


@dataclass(frozen=True)
class HandWrittenKernel:
    """A kernel that fusion did not make.

    Attributes:
      name: the kernel's.
      origin: who wrote it.
      at: line of the user's source that calls it.
      grid: number of programs per dimension.
      lines: how each grid dimension runs, then further lines of the report.
    """

    name: str
    origin: str
    at: str | None
    grid: tuple
    lines: tuple[str, ...]

    def __str__(self) -> str:
        head = f"{self.name} ({self.origin}): grid [{', '.join(map(str, self.grid))}]  at {self.at or 'unknown line'}"
        return "\n".join([head, *(f"    {line}" for line in self.lines)])

    def as_dict(self) -> dict:
        """The report as values that JSON has, without `lines`."""
        return {"name": self.name, "origin": self.origin, "at": self.at, "grid": list(self.grid)}


# Lines of the source in the table of times.
LINES = 8
# Most kernels, and most refusals, that a report lists unless it is asked for more.
TOP = 12


@dataclass(frozen=True)
class Explanation:
    """Report of the fuser's work.

    `str()` is the text: figures of the whole, time by line of the source, kernels in launch order, operations that were not
    fused, then the number of those that were. `as_dict()` is the same as data.

    Attributes:
      name: the function's.
      kernels: the fuser's, in launch order.
      edges: decisions to fuse or not to fuse an operation with its consumers.
      left: operations that XLA runs.
      written: hand-written kernels (api/report/written.py adds them).
      verbose: whether the text has all kernels, refusals and fusions, and operations that were refused at first and fused
        later.
      planned_anew: why the plan is not kept on disk; "" where it is, and where there is no store.
      temporaries: bytes of arrays between kernels.
      timeline: the order in which kernels and XLA's operations run.
      top: most kernels, and most refusals, in the text: those that take or would save most.
      machine_note: how the machine's figures were chosen; "" for the usual way.
    """

    name: str
    kernels: tuple[KernelReport, ...]
    edges: tuple[Edge, ...]
    left: tuple
    written: tuple[HandWrittenKernel, ...] = ()
    verbose: bool = False
    planned_anew: str = ""
    temporaries: int = 0
    timeline: Timeline = dataclasses.field(default_factory=Timeline)
    top: int = TOP
    machine_note: str = ""

    @property
    def seconds(self) -> float:
        """Seconds of all fused kernels in one call, measured where they were, else predicted."""
        return sum(kernel.seconds for kernel in self.kernels)

    def __str__(self) -> str:
        edges = self._edges()
        fused = [edge for edge in edges if edge.fused]
        grouped = sum(kernel.origin == GROUPED for kernel in self.written)
        users = len(self.written) - grouped
        written = f" and {users} that you wrote" if users else ""
        out = [
            f"{self.name}: {len(self.kernels) + grouped} kernel(s){written}, {len(self.left)} operation(s) left to XLA"
        ]
        out += self._figures()
        out += [f"  machine: {self.machine_note}"] * bool(self.machine_note)
        out += self._kernel_lines()
        out += [f"  kernel {kernel}" for kernel in self.written]
        out += self._refusals([edge for edge in edges if not edge.fused])
        if self.verbose:
            out += [f"  {_edge([edge])}" for edge in fused]
        elif fused:
            saved = sum(edge.bytes_saved for edge in fused) / 1e6
            out.append(
                f"  fused: {len(fused)} operation(s), which saves {saved:.2f} MB; verbose=True lists them"
            )
        out += [f"  XLA: {x.op} at {x.at or 'unknown line'}: {x.why}" for x in self.left]
        out += [f"  planned anew in each process: {self.planned_anew}"] * bool(self.planned_anew)
        return "\n".join(out)

    def by_line(self) -> dict[str, float]:
        """Line of the source -> seconds, the slowest first; a kernel's time is divided as the work of its operations is.

        Forward and backward operations of a line count together.
        """
        return self._divided(
            lambda kernel: [line or "unknown line" for _, line in kernel.ops],
        )

    def by_scope(self) -> dict[str, float]:
        """Scope of jax.named_scope -> seconds, the slowest first; operations outside of scopes count as "".

        Empty where the function has no scopes.
        """
        seconds = self._divided(lambda kernel: kernel.scopes)
        return seconds if any(seconds) else {}

    def _divided(self, parts_of: Callable[[KernelReport], Sequence[str]]) -> dict[str, float]:
        """Seconds of the parts to which kernels' operations belong, the slowest first."""
        seconds: dict[str, float] = {}
        for kernel in self.kernels:
            whole = sum(kernel.work)
            for part, work in zip(parts_of(kernel), kernel.work):
                share = work / whole if whole else 1 / len(kernel.ops)
                seconds[part] = seconds.get(part, 0.0) + kernel.seconds * share
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    def as_dict(self) -> dict:
        """The report as values that JSON has: seconds, bytes, operations, lines of the source."""
        refused = [edge for edge in self._edges() if not edge.fused and not edge.superseded]
        return {
            "name": self.name,
            "machine_note": self.machine_note,
            "seconds": self.seconds,
            "limit_seconds": self._limit(),
            "launches": self._launches(),
            "bytes_moved": self._bytes_moved(),
            "temporary_bytes": self.temporaries,
            "peak_bytes": self._peak_bytes(),
            "peak_at": self._peak_place(),
            "planned_anew": self.planned_anew,
            "seconds_by_line": self.by_line(),
            "seconds_by_scope": self.by_scope(),
            "kernels": [kernel.as_dict() for kernel in self.kernels],
            "written": [kernel.as_dict() for kernel in self.written],
            "not_fused": [
                {
                    "operation": _name(group[0].producer),
                    "at": user_line(group[0].producer),
                    "why": group[0].why,
                    "times": len(group),
                    "bytes": sum(edge.bytes_saved for edge in group),
                }
                for group in _alike(refused)
            ],
            "left_to_xla": [{"operation": x.op, "at": x.at, "why": x.why} for x in self.left],
            "timeline": self.timeline.as_dict(),
        }

    def _edges(self) -> list[Edge]:
        return [edge for edge in self.edges if edge.producer.primitive.name not in DATA_MOVEMENT]

    def _limit(self) -> float:
        return sum(kernel.cost.limit * (kernel.launches or 1) for kernel in self.kernels)

    def _launches(self) -> int:
        return sum(kernel.launches or 1 for kernel in self.kernels)

    def _bytes_moved(self) -> int:
        return sum(kernel.cost.bytes_moved * (kernel.launches or 1) for kernel in self.kernels)

    def _peak_bytes(self) -> int:
        return self.timeline.peak.live_bytes if self.timeline.peak else 0

    def _peak_place(self) -> str:
        """The kernel, or the operations of XLA, at which most temporaries are live; "" without temporaries.

        A kernel has the line of its last operation.
        """
        if not self._peak_bytes():
            return ""
        entry = self.timeline.peak
        assert entry is not None
        places = [kernel.ops[-1][1] for kernel in self.kernels if kernel.name == entry.name]
        return f"{entry.name}, {places[0]}" if places and places[0] else entry.name

    def _figures(self) -> list[str]:
        """Time, limit, launches and memory of the whole, and the lines that take most of the time."""
        if not self.kernels:
            return []
        kind = "predicted" if any(k.measured is None for k in self.kernels) else "measured"
        least = (
            " at least: values decide how often some run" if self._has_unknown_launches() else ""
        )
        if any(span.label.startswith("branch") for span in self.timeline.spans):
            least += ", as if every branch were taken"
        out = [
            f"  {self.seconds * 1e6:.1f} us {kind} in {self._launches()} launch(es){least}; "
            f"{self._limit() * 1e6:.1f} us at the machine's limit; "
            f"{self._bytes_moved() / 1e6:.2f} MB moved, {self.temporaries / 1e6:.2f} MB of temporaries"
        ]
        if self._peak_bytes():
            out.append(
                f"  most temporaries are live, {self._peak_bytes() / 1e6:.2f} MB, at {self._peak_place()}"
            )
        scopes = [
            f"{100 * seconds / self.seconds:.0f} % {scope or 'outside'}"
            for scope, seconds in self.by_scope().items()
            if self.seconds
        ]
        if scopes:
            out.append(f"  time by scope: {', '.join(scopes[:LINES])}")
        lines = self.by_line()
        if len(self.kernels) > 1 and len(lines) > 1 and self.seconds:
            out.append("  time by line:")
            out += [
                f"    {100 * seconds / self.seconds:3.0f} %  {seconds * 1e6:.1f} us  {line}"
                for line, seconds in list(lines.items())[:LINES]
            ]
        return out

    def _has_unknown_launches(self) -> bool:
        return any(kernel.launches is None for kernel in self.kernels)

    def _kernel_lines(self) -> list[str]:
        """Kernels in launch order: each, or the slowest, with the number of equal ones."""
        if self.verbose:
            return [f"  kernel {kernel}" for kernel in self.kernels]
        groups: dict[tuple, list[KernelReport]] = {}
        for kernel in self.kernels:
            groups.setdefault(kernel.content, []).append(kernel)
        seconds = {key: sum(kernel.seconds for kernel in group) for key, group in groups.items()}
        shown = sorted(groups, key=lambda key: -seconds[key])[: self.top]
        out = []
        for key in (key for key in groups if key in shown):
            first, *rest = groups[key]
            equal = (
                f"\n    {len(rest) + 1} equal kernels: {first.name} to {rest[-1].name}"
                if rest
                else ""
            )
            out.append(f"  kernel {first}{equal}")
        hidden = [key for key in groups if key not in shown]
        if hidden:
            count = sum(len(groups[key]) for key in hidden)
            time = sum(seconds[key] for key in hidden) * 1e6
            out.append(
                f"  {count} more kernel(s), {time:.1f} us together; top=N or verbose=True lists them"
            )
        return out

    def _refusals(self, edges: list[Edge]) -> list[str]:
        if self.verbose:
            return list(dict.fromkeys(f"  {_edge([edge])}" for edge in edges))
        groups = _alike([edge for edge in edges if not edge.superseded])
        largest = sorted(groups, key=lambda group: -sum(edge.bytes_saved for edge in group))[
            : self.top
        ]
        out = [f"  {_edge(group)}" for group in groups if group in largest]
        if len(groups) > len(largest):
            count = len(groups) - len(largest)
            out.append(f"  {count} more that were not fused; top=N or verbose=True lists them")
        return out

    def with_instructions(self, names: Mapping[str, tuple[str, ...]]) -> Explanation:
        """Adds matrix instructions of kernels, by the kernels' names."""
        kernels = tuple(
            dataclasses.replace(kernel, instructions=names.get(kernel.name, ()))
            for kernel in self.kernels
        )
        return dataclasses.replace(self, kernels=kernels)

    def with_times(self, seconds: Mapping[str, float]) -> Explanation:
        """Adds measured times of kernels, by name."""
        kernels = tuple(
            dataclasses.replace(kernel, measured=seconds.get(kernel.name, kernel.measured))
            for kernel in self.kernels
        )
        return dataclasses.replace(self, kernels=kernels)


def _by_line(ops: Iterable[tuple[str, str | None]], contexts: Sequence[str] = ()) -> list[str]:
    """Operations of each line of the source and context."""
    lines: dict[str, list[str]] = {}
    for n, (op, at) in enumerate(ops):
        context = contexts[n] if contexts else ""
        place = f"{at or 'unknown line'}{context and ', '}{context}"
        lines.setdefault(place, []).append(op)
    return [f"{', '.join(operations)}  at {place}" for place, operations in lines.items()]


def _alike(edges: Iterable[Edge]) -> list[list[Edge]]:
    """Edges of one operation and line with one reason together, in the order of the first."""
    groups: dict[tuple, list[Edge]] = {}
    for edge in edges:
        key = (_name(edge.producer), user_line(edge.producer), edge.why)
        groups.setdefault(key, []).append(edge)
    return list(groups.values())


def _edge(group: Sequence[Edge]) -> str:
    """One line for edges that are alike."""
    edge, times = group[0], f", {len(group)} times" if len(group) > 1 else ""
    verdict = "fused" if edge.fused else "not fused at first" if edge.superseded else "not fused"
    before, after = (sum(getattr(e, side) for e in group) * 1e6 for side in ("before", "after"))
    price = f", {before:.1f} us apart, {after:.1f} us together" if after else ""
    megabytes = sum(e.bytes_saved for e in group) / 1e6
    saved = f"{'saves' if edge.fused else 'would save'} {megabytes:.2f} MB"
    return (
        f"{verdict}{times}: {_name(edge.producer)} at "
        f"{user_line(edge.producer) or 'unknown line'}: {edge.why}; {saved}{price}"
    )


def _name(eqn) -> str:
    kernel = eqn.params.get("kernel")
    return eqn.primitive.name if kernel is None else f"kernel `{kernel.name}`"


def report(name: str, node: Node, options: FuseOptions, launches: int | None = 1) -> KernelReport:
    schedule = node.own_schedule
    cost = dataclasses.replace(schedule.cost, seconds=node.seconds)
    wave = schedule.wave
    online = schedule.online
    is_mixed = options.precision == MATRIX_MODE and any(map(multiplies_halves, _equations(node)))
    source = "the default of this device" if options.is_default_precision else "as asked"
    precision = f"products of float16, sums of float32: {MATRIX_MODE}, {source}" if is_mixed else ""
    return KernelReport(
        name,
        schedule.grid,
        _equations(node),
        options.machine,
        cost,
        _equations(node.finish) if node.finish else (),
        launches=launches,
        steps=wave.steps if wave else schedule.loop.steps if schedule.loop else 1,
        chunk_columns=online.online.chunk_columns if online else 0,
        leaves_out_hidden=online is not None and leaves_out_hidden(online),
        precision=precision,
    )


def _work(eqn: jex.JaxprEqn, costs: CostModel) -> float:
    """Operations of an equation, as the cost model counts them; views have none."""
    if eqn.primitive.name in DATA_MOVEMENT or not eqn.outvars:
        return 0.0
    return costs.operations(eqn) * math.prod(array_aval(eqn.outvars[0]).shape)


def _equations(node: Node) -> Sequence[jex.JaxprEqn]:
    """The equations of a kernel; of a wavefront, those of one step."""
    if node.schedule is not None and node.schedule.loop is not None:
        return node.schedule.loop.equations()
    wave = node.schedule.wave if node.schedule is not None else None
    return node.eqns if wave is None else wave.body.jaxpr.eqns


def _named(eqns: Iterable[jex.JaxprEqn]) -> tuple[tuple[str, str | None], ...]:
    return tuple((eqn.primitive.name, user_line(eqn)) for eqn in eqns)


def explain(name: str, parts: Partition, plan, options: FuseOptions) -> Explanation:
    launches = {
        name: count
        for program in plan.programs()
        for name, count in program.launch_counts().items()
    }
    kernels = tuple(
        report(group.kernel, group, options, launches.get(group.kernel, 1))
        for group in reversed(parts.groups())
    )
    kernels_of = _EquationPlaces(parts, (edge for edge in parts.edges if not edge.fused))
    edges = (
        dataclasses.replace(edge, superseded=True)
        if not edge.fused and kernels_of.are_shared(edge.producer)
        else edge
        for edge in parts.edges
    )
    temporaries = sum(map(_temporary_bytes, plan.programs()))
    left = tuple(plan.left_to_xla())
    return Explanation(
        name, kernels, tuple(edges), left, temporaries=temporaries, timeline=timeline_of(plan)
    )


def _temporary_bytes(program: HostProgram) -> int:
    """Bytes of arrays between the kernels of a program: those of one slot share their memory."""
    slots: dict[object, int] = {}
    for buffer in program.of_kind(BufferKind.TEMP):
        slot = buffer.name if buffer.slot < 0 else buffer.slot
        slots[slot] = max(slots.get(slot, 0), buffer.type.nbytes)
    return sum(slots.values())


class _EquationPlaces:
    """Which nodes of a partition compute the producers of these edges, and which read their results."""

    def __init__(self, parts: Partition, edges: Iterable[Edge]):
        producers = {id(edge.producer): edge.producer for edge in edges}
        results = {var for producer in producers.values() for var in producer.outvars}
        self.makers: dict[int, set[int]] = {}
        self.readers: dict[jex.Var, set[int]] = {}
        for number, node in enumerate(parts.nodes):
            for eqn in (*node.eqns, *(node.finish.eqns if node.finish else ())):
                # Loops have refusals of their own: of several steps in one kernel.
                if id(eqn) in producers and node.kind != "control":
                    self.makers.setdefault(id(eqn), set()).add(number)
                for value in results.intersection(atoms(eqn)):
                    self.readers.setdefault(value, set()).add(number)

    def are_shared(self, producer: jex.JaxprEqn) -> bool:
        """Whether every node that reads a producer's results computes them itself, or for others as well."""
        makers = self.makers.get(id(producer), set())
        return bool(makers) and all(
            self.readers.get(var, set()) <= makers for var in producer.outvars
        )
