"""ClosedJaxpr -> Plan: simplify, split narrow reductions, group, schedule, emit.

`plan` is the entry point and the whole pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jax.extend import core as jex

from pbkern.core.errors import UnsupportedOp
from pbkern.core.machine import Machine
from pbkern.fuse.access.blocks import steps_remembered
from pbkern.fuse.algebra.contraction_precision import set_precision
from pbkern.fuse.algebra.late_division import divide_late
from pbkern.fuse.algebra.log_of_exp import undo_exponentials
from pbkern.fuse.algebra.outer_products import multiply_outer
from pbkern.fuse.algebra.prng_keys import keys_as_words
from pbkern.fuse.algebra.reassociate_row_sums import sum_results
from pbkern.fuse.complex.to_pairs import complex_as_pairs
from pbkern.fuse.emit.choices import Choice, apply, groups_of
from pbkern.fuse.emit.explain import Explanation, explain
from pbkern.fuse.emit.host_program import build_program
from pbkern.fuse.emit.plan import Left, Plan, Segment, as_arrays, order_nodes, read_later, xla_segment
from pbkern.fuse.indexing.gather_hoisting import pick_early
from pbkern.fuse.indexing.gather_to_select import choose_pieces
from pbkern.fuse.indexing.repeat_to_broadcast import repeat_first
from pbkern.fuse.indexing.static_updates import place_updates
from pbkern.fuse.indexing.transpose_motion import move_transposes
from pbkern.fuse.loops.batched_while import loops_as_one
from pbkern.fuse.loops.dead_carries import drop_dead_carries
from pbkern.fuse.loops.full_unrolling import write_out_loops
from pbkern.fuse.loops.induction_variables import count_loops, walk_counters
from pbkern.fuse.loops.invariant_hoisting import compute_once
from pbkern.fuse.loops.mask_sinking import sink_masks
from pbkern.fuse.partition.donation import write_in_place
from pbkern.fuse.partition.leave_layouts_to_xla import leave_moves
from pbkern.fuse.partition.partitioner import partition
from pbkern.fuse.simplify.driver import simplify
from pbkern.fuse.simplify.literal_operands import operands_as_equations
from pbkern.fuse.split.two_stage import split_reductions
from pbkern.fuse.tiling.online_analysis import runs_allowed
from pbkern.fuse.tiling.search_memo import searches_remembered

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
      params_for: grid semantics of a fused kernel, and chosen fields by name -> its compiler_params.
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
