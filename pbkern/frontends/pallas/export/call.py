"""Kernel -> function of arrays, made by pl.pallas_call: one call per stage.

Pallas promises less than Kernel does, so that some things are written out. Sizes of dynamic grids are values of the grid. A
last stage is a second call. Results that values may leave unwritten share the memory of zeros. On a TPU, a block of a result
that shares memory with an operand starts undefined in the kernel's memory: the first program that has it copies the
operand's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pbkern import _jax
from pbkern.core.errors import OptionError, UnsupportedOp
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.conditional_results import unsure_results
from pbkern.dsl.interpret import parallel_dims
from pbkern.dsl.kernel import BlockMapping, Kernel, make_pallas_function
from pbkern.dsl.primitives import grid as primitives
from pbkern.dsl.trace import body_dtypes, needs_x64
from pbkern.targets.tpu.params import CompilerParams

from .blocks import ArrayBlocks, suits_tpu
from .body import PallasBody


def pallas_function(
    kernel: Kernel, target: str | None = None, interpret: Any = False
) -> Callable[..., list]:
    """A function from arrays of kernel.in_types to a list of results.

    Args:
      kernel: the kernel.
      target: "tpu", or None for Pallas's interpreters.
      interpret: as pl.pallas_call takes it.
    """
    if target not in (None, "tpu"):
        raise OptionError(
            f"to_pallas for target `{target}`",
            at=kernel.defined_at or None,
            why="pbkern compiles kernels for CPUs and GPUs itself",
            hint='target="tpu", or None for the interpreters of JAX',
        )
    stages = [_stage(stage, target == "tpu", interpret) for stage in kernel.stages]
    first = len(kernel.inputs)

    def call(*arrays) -> list:
        results = stages[0](arrays[:first])
        for stage in stages[1:]:
            results = stage([*results, *arrays[first:]])
        return results

    call.__name__ = call.__qualname__ = kernel.name
    return call


make_pallas_function.append(pallas_function)


def _stage(kernel: Kernel, is_tpu: bool, interpret: Any) -> Callable[[Sequence], list]:
    """A function from arrays to results, by one pallas_call of a kernel without a last stage."""
    _refuse_types(kernel, is_tpu)
    outputs = [_blocks(kernel, mapping, is_tpu, is_result=True) for mapping in kernel.outputs]
    shared = dict(kernel.aliases)
    inputs = [
        _shared_operand(kernel, number, outputs[shared[number]])
        if number in shared
        else _blocks(
            kernel, mapping, is_tpu and number >= kernel.num_scalar_prefetch, is_result=False
        )
        for number, mapping in enumerate(kernel.inputs)
    ]
    for output in outputs if is_tpu else ():
        _refuse_returns(kernel, output.mapping)
    return _Stage(kernel, is_tpu, interpret, inputs, outputs, unsure_results(kernel))


@dataclass(frozen=True, eq=False)
class _Stage:
    """One pallas_call. Its operands are the kernel's, then zeros for results that values may leave unwritten.

    Attributes:
      kernel: the kernel, without a last stage.
      is_tpu: whether a TPU runs it.
      interpret: as pl.pallas_call takes it.
      inputs, outputs: blocks of the kernel's operands and results.
      unsure: numbers of the results that values may leave unwritten.
    """

    kernel: Kernel
    is_tpu: bool
    interpret: Any
    inputs: Sequence[ArrayBlocks]
    outputs: Sequence[ArrayBlocks]
    unsure: Sequence[int]

    @property
    def zeros(self) -> list[ArrayBlocks]:
        """Blocks of the operands that are zeros."""
        return [self.outputs[number] for number in self.unsure]

    @property
    def aliases(self) -> dict[int, int]:
        """Number of an operand -> number of the result that shares its memory."""
        first = len(self.inputs)
        return dict(self.kernel.aliases) | {
            first + n: result for n, result in enumerate(self.unsure)
        }

    def __call__(self, arrays: Sequence) -> list:
        from jax.experimental import pallas as pl

        with jax.enable_x64(needs_x64(body_dtypes(self.kernel.body.jaxpr))):
            call = pl.pallas_call(
                self.body,
                out_shape=[
                    jax.ShapeDtypeStruct(block.shape, block.mapping.array.dtype)
                    for block in self.outputs
                ],
                grid_spec=self.grid_spec(arrays),
                input_output_aliases=self.aliases,
                compiler_params=_params(self.kernel) if self.is_tpu else None,
                interpret=self.interpret,
                name=self.kernel.name,
            )
            results = call(
                *(block.given(jnp.asarray(array)) for block, array in zip(self.inputs, arrays)),
                *(jnp.zeros(block.shape, block.mapping.array.dtype) for block in self.zeros),
            )
            return [block.returned(result) for block, result in zip(self.outputs, results)]

    def grid_spec(self, arrays: Sequence) -> Any:
        """Pallas's grid, blocks and scratch; `arrays` has the sizes of dynamic grid dimensions."""
        from jax.experimental.pallas import tpu

        kernel = self.kernel
        grid: list = list(kernel.grid)
        for axis, operand in kernel.dynamic_grid:
            grid[axis] = jnp.minimum(arrays[operand].reshape(()), np.int32(grid[axis]))
        specs = [block.spec() for block in (*self.inputs, *self.zeros)]
        return tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=kernel.num_scalar_prefetch,
            grid=tuple(grid),
            in_specs=specs[kernel.num_scalar_prefetch :],
            out_specs=[block.spec() for block in self.outputs],
            scratch_shapes=[
                (tpu.VMEM if buffer.shape else tpu.SMEM)(buffer.shape, buffer.dtype)
                for buffer in kernel.scratch
            ],
        )

    def body(self, *refs) -> None:
        """Binds the kernel's body on Pallas's Refs.

        On a TPU, the first program with a block of a result that shares memory copies the operand's to it.
        """
        from jax.experimental import pallas as pl

        kernel, num_inputs = self.kernel, len(self.inputs)
        num_operands = num_inputs + len(self.unsure)
        place = [pl.program_id(axis) for axis in range(len(kernel.grid))]
        dynamic = dict(kernel.dynamic_grid)
        sizes = [
            pl.num_programs(axis) if axis in dynamic else np.int32(size)
            for axis, size in enumerate(kernel.grid)
        ]
        results = refs[num_operands : num_operands + len(self.outputs)]
        prefetched = refs[: kernel.num_scalar_prefetch]
        for operand, number in self.aliases.items() if self.is_tpu else ():
            is_first = _is_first_with_block(self.outputs[number], sizes, place, prefetched)
            primitives.when(is_first)(functools.partial(_copy, results[number], refs[operand]))
        blocks = [*self.inputs, *self.outputs]
        body_refs = [*refs[:num_inputs], *refs[num_operands:]]
        PallasBody(kernel, blocks, self.is_tpu, place, sizes, body_refs).run()


