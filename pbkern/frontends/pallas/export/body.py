"""Body of a Kernel -> statements of a Pallas body, on Pallas's Refs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pbkern import _jax
from pbkern.core.errors import UnsupportedOp
from pbkern.core.jaxprs.retracing import retrace_into
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.body_rewrites.contents import access_of, read, written
from pbkern.dsl.kernel import Kernel, Squeezed
from pbkern.dsl.primitives.atomics import one_by_one
from pbkern.dsl.primitives.ref_access import (
    GatheredIndex,
    Index,
    Point,
    Range,
    RefAccess,
    bind_access,
    constant_positions,
    is_ref_access,
)

from .blocks import ArrayBlocks

# Reports have no place to go: Pallas has neither our interpreter's debugger nor checks that raise.
REFUSED = {
    "check_failed": "pbkern.interpret(kernel, *arrays) runs checks; leave them out of what Pallas runs",
    "breakpoint": "pbkern.interpret(kernel, *arrays) stops at breakpoints",
}

# Columns of a strided load on a TPU, at most: one vector.
MOST_SLICES = 128


@dataclass(frozen=True)
class PallasBody:
    """One program of a kernel, as Pallas runs it.

    Attributes:
      kernel: the kernel, without a last stage.
      blocks: its operands and results as the call takes them, in order.
      is_tpu: JAX's compiler for TPUs has to know each primitive.
      place: this program's grid indices.
      sizes: those of the grid.
      refs: Pallas's Refs of blocks, then of scratch.
    """

    kernel: Kernel
    blocks: Sequence[ArrayBlocks]
    is_tpu: bool
    place: Sequence
    sizes: Sequence
    refs: Sequence

    def run(self) -> None:
        """Binds the body's equations."""
        retrace_into(one_by_one(self.kernel.body).jaxpr, (), self.refs, self._rewrite)

    def _number(self, ref) -> int:
        """The number of a Ref that is an operand of an equation."""
        return next(number for number, candidate in enumerate(self.refs) if candidate is ref)

    def _rewrite(self, eqn, *operands) -> list | None:
        name, params = eqn.primitive.name, eqn.params
        if name == "program_id":
            return [self.place[params["axis"]]]
        if name == "num_programs":
            return [self.sizes[params["axis"]]]
        if name == "in_bounds":
            return [self._in_bounds(self._number(operands[0]), params["axis"])]
        if name == "in_range":
            return [operands[0]]
        if name in REFUSED:
            raise UnsupportedOp(
                f"`{name}` in a kernel for Pallas",
                at=_jax.user_line(eqn),
                why="Pallas has no such report",
                hint=REFUSED[name],
            )
        if is_ref_access(eqn):
            return self._accessed(eqn, operands)
        if self.is_tpu and name == "scan":
            return self._scan(eqn, operands)
        if not self.is_tpu or _jax.lowers_for_tpu(eqn.primitive):
            return None
        if name not in WRITTEN_OUT:
            raise UnsupportedOp(
                f"`{name}` on a TPU",
                at=_jax.user_line(eqn),
                why="the installed JAX's Pallas has no code for it there",
                hint="compute it outside of the kernel, or from other operations",
            )
        return [WRITTEN_OUT[name](eqn.params, *operands)]

    def _scan(self, eqn, operands: Sequence) -> list | None:
        """A loop in place of a scan over arrays, which a TPU's loops take and give as carries."""
        params = _jax.params_of(eqn)
        body, length = params["jaxpr"], params["length"]
        num_consts, num_carry = params["num_consts"], params["num_carry"]
        first = num_consts + num_carry
        stacked = [jnp.zeros(var.aval.shape, var.aval.dtype) for var in eqn.outvars[num_carry:]]
        if len(operands) == first and not stacked:
            return None
        consts, carry, arrays = operands[:num_consts], operands[num_consts:first], operands[first:]

        def step(trip, state):
            position = length - 1 - trip if params["reverse"] else trip
            parts = [_element(array, position) for array in arrays]
            values = [*consts, *state[:num_carry], *parts]
            results = retrace_into(body.jaxpr, body.consts, values, self._rewrite)
            pairs = zip(state[num_carry:], results[num_carry:])
            return [
                *results[:num_carry],
                *(
                    jnp.where(_positions(rows.shape, 0) == position, row, rows)
                    for rows, row in pairs
                ),
            ]

        return list(lax.fori_loop(0, length, step, [*carry, *stacked]))

    def _in_bounds(self, number: int, axis: int) -> jax.Array:
        """Which positions of a Ref's dimension are inside the array; all of them in scratch."""
        size = self.kernel.body.jaxpr.invars[number].aval.shape[axis]
        if number >= len(self.blocks):
            return jnp.ones(size, bool)
        mapping = self.blocks[number].mapping
        args = [*self.place, *self.refs[: self.kernel.num_scalar_prefetch]]
        dims = [dim for dim, block in enumerate(mapping.dims) if not isinstance(block, Squeezed)]
        start = self.blocks[number].starts(args)[dims[axis]]
        position = _positions((size,), 0) + start
        return (position >= 0) & (position < np.int32(mapping.array.shape[dims[axis]]))

    def _accessed(self, eqn, operands: Sequence) -> list:
        """An access by Pallas's own primitives: plain ones as they are, masked ones as choices between contents."""
        number = self._number(operands[0])
        access = access_of(eqn, self.kernel.body.jaxpr.invars[number].aval.shape, operands)
        has_arrays = any(isinstance(index, GatheredIndex) for index in access.indices)
        if has_arrays and (self.is_tpu or (access.mask is not None and access.kind != "load")):
            raise UnsupportedOp(
                "an access at arrays of indices in a kernel for Pallas",
                at=_jax.user_line(eqn),
                why="TPUs load and store slices" if self.is_tpu else "masked stores are to slices",
                hint="a loop over the elements, with pbkern.when",
            )
        if access.mask is not None:
            return self._masked(eqn, number, access)
        before = self._load(eqn, number, access.indices)
        if access.kind == "load":
            return [before]
        value = before + access.value if access.kind == "add" else access.value
        self._store(number, access.indices, value)
        return [before] * len(eqn.outvars)

    def _bound(self, name: str, number: int, indices: Sequence[Index], *value):
        """The result of get or swap at these indices of a Ref."""
        ref = self.refs[number]
        return bind_access(_jax.REF_PRIMITIVES[name], ref.shape, [ref, *value], tuple(indices))[0]

    def _load(self, eqn, number: int, indices: Sequence[Index]):
        """The elements at these indices. A TPU loads neither every second column nor a column that a value chooses."""
        in_vectors = self.is_tpu and number >= self.kernel.num_scalar_prefetch
        match indices[-1:] if in_vectors else ():
            case [Point(at)] if not isinstance(at, int):
                whole = Range(0, self.refs[number].shape[-1])
                row = self._bound("get", number, [*indices[:-1], whole])
                return _element(row, at, row.ndim - 1)
            case [Range(start, size, stride)] if stride > 1:
                if size > MOST_SLICES:
                    raise UnsupportedOp(
                        f"every {stride}th of {size * stride} columns on a TPU",
                        at=_jax.user_line(eqn),
                        why=f"each of them is a slice of its own; at most {MOST_SLICES} are taken",
                        hint="a dimension of its own, x.reshape(-1, size, stride), outside of the kernel",
                    )
                whole = Range(start, (size - 1) * stride + 1)
                row = self._bound("get", number, [*indices[:-1], whole])
                axis = row.ndim - 1
                columns = [
                    lax.slice_in_dim(row, column * stride, column * stride + 1, axis=axis)
                    for column in range(size)
                ]
                return lax.concatenate(columns, axis)
        return self._bound("get", number, indices)

    def _store(self, number: int, indices: Sequence[Index], value) -> None:
        """Stores elements. A TPU's vector memory takes whole vectors: one column is stored with its row."""
        if not (self.is_tpu and indices and isinstance(indices[-1], Point)):
            self._bound("swap", number, indices, value)
            return
        row = [*indices[:-1], Range(0, self.refs[number].shape[-1])]
        before = self._bound("get", number, row)
        is_chosen = _positions(before.shape, before.ndim - 1) == indices[-1].at
        after = jnp.broadcast_to(lax.expand_dims(value, [before.ndim - 1]), before.shape)
        self._bound("swap", number, row, lax.select(is_chosen, after, before))

    def _masked(self, eqn, number: int, access: RefAccess) -> list:
        """A choice between elements of the whole block."""
        shape = self.refs[number].shape
        if self.is_tpu and any(constant_positions(index) is None for index in access.indices):
            raise UnsupportedOp(
                "a masked access at places that are values, on a TPU",
                at=_jax.user_line(eqn),
                why="it is a choice between elements of the block, and a TPU moves no vector by a value",
                hint="ref[pbkern.ds(start, size)] and jnp.where, where the slice stays inside the block",
            )
        whole = [Range(0, size) for size in shape]
        contents = self._bound("get", number, whole)
        if access.kind == "load":
            return [read(contents, access)]
        self._bound("swap", number, whole, written(contents, access))
        return []


