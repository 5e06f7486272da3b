"""ClosedJaxpr -> Plan: simplify, split narrow reductions, group, schedule, emit.

`plan` is the entry point and the whole pipeline; FUSE_PASSES are its rewrites, in order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

from jax.extend import core as jex

from pbkern.core.errors import UnsupportedOp
from pbkern.core.jaxprs.maximum_tests import compare_operands
from pbkern.core.jaxprs.shardings import without_shardings
from pbkern.core.ops.ordered_values import ordered_values
from pbkern.core.ops.shared_products import shared_products
from pbkern.core.passes import Pass, passed_over, run_passes
from pbkern.core.process import fallback, gc_pause
from pbkern.core.process.context_values import during
from pbkern.dsl.host_program import HostProgram
from pbkern.dsl.text.identifiers import identifier, unused
from pbkern.fuse.access.blocks import rounded_values, steps_memoised
from pbkern.fuse.access.equation_kinds import kinds_memoised
from pbkern.fuse.algebra.contraction_precision import set_precision
from pbkern.fuse.algebra.grouped_products import GroupProducts
from pbkern.fuse.algebra.late_division import delay_normalisation
from pbkern.fuse.algebra.log_of_exp import cancel_log_of_exp
from pbkern.fuse.algebra.one_hot_sums import pick_labels
from pbkern.fuse.algebra.outer_products import multiply_outer
from pbkern.fuse.algebra.prng_keys import keys_as_words
from pbkern.fuse.algebra.reassociate_row_sums import SumResults
from pbkern.fuse.algebra.round_operations import round_operations
from pbkern.fuse.algebra.sign_tests import join_sign_tests
from pbkern.fuse.algebra.softmax_by_logarithm import softmax_as_quotient
from pbkern.fuse.algebra.sums_of_parts import JoinParts
from pbkern.fuse.complex.to_pairs import ComplexAsPairs
from pbkern.fuse.cost.model import CostModel
from pbkern.fuse.emit.body_memo import bodies_memoised
from pbkern.fuse.emit.choices import Choice, apply, groups_of
from pbkern.fuse.emit.explain import Explanation, explain
from pbkern.fuse.emit.host_program import build_program
from pbkern.fuse.emit.plan import (
    LeftToXla,
    Plan,
    Segment,
    as_arrays,
    order_nodes,
    read_later,
    xla_segment,
)
from pbkern.fuse.emit.written_kernels.fuse_neighbours import FuseNeighbours
from pbkern.fuse.graph import Node, Partition
from pbkern.fuse.indexing.gather_hoisting import HoistGathers
from pbkern.fuse.indexing.gather_to_select import GathersToSelects
from pbkern.fuse.indexing.known_numbers import NumbersOfFloats
from pbkern.fuse.indexing.places_as_views import PlacesAsViews
from pbkern.fuse.indexing.repeat_to_broadcast import repeats_to_broadcasts
from pbkern.fuse.indexing.reshape_motion import MoveReshapes
from pbkern.fuse.indexing.row_views import ViewRows
from pbkern.fuse.indexing.slices_of_cases import read_cases
from pbkern.fuse.indexing.static_updates import UpdatesToSelects
from pbkern.fuse.indexing.transpose_motion import move_transposes
from pbkern.fuse.indexing.transposed_operands import fold_transposes
from pbkern.fuse.loops.associative_trees import TreesToScans
from pbkern.fuse.loops.batched_while import loops_as_one
from pbkern.fuse.loops.constants_of_bodies import hoist_constants_of_bodies
from pbkern.fuse.loops.dead_carries import drop_dead_carries
from pbkern.fuse.loops.full_unrolling import UnrollLoops
from pbkern.fuse.loops.induction_variables import count_loops, walk_counters
from pbkern.fuse.loops.invariant_hoisting import HoistInvariants
from pbkern.fuse.loops.mask_sinking import SinkMasks
from pbkern.fuse.loops.updated_slices import SlicesToCarries
from pbkern.fuse.options import FuseOptions
from pbkern.fuse.partition.donation import donated_pairs, use_donated
from pbkern.fuse.partition.passes import KERNEL_PASSES, WHOLE_PASSES, partition
from pbkern.fuse.simplify.driver import Simplify
from pbkern.fuse.simplify.literal_operands import operands_as_equations
from pbkern.fuse.simplify.proved_ranges import drop_proved_ranges
from pbkern.fuse.split.two_stage import SPLIT_REDUCTIONS
from pbkern.fuse.tiling.online_analysis import chunks_allowed
from pbkern.fuse.tiling.search_memo import searches_memoised

__all__ = [
    "Choice",
    "Explanation",
    "LeftToXla",
    "Plan",
    "Segment",
    "groups_of",
    "left_whole",
    "plan",
]


def _of_jaxpr(
    function: Callable[[jex.ClosedJaxpr], jex.ClosedJaxpr],
) -> Callable[[jex.ClosedJaxpr, FuseOptions], jex.ClosedJaxpr]:
    """A pass that needs no options."""
    return lambda closed, options: function(closed)


_unsafe = attrgetter("unsafe")


def _fast_and_unsafe(options: FuseOptions) -> bool:
    return options.fast and options.unsafe


# ClosedJaxpr, FuseOptions -> ClosedJaxpr. Groups are made of what the last one leaves.
FUSE_PASSES = (
    Pass(
        "without shardings",
        _of_jaxpr(without_shardings),
        "plans are for one device; JAX refuses types with other meshes than those of later passes",
        required=True,
    ),
    Pass(
        "trees to scans",
        TreesToScans(),
        "an associative scan reads its operands once",
        when=attrgetter("fast"),
    ),
    Pass(
        "keys as words", _of_jaxpr(keys_as_words), "no later pass meets typed keys", required=True
    ),
    Pass(
        "complex as pairs",
        ComplexAsPairs(),
        "no later pass meets complex numbers, but at the ends",
        required=True,
    ),
    Pass(
        "round operations",
        _of_jaxpr(round_operations),
        "16-bit floats are rounded after each operation of the function",
        when=lambda options: options.rounds,
        required=True,
    ),
    Pass(
        "drop proved ranges",
        _of_jaxpr(drop_proved_ranges),
        "places that a program computes for itself are not checked",
    ),
    Pass(
        "numbers of floats",
        NumbersOfFloats(),
        "places that are computed in floats are exact; before quotients become products",
    ),
    Pass(
        "hoist constants",
        _of_jaxpr(hoist_constants_of_bodies),
        "bodies of loops and branches read operands alone",
    ),
    Pass("batched whiles as one", _of_jaxpr(loops_as_one), "loops of a batch run together"),
    Pass(
        "simplify",
        Simplify(),
        "calls are inlined, so that later passes see every equation",
        required=True,
    ),
    Pass("undo exponentials", _of_jaxpr(cancel_log_of_exp), "log(exp(x)) is x", when=_unsafe),
    Pass(
        "softmax as quotient",
        _of_jaxpr(softmax_as_quotient),
        "exp(log_softmax(x)) is a softmax, as later passes know it",
        when=_unsafe,
    ),
    Pass(
        "join sign tests",
        _of_jaxpr(join_sign_tests),
        "floor_divide and remainder compare once",
    ),
    Pass(
        "compare operands",
        _of_jaxpr(compare_operands),
        "derivatives of max and min do not ask which operand equals the result",
    ),
    Pass("group products", GroupProducts(), "rows are multiplied by their group's matrix alone"),
    Pass("move transposes", _of_jaxpr(move_transposes), "transposes meet and cancel"),
    Pass("move reshapes", MoveReshapes(), "values per group are rows of the whole array"),
    Pass("join parts", JoinParts(), "padded values that do not overlap are pieces of one"),
    Pass("count loops", _of_jaxpr(count_loops), "whiles that count have a number of turns"),
    Pass("sink masks", SinkMasks(), "masks are made where they are read, inside loops"),
    Pass(
        "place updates",
        UpdatesToSelects(),
        "updates at known places are selects, which fuse",
    ),
    Pass(
        "read cases",
        _of_jaxpr(read_cases),
        "an update is not stored for one that reads beside it",
    ),
    Pass(
        "places as views",
        PlacesAsViews(),
        "gathers and sums at places that are known are slices and broadcasts, which fuse",
    ),
    Pass("repeat first", _of_jaxpr(repeats_to_broadcasts), "repeats are broadcasts, which fuse"),
    Pass(
        "choose pieces",
        GathersToSelects(),
        "gathers of few pieces are selects, which fuse",
    ),
    Pass(
        "slices to carries",
        SlicesToCarries(),
        "an update of few places of a slice copies nothing else",
    ),
    Pass("drop dead carries", _of_jaxpr(drop_dead_carries), "loops carry what somebody reads"),
    Pass(
        "write out loops",
        UnrollLoops(),
        "short loops fuse with what is around them",
        when=attrgetter("joins"),
    ),
    Pass(
        "walk counters",
        _of_jaxpr(walk_counters),
        "carries that count follow from the loop's counter",
    ),
    Pass(
        "hoist invariants",
        HoistInvariants(),
        "what no turn changes is made once",
    ),
    Pass(
        "set precision",
        lambda closed, options: set_precision(
            closed, options.precision, options.is_default_precision
        ),
        "contractions have their operands' types",
        required=True,
    ),
    Pass(
        "multiply outer",
        _of_jaxpr(multiply_outer),
        "contractions without sums are products, which fuse",
    ),
    Pass(
        "pick labels",
        _of_jaxpr(pick_labels),
        "sums under masks of one element read no row again",
        when=_unsafe,
    ),
    Pass("pick early", HoistGathers(), "arithmetic runs on what gathers have picked"),
    Pass(
        "divide late",
        _of_jaxpr(delay_normalisation),
        "softmax divides its result, not its weights",
        when=_fast_and_unsafe,
    ),
    Pass(
        "sum results",
        SumResults(),
        "row sums ride on contractions",
        when=_fast_and_unsafe,
    ),
    Pass(
        "fold transposes",
        _of_jaxpr(fold_transposes),
        "contractions know how their operands are stored",
    ),
    SPLIT_REDUCTIONS,
    Pass(
        "fuse neighbours",
        FuseNeighbours(),
        "what stands beside hand-written kernels is computed on their blocks",
        when=attrgetter("joins"),
    ),
    Pass(
        "view rows",
        ViewRows(),
        "layers of stacked parameters run the same kernels",
    ),
    Pass(
        "operands as equations",
        _of_jaxpr(operands_as_equations),
        "literals are values that groups can read; last",
        required=True,
    ),
)


def plan(
    closed: jex.ClosedJaxpr,
    *,
    name: str,
    options: object,
    machine: CostModel,
    supports: Callable[[object], str | None],
    params_for: Callable[..., Mapping] = lambda semantics, **params: {},
    choices: Sequence[Choice] = (),
    donated: Sequence[bool] = (),
) -> Plan:
    """Fuses a jaxpr into HostPrograms and jaxprs that XLA runs.

    Args:
      closed: what is fused.
      name: the function's, in names of kernels.
      options: any object; reads disable_affine_fusion, disable_reduce_reduce_fusion,
        disable_unsafe_math_canonicalizations, mlir_disable_fast_math, mm_conv_precision_mode,
        emulate_precision_casts, polyblocks_gpu_no_tensor_core, strict_target.
      supports: equation -> None if the target's bodies can contain it, else the reason.
      machine: the target's cost model.
      params_for: grid semantics of a fused kernel, and chosen fields by name -> its compiler_params.
      choices: one per fused kernel, in the order of choices.groups_of; (): the model's.
      donated: per operand, whether kernels may write results into it; (): none.
    Raises UnsupportedOp under strict_target if anything is left to XLA.
    """
    results, strict = closed.out_avals, bool(getattr(options, "strict_target", False))
    wanted = FuseOptions.of(options, machine, supports, donated)
    simple = run_passes("jaxpr", FUSE_PASSES, closed, wanted, of=name, failed=passed_over(name))
    with kinds_memoised(), steps_memoised():
        with searches_memoised(), chunks_allowed(wanted.fast):
            pairs = donated_pairs(simple.jaxpr, donated)
            parts = partition(simple, machine, supports, options, name, pairs)
            run_passes("partition", WHOLE_PASSES, parts, options, of=name)
            outputs = {var for var in simple.jaxpr.outvars if not isinstance(var, jex.Literal)}
            run_passes("partition", KERNEL_PASSES, parts, wanted, outputs, of=name)
            apply(parts.groups(), choices, machine)
        parts.edges[:0] = wanted.edges
        use_donated(parts.nodes, simple.jaxpr, donated)
        once = ordered_values(simple.jaxpr)
        if wanted.fast:
            once |= shared_products(simple.jaxpr)
        with during(rounded_values, once), bodies_memoised():
            segments = make_segments(
                name, simple, parts.nodes, params_for, argument_names(closed.jaxpr, simple.jaxpr)
            )
        if strict:
            refuse_leftovers(name, segments)
        result = Plan(
            name, simple.jaxpr, as_arrays(simple.consts), segments, results, nodes=parts.nodes
        )
        result.explained = lambda: _explanation(name, parts, result, wanted)
    return result


def _explanation(name: str, parts: Partition, result: Plan, options: FuseOptions) -> Explanation:
    with gc_pause.paused():
        return explain(name, parts, result, options)


def argument_names(given: jex.Jaxpr, simple: jex.Jaxpr) -> dict[jex.Var, str]:
    """Identifiers for the simplified function's operands, in their order, by the names that the function's author gave them."""
    names = given.debug_info.arg_names or ()
    if not len(names) == len(given.invars) == len(simple.invars):
        return dict.fromkeys(simple.invars, "")
    called: dict[jex.Var, str] = {}
    taken: set[str] = set()
    for number, (var, name) in enumerate(zip(simple.invars, names)):
        called[var] = unused(identifier(name, f"arg{number}"), taken) if name else ""
        taken.add(called[var])
    return called


def make_segments(
    name: str,
    simple: jex.ClosedJaxpr,
    nodes,
    params_for,
    arguments: Mapping[jex.Var, str],
) -> tuple[Segment, ...]:
    jaxpr = simple.jaxpr
    results = {var for var in jaxpr.outvars if not isinstance(var, jex.Literal)}
    runs = order_nodes(nodes, {*jaxpr.invars, *jaxpr.constvars}, results)
    segments = []
    for n, run in enumerate(runs):
        needed = read_later(runs, n, results)
        if run[0].kind == "xla":
            segments.append(xla_segment(run, needed))
            continue
        computed = {output for node in run for output in node.outputs}
        read = {var for node in run for var in node.reads()} - computed
        reads = tuple(
            var for var in (*jaxpr.constvars, *jaxpr.invars, *_made_before(segments)) if var in read
        )
        makes = tuple(output for node in run for output in node.outputs if output in needed)
        suffix = "" if len(runs) == 1 else f"_{n}"
        build = functools.partial(build_program, params_for=params_for, arguments=arguments)
        segments.append(_compiled_segment(name + suffix, run, reads, makes, needed, build))
    return tuple(segments)


def left_whole(closed: jex.ClosedJaxpr, name: str) -> Plan:
    """The plan that leaves all of a function to XLA."""
    result = Plan(name, closed.jaxpr, as_arrays(closed.consts), (), closed.out_avals, whole=closed)
    result.explained = lambda: Explanation(name, (), (), tuple(result.left_to_xla()))
    return result


def _compiled_segment(
    name: str,
    run: list[Node],
    reads: tuple,
    makes: tuple,
    needed: set,
    build: Callable[..., HostProgram],
) -> Segment:
    """A HostProgram of ours; XLA's where its kernels cannot be made."""
    try:
        fallback.enter("kernels")
        return Segment(
            build(name, run, reads, makes, read_later=needed),
            reads,
            makes,
            run=tuple(run),
        )
    except Exception as e:
        if not fallback.catches(e):
            raise
        fallback.warn(
            f"no kernels could be made of {len(run)} group(s) of `{name}`",
            e,
            "XLA runs their operations",
        )
        return xla_segment(run, set(makes))


def _made_before(segments) -> list:
    return [make for segment in segments for make in segment.makes]


def refuse_leftovers(name: str, segments) -> None:
    left = [x for segment in segments for x in segment.left]
    if left:
        ops = "; ".join(f"{x.op} at {x.at or 'an unknown line'} ({x.why})" for x in left)
        raise UnsupportedOp(
            f"`{name}` leaves {len(left)} operation(s) to XLA, and strict_target forbids it",
            at=left[0].at,
            why=ops,
            hint="drop strict_target, or rewrite these operations",
        )
