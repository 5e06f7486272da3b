"""The image pipelines in Halide, where it is installed: name -> pipeline of one input, scheduled by hand.

Schedules are the usual ones for such pipelines: strips of rows on all threads, stages computed within a strip, vectors
along rows. Arrays are as in the workloads, so that Halide's first dimension is NumPy's last.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

import halide as hl
import numpy as np

BINOMIAL = [k / 16 for k in (1.0, 4, 6, 4, 1)]
STRIP, VECTOR = 32, 16


def version() -> str:
    return importlib.metadata.version("halide")


def blur(image):
    """(w, h, c) -> (w - 4, h - 4, c), horizontally, then vertically."""
    x, y, c, strip = (hl.Var(n) for n in ("x", "y", "c", "strip"))
    rows, out = hl.Func("rows"), hl.Func("out")
    rows[x, y, c] = hl.f32(0) + sum(hl.f32(k) * image[x + i, y, c] for i, k in enumerate(BINOMIAL))
    out[x, y, c] = hl.f32(0) + sum(hl.f32(k) * rows[x, y + i, c] for i, k in enumerate(BINOMIAL))
    out.split(y, strip, y, STRIP, hl.TailStrategy.ShiftInwards).parallel(strip).vectorize(x, VECTOR)
    rows.store_at(out, strip).compute_at(out, y).vectorize(x, VECTOR)
    return out


def unsharp(image):
    """(c, w, h) -> (c, w - 4, h - 4); channels and columns of a row are one line of memory."""
    c, x, y, strip = (hl.Var(n) for n in ("c", "x", "y", "strip"))
    columns, out = hl.Func("columns"), hl.Func("out")
    columns[c, x, y] = hl.f32(0) + sum(
        hl.f32(k) * image[c, x, y + i] for i, k in enumerate(BINOMIAL)
    )
    blurred = hl.f32(0) + sum(hl.f32(k) * columns[c, x + i, y] for i, k in enumerate(BINOMIAL))
    centre = image[c, x + 2, y + 2]
    sharp = hl.f32(1.5) * centre - hl.f32(0.5) * blurred
    out[c, x, y] = hl.select(hl.abs(centre - blurred) < hl.f32(0.01), centre, sharp)
    out.bound(c, 0, 3).split(y, strip, y, STRIP, hl.TailStrategy.ShiftInwards).parallel(strip)
    out.reorder(x, c, y, strip).unroll(c).vectorize(x, VECTOR)
    columns.compute_at(out, y).bound_extent(c, 3).reorder(x, c, y).unroll(c).vectorize(x, VECTOR)
    return out


def harris(image):
    """(w, h) -> (w - 4, h - 4)."""
    x, y, strip = (hl.Var(n) for n in ("x", "y", "strip"))
    ix, iy, out = hl.Func("ix"), hl.Func("iy"), hl.Func("out")
    weights = tuple(k / 12 for k in (1.0, 2, 1))
    ix[x, y] = hl.f32(0) + sum(
        hl.f32(k) * (image[x + 2, y + i] - image[x, y + i]) for i, k in enumerate(weights)
    )
    iy[x, y] = hl.f32(0) + sum(
        hl.f32(k) * (image[x + i, y + 2] - image[x + i, y]) for i, k in enumerate(weights)
    )

    def box(a, b):
        return hl.f32(0) + sum(
            a[x + i, y + j] * b[x + i, y + j] for i in range(3) for j in range(3)
        )

    xx, yy, xy = box(ix, ix), box(iy, iy), box(ix, iy)
    out[x, y] = xx * yy - xy * xy - hl.f32(0.04) * (xx + yy) * (xx + yy)
    out.split(y, strip, y, STRIP, hl.TailStrategy.ShiftInwards).parallel(strip).vectorize(x, VECTOR)
    for f in (ix, iy):
        f.store_at(out, strip).compute_at(out, y).vectorize(x, VECTOR)
    return out


PIPELINES = {"blur": blur, "unsharp": unsharp, "harris": harris}


def pipeline(
    name: str, array: np.ndarray, shape: tuple[int, ...]
) -> Callable[[], np.ndarray] | None:
    """A call without arguments that returns the result, a new array of `shape`; None where there is no such pipeline."""
    if name not in PIPELINES:
        return None
    writable = np.array(
        array
    )  # Halide takes no read-only arrays, and keeps no reference to what it takes
    out = PIPELINES[name](hl.Buffer(writable))
    out.compile_jit()

    def call(_keep=writable) -> np.ndarray:
        result = np.empty(shape, np.float32)
        out.realize(hl.Buffer(result))
        return result

    return call
