"""The only importer of private JAX. Tested with jax 0.10.2 (Python 3.11) and 0.11.2 (Python 3.13).

`scripts/second_environment.py` runs the tests with the second. Where the two differ, the difference
ends here: parameters of equations, for instance, have the names of 0.10 everywhere else
(`params_of`, `bind_again`).

Everything else in pbkern uses public JAX: `jax`, `jax.numpy`, `jax.lax`, `jax.ref`,
`jax.extend.core`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import operator
import pathlib
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import jax
import numpy as np
from jax._src import (
    ad_util,
    api_util,
    array,
    config,
    core,
    debugging,
    dispatch,
    dtypes,
    source_info_util,
    traceback_util,
)
from jax._src.interpreters import ad, batching, mlir, partial_eval, pxla
from jax._src.state import discharge, indexing, types
from jax._src.state import primitives as state
from jax._src.util import register_cache, split_list, weakref_lru_cache
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core as jex
from jax.extend.random import threefry_prng_impl

from pbkern._user_lines import UserLine, line_of_frame

if TYPE_CHECKING:
    from typing_extensions import TypeIs

SINCE_0_11 = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 11)
Var = jex.Var
Literal = jex.Literal
Slice = indexing.Slice

# Our own frames are not the user's: error messages and equations name the line that called us.
PACKAGE = str(pathlib.Path(__file__).parent)
source_info_util.register_exclusion(PACKAGE)  # lines of users are outside of it
traceback_util.register_exclusion(PACKAGE)  # and so are the frames that tracebacks show
_NUMPY = str(pathlib.Path(np.__file__).parent)
_PBKERN = str(pathlib.Path(__file__).parent)


# Decorator: errors that leave the function show the user's frames alone, as those of jax.jit do.
hides_own_frames = traceback_util.api_boundary


def shows_all_frames() -> bool:
    """Whether the user asked for frames of JAX's own (JAX_TRACEBACK_FILTERING=off)."""
    return config.traceback_filtering.value == "off"


def runs_eagerly() -> bool:
    """Whether jax.jit runs its functions op by op (jax.disable_jit)."""
    return config.disable_jit.value


def is_array_of_numbers(value) -> bool:
    """Whether a value is an array of JAX's that exists, and not one of PRNG keys."""
    return type(value) is array.ArrayImpl


def looks_for_bad_numbers() -> bool:
    """Whether JAX checks results for NaN or infinities (jax_debug_nans, jax_debug_infs)."""
    return config.debug_nans.value or config.debug_infs.value


def is_user_file(name: str) -> bool:
    """Whether a code object's file holds a user's code: not that of JAX, NumPy or pbkern."""
    return source_info_util.is_user_filename(name) and not name.startswith(
        (_NUMPY, "<string>")
    )  # "<string>": dataclasses


def ref_aval(shape: tuple[int, ...], dtype) -> jax.ref.AbstractRef:
    """A fresh Ref type. JAX rejects one aval object for two arguments, hence no caching."""
    return jax.ref.AbstractRef(jax.core.ShapedArray(tuple(shape), np.dtype(dtype)))


def is_ref(aval) -> bool:
    return isinstance(aval, types.AbstractRef)


def ref_type(aval) -> tuple[tuple[int, ...], np.dtype]:
    """(shape, dtype) of what a Ref type refers to; the dtype of PRNG keys is none of NumPy's."""
    dtype = aval.inner_aval.dtype
    return tuple(aval.inner_aval.shape), dtype if jax.dtypes.issubdtype(
        dtype, jax.dtypes.extended
    ) else np.dtype(dtype)


def ref_contents(aval):
    """Array type of what a Ref type refers to; any other type itself."""
    return aval.inner_aval if is_ref(aval) else aval


def fresh_aval(aval):
    """Returns the type without weak type, as a new object."""
    if is_ref(aval):
        return ref_aval(*ref_type(aval))
    return jax.core.ShapedArray(aval.shape, aval.dtype)


def user_line(eqn) -> str | None:
    """`file:line:column (function)` of the user's code that made an equation, or None."""
    return _innermost_line(eqn.source_info.traceback)


def line_of_call(eqn) -> str | None:
    """user_line, or that of the call inside whose `source_context` the equation of a library function is looked at."""
    place = place_of_call(eqn)
    return place and str(place)


def current_line() -> str | None:
    """The text of `current_place`."""
    place = current_place()
    return place and str(place)


def place_of_call(eqn) -> UserLine | None:
    """The place of which line_of_call is the text."""
    return _place_of(eqn.source_info) or current_place()


def current_place() -> UserLine | None:
    """The user's line of what is being traced or lowered; else, as of functions that JAX traced before, that of the call."""
    return _place_of(source_info_util._source_info_context.context) or _place_of_caller()


def _place_of_caller() -> UserLine | None:
    """The innermost line of the user's on Python's stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame and line_of_frame(frame.f_code, frame.f_lineno, frame.f_lasti)


def user_stack_level() -> int:
    """Finds the innermost line of the user's: stacklevel of a warning that the calling function gives."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and not is_user_file(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def _place_of(info) -> UserLine | None:
    return _innermost_place(info.traceback)


# Equations of one line, and of a loop's turns, share their traceback.
@functools.lru_cache(maxsize=4096)
def _innermost_place(traceback) -> UserLine | None:
    frame = source_info_util.user_frame(traceback)
    return frame and UserLine(
        frame.file_name, frame.start_line, frame.start_column, frame.function_name
    )


@functools.lru_cache(maxsize=4096)
def _innermost_line(traceback) -> str | None:
    place = _innermost_place(traceback)
    return place and str(place)


def scopes_of_place(eqn) -> list[str]:
    """The scopes of jax.named_scope around an equation, from the outermost on."""
    stack = eqn.source_info.name_stack.stack
    return [entry.name for entry in stack if isinstance(entry, source_info_util.Scope)]


def context_of_place(eqn) -> str:
    """Tells an equation from others of its line: scopes of jax.named_scope, pass, and the line that called the line's function.

    The caller is one of the function that was traced: frames behind a decorated function's do not
    count.
    """
    scopes = scopes_of_place(eqn)
    is_backward = any(entry.name == "transpose" for entry in eqn.source_info.name_stack.stack)
    parts = [f"in {'/'.join(scopes)}"] * bool(scopes) + ["backward"] * is_backward
    caller = _caller(eqn.source_info.traceback)
    return ", ".join([*parts, f"called from {caller}"] if caller else parts)


