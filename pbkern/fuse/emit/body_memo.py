"""Bodies of equal groups, such as those of equal layers, are traced once."""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import field

from jax.extend import core as jex

from pbkern._jax import user_line
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.process.context_values import during
from pbkern.fuse.access.blocks import BlockRequests, rounded_values, trace_body
from pbkern.fuse.access.equation_kinds import EquationKinds, current_kinds
from pbkern.fuse.access.rules import Access


@dataclass
class _Bodies:
    """Memo of one plan: key of a body's computations -> the body."""

    kinds: EquationKinds
    traced: dict[tuple, jex.ClosedJaxpr] = field(default_factory=dict)

    def key(self, requests: BlockRequests, outputs: Sequence[tuple[jex.Var, Access]]) -> tuple:
        """Equal for bodies that differ only in the names of values; messages of both name the same lines of the user."""
        names: dict = {}
        once = rounded_values.get()

        def name(atom) -> int | None:
            return None if isinstance(atom, jex.Literal) else names.setdefault(atom, len(names))

        def named(pairs: Sequence[tuple[jex.Var, Access]]) -> tuple:
            return tuple((name(var), var.aval, access) for var, access in pairs)

        steps = tuple(
            (
                self.kinds.number(step.eqn),
                user_line(step.eqn),
                tuple(map(name, (*step.eqn.invars, *step.eqn.outvars))),
                tuple(var in once for var in step.eqn.outvars),
                step.pull.inputs,
                step.out,
            )
            for step in requests.steps
        )
        return named(requests.inputs), steps, named(outputs)


_current: contextvars.ContextVar[_Bodies | None] = contextvars.ContextVar(
    "bodies of one plan", default=None
)


def bodies_memoised() -> AbstractContextManager:
    """In a `with` block, bodies of equal structure are traced once."""
    return during(_current, _Bodies(current_kinds() or EquationKinds()))


def body_once(
    requests: BlockRequests, outputs: Sequence[tuple[jex.Var, Access]]
) -> jex.ClosedJaxpr:
    """trace_body(requests, outputs), or that of an earlier group of equal structure."""
    bodies = _current.get()
    if bodies is None:
        return trace_body(requests, outputs)
    key = bodies.key(requests, outputs)
    if key not in bodies.traced:
        bodies.traced[key] = trace_body(requests, outputs)
    return bodies.traced[key]
