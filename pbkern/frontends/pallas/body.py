"""Body of a pallas_call -> DSL body: one rule per primitive that Pallas adds to lax.

The body is traced again over fresh Refs; lax equations pass through, Pallas's own become DSL
primitives or lax equations. Refs allocated in the body (`run_scoped`) become scratch of the kernel,
one per allocation site.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.errors import UnsupportedOp
from pbkern.core.jaxprs.retracing import retrace_into
from pbkern.core.jaxprs.walks import inner_jaxprs
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.rules import RuleTable
from pbkern.dsl import checks
from pbkern.dsl.body_rewrites import value_primitives
from pbkern.dsl.body_rewrites.byte_refs import held_as
from pbkern.dsl.body_rewrites.narrow_floats import body_dtype, in_body
from pbkern.dsl.kernel import Scratch
from pbkern.dsl.primitives import grid, prng_keys
from pbkern.dsl.primitives.atomics import COMBINE
from pbkern.frontends.pallas.refs.views import IndexedRef, view

from . import prng_state

Rule = Callable[..., list]
RULES: RuleTable[Rule] = RuleTable("pallas import")


@dataclass
class Importer:
    """Knowledge of the kernel around the body that the rules need.

    Attributes:
      axes: pallas grid axis -> axis of the kernel's grid (vmapped dimensions come first and are not seen by the body).
      axis_names: names of the kernel's grid axes, if the grid is named.
      scoped: id of a run_scoped jaxpr or new_ref equation -> the Refs that stand for its allocations.
      sizes: of the grid, where num_programs is a number (in index maps); None in bodies.
      generator: the Ref that holds the state of the random number generator, if the body uses it.
      writes_back: set where a store writes elements that it leaves as they are: programs that share
        memory take turns.
    """

    axes: tuple[int, ...]
    axis_names: tuple = ()
    scoped: dict[int, Sequence] = dataclasses.field(default_factory=dict)
    sizes: tuple[int, ...] | None = None
    generator: object = None
    writes_back: bool = False

    def stored_to(self, where: IndexedRef) -> IndexedRef:
        """`where`, noted as the target of a store."""
        self.writes_back |= where.writes_back
        return where

    def rewrite(self, eqn, *operands) -> list | None:
        """retrace's rewrite rule: results of a Pallas equation, None for any other."""
        if eqn.primitive in _jax.sparse_core_primitives():
            raise UnsupportedOp(
                f"`{eqn.primitive.name}` of a SparseCore in a Pallas kernel",
                at=_jax.line_of_call(eqn),
                why="it has no rule yet",
                hint="indexing, lax and jnp",
            )
        rule = RULES.get(eqn.primitive.name)
        results = prng_keys.rewrite(eqn, operands, self.run, partial(rule or _bind, self, eqn))
        if results is not None:
            return results
        if rule is not None:
            return rule(self, eqn, *operands)
        if eqn.primitive.name in NEEDS_HARDWARE:
            raise UnsupportedOp(
                f"`{eqn.primitive.name}` in a Pallas kernel",
                at=_jax.line_of_call(eqn),
                why=NEEDS_HARDWARE[eqn.primitive.name],
            )
        return value_primitives.rewrite(eqn, *operands)

    def run(self, jaxpr: jex.Jaxpr, consts: Sequence, args: Sequence) -> list:
        """Translates a jaxpr inside an equation."""
        return retrace_into(jaxpr, consts, args, self.rewrite, in_body)


def _bind(_importer: Importer, eqn, *operands) -> Sequence:
    return _jax.bind_again(eqn, operands)