@functools.lru_cache(maxsize=4096)
def _caller(traceback) -> str | None:
    """`file:line (function)` of the user's frame that called the innermost one of the user's, within what was traced."""
    if traceback is None:
        return None
    innermost = None
    for code, instruction in zip(*traceback.raw_frames()):
        if code.co_filename.startswith(_PBKERN) and innermost is not None:
            return None
        if not is_user_file(code.co_filename):
            continue
        if innermost is not None:
            frame = source_info_util.raw_frame_to_frame(code, instruction)
            return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
        innermost = code
    return None


def source_context(eqn):
    """Context manager: equations bound inside belong to the user line that made `eqn`.

    Equations of a library function that JAX traced earlier have no user line: they belong to the
    line of the call.
    """
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    traceback = eqn.source_info.traceback if user_line(eqn) else None
    return source_info_util.user_context(traceback, name_stack=stack)


def context_of_line(line: UserLine):
    """Context manager: equations bound inside belong to this line, which no frame of Python's has."""
    return source_info_util.user_context(_traceback_at(line))


@functools.lru_cache(maxsize=4096)
def _traceback_at(line: UserLine):
    """A traceback whose innermost frame of a user's is this line."""
    return line.called(source_info_util.Traceback.get_traceback)


def params_of(eqn) -> Mapping:
    """An equation's parameters under the names of jax 0.10: scans of 0.11 hold trees in place of numbers of operands."""
    params = eqn.params
    if eqn.primitive.name != "scan" or "num_carry" in params:
        return params
    consts, carry, _ = map(len, params["ft_in"].unpack())
    rest = {key: param for key, param in params.items() if key not in ("ft_in", "ft_out")}
    return rest | {"num_consts": consts, "num_carry": carry}


def _native(primitive, operands: Sequence, params: Mapping) -> Mapping:
    """params_of, the other way: what the installed JAX calls them."""
    if primitive.name != "scan" or "num_carry" not in params or not SINCE_0_11:
        return params
    from jax._src import flattree as ft  # type: ignore[attr-defined]  # of jax 0.11

    rest = {key: param for key, param in params.items() if key not in ("num_consts", "num_carry")}
    consts, carry, results = (
        params["num_consts"],
        params["num_carry"],
        len(params["jaxpr"].out_avals),
    )
    given = ft.pack((ft.nones(consts), ft.nones(carry), ft.nones(len(operands) - consts - carry)))
    return rest | {"ft_in": given, "ft_out": ft.pack((ft.nones(carry), ft.nones(results - carry)))}


def bind_again(eqn, operands: Sequence, params: dict | None = None) -> list:
    """Results of an equation on these operands, with its own parameters or others.

    What `bind` takes are not always an equation's parameters: shard_map and others have functions
    there, and keep jaxprs.
    """
    if params is None or params is eqn.params:
        copied = _copied(eqn, operands)
        if copied is not None:
            return copied
    bound_params = eqn.params if params is None else _native(eqn.primitive, operands, params)
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(bound_params))
    return list(results) if eqn.primitive.multiple_results else [results]


def copied_from(eqn, operands: Sequence, source) -> list | None:
    """Results of `bind_again` in `source_of(source)`; None where that makes no copy, and where `source` has no traceback."""
    info = source.source_info
    return _copied(eqn, operands, info) if info.traceback else None


def _copied(eqn, operands: Sequence, place=None) -> list | None:
    """Results of a copy of an equation in the function that is being traced; None unless `bind` would make just that.

    `bind` derives the types of results, which the equation has, and looks for rules that plain
    primitives have not. A copy takes a fourth of its time. place: the copy's source, default that of the context.
    """
    trace, primitive = core.trace_ctx.trace, eqn.primitive
    if (
        type(trace) is not partial_eval.DynamicJaxprTrace
        or eqn.effects
        or len(operands) != len(eqn.invars)
        or not _is_plain(primitive)
    ):
        return None
    if config.eager_constant_folding.value and not any(
        isinstance(operand, core.Tracer) for operand in operands
    ):
        return None
    place = place or source_info_util.current()
    tracers = []
    for operand, atom in zip(operands, eqn.invars):
        if isinstance(atom, core.Literal):
            if isinstance(operand, core.Tracer) or primitive in partial_eval.const_fold_rules:
                return None
            operand = trace.to_jaxpr_tracer(dtypes.canonicalize_value(operand), place)
        elif not isinstance(operand, core.Tracer) or operand._trace is not trace:
            return None
        if operand.aval is not atom.aval and operand.aval != atom.aval:
            return None
        tracers.append(operand)
    types = [result.aval for result in eqn.outvars]
    copy, results = trace.make_eqn(tracers, types, primitive, eqn.params, eqn.effects, place)
    trace.frame.add_eqn(copy)
    return results


@functools.cache
def _is_plain(primitive) -> bool:
    """Whether a trace adds an equation for a primitive, and does nothing else.

    Results that are operands, as those of a conversion to the same type, were forwarded when the
    equation was made.
    """
    return (
        type(primitive) is core.Primitive
        and not vars(primitive).keys() & {"bind", "bind_with_trace"}
        and not primitive.ref_allocating
        and (primitive not in partial_eval.custom_staging_rules or primitive.name in _STAGED_ALIKE)
    )


# Primitives whose rule for traces makes the equation that any other has.
_STAGED_ALIKE = ("broadcast_in_dim", "dynamic_slice", "iota", "reshape")


def types_kept(closed: jex.ClosedJaxpr):
    """Context manager: what is traced of a jaxpr keeps its 64-bit types, also where the user has not enabled them."""
    return jax.enable_x64(True) if _has_wide_types(closed) else contextlib.nullcontext()


@weakref_lru_cache
def _has_wide_types(closed: jex.ClosedJaxpr) -> bool:
    return any(
        getattr(variable.aval, "dtype", None) in _WIDE for variable in _variables(closed.jaxpr)
    )


_WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))


