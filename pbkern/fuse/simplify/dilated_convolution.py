"""Polyphase decomposition: convolution of a dilated input (transposed, or gradient of a strided one) -> one per phase.

With input dilation s, result s q + r meets only the taps k with (s q + r + k - low) divisible by s: every s-th one. That is a
convolution of the input itself with a part of the kernel. The s phases of each dimension are interleaved. Convolving with the
zeros in between would cost s times as much, per dimension.
"""

from __future__ import annotations

import itertools

import numpy as np
from jax import lax


def polyphase(eqn, operands):
    """Results of a convolution with a dilated input; None if the input is not dilated, or if there are strides as well."""
    (x, w), p = operands, eqn.params
    plain = all(n == 1 for n in (*p["window_strides"], *p["rhs_dilation"])) and p["batch_group_count"] == 1
    steps = p["lhs_dilation"]
    if not plain or all(s == 1 for s in steps) or 0 in x.shape or 0 in w.shape or 0 in eqn.outvars[0].aval.shape:
        return None
    numbers, out = p["dimension_numbers"], eqn.outvars[0].aval
    spatial = numbers.out_spec[2:]
    sizes = [-(-out.shape[d] // s) for d, s in zip(spatial, steps)]
    parts = {phase: _phase(eqn, x, w, phase, sizes) for phase in itertools.product(*map(range, steps))}
    return [lax.slice(interleave(parts, steps, spatial), (0,) * out.ndim, out.shape)]


def interleave(parts: dict, steps, axes):
    """Parts by phase (one number per axis of `axes`) -> the array whose element s q + r, along an axis of step s, is element q
    of phase r.
    """
    for k in reversed(range(len(steps))):  # the last dimension's phases become neighbours first
        parts = {
            rest: _interleave([parts[*rest, r] for r in range(steps[k])], axes[k])
            for rest in itertools.product(*map(range, steps[:k]))
        }
    return parts[()]


def _phase(eqn, x, w, phase, sizes):
    """Results s q + r, for q below `sizes`."""
    p = eqn.params
    numbers, starts, limits, strides = p["dimension_numbers"], [0] * w.ndim, list(w.shape), [1] * w.ndim
    pads = [(0, 0, 0)] * x.ndim
    for k, (r, s, (low, _)) in enumerate(zip(phase, p["lhs_dilation"], p["padding"])):
        tap, first = numbers.rhs_spec[2 + k], (low - r) % s
        starts[tap], strides[tap] = min(first, w.shape[tap]), s
        taps = -(-(w.shape[tap] - starts[tap]) // s)
        before = -((r + first - low) // s)
        at = numbers.lhs_spec[2 + k]
        # At least one tap, so that a convolution remains: it then meets zeros.
        pads[at] = (before, sizes[k] - x.shape[at] - before + max(taps, 1) - 1, 0)
    kernel = lax.slice(w, starts, limits, strides)
    missing = [(0, 0 if n else 1, 0) for n in kernel.shape]
    if any(high for _, high, _ in missing):
        kernel = lax.pad(kernel, np.zeros((), w.dtype), missing)
    x = lax.pad_p.bind(x, np.zeros((), x.dtype), padding_config=tuple(pads))
    count = len(phase)
    changed = {"padding": ((0, 0),) * count, "lhs_dilation": (1,) * count}
    return eqn.primitive.bind(x, kernel, **{**p, **changed})


def _interleave(parts: list, axis: int):
    """Element q of part r -> element len(parts) q + r."""
    if len(parts) == 1:
        return parts[0]
    shape = parts[0].shape
    wide = [lax.expand_dims(x, (axis + 1,)) for x in parts]
    return lax.reshape(lax.concatenate(wide, axis + 1), (*shape[:axis], shape[axis] * len(parts), *shape[axis + 1 :]))