def _copy(target, source) -> None:
    target[...] = source[...]


def _blocks(kernel: Kernel, mapping: BlockMapping, is_tpu: bool, is_result: bool) -> ArrayBlocks:
    """The blocks of an operand or result, in a shape that the device takes.

    Raises UnsupportedOp for windows that would have to be copied apart and cannot be.
    """
    if not is_tpu:
        return ArrayBlocks(mapping, kernel.grid, False)
    if not mapping.array.shape:
        from jax.experimental.pallas import tpu

        return ArrayBlocks(mapping, kernel.grid, False, tpu.SMEM)
    blocks = ArrayBlocks(mapping, kernel.grid, not suits_tpu(mapping))
    reads_operands = any(_jax.is_ref(var.aval) for var in mapping.index_map.jaxpr.invars)
    is_known = not (is_result or kernel.dynamic_grid or (reads_operands and None in mapping.starts))
    if blocks.is_cut and blocks.has_windows and not is_known:
        raise UnsupportedOp(
            f"blocks of {mapping.origin} of kernel `{kernel.name}` on a TPU",
            at=kernel.defined_at or None,
            why=f"{mapping.dims} of {mapping.array}: windows that start anywhere are copied side by side before the call, "
            "and these are of a result, or operands decide where they are",
            hint="pbkern.Blocked, or windows whose last two sizes are multiples of 8 and 128 or those of the array",
        )
    return blocks


