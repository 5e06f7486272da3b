"""Kernel, which operands are stacked -> the kernel with one more grid dimension, in front, over them: vmap of a call."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.errors import UnsupportedOp
from pbkern.core.jaxprs import retrace

from .kernel import ArrayType, BlockMapping, Kernel, Squeezed


def batch(primitive, args, dims, k: Kernel):
    """(results, their batch dimensions) of a call of a kernel whose operands are stacked along `dims`, all or some."""
    size = next(a.shape[d] for a, d in zip(args, dims) if d is not None)
    batched = [d is not None for d in dims]
    args = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(args, dims)]
    sizes = [operand for _, operand in k.dynamic_grid]
    has_finish_of_its_own = k.finish and (k.finish.num_scalar_prefetch or k.finish.dynamic_grid)
    if (
        any(batched[: k.num_scalar_prefetch])
        or any(batched[n] for n in sizes)
        or has_finish_of_its_own
    ):
        # Index maps or grids differ per element: one launch each.
        rest = [a for a, b in zip(args, batched) if b]

        def one(xs):
            it = iter(xs)
            return primitive.bind(*[next(it) if b else a for a, b in zip(args, batched)], kernel=k)

        return jax.lax.map(one, rest), [0] * len(k.outputs)
    for i in _aliased_operands(k):  # an aliased result is batched, so its operand is too
        if not batched[i]:
            args[i], batched[i] = jnp.broadcast_to(args[i], (size, *args[i].shape)), True
    results = primitive.bind(*args, kernel=batched_kernel(k, tuple(batched), size))
    return results, [0] * len(results)


def _aliased_operands(k: Kernel) -> list[int]:
    """Operands of a call that share an array with a result of either stage."""
    own = [i for i, _ in k.aliases]
    if k.finish is None:
        return own
    made = len(k.outputs)
    return own + [i - made + len(k.inputs) for i, _ in k.finish.aliases if i >= made]


@functools.lru_cache(maxsize=256)
def batched_kernel(k: Kernel, batched: tuple[bool, ...], size: int) -> Kernel:
    """k with a leading grid dimension over `size` stacked operands (where `batched`) and results."""
    inputs = tuple(_batched_mapping(m, size, b) for m, b in zip(k.inputs, batched))
    outputs = tuple(_batched_mapping(m, size, True) for m in k.outputs)

    def shift_axis(eqn, *operands):
        if eqn.primitive.name in ("program_id", "num_programs"):
            return [eqn.primitive.bind(axis=eqn.params["axis"] + 1)]
        return None

    with jax.enable_x64(True):
        body = retrace(k.body, shift_axis)
    return dataclasses.replace(
        k,
        grid=(size, *k.grid),
        dynamic_grid=tuple((d + 1, operand) for d, operand in k.dynamic_grid),
        inputs=inputs,
        outputs=outputs,
        body=body,
        compiler_params={t: _batched_params(p) for t, p in k.compiler_params.items()},
        finish=k.finish
        and batched_kernel(k.finish, (True,) * len(k.outputs) + batched[len(k.inputs) :], size),
    )


def _batched_mapping(m: BlockMapping, size: int, batched: bool) -> BlockMapping:
    def index_map(b, *args):
        out = jex.jaxpr_as_fun(m.index_map)(*args) if args or m.index_map.jaxpr.outvars else []
        return [b, *out] if batched else out

    avals = [_jax.fresh_aval(v.aval) for v in m.index_map.jaxpr.invars]
    with jax.enable_x64(False):
        shifted = retrace(
            jax.make_jaxpr(index_map)(jax.core.ShapedArray((), np.dtype("int32")), *avals)
        )
    if not batched:
        return dataclasses.replace(m, index_map=shifted)
    array = ArrayType((size, *m.array.shape), m.array.dtype)
    return dataclasses.replace(m, array=array, dims=(Squeezed(), *m.dims), index_map=shifted)


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