def _variables(jaxpr: jex.Jaxpr) -> Iterator[Var]:
    yield from (*jaxpr.invars, *jaxpr.constvars)
    for eqn in jaxpr.eqns:
        yield from eqn.outvars
    for eqn in nesting(jaxpr):
        for inner in core.jaxprs_in_params(eqn.params):
            yield from _variables(inner)


# Types of parameters that hold no jaxpr: most parameters of most equations.
PLAIN_PARAMETERS = frozenset((bool, int, float, str, type(None)))


@weakref_lru_cache(trace_context_in_key=False)
def nesting(jaxpr: jex.Jaxpr) -> tuple:
    """The equations that hold jaxprs: few, for which every walk would look at the parameters of all."""
    return tuple(eqn for eqn in jaxpr.eqns if _holds_jaxprs(eqn.params))


def _holds_jaxprs(params: Mapping) -> bool:
    for value in params.values():
        if type(value) in PLAIN_PARAMETERS:
            continue
        for inner in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(inner, (core.ClosedJaxpr, core.Jaxpr)):
                return True
    return False


# Operands before the index leaves, per Ref primitive.
REF_OPERANDS = {"get": 1, "swap": 2, "addupdate": 2, "masked_load": 3, "masked_store": 3}
REF_PRIMITIVES = {"get": state.get_p, "swap": state.swap_p, "addupdate": state.addupdate_p}

READ = types.ReadEffect
WRITE = types.WriteEffect


def only_reads(eqn) -> bool:
    """Whether dropping an equation whose results are unused changes nothing."""
    return all(isinstance(effect, types.ReadEffect) for effect in eqn.effects)


def ref_indexers(eqn) -> list[tuple]:
    """Index tuples of a get / swap / addupdate / masked_load / masked_store equation, outermost first.

    Each entry of a tuple is an int, an atom (Var or Literal: scalar or integer array) or a Slice,
    which has `.start` (int or atom), `.size` and `.stride`.
    """
    return unflatten_indexers(eqn.params["tree"], eqn.invars[REF_OPERANDS[eqn.primitive.name] :])


def shaped_indexers(eqn) -> list[tuple[tuple, tuple[int, ...]]]:
    """(index tuple, shape that it indexes) of a get / swap / addupdate equation, outermost first; other transforms end it."""
    indexers = []
    for transform in jax.tree.unflatten(
        eqn.params["tree"], eqn.invars[REF_OPERANDS[eqn.primitive.name] :]
    ):
        if not isinstance(transform, indexing.NDIndexer):
            break
        indexers.append((tuple(transform.indices), tuple(transform.shape)))
    return indexers


def unflatten_indexers(tree, leaves) -> list[tuple]:
    """Index tuples from a Ref primitive's `tree` and index operands (atoms or values)."""
    indexers = []
    for transform in jax.tree.unflatten(tree, leaves):
        if not isinstance(transform, indexing.NDIndexer):
            raise NotImplementedError(f"Ref transform {type(transform).__name__}")
        indexers.append(tuple(transform.indices))
    return indexers


def flatten_indices(
    shape: tuple[int, ...], indices: tuple, masked: bool = False
) -> tuple[list, object]:
    """(operands, tree) that say `ref[indices]` of a Ref of this shape: one int, array or Slice per dimension.

    With `masked`, constant indices may lie outside the shape.
    """
    arrays = [index for index in indices if not isinstance(index, Slice)]
    gathered = np.broadcast_shapes(*(np.shape(array) for array in arrays)) if arrays else ()
    indexer = indexing.NDIndexer(tuple(indices), tuple(shape), gathered, validate=not masked)
    return jax.tree.flatten((indexer,))


def flatten_subscript(ref, index, masked: bool) -> tuple[object, list, object]:
    """(Ref, operands, tree) of what a user writes as `ref[index]`, where `ref` may be `r.at[...]` already."""
    if not masked:
        base, transforms = state.get_ref_and_transforms(ref, index, "load")
        return (base, *jax.tree.flatten(transforms))
    shape = ref.shape
    index = index if isinstance(index, tuple) else (index,)
    if any(position is ... for position in index):
        at = next(n for n, position in enumerate(index) if position is ...)
        index = (*index[:at], *[slice(None)] * (len(shape) - len(index) + 1), *index[at + 1 :])
    index = (*index, *[slice(None)] * (len(shape) - len(index)))
    index = tuple(
        Slice.from_slice(position, size) if isinstance(position, slice) else position
        for position, size in zip(index, shape)
    )
    anywhere = tuple(max(size, 2**31 - 1) for size in shape)
    whole = indexing.NDIndexer.from_indices_shape(index, anywhere)
    indexer = indexing.NDIndexer(whole.indices, tuple(shape), whole.int_indexer_shape)
    base, outer = state.get_ref_and_transforms(ref, None, "load")
    return (base, *jax.tree.flatten((*outer, indexer)))


def indexed_type(aval, tree, leaves):
    """Array type of `ref[indices]`."""
    return state.transform_type(jax.tree.unflatten(tree, leaves), aval.inner_aval)


def written_inputs(jaxpr) -> set[int]:
    """Positions of the Refs among a jaxpr's operands that it writes to, at any depth."""
    written = {
        effect.input
        for effect in jaxpr.effects
        if isinstance(effect, (types.WriteEffect, types.AccumEffect))
    }
    return {n for n, var in enumerate(jaxpr.invars) if var in written or n in written}


def read_inputs(jaxpr) -> set[int]:
    """Positions of the Refs among a jaxpr's operands that it reads, or adds to, at any depth."""
    read = {
        effect.input
        for effect in jaxpr.effects
        if isinstance(effect, (types.ReadEffect, types.AccumEffect))
    }
    return {n for n, var in enumerate(jaxpr.invars) if var in read or n in read}


NO_INDICES = jax.tree.flatten(())[1]


def is_slice(index) -> TypeIs[Slice]:
    return isinstance(index, Slice)


def source_of(eqn):
    """Context in which traced equations carry `eqn`'s source line, and not that of the code that traces."""
    return source_info_util.user_context(
        eqn.source_info.traceback, name_stack=eqn.source_info.name_stack
    )


# ---- primitives that carry a jaxpr: what transformations make of it
# -------------------------------------------------

Zero = ad_util.Zero
cached_by_jaxpr = weakref_lru_cache  # f(jaxpr, *hashables), forgotten with the jaxpr
# The same for what JAX's context, such as the mesh, does not change.
cached_by_jaxpr_alone = weakref_lru_cache(trace_context_in_key=False)


