"""Copies and semaphores of TPU kernels on one device: a local copy is done where it starts, and waiting is over at once.

That is one of the orders in which a TPU may do it: a copy may finish at any time between its start and its wait, and what a
program waits for on its own device it has started or signalled before, or it would wait for ever. So semaphores need no
value. Copies to other devices, and programs that read a semaphore, are refused.
"""

from __future__ import annotations

import jax

from .. import _jax
from ..errors import UnsupportedOp
from .pallas_body import RULES
from .ref_views import View, view


def _refuse(eqn, what: str, why: str):
    raise UnsupportedOp(
        f"{what} in a Pallas kernel", at=_jax.user_line(eqn), why=why,
        hint="interpret=pltpu.InterpretParams() simulates several devices",
    )  # fmt: skip


def _view(eqn, ref, transforms, aval) -> View:
    for t in transforms:
        if any(_jax.is_slice(i) and not isinstance(i.size, int) for i in getattr(t, "indices", ())):
            raise UnsupportedOp(
                "a copy of a slice of dynamic size in a Pallas kernel", at=_jax.user_line(eqn),
                why="every access of a body has a fixed shape",
                hint="copy a block of the largest size, or row by row in a loop",
            )  # fmt: skip
    return view(ref, _jax.ref_type(aval)[1], transforms)


def _ends(eqn, operands) -> tuple[View, View]:
    """(source, destination) of a copy. Raises UnsupportedOp for another device's."""
    (source, picked), (target, placed), _, _, device = _jax.copy_operands(eqn, operands)
    (source_aval, _), (target_aval, _), *_ = _jax.copy_operands(eqn, [v.aval for v in eqn.invars])
    if jax.tree.leaves(device):
        _refuse(eqn, "a copy to another device", "one device runs the whole kernel")
    return _view(eqn, source, picked, source_aval), _view(eqn, target, placed, target_aval)


@RULES.register("dma_start")
def _dma_start(importer, eqn, *operands):
    source, target = _ends(eqn, operands)
    if eqn.params["add"]:
        target.add(source.load())
    else:
        target.swap(source.load(), want_old=False)
    return []


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