def _shared_operand(kernel: Kernel, number: int, output: ArrayBlocks) -> ArrayBlocks:
    """Blocks of an operand that shares its array with a result: the result's blocks.

    Pallas gives programs the operand's values before the call. In a Kernel, a program reads what others have written. So the
    body may read such an operand only if no other program writes to the block.

    Raises UnsupportedOp otherwise.
    """
    mapping = kernel.inputs[number]
    is_prefetched = number < kernel.num_scalar_prefetch  # index maps may read it, too
    is_read = is_prefetched or number in _jax.read_inputs(kernel.body.jaxpr)
    are_same = (mapping.dims, mapping.starts) == (output.mapping.dims, output.mapping.starts)
    is_safe = are_same and None not in mapping.starts and _moves_always(kernel, mapping)
    if is_read and (is_prefetched or not is_safe):
        raise UnsupportedOp(
            f"{mapping.origin} of kernel `{kernel.name}` shares memory with a result, in Pallas",
            at=kernel.defined_at or None,
            why="the body reads it, and a program may have written to the block that another one reads: Pallas gives "
            "programs what there was before the call",
            hint="blocks of the operand that are those of the result, another one in each program",
        )
    return output


def _moves_always(kernel: Kernel, mapping: BlockMapping) -> bool:
    """Whether no two programs have the same block."""
    return all(size == 1 or mapping.moves_apart(axis) for axis, size in enumerate(kernel.grid))


def _refuse_returns(kernel: Kernel, mapping: BlockMapping) -> None:
    """Raises UnsupportedOp where programs come back to a block of a result after another one: a TPU's memory holds one."""
    if None in mapping.starts:
        return
    moving = {axis for start in mapping.starts for axis in start.symbols}  # type: ignore[union-attr]
    moving = {axis for axis in moving if kernel.grid[axis] > 1}
    for axis, size in enumerate(kernel.grid):
        if size > 1 and axis not in moving and axis < max(moving, default=-1):
            raise UnsupportedOp(
                f"{mapping.origin} of kernel `{kernel.name}` on a TPU",
                at=kernel.defined_at or None,
                why=f"its block is the same along grid dimension {axis} and moves along {max(moving)}, which is further in: "
                "programs come back to a block that the TPU's memory no longer holds",
                hint="make the dimensions along which a result's block stays the last ones of the grid",
            )


def _is_first_with_block(
    output: ArrayBlocks, sizes: Sequence, place: Sequence, prefetched: Sequence
) -> Any:
    """Whether the previous program had another block of a result, or there is no previous program.

    Args:
      output: the result's blocks.
      sizes: of the grid.
      place: the program's number along each grid dimension.
      prefetched: Refs that index maps read.
    """
    before: list = []
    borrows: Any = np.bool_(True)
    for size, index in zip(reversed(sizes), reversed(place)):
        last = jnp.where(index == 0, size - 1, index - 1)
        before.insert(0, jnp.where(borrows, last, index))
        borrows = borrows & (index == 0)
    pairs = zip(output.indices([*place, *prefetched]), output.indices([*before, *prefetched]))
    # `borrows` is left true in the first program alone.
    return functools.reduce(lambda differs, pair: differs | (pair[0] != pair[1]), pairs, borrows)


def _refuse_types(kernel: Kernel, is_tpu: bool) -> None:
    """Raises UnsupportedOp for types of 64 bits on a TPU."""
    wide = sorted(dtype.name for dtype in body_dtypes(kernel.body.jaxpr) if needs_x64([dtype]))
    if is_tpu and wide:
        raise UnsupportedOp(
            f"kernel `{kernel.name}` on a TPU",
            at=kernel.defined_at or None,
            why=f"it has values of type {', '.join(wide)}, and TPUs have 32 bits",
            hint="32-bit types",
        )


def _params(kernel: Kernel) -> Any:
    """JAX's CompilerParams of a kernel."""
    params = kernel.compiler_params.get("tpu", CompilerParams())
    if params.dimension_semantics is None and kernel.grid:
        parallel = parallel_dims(kernel)
        params = params.replace(
            dimension_semantics=tuple(
                "parallel" if axis in parallel else "arbitrary" for axis in range(len(kernel.grid))
            )
        )
    return params.for_pallas(kernel.defined_at or None)
