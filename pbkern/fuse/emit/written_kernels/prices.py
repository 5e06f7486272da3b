"""Seconds of a kernel's neighbours: computed in it, and apart from it.

The author's kernel keeps its grid and blocks; what it computes itself costs the same either way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import atoms, equations
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.kernel import BlockMapping, Kernel
from pbkern.fuse.access.blocks import volume
from pbkern.fuse.cost.kinds import CONTRACTIONS, nbytes
from pbkern.fuse.cost.model import CostModel

from .calls import KernelCall
from .computed_inputs import ComputedInput


@dataclass(frozen=True)
class Prices:
    """Prices of one target."""

    machine: CostModel

    def stored(self, values: Iterable) -> float:
        """Writing values to memory."""
        return sum(2 * self.moved(var) for var in values)

    def moved(self, var) -> float:
        """Reading a value once."""
        size = nbytes(var.aval)
        return size / self.machine.far_bandwidth(size)

    def computed(self, eqn, elements: float | None = None) -> float:
        """So many elements of an equation; None: all of them, once."""
        aval, machine = array_aval(eqn.outvars[0]), self.machine
        count = math.prod(aval.shape) if elements is None else elements
        lanes = machine.lanes(aval.dtype.itemsize)
        return machine.operations(eqn) * count / lanes / machine.clock_hz / machine.cores

    def read_by(self, kernel: Kernel, var, block: int, times: float = 1.0) -> float:
        """Reading blocks of so many elements, one per program: the first time from memory, then from caches."""
        size, itemsize = nbytes(var.aval), array_aval(var).dtype.itemsize
        again = max(kernel.num_programs * times * block * itemsize - size, 0.0)
        is_near = max(size, block * itemsize) <= self.machine.near_bytes
        rate = self.machine.near_bandwidth if is_near else self.machine.shared_bandwidth
        return self.moved(var) + again / rate

    def apart(self, eqns: Sequence, inputs: Iterable, results: Sequence) -> float:
        """Equations in a kernel of their own."""
        if not eqns:
            return 0.0
        far = self.stored(results) + sum(map(self.moved, inputs))
        return max(far, sum(map(self.computed, eqns))) + self.machine.launch_seconds

    def read_as_is(self, kernel: Kernel, mapping: BlockMapping, var, times: float) -> float:
        return self.read_by(kernel, var, math.prod(dim.size for dim in mapping.dims), times)

    def of_kernel(self, call: KernelCall) -> float:
        """The kernel by itself, as far as sums of products and traffic tell."""
        kernel, machine = call.kernel, self.machine
        products = sum(
            machine.operations(eqn)
            * math.prod(array_aval(eqn.outvars[0]).shape)
            / machine.flops(str(array_aval(eqn.invars[0]).dtype))
            for eqn in equations(kernel.body.jaxpr)
            if eqn.primitive.name in CONTRACTIONS
        )
        return max(products * kernel.num_programs, self.traffic(call)) + machine.launch_seconds

    def traffic(self, call: KernelCall) -> float:
        """Reading all operands and storing all results of a kernel once."""
        return sum(map(self.moved, atoms(call))) + self.stored(call.results)

    def inside(self, kernel: Kernel, one: ComputedInput) -> float:
        """An operand that is computed block by block."""
        programs = kernel.num_programs * one.times
        return sum(
            self.read_by(kernel, var, volume(access), one.times)
            for var, access in one.requests.inputs
        ) + sum(self.computed(step.eqn, programs * volume(step.out)) for step in one.requests.steps)