def set_eager_rule(primitive, explain_bad_number: Callable | None = None) -> None:
    """Outside of tracing, the primitive compiles and runs alone; also under jax.disable_jit.

    explain_bad_number(error, *operands, **params): called where there is a NaN or an infinity in the
    results (jax_debug_nans, jax_debug_infs); it may raise an error that says more.
    """

    def run(*args, **params):
        try:
            results = dispatch.apply_primitive(primitive, *args, **params)
            refuse_bad_numbers(primitive.name, results)
        except FloatingPointError as error:
            if explain_bad_number is not None:
                explain_bad_number(error, *args, **params)
            raise
        return results

    primitive.def_impl(run)


def refuse_bad_numbers(name: str, results) -> None:
    """Raises FloatingPointError for a NaN or an infinity among results, where jax_debug_nans or jax_debug_infs asks for it.

    JAX does so itself when it compiles an operation. Once a function of its own has turned the
    setting off for a while, as jnp.var does, it does not look at what was compiled before.
    """
    if looks_for_bad_numbers():
        shards = [
            shard.data
            for leaf in jax.tree.leaves(results)
            for shard in getattr(leaf, "addressable_shards", ())
        ]
        try:
            dispatch.check_special(name, shards)
        except api_util.InternalFloatingPointError as error:
            raise FloatingPointError(f"invalid value ({error.ty}) encountered in {name}") from None


def set_transformation_rules(
    primitive, *, jvp, partial_eval_rule, transpose, batch, dce, params_of_split
) -> None:
    """Registers a primitive's rules; `params_of_split` updates parameters when remat or scan split its jaxpr."""
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.fancy_primitive_batchers[primitive] = batch
    partial_eval.custom_partial_eval_rules[primitive] = partial_eval_rule
    partial_eval.dce_rules[primitive] = dce
    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = lambda *args, **kw: (
        partial_eval.closed_call_partial_eval_custom_rule("jaxpr", params_of_split, *args, **kw)
    )


