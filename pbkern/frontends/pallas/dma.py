"""Copies and semaphores of TPU kernels on one device: a local copy is done where it starts, and waiting is over at once.

That is one of the orders in which a TPU may do it: a copy may finish at any time between its start
and its wait, and what a program waits for on its own device it has started or signalled before, or
it would wait for ever. So semaphores need no value. Copies to other devices, and programs that read
a semaphore, are refused.

A copy whose size is a value goes row by row, and under a mask along its last dimension. It stays
inside both arrays: a TPU rounds sizes up to its tiles, and has padding there.
"""

from __future__ import annotations

import jax
import numpy as np
from jax import lax

from pbkern import _jax
from pbkern.core.errors import UnsupportedOp
from pbkern.dsl.primitives.prng_keys import is_key
from pbkern.frontends.pallas.refs.dynamic_slices import DynamicSlices, is_dynamic
from pbkern.frontends.pallas.refs.views import view

from .body import RULES


def _refuse(
    eqn,
    what: str,
    why: str,
    hint: str = "interpret=pltpu.InterpretParams() simulates several devices",
):
    raise UnsupportedOp(f"{what} in a Pallas kernel", at=_jax.user_line(eqn), why=why, hint=hint)


def _ends(eqn, operands) -> tuple[tuple, tuple]:
    """(Ref, transforms, dtype) of source and destination.

    Raises UnsupportedOp for a copy to another device.
    """
    (source, picked), (target, placed), _, _, device = _jax.copy_operands(eqn, operands)
    (source_aval, _), (target_aval, _), *_ = _jax.copy_operands(
        eqn, [var.aval for var in eqn.invars]
    )
    if jax.tree.leaves(device):
        _refuse(eqn, "a copy to another device", "one device runs the whole kernel")
    return (source, picked, _jax.ref_type(source_aval)[1]), (
        target,
        placed,
        _jax.ref_type(target_aval)[1],
    )


@RULES.register("dma_start")
def _dma_start(importer, eqn, *operands):
    source, target = _ends(eqn, operands)
    dynamic = [is_dynamic(transforms) for _, transforms, _ in (source, target)]
    if not any(dynamic):
        _copy(importer, source, target, eqn.params["add"])
        return []
    ends = (
        [DynamicSlices(transforms) for _, transforms, _ in (source, target)] if all(dynamic) else []
    )
    if not ends or [dim is None for dim in ends[0].dims] != [dim is None for dim in ends[1].dims]:
        why, hint = "their shapes may differ", "give source and destination the same size"
        _refuse(eqn, "a copy between slices of constant and of dynamic size", why, hint)
    _copy_dynamic(importer, source, target, ends, eqn.params["add"])
    return []


def _copy(importer, source: tuple, target: tuple, add: bool, mask=None) -> None:
    """`mask`: of the elements to copy; None: all."""
    (ref, picked, dtype), (to, placed, to_dtype) = source, target
    where, value = importer.stored_to(view(to, to_dtype, placed)), view(ref, dtype, picked)
    if mask is None:
        where.add(value.load()) if add else where.swap(value.load(), want_old=False)
        return
    loaded = value.masked_load(mask, np.zeros((), dtype))
    if add:
        loaded = lax.add(loaded, where.masked_load(mask, np.zeros((), to_dtype)))
    where.masked_store(loaded, mask)


def _copy_dynamic(
    importer, source: tuple, target: tuple, ends: list[DynamicSlices], add: bool
) -> None:
    """A loop over each dimension of dynamic size but the last, which is copied as a whole under a mask."""
    if is_key(source[-1]):
        raise UnsupportedOp(
            "a copy of PRNG keys of dynamic size",
            hint="copy all of them, or their jax.random.key_data",
        )
    counts = {
        axis: lax.min(*(end.count(axis) for end in ends))
        for axis, dim in enumerate(ends[0].dims)
        if dim is not None
    }
    last = len(ends[0].dims) - 1
    most = min(end.most(last) for end in ends) if last in counts else 0

    def copy(taken: dict) -> None:
        count = next((dim for dim in counts if dim not in taken), None)
        if count is None:
            mask = lax.iota(np.int32, most) < counts[last] if last in counts else None
            parts = [
                (ref, end.part(taken), dtype)
                for end, (ref, _, dtype) in zip(ends, (source, target))
            ]
            _copy(importer, parts[0], parts[1], add, mask)
        elif count == last:
            copy(taken | {count: (0, most)})
        else:
            lax.fori_loop(
                np.int32(0), counts[count], lambda step, _: copy(taken | {count: (step, 1)}), None
            )

    copy({})


@RULES.register("dma_wait")
def _dma_wait(importer, eqn, *operands):
    _ends(eqn, operands)
    return []


@RULES.register("semaphore_signal")
def _signal(importer, eqn, *operands):
    _, _, _, device, core = jax.tree.unflatten(eqn.params["args_tree"], operands)
    if jax.tree.leaves((device, core)):
        _refuse(eqn, "a signal to another device or core", "one device runs the whole kernel")
    return []


@RULES.register("semaphore_wait")
def _wait(importer, eqn, *operands):
    return []