# --- what the compiler for TPUs does not know
# ----------------------------------------------------------------------------------------------------


def _positions(shape: Sequence[int], axis: int) -> jax.Array:
    """Numbers of an array's elements along an axis. A TPU's vectors have two dimensions."""
    if len(shape) == 1:
        return lax.broadcasted_iota(np.int32, (1, *shape), 1).reshape(shape)
    return lax.broadcasted_iota(np.int32, shape, axis)


def _element(array: jax.Array, position, axis: int = 0) -> jax.Array:
    """Picks a position along an axis: the sum of an array whose other elements are zeros. Sums are of 32 bits."""
    kind = np.float32 if jnp.issubdtype(array.dtype, jnp.floating) else np.int32
    chosen = jnp.where(_positions(array.shape, axis) == position, array.astype(kind), kind(0))
    return lax.convert_element_type(chosen.sum(axis), array.dtype)


def _running(combine: Callable, identity: float, params, operand: jax.Array) -> jax.Array:
    """Sums of all elements up to each, by adding the array to itself moved by 1, 2, 4, ... elements."""
    axis, is_reversed = params["axis"], params["reverse"]
    size, step = operand.shape[axis], 1
    while step < size:
        filler_shape = [step if dim == axis else n for dim, n in enumerate(operand.shape)]
        filler = jnp.full(filler_shape, identity, operand.dtype)
        rest = lax.slice_in_dim(operand, *((step, size) if is_reversed else (0, size - step)), axis=axis)  # fmt: skip
        moved = [rest, filler] if is_reversed else [filler, rest]
        operand, step = combine(operand, lax.concatenate(moved, axis)), 2 * step
    return operand


# Primitives without code for TPUs -> the same result of others.
WRITTEN_OUT: dict[str, Callable] = {
    "cumsum": functools.partial(_running, lax.add, 0),
    "cumprod": functools.partial(_running, lax.mul, 1),
    "exp2": lambda params, x: lax.exp(x * np.asarray(np.log(2), x.dtype)),
    "copy": lambda params, x: x,
}
