"""A simulated program as a JAX operation on arrays of the CPU.

JAX calls back on a thread of its own, where 64-bit types may be off: elements of 8 bytes travel as pairs of words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import lax

from pbkern.dsl.host_program import HostProgram
from pbkern.dsl.kernel import ArrayType

WORD = np.dtype(np.uint32)


def simulated_call(program: HostProgram, run: Callable[[list[np.ndarray]], list[np.ndarray]], operands: Sequence) -> list:
    """Results of `run`, which takes and returns NumPy arrays of the program's types. Traceable."""
    ins, outs = ([b.type for b in side] for side in (program.inputs, program.outputs))
    words = [lax.bitcast_convert_type(x, WORD) if _in_words(t) else x for x, t in zip(operands, ins)]

    def called(*arrays: np.ndarray) -> list[np.ndarray]:
        results = run([np.ascontiguousarray(a).view(t.dtype).reshape(t.shape) if _in_words(t) else np.asarray(a)
                       for a, t in zip(arrays, ins)])
        return [np.ascontiguousarray(r)[..., None].view(WORD) if _in_words(t) else r for r, t in zip(results, outs)]

    types = [jax.ShapeDtypeStruct((*t.shape, 2), WORD) if _in_words(t) else jax.ShapeDtypeStruct(t.shape, t.dtype)
             for t in outs]
    found = jax.pure_callback(called, types, *words)
    return [lax.bitcast_convert_type(r, t.dtype) if _in_words(t) else r for r, t in zip(found, outs)]


def _in_words(t: ArrayType) -> bool:
    dtype = np.dtype(t.dtype)
    return dtype.itemsize == 8 and dtype.kind in "iuf"
