"""ClosedJaxpr -> Plan: simplify, split narrow reductions, group, schedule, emit.

`plan` is the entry point and the whole pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jax.extend import core as jex

from ..errors import UnsupportedOp
from ..machine import Machine
from .alike import searches_remembered
from .blocks import steps_remembered
from .carries import drop_dead_carries
from .choices import Choice, apply, groups_of
from .chosen import choose_pieces
from .complex_pairs import complex_as_pairs
from .counters import count_loops, walk_counters
from .donation import write_in_place
from .explain import Explanation, explain
from .indexed import place_updates
from .keys import keys_as_words
from .layouts import move_transposes
from .literals import operands_as_equations
from .logarithms import undo_exponentials
from .lookups import pick_early
from .moves import leave_moves
from .once import compute_once
from .online import runs_allowed
from .outer import multiply_outer
from .partition import partition
from .precision import set_precision
from .program import build_program
from .quotients import divide_late
from .repeats import repeat_first
from .row_sums import sum_results
from .segment import Left, Plan, Segment, as_arrays, order_nodes, read_later, xla_segment
from .short_loops import write_out_loops
from .side_by_side import loops_as_one
from .simplify import simplify
from .stages import split_reductions
from .sunk import sink_masks

__all__ = ["Choice", "Explanation", "Left", "Plan", "Segment", "groups_of", "plan"]


def plan(
    closed: jex.ClosedJaxpr,
    *,
    name: str,
    options: object,
    machine: Machine,
    supports: Callable[[object], str | None],
    params_for: Callable[..., Mapping] = lambda semantics, **params: {},
    choices: Sequence[Choice] = (),
    donated: Sequence[bool] = (),
) -> Plan:
    """Fuses a jaxpr into HostPrograms and what is left to XLA.

    Args:
      options: any object; reads disable_affine_fusion, disable_reduce_reduce_fusion,
        disable_unsafe_math_canonicalizations, mlir_disable_fast_math, mm_conv_precision_mode, strict_target.
      supports: equation -> None if the target's bodies can contain it, else the reason.
      params_for: grid semantics of a fused kernel, and fields that were chosen by name -> its compiler_params.
      choices: one per fused kernel, in the order of choices.groups_of; (): the model's.
      donated: per operand, whether kernels may write results into it; (): none.
    Raises UnsupportedOp under strict_target if anything is left to XLA.
    """
    results = closed.out_avals
    closed = loops_as_one(complex_as_pairs(keys_as_words(closed)))
    unsafe = not getattr(options, "disable_unsafe_math_canonicalizations", False)
    simple = simplify(closed, unsafe_math=unsafe, platform=machine.name)
    simple = sink_masks(count_loops(move_transposes(undo_exponentials(simple) if unsafe else simple)))
    strict = bool(getattr(options, "strict_target", False))
    simple = drop_dead_carries(choose_pieces(repeat_first(place_updates(simple))))
    if not getattr(options, "disable_affine_fusion", False):
        simple = write_out_loops(simple)
    simple = compute_once(walk_counters(simple), machine)
    simple = pick_early(multiply_outer(set_precision(simple, getattr(options, "mm_conv_precision_mode", None))))
    fast = not getattr(options, "mlir_disable_fast_math", False)
    if fast:  # these reassociate
        simple = split_reductions(sum_results(divide_late(simple)) if unsafe else simple, machine)
    simple = operands_as_equations(simple)
    with steps_remembered(), searches_remembered(), runs_allowed(fast):
        parts = partition(simple, machine, supports, options)
        if not strict:
            leave_moves(parts.nodes)
        apply(parts.groups(), choices, machine)
    write_in_place(parts.nodes, simple.jaxpr, donated)
    segments = make_segments(name, simple, parts.nodes, params_for)
    if strict:
        refuse_leftovers(name, segments)
    made = Plan(name, simple.jaxpr, as_arrays(simple.consts), segments, results, nodes=parts.nodes)
    made.explanation = explain(name, parts, made)
    return made


def make_segments(name: str, simple: jex.ClosedJaxpr, nodes, params_for) -> tuple[Segment, ...]:
    jaxpr = simple.jaxpr
    results = {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)}
    runs = order_nodes(nodes, {*jaxpr.invars, *jaxpr.constvars}, results)
    segments = []
    for n, run in enumerate(runs):
        needed = read_later(runs, n, results)
        if run[0].kind == "xla":
            segments.append(xla_segment(run, needed))
            continue
        made = {v for node in run for v in node.outputs}
        read = {v for node in run for v in node.reads()} - made
        reads = tuple(v for v in (*jaxpr.constvars, *jaxpr.invars, *_made_before(segments)) if v in read)
        makes = tuple(v for node in run for v in node.outputs if v in needed)
        suffix = "" if len(runs) == 1 else f"_{n}"
        segments.append(Segment(build_program(name + suffix, run, reads, makes, params_for), reads, makes))
    return tuple(segments)


def _made_before(segments) -> list:
    return [v for s in segments for v in s.makes]


def refuse_leftovers(name: str, segments) -> None:
    left = [x for s in segments for x in s.left]
    if left:
        ops = "; ".join(f"{x.op} at {x.at or 'an unknown line'} ({x.why})" for x in left)
        raise UnsupportedOp(
            f"`{name}` leaves {len(left)} operation(s) to XLA, and strict_target forbids it",
            at=left[0].at, why=ops, hint="drop strict_target, or rewrite these operations",
        )  # fmt: skip
