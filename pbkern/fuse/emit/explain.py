"""Partition, Plan -> Explanation: kernels and their ops, what was not fused and why, with prices, and what XLA keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jax.extend import core as jex

from pbkern._jax import user_line
from pbkern.core.jaxprs import atoms
from pbkern.fuse.algebra.contraction_precision import MATRIX_MODE, multiplies_halves
from pbkern.fuse.cost.kinds import VIEWS
from pbkern.fuse.cost.model import Cost
from pbkern.fuse.graph import Edge, Node, Partition
from pbkern.fuse.options import FuseOptions


@dataclass(frozen=True)
class KernelReport:
    """One fused kernel: its ops as (primitive, user line), its grid and the model's figures.

    `finish`: ops of its last stage. `measured`: seconds of one run of the kernel alone, if asked
    for. `steps`: steps of a loop in it (`ops` are those of one). `run`: columns that online
    reductions take at a time, or 0. `runs`: how often one call runs it, as in a loop, None if that
    depends on values. `precision`: in which mode its products are multiplied and added; "" where
    their types say that. `instructions`: matrix instructions that compute its products. All other
    figures are of one run.
    """

    name: str
    grid: tuple[int, ...]
    ops: tuple[tuple[str, str | None], ...]
    cost: Cost
    finish: tuple[tuple[str, str | None], ...] = ()
    measured: float | None = None
    steps: int = 1
    run: int = 0
    runs: int | None = 1
    instructions: tuple[str, ...] = ()
    precision: str = ""

    def __str__(self) -> str:
        price, one = self.cost, self.measured or self.cost.seconds
        steps = (
            f"{self.steps} steps of a loop, "
            if self.steps > 1
            else f"in runs of {self.run} columns, "
            if self.run
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
        return "\n".join([head, *(f"    {line}" for line in _by_line(self.ops)), *products, *last])

    def _times(self, seconds: float) -> str:
        if self.runs == 1:
            return ""
        if self.runs is None:
            return "run as often as values say, each time "
        return f"run {self.runs} times in {self.runs * seconds * 1e6:.1f} us, each time "


# Origin of a kernel that a rewrite of the function made (fuse/algebra/grouped_products.py).
GROUPED = "a grouped product"


@dataclass(frozen=True)
class HandWrittenKernel:
    """A kernel that fusion did not make.

    `origin` says who wrote it, `lines` how each grid dimension runs, and what follows.
    """

    name: str
    origin: str
    at: str | None
    grid: tuple
    lines: tuple[str, ...]

    def __str__(self) -> str:
        head = f"{self.name} ({self.origin}): grid [{', '.join(map(str, self.grid))}]  at {self.at or 'unknown line'}"
        return "\n".join([head, *(f"    {line}" for line in self.lines)])


@dataclass(frozen=True)
class Explanation:
    """Report of the fuser's work.

    `str()` is the text: kernels, then what was not fused, then a count of what was.

    `kernels` are the fuser's, `written` the hand-written ones (api/explain_handwritten.py adds
    them). `planned_anew`: why the plan is not kept on disk. With `verbose`, fusions are listed too,
    and what was refused at first and fused later.
    """

    name: str
    kernels: tuple[KernelReport, ...]
    edges: tuple[Edge, ...]
    left: tuple
    written: tuple[HandWrittenKernel, ...] = ()
    verbose: bool = False
    planned_anew: str = ""

    def __str__(self) -> str:
        edges = [edge for edge in self.edges if edge.producer.primitive.name not in VIEWS]
        fused = [edge for edge in edges if edge.fused]
        grouped = sum(kernel.origin == GROUPED for kernel in self.written)
        users = len(self.written) - grouped
        written = f" and {users} that you wrote" if users else ""
        out = [
            f"{self.name}: {len(self.kernels) + grouped} kernel(s){written}, {len(self.left)} operation(s) left to XLA"
        ]
        out += [f"  kernel {kernel}" for kernel in (*self.kernels, *self.written)]
        out += dict.fromkeys(
            f"  {_edge(edge)}"
            for edge in edges
            if not edge.fused and (self.verbose or not edge.superseded)
        )
        if self.verbose:
            out += [f"  {_edge(edge)}" for edge in fused]
        elif fused:
            saved = sum(edge.bytes_saved for edge in fused) / 1e6
            out.append(
                f"  fused: {len(fused)} operation(s), which saves {saved:.2f} MB; verbose=True lists them"
            )
        out += [f"  XLA: {x.op} at {x.at or 'unknown line'}: {x.why}" for x in self.left]
        out += [f"  planned anew in each process: {self.planned_anew}"] * bool(self.planned_anew)
        return "\n".join(out)

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


def _by_line(ops: Iterable[tuple[str, str | None]]) -> list[str]:
    lines: dict[str, list[str]] = {}
    for op, at in ops:
        lines.setdefault(at or "unknown line", []).append(op)
    return [f"{', '.join(operations)}  at {at}" for at, operations in lines.items()]


def _edge(edge: Edge) -> str:
    verdict = "fused" if edge.fused else "not fused at first" if edge.superseded else "not fused"
    price = (
        f", {edge.before * 1e6:.1f} us apart, {edge.after * 1e6:.1f} us together"
        if edge.after
        else ""
    )
    saved = f"{'saves' if edge.fused else 'would save'} {edge.bytes_saved / 1e6:.2f} MB"
    return (
        f"{verdict}: {_name(edge.producer)} at "
        f"{user_line(edge.producer) or 'unknown line'}: {edge.why}; {saved}{price}"
    )


def _name(eqn) -> str:
    kernel = eqn.params.get("kernel")
    return eqn.primitive.name if kernel is None else f"kernel `{kernel.name}`"


def report(name: str, node: Node, options: FuseOptions) -> KernelReport:
    schedule = node.own_schedule
    cost = dataclasses.replace(schedule.cost, seconds=node.seconds)
    finish = _ops(node.finish) if node.finish else ()
    wave = schedule.wave
    run = schedule.online.online.run if schedule.online else 0
    is_mixed = options.precision == MATRIX_MODE and any(map(multiplies_halves, _equations(node)))
    source = "the default of this device" if options.is_default_precision else "as asked"
    precision = f"products of float16, sums of float32: {MATRIX_MODE}, {source}" if is_mixed else ""
    return KernelReport(
        name, schedule.grid, _ops(node), cost, finish, steps=wave.steps if wave else 1, run=run,
        precision=precision,
    )  # fmt: skip


def _equations(node: Node) -> Sequence[jex.JaxprEqn]:
    """The equations of a kernel; of a wavefront, those of one step."""
    wave = node.schedule.wave if node.schedule is not None else None
    return node.eqns if wave is None else wave.body.jaxpr.eqns


def _ops(node: Node) -> tuple[tuple[str, str | None], ...]:
    return tuple((eqn.primitive.name, user_line(eqn)) for eqn in _equations(node))


def explain(name: str, parts: Partition, plan, options: FuseOptions) -> Explanation:
    runs = {name: run for program in plan.programs() for name, run in program.runs().items()}
    kernels = tuple(
        dataclasses.replace(report(group.kernel, group, options), runs=runs.get(group.kernel, 1))
        for group in reversed(parts.groups())
    )
    kernels_of = _EquationPlaces(parts)
    edges = (
        dataclasses.replace(
            edge, superseded=not edge.fused and kernels_of.are_shared(edge.producer)
        )
        for edge in parts.edges
    )
    return Explanation(name, kernels, tuple(edges), tuple(plan.left_to_xla()))


class _EquationPlaces:
    """Which nodes of a partition compute an equation, and which read a value."""

    def __init__(self, parts: Partition):
        self.makers: dict[int, set[int]] = {}
        self.readers: dict[jex.Var, set[int]] = {}
        for number, node in enumerate(parts.nodes):
            for eqn in (*node.eqns, *(node.finish.eqns if node.finish else ())):
                self.makers.setdefault(id(eqn), set()).add(number)
                for value in atoms(eqn):
                    self.readers.setdefault(value, set()).add(number)

    def are_shared(self, producer: jex.JaxprEqn) -> bool:
        """Whether every node that reads a producer's results computes them itself, or for others as well."""
        makers = self.makers.get(id(producer), set())
        return bool(makers) and all(
            self.readers.get(var, set()) <= makers for var in producer.outvars
        )