def uses_atomics(jaxpr: jex.Jaxpr) -> bool:
    return any(
        eqn.primitive.name in ATOMICS or any(uses_atomics(j.jaxpr) for j in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def scoped_allocations(jaxpr: jex.Jaxpr) -> dict[int, tuple[Scratch, ...]]:
    """id of each run_scoped jaxpr, or new_ref equation -> its allocations, at any depth."""
    allocations: dict[int, tuple[Scratch, ...]] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "run_scoped":
            inner = eqn.params["jaxpr"]
            allocations[id(inner)] = tuple(allocation(var.aval, eqn) for var in inner.invars)
        if eqn.primitive.name in ("new_ref", "empty_ref"):
            allocations[id(eqn)] = (allocation(eqn.outvars[0].aval, eqn),)
        for inner in inner_jaxprs(eqn):
            allocations |= scoped_allocations(inner.jaxpr)
    return allocations


def allocation(aval, eqn=None) -> Scratch:
    """Scratch for a Ref type: of the kernel, or of a run_scoped equation.

    Raises UnsupportedOp for barriers.
    """
    dtype = aval.inner_aval.dtype if _jax.is_ref(aval) else aval.dtype
    if _jax.is_semaphore(dtype):  # never read: see dma.py
        return Scratch(tuple(aval.shape), np.dtype(np.int32), scoped=True)
    if prng_keys.is_key(dtype):
        return Scratch(
            *prng_keys.held(jax.ShapeDtypeStruct(aval.shape, dtype)), scoped=eqn is not None
        )
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) or not isinstance(dtype, np.dtype):
        raise UnsupportedOp(
            f"scratch of type {aval}",
            at=None if eqn is None else _jax.line_of_call(eqn),
            why="one device runs the whole kernel: there is nothing to wait for",
            hint="barriers need a GPU, or interpret=pltpu.InterpretParams()",
        )
    return Scratch(tuple(aval.shape), held_as(dtype), scoped=eqn is not None)


ATOMICS = ("atomic_rmw", "atomic_cas")
NEEDS_HARDWARE = dict.fromkeys(
    (
        "semaphore_read",
        "get_barrier_semaphore",
        "get_global",
        "barrier_arrive",
        "barrier_wait",
        "copy_smem_to_gmem",
        "copy_gmem_to_smem",
    ),
    "one device runs the whole kernel; values of semaphores and barriers have no counterpart here",
)


# --- Refs
# ----------------------------------------------------------------------------------------------------------


def _plain_view(eqn, operands) -> tuple[IndexedRef, Sequence]:
    """(view, operands before the index) of JAX's own get, swap and addupdate."""
    num_leading = _jax.REF_OPERANDS[eqn.primitive.name]
    return view(
        operands[0],
        eqn.invars[0].aval.dtype,
        jax.tree.unflatten(eqn.params["tree"], operands[num_leading:]),
    ), operands[1:num_leading]


@RULES.register("get")
def _get(importer, eqn, *operands):
    return [_plain_view(eqn, operands)[0].load()]


@RULES.register("swap")
def _swap(importer, eqn, *operands):
    where, (value,) = _plain_view(eqn, operands)
    importer.stored_to(where)
    return [where.swap(value, want_old=not _jax.is_dropped(eqn.outvars[0]))]


@RULES.register("addupdate")
def _addupdate(importer, eqn, *operands):
    where, (value,) = _plain_view(eqn, operands)
    importer.stored_to(where).add(value)
    return []


def _holds_keys(eqn) -> bool:
    return prng_keys.is_key(_jax.ref_contents(eqn.invars[0].aval).dtype)


def _refuse_keys(eqn) -> None:
    if _holds_keys(eqn):
        raise UnsupportedOp(
            "PRNG keys under a mask",
            at=_jax.line_of_call(eqn),
            why="a key is several words",
            hint="jnp.where between keys",
        )


@RULES.register("masked_load")
def _masked_load(importer, eqn, *operands):
    ref, transforms, mask, other = eqn.params["args_tree"].unflatten(operands)
    where = view(ref, eqn.invars[0].aval.dtype, transforms)
    if mask is None and (where.stays or _holds_keys(eqn)):
        return [where.load()]
    mask = (
        np.bool_(True) if mask is None else mask
    )  # what reaches over the end of an array does not move, as get's slices do
    _refuse_keys(eqn)
    dtype = body_dtype(eqn.outvars[0].aval.dtype)
    return [
        where.masked_load(
            mask, np.zeros((), dtype) if other is None else lax.convert_element_type(other, dtype)
        )
    ]


@RULES.register("masked_swap")
def _masked_swap(importer, eqn, *operands):
    ref, transforms, value, mask = eqn.params["args_tree"].unflatten(operands)
    where, used = (
        importer.stored_to(view(ref, eqn.invars[0].aval.dtype, transforms)),
        not _jax.is_dropped(eqn.outvars[0]),
    )
    if mask is None and (where.stays or _holds_keys(eqn)):
        return [where.swap(value, want_old=used)]
    mask = np.bool_(True) if mask is None else mask
    _refuse_keys(eqn)
    old = where.masked_load(mask, value) if used else None
    where.masked_store(value, mask)
    return [old]


@RULES.register("run_scoped")
def _run_scoped(importer, eqn, *consts):
    jaxpr = eqn.params["jaxpr"]
    return importer.run(jaxpr, consts, importer.scoped[id(jaxpr)])


@RULES.register("new_ref")
def _new_ref(importer, eqn, value):
    """jax.new_ref, pl.empty_ref_like: scratch that starts again wherever the equation is met."""
    (ref,) = importer.scoped[id(eqn)]
    dtype = _jax.ref_contents(eqn.outvars[0].aval).dtype
    if not _jax.is_semaphore(dtype):
        view(ref, dtype, ()).swap(value, want_old=False)
    return [ref]


@RULES.register("empty_ref")
def _empty_ref(importer, eqn):
    """jax.empty_ref, whose elements are not specified."""
    return importer.scoped[id(eqn)]


@RULES.register("freeze")
def _freeze(importer, eqn, ref):
    return [view(ref, eqn.invars[0].aval.dtype, ()).load()]


@RULES.register("empty")
def _empty(importer, eqn):
    """Semaphores, which nothing reads, and values that are not specified."""
    if _jax.is_semaphore(eqn.outvars[0].aval.dtype):
        return [np.int32(0)]
    return value_primitives.rewrite(eqn)


@RULES.register("parallel_loop")
def _parallel_loop(importer, eqn, *operands):
    """plsc.parallel_loop: its iterations may run in any order."""
    lower, upper, step, consts, carries = eqn.params["tree"].unflatten(operands)
    count = lax.max(lax.div(upper - lower + step - np.int32(1), step), np.int32(0))
    jaxpr = eqn.params["jaxpr"]
    first = () if jaxpr.constvars else tuple(consts)  # jax 0.11 has them among the arguments

    def body(trip, values):
        return importer.run(
            jaxpr, consts if jaxpr.constvars else (), (*first, lower + trip * step, *values)
        )

    return lax.fori_loop(np.int32(0), count, body, list(carries))


# --- grid and hints
# ------------------------------------------------------------------------------------------------


@RULES.register("program_id")
def _program_id(importer, eqn):
    return [grid.program_id(importer.axes[eqn.params["axis"]])]


@RULES.register("num_programs")
def _num_programs(importer, eqn):
    axis = importer.axes[eqn.params["axis"]]
    return [grid.num_programs(axis) if importer.sizes is None else np.int32(importer.sizes[axis])]


@RULES.register("axis_index")
def _axis_index(importer, eqn):
    name = eqn.params["axis_name"]
    if name not in importer.axis_names:
        raise UnsupportedOp(
            f"`axis_index` of `{name}` in a Pallas kernel",
            at=_jax.line_of_call(eqn),
            why=f"grid names: {', '.join(map(str, importer.axis_names)) or 'none'}",
            hint="pass the index of a mesh axis as a scalar operand",
        )
    return [grid.program_id(importer.axis_names.index(name))]


@RULES.register("prng_seed")
def _prng_seed(importer, eqn, *seeds):
    prng_state.seed(importer.generator, eqn, seeds)
    return []


@RULES.register("prng_random_bits")
def _prng_random_bits(importer, eqn):
    return [prng_state.draw(importer.generator, tuple(eqn.params["shape"]))]


@RULES.register("prng_split")
def _prng_split(importer, eqn, key):
    return prng_state.split_key(key)


@RULES.register("prng_join")
def _prng_join(importer, eqn, *words):
    return [prng_state.join_key(eqn, words)]


# --- looking inside
# ------------------------------------------------------------------------------------------------


@RULES.register("debug_print")
def _debug_print(importer, eqn, *operands):
    """jax.debug.print; of a Ref, its contents."""
    types = [var.aval for var in eqn.invars]
    values = [
        view(operand, type_.dtype, ()).load() if _jax.is_ref(type_) else operand
        for operand, type_ in zip(operands, types)
    ]
    eqn.primitive.bind(*values, **eqn.params)
    return []


@RULES.register("check")
def _check(importer, eqn, *operands):
    """checkify.check; pl.debug_check where debug checks are enabled while the call is compiled."""
    if eqn.params["debug"] and not _jax.pallas().debug_checks_enabled():
        return []
    failed, message, values, named = _jax.failed_check(eqn, operands)
    grid.when(failed)(lambda: checks.fail(message, *values, **named))
    return []


# --- atomics
# -------------------------------------------------------------------------------------------------------

# Programs that could touch one element run in order (`cpu_params`, lower/grid/parallelism.py).


@RULES.register("atomic_rmw")
def _atomic_rmw(importer, eqn, *operands):
    ref, transforms, value, mask = eqn.params["args_tree"].unflatten(operands)
    where = importer.stored_to(view(ref, eqn.invars[0].aval.dtype, transforms))
    return [where.update(COMBINE[eqn.params["atomic_type"].value], [value], mask)]


@RULES.register("atomic_cas")
def _atomic_cas(importer, eqn, ref, compare, value):
    return [view(ref, eqn.invars[0].aval.dtype, ()).update(COMBINE["cas"], [compare, value], None)]
