"""Partition, Plan -> Explanation: kernels and their ops, each fusion decision with its price, what XLA keeps
and why.
"""

from __future__ import annotations

from dataclasses import dataclass

from .._jax import user_line
from .cost import VIEWS, Cost
from .nodes import Edge, Node, Partition


@dataclass(frozen=True)
class KernelReport:
    """One fused kernel: its ops as (primitive, user line), its grid and the model's figures."""

    name: str
    grid: tuple[int, ...]
    ops: tuple[tuple[str, str | None], ...]
    cost: Cost

    def __str__(self) -> str:
        c = self.cost
        head = (
            f"{self.name}: grid {list(self.grid)}, {c.seconds * 1e6:.1f} us predicted, "
            f"{100 * c.share_of_limit:.0f} % of the machine's limit, {c.bytes_moved / 1e6:.2f} MB, "
            f"{c.flops / 1e6:.2f} Mflop (x{c.recompute:.2f} recompute), "
            f"{c.working_set // 1024} KB per program"
        )
        lines: dict[str, list[str]] = {}
        for op, at in self.ops:
            lines.setdefault(at or "unknown line", []).append(op)
        return "\n".join([head, *(f"    {', '.join(ops)}  at {at}" for at, ops in lines.items())])


@dataclass(frozen=True)
class WrittenKernel:
    """A kernel that fusion did not make: `origin` says who wrote it, `lines` how the dimensions of its grid run."""

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
    """What the fuser did. `str()` is the report.

    `kernels` are those of the fuser, `written` those of the function's author (api.py adds them).
    """

    name: str
    kernels: tuple[KernelReport, ...]
    edges: tuple[Edge, ...]
    left: tuple
    written: tuple[WrittenKernel, ...] = ()

    def __str__(self) -> str:
        written = f" and {len(self.written)} that you wrote" if self.written else ""
        out = [f"{self.name}: {len(self.kernels)} kernel(s){written}, {len(self.left)} operation(s) left to XLA"]
        out += [f"  kernel {k}" for k in (*self.kernels, *self.written)]
        out += [f"  {_edge(e)}" for e in self.edges if e.producer.primitive.name not in VIEWS]
        out += [f"  XLA: {x.op} at {x.at or 'unknown line'}: {x.why}" for x in self.left]
        return "\n".join(out)


def _edge(e: Edge) -> str:
    verdict = "fused" if e.fused else "not fused"
    price = f", {e.before * 1e6:.1f} us apart, {e.after * 1e6:.1f} us together" if e.after else ""
    at = user_line(e.producer) or "unknown line"
    return (
        f"{verdict}: {e.producer.primitive.name} at {at}: {e.why}; saves {e.bytes_saved / 1e6:.2f} MB{price}"
    )


def report(name: str, node: Node) -> KernelReport:
    ops = tuple((e.primitive.name, user_line(e)) for e in node.eqns)
    return KernelReport(name, node.schedule.grid, ops, node.schedule.cost)


def explain(name: str, parts: Partition, plan) -> Explanation:
    kernels = tuple(report(g.kernel, g) for g in reversed(parts.groups()))
    return Explanation(name, kernels, tuple(parts.edges), tuple(plan.left_to_xla()))