def without_refs(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Replaces Refs that a function makes for itself (jax.new_ref) by values."""
    if not any(isinstance(effect, core.InternalMutableArrayEffect) for effect in closed.effects):
        return closed
    return pxla._discharge_internal_refs(closed)


def of_contents(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A jaxpr over Refs as a function: contents of Refs -> its results, then the new contents of every Ref."""
    return discharge.discharge_state(closed, lower=False)  # which keeps rules for derivatives


def needed_operands(
    closed: jex.ClosedJaxpr, results: Sequence[bool]
) -> tuple[jex.ClosedJaxpr, list[bool]]:
    """(the jaxpr without what these results do not need but its operands, which operands they need).

    Carries of loops that lead to no result are gone, too.
    """
    _, used = partial_eval.dce_jaxpr(closed.jaxpr, list(results))
    whole, _ = partial_eval.dce_jaxpr(closed.jaxpr, list(results), instantiate=True)
    return core.ClosedJaxpr(whole, closed.consts), used


def without_ref_operands(closed: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, tuple[int, ...]]:
    """(a jaxpr over the contents of Refs, the numbers of the operands that are Refs).

    The jaxpr takes the contents of Refs among its operands, and has the new contents of those that
    it writes to as further results. Constants must be hoisted.
    """
    written = tuple(
        sorted(
            operand for operand in written_inputs(closed.jaxpr) if is_ref(closed.in_avals[operand])
        )
    )
    if not any(map(is_ref, closed.in_avals)):
        return closed, ()
    count, pure = len(closed.out_avals), discharge.discharge_state(closed)
    refs = [
        n for n, aval in enumerate(closed.in_avals) if is_ref(aval)
    ]  # all of them are results afterwards
    remaining = [*range(count), *(count + k for k, ref in enumerate(refs) if ref in written)]
    outvars, info = (
        [pure.jaxpr.outvars[position] for position in remaining],
        pure.jaxpr.debug_info.with_unknown_names(),
    )
    return core.ClosedJaxpr(
        pure.jaxpr.replace(outvars=outvars, debug_info=info), pure.consts
    ), written


def set_checkify_rule(primitive, bind: Callable) -> None:
    """Makes checkify look into a primitive: bind(operands, jaxpr, **its other parameters) calls it with the checked jaxpr."""
    from jax._src import checkify

    def rule(*arguments, jaxpr, **params):
        context = arguments[: 1 if SINCE_0_11 else 0]  # that numbers errors
        error, enabled_errors, *operands = arguments[len(context) :]
        given, tree = jax.tree.flatten(error)
        types = [core.typeof(x) for x in (*given, *operands)]
        checked, results, _ = checkify.jaxpr_to_checkify_jaxpr(
            *context, jaxpr, enabled_errors, tree, *types
        )
        return jax.tree.unflatten(results, bind([*given, *operands], checked, **params))

    checkify.error_checks[primitive] = rule


def hoist_constants(closed: jex.ClosedJaxpr, but: Sequence[int] = ()) -> jex.ClosedJaxpr:
    """Makes a jaxpr's constants its leading operands, except those at the places `but`."""
    hoisted = core.ClosedJaxpr(partial_eval.convert_constvars_jaxpr(closed.jaxpr), ())
    if not but:
        return hoisted
    operands, count = hoisted.jaxpr.invars, len(closed.consts)
    leading = [*but, *(n for n in range(count) if n not in but)]
    ordered = [*(operands[n] for n in leading), *operands[count:]]
    return with_constants(
        core.ClosedJaxpr(hoisted.jaxpr.replace(invars=ordered), ()), [closed.consts[n] for n in but]
    )


def with_constants(closed: jex.ClosedJaxpr, values: Sequence) -> jex.ClosedJaxpr:
    """Makes `values` constants, in the place of the leading operands of a jaxpr that has none: undoes hoist_constants."""
    if SINCE_0_11:  # leading operands with values are constants
        return core.ClosedJaxpr(closed.jaxpr, values)
    return core.ClosedJaxpr(
        partial_eval.convert_invars_to_constvars(closed.jaxpr, len(values)), values
    )


def jvp_jaxpr(
    closed: jex.ClosedJaxpr, nonzero: Sequence[bool]
) -> tuple[jex.ClosedJaxpr, Sequence[bool]]:
    """(primals, nonzero tangents) -> (results, nonzero result tangents), and which result tangents are nonzero."""
    return ad.jvp_jaxpr(closed, list(nonzero), False)


def tangent_type(type_):
    """Array type of the tangents of arrays of a type; float0 for those without derivatives."""
    return jax.core.ShapedArray(type_.shape, type_.dtype).to_tangent_aval()


def tangent_zeros(results: Sequence) -> list[Zero]:
    return [Zero(core.typeof(result).to_tangent_aval()) for result in results]


def batch_jaxpr(
    closed: jex.ClosedJaxpr, axis_data, dims: Sequence
) -> tuple[jex.ClosedJaxpr, tuple]:
    """The jaxpr over operands with a batch dimension where `dims` says so, and the dimensions of its results."""
    return batching.batch_jaxpr2(closed, axis_data, tuple(dims))


class Split(NamedTuple):
    """A jaxpr cut in two by what is known.

    known: known operands -> known results, then residuals.
    unknown: residuals, then unknown operands -> unknown results.
    unknown_results: per result of the whole.
    residuals: how many.
    """

    known: jex.ClosedJaxpr
    unknown: jex.ClosedJaxpr
    unknown_results: tuple[bool, ...]
    residuals: int


def split_by_known(closed: jex.ClosedJaxpr, unknown: Sequence[bool]) -> Split:
    known, rest, unknown_out, residuals = partial_eval.partial_eval_jaxpr_nounits(
        closed, tuple(unknown), False
    )
    return Split(known, rest, tuple(unknown_out), len(residuals))


def stage_unknown(
    trace, primitive, operands: Sequence, result_avals: Sequence, params: dict, effects
) -> list:
    """Records an equation on a partial-evaluation trace; `operands` are values or the trace's own tracers."""
    tracers = [trace.instantiate_const(trace.to_jaxpr_tracer(operand)) for operand in operands]
    results = [
        partial_eval.JaxprTracer(trace, partial_eval.PartialVal.unknown(aval), None)
        for aval in result_avals
    ]
    eqn = partial_eval.new_eqn_recipe(
        trace, tracers, results, primitive, params, effects, source_info_util.current()
    )
    for result in results:
        result.recipe = eqn
    return results


def set_partial_rule(primitive, rule: Callable) -> None:
    """Makes rule(trace, *tracers, **params) say what of a primitive waits for operands that are unknown yet."""
    partial_eval.custom_partial_eval_rules[primitive] = rule


def partly_evaluated(trace, primitive, tracers: Sequence, params: dict) -> list:
    """Binds a primitive where all operands are known, and records an equation otherwise."""
    return trace.default_process_primitive(primitive, tracers, params)


def known_value(tracer):
    """A tracer's value under partial evaluation; `is_known` first."""
    return tracer.pval.get_known()


def replace_jvp(primitive, rule: Callable) -> Callable[[], None]:
    """Makes rule(stock rule, primals, tangents, **params) a primitive's JVP rule; returns what undoes it."""
    stock = ad.primitive_jvps[primitive]
    ad.primitive_jvps[primitive] = functools.partial(rule, stock)
    return functools.partial(ad.primitive_jvps.__setitem__, primitive, stock)


def is_linear_operand(x) -> bool:
    """Whether a transpose rule is asked for the cotangent of this operand."""
    return isinstance(x, ad.UndefinedPrimal)


def transposed_jaxpr(
    closed: jex.ClosedJaxpr, linear: tuple[bool, ...], nonzero_ct: tuple[bool, ...]
) -> tuple:
    """(jaxpr: nonlinear operands, nonzero cotangents -> nonzero cotangents of linear operands; which those are)."""
    known_avals = [aval for aval, is_linear in zip(closed.in_avals, linear) if not is_linear]
    ct_avals = [aval.to_ct_aval() for aval, nz in zip(closed.out_avals, nonzero_ct) if nz]
    nonzero: list[bool] = []

    def run(*args):
        known, cts = map(iter, split_list(list(args), [len(known_avals)]))
        operands = [
            ad.UndefinedPrimal(aval) if is_linear else next(known)
            for is_linear, aval in zip(linear, closed.in_avals)
        ]
        cotangents = [
            next(cts) if nz else Zero(aval.to_ct_aval())
            for nz, aval in zip(nonzero_ct, closed.out_avals)
        ]
        cotangents_back = ad.backward_pass(closed.jaxpr, False, closed.consts, operands, cotangents)
        cotangents_back = [ct for ct, is_linear in zip(cotangents_back, linear) if is_linear]
        nonzero[:] = [type(ct) is not Zero for ct in cotangents_back]
        return [ct for ct in cotangents_back if type(ct) is not Zero]

    return jax.make_jaxpr(run)(*known_avals, *ct_avals), tuple(nonzero)


def cotangent_zero(operand) -> Zero:
    return Zero(operand.aval.to_ct_aval())


def prune_equation(
    used_results: Sequence[bool], eqn, keep_params: Callable
) -> tuple[list[bool], object]:
    """Dead code rule of a primitive with a `jaxpr`: (which operands are needed, the smaller equation or None).

    An equation without dead code stays itself: what has been compiled of its jaxpr is found by it.
    """
    closed = eqn.params["jaxpr"]
    if not any(used_results) and not closed.effects:
        return [False] * len(eqn.invars), None
    jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, list(used_results))
    if all(used) and all(used_results) and _size(jaxpr) == _size(closed.jaxpr):
        return used, eqn
    params = keep_params(dict(eqn.params, jaxpr=core.ClosedJaxpr(jaxpr, closed.consts)), used)
    invars = [var for var, is_used in zip(eqn.invars, used) if is_used]
    outvars = [var for var, result in zip(eqn.outvars, used_results) if result]
    return used, eqn.replace(invars=invars, outvars=outvars, params=params, effects=jaxpr.effects)


