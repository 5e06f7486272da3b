"""Kernel, which operands are stacked -> the kernel with one more grid dimension, in front, over them: vmap of a call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.errors import UnsupportedOp
from pbkern.core.jaxprs.calls import rules_kept
from pbkern.core.jaxprs.retracing import retrace
from pbkern.dsl.kernel import ArrayType, BlockMapping, Kernel, Squeezed


def batch(primitive, args, dims, kernel: Kernel):
    """(results, their batch dimensions) of a call of a kernel whose operands are stacked along `dims`, all or some."""
    size = next(arg.shape[dim] for arg, dim in zip(args, dims) if dim is not None)
    batched = [dim is not None for dim in dims]
    if needs_launches(kernel, batched):
        results = launch_each(lambda *xs: primitive.bind(*xs, kernel=kernel), args, dims)
        return results, [0] * len(results)
    for i in aliased_operands(kernel):  # an aliased result is batched, so its operand is too
        batched[i] = True
    args = [
        stacked(arg, dim, size) if is_batched else arg
        for arg, dim, is_batched in zip(args, dims, batched)
    ]
    results = primitive.bind(*args, kernel=batched_kernel(kernel, tuple(batched), size))
    return results, [0] * len(results)


def needs_launches(kernel: Kernel, batched: Sequence[bool]) -> bool:
    """Whether index maps or grids differ per element of stacked operands: one launch each."""
    sizes = [operand for _, operand in kernel.dynamic_grid]
    has_finish_of_its_own = kernel.finish and (
        kernel.finish.num_scalar_prefetch or kernel.finish.dynamic_grid
    )
    return bool(
        any(batched[: kernel.num_scalar_prefetch])
        or any(batched[position] for position in sizes)
        or has_finish_of_its_own
    )


def launch_each(call: Callable, args: Sequence, dims: Sequence) -> list:
    """Stacked results of call(*args) for one element of the stacked operands after the other."""
    rest = [jnp.moveaxis(arg, dim, 0) for arg, dim in zip(args, dims) if dim is not None]

    def one(xs):
        it = iter(xs)
        return call(*[arg if dim is None else next(it) for arg, dim in zip(args, dims)])

    return jax.lax.map(one, rest)


def stacked(arg, dim: int | None, size: int) -> jax.Array:
    """An operand with its batch dimension in front; without one it is repeated."""
    return jnp.broadcast_to(arg, (size, *arg.shape)) if dim is None else jnp.moveaxis(arg, dim, 0)


def aliased_operands(kernel: Kernel) -> list[int]:
    """Operands of a call that share an array with a result of either stage."""
    aliased = [i for i, _ in kernel.aliases]
    if kernel.finish is None:
        return aliased
    num_results = len(kernel.outputs)
    return aliased + [
        i - num_results + len(kernel.inputs) for i, _ in kernel.finish.aliases if i >= num_results
    ]


@functools.lru_cache(maxsize=256)
def batched_kernel(kernel: Kernel, batched: tuple[bool, ...], size: int) -> Kernel:
    """The kernel with a leading grid dimension over `size` stacked operands (where `batched`) and results."""
    inputs = tuple(
        _batched_mapping(operand, size, is_batched)
        for operand, is_batched in zip(kernel.inputs, batched)
    )
    outputs = tuple(_batched_mapping(output, size, True) for output in kernel.outputs)

    def shift_axis(eqn, *operands):
        if eqn.primitive.name in ("program_id", "num_programs"):
            return [eqn.primitive.bind(axis=eqn.params["axis"] + 1)]
        return None

    with jax.enable_x64(True):
        body = retrace(kernel.body, shift_axis)
        with rules_kept():
            with_rules = kernel.with_rules and retrace(kernel.with_rules, shift_axis)
    return dataclasses.replace(
        kernel,
        grid=(size, *kernel.grid),
        dynamic_grid=tuple((dim + 1, operand) for dim, operand in kernel.dynamic_grid),
        inputs=inputs,
        outputs=outputs,
        body=body,
        with_rules=with_rules,
        compiler_params={
            key: _batched_params(param) for key, param in kernel.compiler_params.items()
        },
        finish=kernel.finish
        and batched_kernel(
            kernel.finish, (True,) * len(kernel.outputs) + batched[len(kernel.inputs) :], size
        ),
    )


def _batched_mapping(mapping: BlockMapping, size: int, batched: bool) -> BlockMapping:
    def index_map(batch_index, *args):
        out = (
            jex.jaxpr_as_fun(mapping.index_map)(*args)
            if args or mapping.index_map.jaxpr.outvars
            else []
        )
        return [batch_index, *out] if batched else out

    avals = [_jax.fresh_aval(var.aval) for var in mapping.index_map.jaxpr.invars]
    with jax.enable_x64(False):
        shifted = retrace(
            jax.make_jaxpr(index_map)(jax.core.ShapedArray((), np.dtype("int32")), *avals)
        )
    if not batched:
        return dataclasses.replace(mapping, index_map=shifted)
    array = ArrayType((size, *mapping.array.shape), mapping.array.dtype)
    return dataclasses.replace(
        mapping, array=array, dims=(Squeezed(), *mapping.dims), index_map=shifted
    )


def _batched_params(params: Any) -> Any:
    """The batch dimension's programs are independent: parallel."""
    semantics = getattr(params, "dimension_semantics", None)
    if semantics is None:
        return params
    if not dataclasses.is_dataclass(params) or isinstance(params, type):
        raise UnsupportedOp(
            "vmap of a kernel whose compiler_params are no dataclass", why=f"{params!r}"
        )
    return dataclasses.replace(params, dimension_semantics=("parallel", *semantics))


_jax.on_clear_caches(batched_kernel.cache_clear)
