"""Kernel: grid, block mappings, scratch and a body jaxpr over Refs.

Where fused, hand-written and adopted kernels meet.

A Kernel is canonical and frozen: what the user wrote (`BlockSpec`, specs.py) is resolved against
array shapes. Tracing is trace.py, checking verify.py, printing printer.py, running on NumPy
interpret.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import cache, cached_property
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.process.jaxpr_digest import fingerprint


@dataclass(frozen=True, slots=True)
class ArrayType:
    """Shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{_name(self.dtype)}[{','.join(map(str, self.shape))}]"


@cache
def _name(dtype: np.dtype) -> str:
    """The name of a dtype, which NumPy works out anew for each question."""
    return dtype.name


@dataclass(frozen=True, slots=True)
class Blocked:
    """`size` elements starting at index * size; the block keeps the dimension.

    Examples:
      >>> spec = pbkern.BlockSpec((pbkern.Blocked(8), 128), lambda i: (i, 0))  # as (8, 128)
      >>> spec.block_shape[0]
      Blocked(size=8)
    """

    size: int


@dataclass(frozen=True, slots=True)
class Squeezed:
    """One element at index; the dimension is absent from the Ref.

    Examples:
      >>> row = pbkern.BlockSpec((pbkern.Squeezed(), 4), lambda i: (i, 0))  # as (None, 4): the Ref is [4]
      >>> @pbkern.kernel(
      ...     grid=(3,), in_specs=[row], out_specs=row,
      ...     out_shape=jax.ShapeDtypeStruct((3, 4), "float32"),
      ... )
      ... def sorted_rows(x, o):
      ...     o[...] = -jnp.sort(-x[...])
      >>> np.asarray(sorted_rows(jnp.arange(12.0).reshape(3, 4)))[1].tolist()
      [7.0, 6.0, 5.0, 4.0]
    """

    size = 1


@dataclass(frozen=True, slots=True)
class Element:
    """`size` elements starting at index itself (halos, overlapping blocks).

    `padding` = (low, high) elements may be outside the array: start may be as low as -low, and
    start + size as high as extent + high. What a read returns there is unspecified (NaN in
    interpret mode); stores are dropped.

    Examples:
      >>> halo = pbkern.BlockSpec((pbkern.Element(6),), lambda i: (4 * i,))  # 4 elements and 2 of the next block
      >>> @pbkern.kernel(
      ...     grid=(2,), in_specs=[halo], out_specs=pbkern.BlockSpec((4,), lambda i: (i,)),
      ...     out_shape=jax.ShapeDtypeStruct((8,), "float32"),
      ... )
      ... def sums_of_three(x, o):
      ...     o[...] = x[0:4] + x[1:5] + x[2:6]
      >>> sums_of_three(jnp.arange(10.0)).tolist()
      [3.0, 6.0, 9.0, 12.0, 15.0, 18.0, 21.0, 24.0]
    """

    size: int
    padding: tuple[int, int] = (0, 0)


BlockDim = Blocked | Squeezed | Element


@dataclass(frozen=True)
class BlockMapping:
    """Which block of one array each program sees.

    Attributes:
      origin: how messages call it, e.g. "input 0 (`x_ref`)".
      array: type of the whole array.
      dims: one BlockDim per array dimension.
      index_map: closed jaxpr from i32 grid indices (then scalar-prefetch Refs) to one i32 index per
        dimension.
      memory_space: "any" (the target chooses) or a space that the target names.
    """

    origin: str
    array: ArrayType
    dims: tuple[BlockDim, ...]
    index_map: ClosedJaxpr
    memory_space: str = "any"

    @cached_property
    def ref_shape(self) -> tuple[int, ...]:
        """Shape of the Ref: block sizes without squeezed dimensions."""
        return tuple(dim.size for dim in self.dims if not isinstance(dim, Squeezed))

    @cached_property
    def starts(self) -> tuple[Affine | None, ...]:
        """First element of the block per array dimension, affine in grid axes (symbols 0, 1, ...); None where it is not."""
        from pbkern.core.jaxprs.evaluation import affine_outputs

        indices = affine_outputs(self.index_map.jaxpr)
        return tuple(
            index if index is None else index * (dim.size if isinstance(dim, Blocked) else 1)
            for index, dim in zip(indices, self.dims)
        )

    def moves_apart(self, axis: int) -> bool:
        """Whether blocks of two programs that differ in a grid axis never overlap.

        Some dimension then moves with that axis alone, by a block or more.
        """
        for start, block in zip(self.starts, self.dims):
            if (
                start is not None
                and start.symbols == {axis}
                and abs(start.coefficient(axis)) >= block.size
            ):
                return True
        return False


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory private to one thread of programs; keeps its contents over sequential grid steps; starts undefined.

    `scoped`: each program writes what it reads, so that nothing is carried from one to the next.

    Examples:
      >>> @pbkern.kernel(
      ...     scratch_shapes=[pbkern.Scratch((4,), np.dtype("float32"))],
      ...     out_shape=jax.ShapeDtypeStruct((4,), "float32"),
      ... )
      ... def cubed(x, o, t):
      ...     t[...] = x[...] * x[...]
      ...     o[...] = t[...] * x[...]
      >>> cubed(jnp.arange(4.0)).tolist()
      [0.0, 1.0, 8.0, 27.0]
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    memory_space: str = "any"
    scoped: bool = False


