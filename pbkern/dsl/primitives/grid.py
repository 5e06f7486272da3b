"""Ref and grid primitives of the DSL: type rule beside NumPy meaning.

Plain Ref indexing is JAX's own get / swap / addupdate. Added here: `program_id`, `num_programs`,
`in_bounds` and masked accesses as equations, and `when`, `loop`, `ds`, `cdiv`, `multiple_of` as
Python over lax. How accesses are read by others is ref_access.py; NumPy meaning of Refs themselves
is dsl/interpret.py.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pbkern import _jax
from pbkern.core.errors import KernelError, shown

from .ref_access import GatheredIndex, Point, Range, RefAccess, is_ref_access, ref_access  # noqa: F401

ds = jax.ds

# NumPy meaning of the grid primitives: name -> rule(program, *operands, **params), see dsl/interpret.py's Program.
NUMPY: dict[str, Callable] = {}


def _check_axis(name: str, axis: int) -> int:
    if not isinstance(axis, (int, np.integer)) or axis < 0:
        raise KernelError(
            f"{name} takes the number of a grid dimension",
            why=f"axis={axis!r}",
            hint=f"{name}(0) is the first dimension of grid",
        )
    return int(axis)


# --- program_id, num_programs
# ------------------------------------------------------------------------------------

program_id_p = Primitive("program_id")
num_programs_p = Primitive("num_programs")


def program_id(axis: int) -> jax.Array:
    """Which program runs, along one grid dimension: i32[].

    Raises KernelError for an `axis` that is no dimension of the grid, and outside of kernels.

    Examples:
      >>> @pbkern.kernel(
      ...     grid=(3,), out_specs=pbkern.BlockSpec((1,), lambda i: (i,)),
      ...     out_shape=jax.ShapeDtypeStruct((3,), "int32"),
      ... )
      ... def numbers(o):
      ...     o[0] = pbkern.program_id(0)
      >>> numbers().tolist()
      [0, 1, 2]
    """
    return program_id_p.bind(axis=_check_axis("program_id", axis))


def num_programs(axis: int) -> jax.Array:
    """Size of one grid dimension: i32[].

    `axis` is as of program_id. Raises KernelError as that does.

    Examples:
      >>> @pbkern.kernel(
      ...     grid=(3,), out_specs=pbkern.BlockSpec((1,), lambda i: (i,)),
      ...     out_shape=jax.ShapeDtypeStruct((3,), "int32"),
      ... )
      ... def sizes(o):
      ...     o[0] = pbkern.num_programs(0)
      >>> sizes().tolist()
      [3, 3, 3]
    """
    return num_programs_p.bind(axis=_check_axis("num_programs", axis))


def _outside(name: str, *_, axis: int):
    raise KernelError(
        f"{name}({axis}) outside of a kernel",
        at=_jax.current_line(),
        why="only the programs of a kernel's grid have numbers",
        hint="call it in the body of a kernel, and not in a function that computes its operands",
    )


for _p in (program_id_p, num_programs_p):
    _p.def_abstract_eval(lambda *, axis: jax.core.ShapedArray((), np.dtype("int32")))
    _p.def_impl(functools.partial(_outside, _p.name))
    mlir.register_lowering(_p, functools.partial(_outside, _p.name))

NUMPY["program_id"] = lambda program, *, axis: np.int32(program.index[axis])
NUMPY["num_programs"] = lambda program, *, axis: np.int32(program.grid[axis])

# --- in_bounds
# ---------------------------------------------------------------------------------------------------

in_bounds_p = Primitive("in_bounds")


def in_bounds(ref, axis: int) -> jax.Array:
    """bool[ref.shape[axis]]: which positions of a Ref's dimension are inside the array.

    All true except in blocks that reach over the array's edge. Reductions over such a dimension
    read `where(in_bounds(x, 1), x[...], identity)`.

    Raises KernelError for an `axis` that the Ref does not have.

    Examples:
      >>> @pbkern.kernel(
      ...     grid=(2,), in_specs=[pbkern.BlockSpec((4,), lambda i: (i,))],
      ...     out_specs=pbkern.BlockSpec((1,), lambda i: (i,)),
      ...     out_shape=jax.ShapeDtypeStruct((2,), "float32"),
      ... )
      ... def sums(x, o):
      ...     o[0] = jnp.where(pbkern.in_bounds(x, 0), x[...], 0).sum()
      >>> sums(jnp.ones(6)).tolist()
      [4.0, 2.0]
    """
    rank = len(ref.shape)
    if not -rank <= axis < rank:
        raise KernelError(
            "in_bounds takes a dimension of the Ref", why=f"axis={axis}, Ref shape {ref.shape}"
        )
    return in_bounds_p.bind(ref, axis=int(axis) % rank)


@in_bounds_p.def_abstract_eval
def _in_bounds_type(ref, *, axis):
    return jax.core.ShapedArray((_jax.ref_type(ref)[0][axis],), np.dtype(bool))


NUMPY["in_bounds"] = lambda program, ref, *, axis: ref.in_bounds(axis)

# --- masked accesses
# ---------------------------------------------------------------------------------------------

masked_load_p = Primitive("masked_load")  # ref, mask, other, *index operands -> elements
masked_store_p = Primitive("masked_store")  # ref, value, mask, *index operands ->
masked_store_p.multiple_results = True


def load(ref, idx=..., *, mask=None, other=None) -> jax.Array:
    """ref[idx] where `mask` holds, `other` (default 0) elsewhere.

    Positions that are masked off are not touched.

    Args:
      ref: a Ref of the kernel.
      idx: as in ref[idx].
      mask: bool, broadcast to the shape of ref[idx]; None loads everything.
      other: broadcast to that shape, in the Ref's dtype.

    Returns an array of the shape of ref[idx] and of the Ref's dtype. Raises KernelError for a mask that
    is not bool, and for `other` without `mask`.

    Examples:
      >>> @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((4,), "float32"))
      ... def halves(x, o):
      ...     o[...] = pbkern.load(x, pbkern.ds(0, 4), mask=jnp.arange(4) < 2, other=-1)
      >>> halves(jnp.arange(8.0)).tolist()
      [0.0, 1.0, -1.0, -1.0]
    """
    base, leaves, tree = _jax.flatten_subscript(ref, idx, mask is not None)
    if mask is None:
        if other is not None:
            raise KernelError(
                "load has `other` but no `mask`", hint="give the mask that selects, or drop other"
            )
        return _jax.REF_PRIMITIVES["get"].bind(base, *leaves, tree=tree)
    out = _jax.indexed_type(jax.typeof(base), tree, leaves)
    other = jnp.broadcast_to(jnp.asarray(0 if other is None else other, out.dtype), out.shape)
    return masked_load_p.bind(base, as_mask(mask, out.shape), other, *leaves, tree=tree)


def store(ref, idx, value, *, mask=None) -> None:
    """ref[idx] = value where `mask` holds; `value` is broadcast and cast like `ref[idx] = value` would be.

    Raises KernelError for a mask that is not bool. Positions that are masked off keep what they had.

    Examples:
      >>> @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((4,), "float32"))
      ... def evens(x, o):
      ...     o[...] = jnp.zeros(4)
      ...     pbkern.store(o, ..., x[...], mask=jnp.arange(4) % 2 == 0)
      >>> evens(jnp.arange(1.0, 5.0)).tolist()
      [1.0, 0.0, 3.0, 0.0]
    """
    base, leaves, tree = _jax.flatten_subscript(ref, idx, mask is not None)
    out = _jax.indexed_type(jax.typeof(base), tree, leaves)
    value = jnp.broadcast_to(
        jnp.asarray(value, None if hasattr(value, "dtype") else out.dtype), out.shape
    )
    if mask is None:
        _jax.REF_PRIMITIVES["swap"].bind(base, value, *leaves, tree=tree)
    else:
        masked_store_p.bind(base, value, as_mask(mask, out.shape), *leaves, tree=tree)


def as_mask(mask, shape: tuple[int, ...]) -> jax.Array:
    """A mask as an access takes it: bool, broadcast to the access's shape.

    Raises KernelError for other dtypes.
    """
    mask = jnp.asarray(mask)
    if mask.dtype != bool:
        raise KernelError(
            "a mask is bool", why=f"mask has dtype {mask.dtype}", hint="compare: mask=(i < n)"
        )
    return jnp.broadcast_to(mask, shape)


@masked_load_p.def_effectful_abstract_eval
def _masked_load_type(ref, mask, other, *leaves, tree):
    out = _jax.indexed_type(ref, tree, leaves)
    _check_shapes("masked_load", out, mask=mask, other=other)
    return out, {_jax.READ(0)}


@masked_store_p.def_effectful_abstract_eval
def _masked_store_type(ref, value, mask, *leaves, tree):
    out = _jax.indexed_type(ref, tree, leaves)
    _check_shapes("masked_store", out, mask=mask, value=value)
    return [], {_jax.WRITE(0)}


def _check_shapes(name: str, out, **operands) -> None:
    for key, operand in operands.items():
        dtype = np.dtype(bool) if key == "mask" else out.dtype
        if operand.shape != out.shape or operand.dtype != dtype:
            raise KernelError(
                f"{name}: `{key}` does not fit ref[idx]",
                why=f"{key} {operand.str_short()}, ref[idx] {out.str_short()}",
            )


# --- control flow and helpers
# ------------------------------------------------------------------------------------


def is_first_program(dims: Iterable[int]) -> jax.Array | np.bool_:
    """Whether this program is the first along these dimensions of the grid."""
    return functools.reduce(operator.and_, (program_id(dim) == 0 for dim in dims), np.bool_(True))


def is_last_program(dims: Sequence[int], sizes: Sequence[int]) -> jax.Array:
    """Whether this program is the last along these dimensions, at least one, of a grid of such sizes."""
    return functools.reduce(
        operator.and_, (program_id(dim) == np.int32(sizes[dim] - 1) for dim in dims)
    )


def when(condition) -> Callable[[Callable[[], Any]], None]:
    """Decorator: runs the function now if `condition` (bool scalar) holds.

    @when(program_id(2) == 0)
    def _():
        acc[...] = jnp.zeros_like(acc)

    Raises KernelError if the function returns a value: what it makes goes to Refs.

    Examples:
      >>> @pbkern.kernel(
      ...     grid=(4,), in_specs=[pbkern.BlockSpec((2,), lambda i: (i,))],
      ...     out_shape=jax.ShapeDtypeStruct((2,), "float32"),
      ... )
      ... def total(x, o):
      ...     @pbkern.when(pbkern.program_id(0) == 0)
      ...     def _():
      ...         o[...] = jnp.zeros(2)
      ...     o[...] += x[...]
      >>> total(jnp.arange(8.0)).tolist()
      [12.0, 16.0]
    """

    def decorate(function: Callable[[], Any]) -> None:
        if isinstance(condition, (bool, np.bool_)):
            if condition:
                function()
        else:
            lax.cond(condition, lambda: _no_result(function()), lambda: None)

    return decorate


def loop(
    lower, upper, *, step: int = 1, init: Any = None, unroll: int | bool | None = None
) -> Callable:
    """Decorator: runs f(i) for i in range(lower, upper, step); bounds may be traced.

    With `init`, f(i, carry) returns the next carry, and the decorated name becomes the last one.

    Raises KernelError for a step that is no positive int, and for a value that a loop without carry
    returns. `unroll` is as of jax.lax.fori_loop.

    Examples:
      >>> @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((), "float32"))
      ... def total(x, o):
      ...     @pbkern.loop(0, 8, init=jnp.float32(0))
      ...     def value(i, carry):
      ...         return carry + x[i]
      ...     o[...] = value
      >>> float(total(jnp.arange(8.0)))
      28.0
    """
    if not isinstance(step, int) or step < 1:
        raise KernelError("loop takes a positive constant step", why=f"step={step!r}")

    def decorate(function: Callable) -> Any:
        def body(i, carry):
            return function(i, carry) if init is not None else _no_result(function(i))

        if step == 1:
            return lax.fori_loop(lower, upper, body, init, unroll=unroll)
        trips = cdiv(upper - lower, step)
        return lax.fori_loop(
            0, trips, lambda trip, carry: body(lower + trip * step, carry), init, unroll=unroll
        )

    return decorate


def _no_result(result) -> None:
    if result is not None:
        raise KernelError(
            "a body under `when` or `loop` returns a value",
            hint="store it in a Ref, or use lax.cond",
        )


def cdiv(a: Any, b: Any) -> Any:
    """ceil(a / b) for integers, traced or not.

    Raises KernelError for what is no integer, and for a `b` that is known to be 0.

    Examples:
      >>> pbkern.cdiv(60, 16)
      4
    """
    wrong = "cdiv divides by 0" if isinstance(b, (int, np.integer)) and b == 0 else ""
    if not wrong:
        try:
            return -(-a // b)
        except TypeError:
            wrong = "cdiv takes integers"
    raise KernelError(
        wrong,
        at=_jax.current_line(),
        why=f"cdiv({shown(a)}, {shown(b)})",
        hint="the size of an array and that of a block, of 1 or more",
    )


def multiple_of(x, k: int | tuple[int, ...]):
    """States that x is divisible by k.

    Returns x; targets that align accesses find the divisibility themselves.

    Raises KernelError for a number that is not.

    Examples:
      >>> pbkern.multiple_of(48, 16)
      48
    """
    if isinstance(x, (int, np.integer)) and any(
        x % divisor for divisor in (k if isinstance(k, tuple) else (k,))
    ):
        raise KernelError("multiple_of does not hold", why=f"{x} is not a multiple of {k}")
    return x