def without_dead_code(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The function without equations that its results and effects do not need; operands stay."""
    live, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.out_avals), instantiate=True)
    return closed if _size(live) == _size(closed.jaxpr) else core.ClosedJaxpr(live, closed.consts)


def _size(jaxpr: jex.Jaxpr) -> int:
    """Counts equations, at any depth."""
    inner = (_size(one) for eqn in nesting(jaxpr) for one in core.jaxprs_in_params(eqn.params))
    return len(jaxpr.eqns) + sum(inner)


def is_for_export(ctx) -> bool:
    """Whether a lowering's module leaves this process (jax.export), where custom FFI targets do not exist."""
    return ctx.module_context.lowering_parameters.for_export


def eager_context() -> tuple | None:
    """Facts that JAX's results depend on beside arguments; None while a function is traced, or JAX wants to see each call."""
    watched = config.debug_nans, config.debug_infs, config.disable_jit
    if not core.trace_state_clean() or any(flag.value for flag in watched):
        return None
    if config.transfer_guard_host_to_device.value not in (
        None,
        "allow",
        "log",
        "disallow",
    ):  # explicit transfers
        return None
    return config.trace_context()


def tracing_settings() -> tuple:
    """Settings on which it depends what is traced of functions of jax.numpy."""
    return (
        config.enable_x64.value,
        config.default_matmul_precision.value,
        config.numpy_dtype_promotion.value,
        config.numpy_rank_promotion.value,
    )


_recorded = contextvars.ContextVar("recorded", default=False)


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Inside, what JAX compiles in this thread records its calls (targets/host/recording.py).

    An attribute of operations, which XLA ignores, keeps it apart in JAX's caches.
    """
    token = _recorded.set(True)
    try:
        with set_xla_metadata(pbkern="recorded"):
            yield
    finally:
        _recorded.reset(token)


def is_recorded() -> bool:
    """Whether `recorded` is in force."""
    return _recorded.get()


def untyped_manual_axes():
    """Context manager: inside shard_map, types do not say over which mesh axes values vary.

    They have been checked when the function was traced; plans and FFI calls are made of plain
    types.
    """
    return config._check_vma(False)


def without_mesh():
    """Context manager: what is traced inside is not typed by the mesh that the user's code has set.

    The mesh of a shard_map stays.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def is_laid_over_devices(sharding) -> bool:
    """Whether a type or a parameter says how an array lies over a mesh, other than the one inside a shard_map."""
    mesh = getattr(sharding, "mesh", None)
    return mesh is not None and not mesh.empty and not mesh.manual_axes


def keep_with_executable(ctx, x) -> None:
    """Makes what a lowering compiles refer to x, from now until it goes."""
    ctx.module_context.add_keepalive(_Held(x))


class _Held:
    """An object that an executable refers to. JAX pickles it where an executable is serialised."""

    def __init__(self, x) -> None:
        self.x = x

    def __reduce__(self) -> NoReturn:
        raise pickle.PicklingError(
            "an executable with kernels of pbkern cannot be serialised: they are machine code of this process. "
            "jax.export.export(f) takes the operations along; polyblocks_aot_jax makes a library of the kernels"
        )


def on_clear_caches(function: Callable[[], None]) -> None:
    """From now on, jax.clear_caches() calls function, once however often it is registered."""
    if function not in _cleared:
        _cleared[function] = _Cleared(function)
        register_cache(_cleared[function], function.__qualname__)


class _Cleared:
    """An object that JAX takes for a cache of its own."""

    def __init__(self, clear: Callable[[], None]):
        self.cache_clear, self.cache_info, self.cache_keys = clear, tuple, tuple


_cleared: dict[Callable, _Cleared] = {}


def part_of(
    closed: jex.ClosedJaxpr, operands: Sequence[Var], results: Sequence, eqns: Sequence
) -> jex.ClosedJaxpr:
    """A jaxpr of some of the equations: from `operands` to `results`, which are values of `closed`."""
    info = closed.jaxpr.debug_info.with_unknown_names()
    effects = functools.reduce(operator.or_, (eqn.effects for eqn in eqns), core.no_effects)
    jaxpr = core.Jaxpr(
        closed.jaxpr.constvars, list(operands), list(results), list(eqns), effects, info
    )
    return core.ClosedJaxpr(jaxpr, closed.consts)


def partitioned_over(ctx) -> int:
    """Devices over which XLA, and not shard_map, divides the values of a lowering; 1 where it does not."""
    axes = ctx.module_context.axis_context
    if getattr(axes, "manual_axes", frozenset()):
        return 1
    mesh = getattr(axes, "mesh", None)
    return getattr(axes, "num_devices", 1) if mesh is None else mesh.size


# --- Pallas
# ------------------------------------------------------------------------------------------------------
# Imported on first use: Pallas costs a third of a second, and most programs have no pallas_call.


@functools.cache
def pallas() -> SimpleNamespace:
    """Names of Pallas that the importer needs: the primitive, the stock lowering, kinds of block dimensions."""
    from jax._src.pallas import core, mpmd, pallas_call

    return SimpleNamespace(
        call_p=pallas_call.pallas_call_p,
        stock_lowering=pallas_call._pallas_call_lowering,
        mesh_call_p=mpmd.mpmd_map_p,
        stock_mesh_lowering=mpmd._mpmd_map_fallback_lowering,
        grid_mapping=core.get_grid_mapping,
        Blocked=core.Blocked,
        Squeezed=core.Squeezed,
        Element=core.Element,
        BoundedSlice=core.BoundedSlice,
        is_dynamic_dim=core.is_dynamic_dim,
        debug_checks_enabled=core.debug_checks_enabled,
    )


def lowers_for_tpu(primitive) -> bool:
    """Whether Pallas's compiler for TPUs has code for a primitive on a TensorCore."""
    from jax._src.pallas.mosaic import core, lowering

    return primitive in lowering.lowering_rules[core.CoreType.TC]


def loaded_pallas():
    """Pallas's module of grids and block specs, if the user has imported it."""
    return sys.modules.get("jax._src.pallas.core")


def pallas_grid(grid: tuple[int, ...]):
    """Context manager: the body that is traced may call Pallas's program_id and num_programs."""
    core = loaded_pallas()
    return contextlib.nullcontext() if core is None else core.tracing_grid_env(grid, ())


def computed_in_the_body():
    """Context manager: equations without traced operands are traced too, also under jax.ensure_compile_time_eval."""
    return config.eager_constant_folding(False)


def copy_operands(eqn, operands) -> tuple:
    """((source Ref, transforms), (target Ref, transforms), semaphore, source's semaphore, device).

    They are those of a dma_start or dma_wait equation, of its operands or of their types.
    """
    subscripts = eqn.params["tree"].unflatten(list(operands))
    ends = (
        (operand.ref, operand.transforms)
        if isinstance(operand, types.TransformedRef)
        else (operand, ())
        for operand in subscripts[:2]
    )
    return (*ends, *subscripts[2:])


def key_implementation(dtype):
    """The generator of a typed PRNG key's dtype: its key_shape, name, and functions seed, split, fold_in, random_bits."""
    return dtype._impl


def is_generator(value) -> bool:
    """Whether a value, as a parameter of an equation, is the generator of typed PRNG keys."""
    return isinstance(value, type(threefry_prng_impl))


def is_tpu_generator(implementation) -> bool:
    """Whether a generator is one of Pallas's, whose functions use the state of a TPU's core."""
    random = sys.modules.get(
        "jax._src.pallas.mosaic.random"
    )  # which whoever has such a key has imported
    return random is not None and random.is_pallas_impl(implementation)


def is_semaphore(dtype) -> bool:
    """Whether a Ref's element type is a TPU's semaphore: DMA, regular or barrier."""
    from jax._src.pallas import core

    return jax.dtypes.issubdtype(dtype, core.semaphore_dtype)


@functools.cache
def sparse_core_primitives() -> frozenset:
    """Primitives for SparseCores but their loop; some have names of others."""
    from jax._src.pallas.mosaic import sc_primitives

    return frozenset(
        var for var in vars(sc_primitives).values() if isinstance(var, core.Primitive)
    ) - {sc_primitives.parallel_loop_p}


@functools.cache
def tpu_infos() -> tuple[dict, Callable]:
    """(device kind -> function that pltpu.get_tpu_info() calls there, function that gives one core of a TPU v6e)."""
    from jax._src.pallas.mosaic import tpu_info

    return tpu_info.registry, lambda: tpu_info.get_tpu_info_for_chip(
        tpu_info.ChipVersion.TPU_V6E, 1
    )


def tpu_kinds() -> dict[str, str]:
    """Generation, as "v6e" -> device_kind of such TPUs."""
    from jax._src.pallas.mosaic import tpu_info

    names = [version.value for version in tpu_info.ChipVersion]
    kinds = {name: [f"TPU {name}", f"TPU{name}"] for name in names}
    kinds["v4i"] = ["TPU v4 lite"]
    version_of = tpu_info.chip_version_from_device_kind
    return {
        name: kind
        for name, candidates in kinds.items()
        for kind in candidates
        if getattr(version_of(kind), "value", None) == name
    }


def answer_as(platform: str, **attributes) -> Callable[[], None]:
    """jax.default_backend() and attributes of devices answer so to callers outside of JAX and pbkern.

    Pallas's kernels and its table of TPUs count as outside: they choose blocks by the answers.
    Returns what undoes it. Attributes are replaced on the class of devices: JAX has no registry for
    them.
    """
    answers = {"platform": platform, **attributes}
    device_class = type(jax.devices()[0])
    stock = {name: vars(device_class).get(name) for name in answers}
    stock_backend = jax.default_backend

    def attribute(name: str) -> property:
        def answer(device):
            if not _asks_from_inside(sys._getframe(1)):
                return answers[name]
            if stock[name] is None:  # which some devices have under this name in another place
                raise AttributeError(f"device {device} has no attribute {name!r}")
            return stock[name].__get__(device)

        return property(answer)

    @functools.wraps(stock_backend)
    def default_backend() -> str:
        return stock_backend() if _asks_from_inside(sys._getframe(1)) else platform

    def undo() -> None:
        jax.default_backend = stock_backend
        for name, descriptor in stock.items():
            if descriptor is None:
                delattr(device_class, name)
            else:
                setattr(device_class, name, descriptor)

    jax.default_backend = default_backend
    for name in answers:
        setattr(device_class, name, attribute(name))
    return undo


# Modules of JAX that choose blocks and variants of kernels by the device.
_ASKING_MODULES = (
    "jax.experimental.pallas.ops",
    "jax._src.pallas.mosaic.tpu_info",
    "jax._src.pallas.triton.gpu_info",  # this and the next since 0.11
    "jax._src.tpu_info",
)


def _asks_from_inside(frame: FrameType) -> bool:
    """Whether a frame is JAX's own or pbkern's."""
    name = frame.f_globals.get("__name__", "")
    return name.partition(".")[0] in ("jax", "jaxlib", "pbkern") and not name.startswith(
        _ASKING_MODULES
    )


def give_meshes_one_core() -> Callable[[], None]:
    """pltpu.create_tensorcore_mesh and pltpu.TensorCoreMesh give one core where a device does not know how many it has.

    Returns what undoes it. The function and the class's initialiser are replaced: JAX has no
    registry for that number, and CPU devices take no attributes.
    """
    from jax._src.pallas.mosaic import core as tpu_core
    from jax.experimental.pallas import tpu

    stock, stock_init = tpu_core.create_tensorcore_mesh, tpu_core.TensorCoreMesh.__init__

    def is_unknown(num_cores: int | None, devices=None) -> bool:
        return num_cores is None and not hasattr((devices or jax.devices())[0], "num_cores")

    @functools.wraps(stock)
    def create(axis_name, devices=None, num_cores=None):
        if is_unknown(num_cores, devices):
            return stock(axis_name, num_cores=1)
        return stock(axis_name, devices, num_cores)

    @functools.wraps(stock_init)
    def initialise(self, *, axis_name, num_cores=None):
        given = {} if num_cores is None else {"num_cores": num_cores}
        stock_init(
            self, axis_name=axis_name, **({"num_cores": 1} if is_unknown(num_cores) else given)
        )

    def replace(function: Callable, init: Callable) -> None:
        for module in (tpu_core, tpu):
            setattr(module, stock.__name__, function)
        setattr(tpu_core.TensorCoreMesh, "__init__", init)  # noqa: B010  # mypy refuses assignments to methods

    counts = "num_cores" in inspect.signature(stock_init).parameters  # since 0.11.2
    replace(create, initialise if counts else stock_init)
    return lambda: replace(stock, stock_init)


def is_whole_memory(mapping) -> bool:
    """Whether an operand of a pallas_call is given in the memory where it is (pl.ANY, HBM), and not in blocks."""
    return memory_space(mapping.transformed_block_aval) in ("any", "hbm")


def memory_space(aval) -> str:
    """The name of the memory that a Ref type or an allocation is in."""
    space = getattr(aval, "memory_space", None)
    return str(getattr(space, "value", space))


def remove_cpu_lowering(primitive) -> None:
    """Undoes `register_lowering(primitive, ..., platform="cpu")`; public JAX has no way."""
    mlir._platform_specific_lowerings["cpu"].pop(primitive, None)


def has_cpu_lowering(name: str) -> bool:
    """Whether a primitive of this name has a lowering for the CPU alone, as pbkern.pallas.install() registers."""
    return any(primitive.name == name for primitive in mlir._platform_specific_lowerings["cpu"])


def has_devices(platform: str) -> bool:
    """Whether JAX finds a device of a platform here."""
    try:
        return bool(jax.devices(platform))
    except RuntimeError:
        return False


debug_effect = debugging.debug_effect


def failed_check(eqn, operands) -> tuple[object, str, tuple, dict]:
    """(what is true if the check fails, message, its values, its named values) of a checkify `check` equation."""
    error = jax.tree.unflatten(eqn.params["err_tree"], operands)
    (failed,) = error._pred.values()
    (tree,) = error._metadata.values()
    (payload,) = error._payload.values()
    exception = jax.tree.unflatten(tree, payload)
    return failed, exception.fmt_string, exception.args, exception.kwargs


def debug_printer(eqn):
    """f(*operands) -> None: what a `debug_print` equation (jax.debug.print) does with its values."""
    params = eqn.params
    options = dict(params["np_printoptions"])
    callback = functools.partial(
        debugging._format_print_callback,
        params["fmt"],
        options,
        params["has_placeholders"],
        params["logging_record"],
    )
    return debugging._make_flat_callback(params["in_tree"], callback, params["static_args"])


def debug_print_arguments(eqn, operands) -> tuple[tuple, dict]:
    """Positional and keyword arguments of jax.debug.print after the format, with `operands` in place of values."""
    params = eqn.params
    return debugging.merge_callback_args(params["in_tree"], operands, params["static_args"])


NDIndexer = indexing.NDIndexer
ReshapeTransform = types.ReshapeTransform
TransposeTransform = types.TransposeTransform
BitcastTransform = types.BitcastTransform


def is_dropped(var) -> bool:
    """Whether an equation's result variable is never read."""
    return type(var).__name__ == "DropVar"


program_p = jex.Primitive("pbkern_program")
program_p.multiple_results = True


@program_p.def_abstract_eval
def _program_types(*_, results, **__):
    return [core.shaped_abstractify(result).update(dtype=result.dtype) for result in results]


def _lower_program(ctx, *operands, target, label, results, aliases, has_side_effect):
    from jaxlib.mlir import ir

    rule = jax.ffi.ffi_lowering(
        target, operand_output_aliases=dict(aliases), has_side_effect=has_side_effect
    )
    with ir.Location.name(label):  # XLA names its operation so, in profiles and dumps
        return rule(ctx, *operands, name=label)  # StableHLO shows it


mlir.register_lowering(program_p, _lower_program)
# While JAX evaluates ahead of time, an equation without traced operands is run, also under jit.
program_p.def_impl(functools.partial(dispatch.apply_primitive, program_p))


def ffi_call(
    target: str,
    label: str,
    results: Sequence[jax.ShapeDtypeStruct],
    operands: Sequence,
    aliases: Iterable[tuple[int, int]] = (),
    has_side_effect: bool = False,
) -> list:
    """The results of an FFI target, for functions that are compiled.

    label: name of XLA's operation. aliases: (operand, result) pairs that share memory.

    Several results are followed by an empty one. Without it a call can become the root of a while
    loop's body, in the place of the tuple of its results, and XLA (jaxlib 0.10.2) then takes
    operands of the call for elements of that tuple: a carry that is passed at its own place counts
    as one that never changes, and the call moves out of the loop.
    """
    types = [*results, jax.ShapeDtypeStruct((0,), np.uint8)] if len(results) > 1 else results
    arrays = program_p.bind(
        *operands,
        target=target,
        label=label,
        results=tuple(types),
        aliases=tuple(aliases),
        has_side_effect=has_side_effect,
    )
    return arrays[: len(results)]


def mlir_context():
    """A fresh MLIR context in which StableHLO, CHLO and what JAX and TensorFlow write beside them can be read."""
    from jaxlib.mlir import ir
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext
    from jaxlib.mlir.dialects import chlo, mhlo, sdy, stablehlo

    context, registry = ir.Context(), ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context.append_dialect_registry(registry)
    for dialect in (stablehlo, chlo, sdy):
        dialect.register_dialect(context)
    mhlo.register_mhlo_dialect(context)
    context.load_all_available_dialects()
    return context


# --- sizes that are symbols (jax.export.symbolic_shape)


def is_symbolic(size) -> bool:
    """Whether a dimension is an expression of symbols."""
    return not isinstance(size, (int, np.integer))


def symbol_ranges(sizes: Sequence) -> dict[str, tuple[int, int | None]]:
    """Symbol of dimensions -> the least and the greatest number that constraints leave; None where there is no greatest."""
    from jax._src.export import shape_poly

    ranges = {}
    for size in filter(is_symbolic, sizes):
        for name in sorted(size._get_vars()):
            variable = shape_poly._DimExpr._from_var(name, size.scope)
            low, high = shape_poly._bounds_decision(variable, shape_poly.BoundsPrecision.BEST)
            ranges[name] = (max(int(low), 1), int(high) if np.isfinite(high) else None)
    return ranges


# The primitive that makes a number of a size.
SIZE_AS_VALUE = "dim_as_value"


def is_linear(size) -> bool:
    """Whether a dimension is a sum of numbers and of multiples of symbols."""
    if not is_symbolic(size):
        return True
    return all(term.is_constant or term.to_var() is not None for term, _ in size._sorted_terms)


def dimension_at(size, sizes: Mapping[str, int]) -> int:
    """A dimension for these numbers of its symbols."""
    if not is_symbolic(size):
        return int(size)
    return int(size._evaluate({name: np.int64(number) for name, number in sizes.items()}))