@dataclass(frozen=True)
class BlockSize:
    """A size of blocks that a kernel was made with, and could have been made with another of.

    `size` elements of `extent` at a time, which its comment calls `what`.
    """

    size: int
    extent: int
    what: str


@dataclass(frozen=True, eq=False)
class BlockSizes:
    """Sizes that a kernel was made with, by name; `at` makes it with others, and raises where it cannot."""

    sizes: Mapping[str, BlockSize]
    at: Callable[[Mapping[str, int]], Kernel]


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel.

    Attributes:
      name: a valid identifier.
      grid: size of each grid dimension; () is a single program.
      inputs: block mappings of the operands; the first `num_scalar_prefetch` are whole arrays that
        index maps read too.
      outputs: block mappings of the results.
      scratch: scratch buffers.
      body: closed jaxpr over Refs (*inputs, *outputs, *scratch), without constants and without
        results.
      aliases: (input, output) pairs that share one array.
      compiler_params: target name -> that target's CompilerParams.
      dynamic_grid: (dimension, operand) pairs: that grid dimension's size is the value of that
        i32[] operand, and its entry in `grid` only an upper bound.
      origin: who wrote it, in reports.
      defined_at: where it was defined, "file:line (function)", or "" for a fused kernel.
      with_rules: the body before functions with derivatives of their own (jax.custom_jvp,
        jax.custom_vjp, stop_gradient) became what they compute; None if it calls none.
      finish: the last stage, a kernel that runs once all programs are done. Its first operands are
        the programs' results, the others are further operands of this kernel; its results are this
        kernel's. What the programs write is private to the kernel, unless the last stage has a
        result that shares its array.
      sizes: sizes of blocks that could be others, of a fused kernel: constants of its source.

    A kernel is called with arrays of its `in_types`, and returns an array, or a list where it has
    several results.

    Examples:
      >>> f = pbkern.jit(lambda x: (x - x.mean()) / x.std())
      >>> (kernel,) = f.kernels(jax.ShapeDtypeStruct((256,), "float32"))
      >>> kernel.grid, [str(operand) for operand in kernel.in_types]
      ((), ['float32[256]'])
      >>> kernel.source().startswith("import")
      True
    """

    name: str
    grid: tuple[int, ...]
    inputs: tuple[BlockMapping, ...]
    outputs: tuple[BlockMapping, ...]
    scratch: tuple[Scratch, ...]
    body: ClosedJaxpr
    aliases: tuple[tuple[int, int], ...] = ()
    compiler_params: Mapping[str, Any] = field(default_factory=dict)
    num_scalar_prefetch: int = 0
    dynamic_grid: tuple[tuple[int, int], ...] = ()
    defined_at: str = ""
    origin: str = "written by hand"
    with_rules: ClosedJaxpr | None = None
    finish: Kernel | None = None
    sizes: BlockSizes | None = field(default=None, repr=False)

    def __call__(self, *arrays) -> Any:
        results = call_traced[0](self, *arrays)
        return results[0] if len(results) == 1 else results

    @property
    def in_types(self) -> tuple[ArrayType, ...]:
        """Types that a call takes: the programs' operands, then the last stage's own."""
        types = tuple(operand.array for operand in self.inputs)
        return types if self.finish is None else types + self.finish.in_types[len(self.outputs) :]

    @property
    def out_types(self) -> tuple[ArrayType, ...]:
        """Types that a call returns."""
        return (
            tuple(output.array for output in self.outputs)
            if self.finish is None
            else self.finish.out_types
        )

    @cached_property
    def stages(self) -> tuple[Kernel, ...]:
        """Kernels without last stages that do the same together: the programs, then the last stage if there is one."""
        return (
            (self,)
            if self.finish is None
            else (dataclasses.replace(self, finish=None), self.finish)
        )

    @cached_property
    def shared(self) -> tuple[tuple[int, int], ...]:
        """(operand, result) pairs of a call that share one array."""
        if self.finish is None:
            return self.aliases
        results, further = dict(self.finish.aliases), len(self.inputs) - len(self.outputs)
        through = tuple((i, results[output]) for i, output in self.aliases if output in results)
        return through + tuple(
            (i + further, result) for i, result in self.finish.aliases if i >= len(self.outputs)
        )

    @property
    def num_programs(self) -> int:
        return math.prod(self.grid)

    @property
    def differentiable(self) -> ClosedJaxpr:
        """The body of which derivatives are taken."""
        return self.with_rules or self.body

    @property
    def symbol(self) -> str:
        """The name as MLIR, PTX and linkers read names: letters of ASCII, digits and underscores."""
        return "".join(
            letter if letter.isascii() and letter.isalnum() else "_" for letter in self.name
        )

    @cached_property
    def content(self) -> tuple:
        """Equal for kernels that do the same.

        Names and what targets take of compiler_params are not in it.
        """
        mappings = tuple(
            (mapping.array, mapping.dims, mapping.memory_space, fingerprint(mapping.index_map))
            for mapping in (*self.inputs, *self.outputs)
        )
        return (
            self.grid,
            self.dynamic_grid,
            len(self.inputs),
            mappings,
            self.scratch,
            self.aliases,
            self.num_scalar_prefetch,
            fingerprint(self.body),
            self.finish and self.finish.content,
        )

    def source(self) -> str:
        """DSL source that rebuilds the kernel."""
        return print_as_source[0](self)

    def to_pallas(self, *, target: str | None = None, interpret: Any = False) -> Callable:
        """A function, made by pl.pallas_call, from arrays of `in_types` to a list of results.

        Args:
          target: "tpu": blocks and accesses are such that JAX's Pallas compiles them for TPUs, with
            the kernel's pbkern.tpu.CompilerParams. None: for JAX's interpreters.
          interpret: as of pl.pallas_call: True, or pltpu.InterpretParams.

        Raises UnsupportedOp, at the kernel's line or when called at that of its body, for what Pallas
        has no counterpart of.

        Examples:
          >>> @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((4,), "float32"))
          ... def doubled(x, o):
          ...     o[...] = 2 * x[...]
          >>> traced = doubled.trace(jnp.ones(4))
          >>> traced.to_pallas(interpret=True)(jnp.arange(4.0))[0].tolist()
          [0.0, 2.0, 4.0, 6.0]
        """
        return make_pallas_function[0](self, target, interpret)

    def __str__(self) -> str:
        return self.source()


def input_fusion(kernel: Kernel) -> tuple[bool, ...]:
    """Per operand of the programs, whether producers may be computed in the kernel (`allow_input_fusion`)."""
    flags: list[bool] = [True] * len(kernel.inputs)
    for params in kernel.compiler_params.values():
        given = getattr(params, "allow_input_fusion", None)
        if given is not None:  # one for each operand, or for each that is not prefetched
            first = len(flags) - len(given)
            flags[first:] = [flag and allowed for flag, allowed in zip(flags[first:], given)]
    return tuple(flags)


def with_input_fusion(params: Mapping, flags: Sequence[bool]) -> dict:
    """compiler_params with permissions for other operands; none where all are given."""
    allowed = None if all(flags) else tuple(flags)
    return {
        target: dataclasses.replace(param, allow_input_fusion=allowed)
        if hasattr(param, "allow_input_fusion")
        else param
        for target, param in params.items()
    }


# Set by printer.py and call.py, which know of tracing: a kernel itself does not.
print_as_source: list[Callable[[Kernel], str]] = []
call_traced: list[Callable[..., list]] = []
# Set by frontends/pallas/export/call.py: (kernel, target, interpret) -> function of arrays.
make_pallas_function: list[Callable[[Kernel, str | None, Any], Callable]] = []
