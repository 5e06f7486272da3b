"""Reductions, contractions and scatters of little parallelism -> two stages: partial results of chunks, then the rest.

Reductions are reductions.py, scatters scatter_privatisation.py. A contraction whose result is small
beside its operands becomes a batch of contractions over chunks of the contracted axis, and a sum.
Where a producer reads the same rows of a matrix, as in X^T (X w - y), one pass over it is left.
Sums are reassociated.
"""

from __future__ import annotations

from collections import Counter
from operator import attrgetter

import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern.core.jaxprs.evaluation import Notes
from pbkern.core.jaxprs.walks import atoms, types_at_any_depth
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.scatter import SCATTERS
from pbkern.core.passes import Pass
from pbkern.fuse.access.rules import is_long, is_long_type
from pbkern.fuse.access.windows_contractions import reducer_params
from pbkern.fuse.cost.model import CostModel
from pbkern.fuse.options import FuseOptions
from pbkern.fuse.simplify.driver import retrace

from .chunks import in_chunks, near_divisor
from .limits import SplitLimits
from .reductions import ReductionStages
from .scatter_privatisation import runs_of, split_scatter


@dataclass(frozen=True)
class SplitReductions(SplitLimits):
    """Splits operations of little parallelism. Programs with arrays that are too long for kernels stay as they are."""

    def __call__(self, closed: jex.ClosedJaxpr, options: FuseOptions) -> jex.ClosedJaxpr:
        machine = options.machine
        types = types_at_any_depth(closed.jaxpr)
        if any(map(is_long_type, types)) and any(map(is_long, closed.jaxpr.eqns)):
            return closed
        reductions = ReductionStages(closed.jaxpr, machine, self)
        tests = (
            reductions.runs_of,
            reductions.is_narrow,
            lambda eqn: self._depth(eqn, machine),
            lambda eqn: runs_of(eqn, machine),
        )
        if not any(test(eqn) for eqn in closed.jaxpr.eqns for test in tests):
            return closed

        transposed, given = Notes(), _arguments_of_one_reader(closed.jaxpr)

        def transpose(eqn, operands):
            return transposed.note(
                "transposed",
                eqn.primitive.bind(*operands, **eqn.params),
                *operands,
                eqn.params["permutation"],
            )

        def deepen(eqn, operands):
            block, (contracted, _) = self._depth(eqn, machine), eqn.params["dimension_numbers"]
            if block is None:
                return None
            lhs, rhs = (
                _as_stored(operand, dim, transposed)
                for operand, (dim,) in zip(operands, contracted)
            )
            if all(not isinstance(var, jex.Literal) and var in given for var in eqn.invars):
                # No other pass over the operands has use for short runs. One thread of Zen 3, ms with runs that stay near and
                # with depth / 8: 64 x 20000 x 64 transposed left 5.8, 4.5, right 3.2, 2.7; 64 x 200000 x 64 left 57, 35.
                block = lhs[0].shape[lhs[1]]
            return [_split_contraction(eqn, lhs, rhs, self._even_run(block, lhs, rhs, machine))]

        scatters = dict.fromkeys(
            SCATTERS, lambda eqn, operands: split_scatter(eqn, operands, machine)
        )
        rewrites = (
            reductions.rewrites() | {"dot_general": deepen, "transpose": transpose} | scatters
        )
        return retrace(retrace(closed, rewrites), {})

    def _depth(self, eqn, machine: CostModel) -> int | None:
        """Elements that a run of the contracted axis of a contraction to be split has at least, or None."""
        if eqn.primitive.name != "dot_general":
            return None
        (lc, _rc), batch = eqn.params["dimension_numbers"]
        if len(lc) != 1 or batch != ((), ()):
            return None
        (lhs, rhs), out = (var.aval for var in eqn.invars[:2]), eqn.outvars[0].aval
        depth = lhs.shape[lc[0]]
        operand_bytes = sum(aval.size * aval.dtype.itemsize for aval in (lhs, rhs))
        result_bytes = out.size * max(out.dtype.itemsize, 4)
        wide = max(lhs.size // max(depth, 1), rhs.size // max(depth, 1), 32)
        sizes = machine.sizes
        if (
            operand_bytes < sizes.split_operand_bytes
            or result_bytes > sizes.split_result_bytes
            or depth < self.depth_per_width * wide
        ):
            return None
        # A run's operands stay in the private cache; partial results are a small part of all traffic.
        block = max(
            machine.near_bytes // 4 * depth // operand_bytes,
            8 * result_bytes * depth // operand_bytes,
        )
        return block or None

    def _even_run(self, fewest: int, lhs: tuple, rhs: tuple, machine: CostModel) -> int:
        """Elements per run, of which there are some for each core: `fewest` if possible, long parts of rows along the depth.

        lhs, rhs: operand and contracted dimension, as stored. Of the larger one, each row is read once, where the other one's
        run stays in the private cache.
        """
        (x, dim), (other, _) = sorted((lhs, rhs), key=lambda operand: -operand[0].size)
        depth, block = x.shape[dim], fewest
        if dim == x.ndim - 1:
            near = machine.near_bytes // 2 * depth // (other.size * other.dtype.itemsize)
            block = max(block, min(self.row_run_bytes // x.dtype.itemsize, near))
        return near_divisor(depth, min(block, -(-depth // (4 * machine.cores))))


# Functions are split before they are partitioned, bodies of control flow when their nodes are made.
SPLIT_REDUCTIONS = Pass(
    "split reductions",
    SplitReductions(),
    "narrow reductions keep all cores busy",
    when=attrgetter("fast"),
)


def _arguments_of_one_reader(jaxpr: jex.Jaxpr) -> set:
    """Arguments that one equation reads, and their transposes that one equation reads."""
    readers = Counter(atom for eqn in jaxpr.eqns for atom in atoms(eqn))
    given = {var for var in jaxpr.invars if readers[var] == 1}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "transpose" and not given.isdisjoint(atoms(eqn)):
            given.update(var for var in eqn.outvars if readers[var] == 1)
    return given


def _as_stored(x, contracted: int, transposed: Notes) -> tuple:
    """(operand, its contracted dimension), without a transpose that keeps the order of the other dimensions."""
    transpose = transposed.find("transposed", x)
    if transpose is None:
        return x, contracted
    base, order = transpose
    free = [dim for axis, dim in enumerate(order) if axis != contracted]
    return (base, order[contracted]) if free == sorted(free) else (x, contracted)


def _split_contraction(eqn, lhs: tuple, rhs: tuple, block: int):
    """dot(x, y) -> sum over chunks of dot(chunk of x, chunk of y). A ragged last chunk ends in zeros.

    lhs, rhs: operand and contracted dimension.
    """
    out = eqn.outvars[0].aval
    wide = (
        out.dtype
        if out.dtype.itemsize >= 4
        else np.dtype("int32" if out.dtype.kind in "iu" else "float32")
    )
    (lhs_chunks, l), (rhs_chunks, rhs_axis) = (
        (in_chunks(z, dim, block, np.zeros((), z.dtype)), dim) for z, dim in (lhs, rhs)
    )
    params = {
        **eqn.params,
        "preferred_element_type": wide,
        "dimension_numbers": (((l + 1,), (rhs_axis + 1,)), ((l,), (rhs_axis,))),
    }
    total = lax.reduce_sum_p.bind(
        eqn.primitive.bind(lhs_chunks, rhs_chunks, **params), **reducer_params("reduce_sum", (0,))
    )
    return total if wide == out.dtype else lax.convert_element_type(total, out.dtype)
