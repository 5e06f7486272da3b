"""Parameters of a pallas_call equation -> dsl.Kernel.

Operands of pallas_call are (*dynamic grid sizes, *scalar prefetch, *inputs); those of the kernel
(*scalar prefetch, *inputs, *dynamic grid sizes), see `Imported.operands`. Bodies are translated by
body.py, CompilerParams by params.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.errors import UnsupportedOp
from pbkern.core.jaxprs.calls import rules_kept
from pbkern.core.jaxprs.walks import equations
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.body_checks.verify import verify
from pbkern.dsl.body_rewrites import bounded_slices, value_primitives
from pbkern.dsl.body_rewrites.byte_refs import held, held_as
from pbkern.dsl.body_rewrites.constant_masks import fold_constant_masks
from pbkern.dsl.body_rewrites.copied_inputs import with_private_inputs
from pbkern.dsl.kernel import (
    ArrayType,
    BlockDim,
    Blocked,
    BlockMapping,
    Element,
    Kernel,
    Scratch,
    Squeezed,
)
from pbkern.dsl.primitives import atomics, prng_keys
from pbkern.dsl.primitives import grid as primitives
from pbkern.dsl.primitives.prng_keys import is_key
from pbkern.dsl.specs import BlockSpec, block_mapping, canonical_index_map
from pbkern.dsl.trace import canonical_body, identifier, limits_of

from . import (
    dma,  # noqa: F401  (pallas_dma registers its rules)
    prng_state,
)
from .body import ATOMICS, Importer, allocation, scoped_allocations, uses_atomics
from .params import backend_of, cpu_params, thread_params


@dataclass(frozen=True)
class ImportedCall:
    """A kernel in place of a pallas_call.

    Attributes:
      kernel: the kernel.
      operands: per operand of the kernel, its number among those of the pallas_call.
    """

    kernel: Kernel
    operands: tuple[int, ...]


class _Operands(NamedTuple):
    """Blocks of a pallas_call.

    Attributes:
      grid: number of programs per dimension; MAX_DYNAMIC for dynamic dimensions.
      dynamic: grid dimensions whose sizes are operands, the last ones.
      prefetch: types of the first operands, which index maps read.
      inputs: blocks of all operands.
      outputs: blocks of the results.
    """

    grid: tuple[int, ...]
    dynamic: list[int]
    prefetch: list[ArrayType]
    inputs: tuple[BlockMapping, ...]
    outputs: tuple[BlockMapping, ...]


def _operands(grid_spec, at: str) -> _Operands:
    prefetch = [
        _array(aval.inner_aval if _jax.is_ref(aval) else aval, at)
        for aval in grid_spec.index_map_avals[len(grid_spec.grid) :]
    ]
    is_dynamic = _jax.pallas().is_dynamic_dim
    dynamic = [axis for axis, size in enumerate(grid_spec.grid) if is_dynamic(size)]
    grid = tuple(
        MAX_DYNAMIC if axis in dynamic else int(size) for axis, size in enumerate(grid_spec.grid)
    )
    whole = [
        block_mapping(BlockSpec(), array_type, f"prefetched operand {n}", grid, prefetch, at)
        for n, array_type in enumerate(prefetch)
    ]
    blocks = [_mapping(mapping, grid, prefetch, at) for mapping in grid_spec.block_mappings]
    sizes = [
        block_mapping(BlockSpec(), SIZE, f"size of grid dimension {axis}", grid, prefetch, at)
        for axis in dynamic
    ]
    inputs = (*whole, *blocks[: grid_spec.num_inputs], *sizes)
    return _Operands(grid, dynamic, prefetch, inputs, tuple(blocks[grid_spec.num_inputs :]))


def import_call(
    *, jaxpr, grid_mapping, input_output_aliases, compiler_params, name, target="cpu", **unused
) -> ImportedCall:
    """The kernel of a pallas_call, for a target.

    Args:
      jaxpr: the call's body.
      grid_mapping: its grid, blocks and scratch.
      input_output_aliases: (operand, result) pairs that share memory.
      compiler_params: of any of Pallas's back ends.
      name: the call's.
      target: name of the target.
      **unused: debug, mesh, metadata, cost_estimate and out_avals, which change no result.

    Raises:
      UnsupportedOp, at the user's line: the body or an option has no counterpart on this machine.
    """
    at = _defined_at(jaxpr)
    operands = _operands(grid_mapping, at)
    grid, dynamic, prefetch, inputs, outputs = operands
    vmapped = grid_mapping.vmapped_dims
    scoped, hands_on = _scoped(jaxpr)
    in_order = (axis for axis in range(len(grid)) if axis not in vmapped)
    importer = Importer(tuple(in_order), grid_mapping.grid_names or ())
    aliases = tuple(sorted(tuple(pair) for pair in input_output_aliases))
    params = cpu_params(compiler_params, grid, vmapped, uses_atomics(jaxpr), at, target)
    cores = [axis for axis, word in enumerate(_semantics(params) or ()) if word == "parallel"]
    if dynamic and params and (allowed := params["cpu"].allow_input_fusion) is not None:
        flags = (*allowed, *(True for _ in dynamic))
        params = params | {"cpu": params["cpu"].replace(allow_input_fusion=flags)}
    params, held = _output_places(jaxpr, params, operands, grid_mapping, aliases)
    scratch = tuple(allocation(aval) for aval in grid_mapping.scratch_avals)
    memory = (*held.scratch(outputs), *scratch)
    translated = partial(
        _body, jaxpr, importer, scoped, len(dynamic), inputs, outputs, memory, held, len(grid)
    )
    body = translated()
    if backend_of(compiler_params) == "triton":
        params = _in_any_order(params, outputs, grid, vmapped, jaxpr)
    if hands_on or (importer.writes_back and held.in_place):
        params = _in_order(params)
    kernel = Kernel(
        name=identifier(name or jaxpr.debug_info.func_name or "kernel"),
        grid=grid,
        inputs=inputs,
        outputs=outputs,
        scratch=memory + tuple(buf for group in scoped.values() for buf in group),
        body=body,
        aliases=aliases,
        compiler_params=params | thread_params(compiler_params, _semantics(params)),
        num_scalar_prefetch=len(prefetch),
        dynamic_grid=tuple(
            (axis, len(inputs) - len(dynamic) + k) for k, axis in enumerate(dynamic)
        ),
        defined_at=at,
        origin="Pallas",
    )
    slices = _slice_sizes(grid_mapping, grid, prefetch, len(dynamic))

    def complete(body: jex.ClosedJaxpr) -> Kernel:
        if slices:
            body = bounded_slices.bound(body, lambda refs: limits_of(kernel, slices, refs))
            body = canonical_body(body)
        return with_private_inputs(dataclasses.replace(kernel, body=body), cores)

    completed = complete(body)
    if value_primitives.needs_rules(jaxpr):
        with rules_kept():
            completed = dataclasses.replace(completed, with_rules=complete(translated()).body)
    verify(completed)
    operand_count, num_dynamic = len(inputs), len(dynamic)
    return ImportedCall(completed, (*range(num_dynamic, operand_count), *range(num_dynamic)))


# Stands for the state of the random number generator, among ids of allocations in the body.
GENERATOR = 0
SIZE = ArrayType((), np.dtype(np.int32))
# Programs along a dynamic dimension of a grid, at most: sizes are int32.
MAX_DYNAMIC = 2**31 - 1


def _defined_at(jaxpr) -> str:
    return jaxpr.debug_info.func_src_info or ""


def _array(aval, at: str) -> ArrayType:
    shape, dtype = prng_keys.held(aval)
    if not isinstance(dtype, np.dtype):
        raise UnsupportedOp(
            f"a Pallas kernel over {aval.str_short()}",
            at=at,
            why="elements are numbers, bools or PRNG keys",
        )
    return ArrayType(tuple(int(size) for size in shape), held_as(dtype))


def _semantics(params: dict) -> tuple[str, ...] | None:
    """The dimension_semantics of CompilerParams, if there are any."""
    return params["cpu"].dimension_semantics if params else None


def _scoped(jaxpr) -> tuple[dict, bool]:
    """(allocations in the body by id, whether random numbers depend on draws of earlier programs)."""
    scoped = scoped_allocations(jaxpr)
    generator = prng_state.allocation(jaxpr)
    if generator is None:
        return scoped, False
    return scoped | {GENERATOR: (generator,)}, not generator.scoped


class _OutputPlaces(NamedTuple):
    """Outputs that the body does not store to by blocks.

    Attributes:
      private: numbers of those that are in scratch until the last program copies them out.
      wide: numbers of those that are in scratch until each program's end.
      in_place: numbers of those that are whole memory.
      same: input -> output in place that is the same array: stores through one of them are seen through both.
    """

    private: tuple[int, ...]
    wide: tuple[int, ...]
    in_place: set[int]
    same: dict[int, int]

    def scratch(self, outputs: Sequence[BlockMapping]) -> list[Scratch]:
        """Scratch for the private outputs, then for the wide ones."""
        mappings = [outputs[output] for output in (*self.private, *self.wide)]
        return [Scratch(mapping.ref_shape, mapping.array.dtype) for mapping in mappings]


def _output_places(
    jaxpr, params: dict, operands: _Operands, grid_spec, aliases: tuple[tuple[int, int], ...]
) -> tuple[dict, _OutputPlaces]:
    """Finds outputs that the body does not store to by blocks.

    Returns:
      (CompilerParams under which such outputs are right, the outputs).
    """
    aliased = {output for _, output in aliases}
    mappings = grid_spec.block_mappings[grid_spec.num_inputs :]
    in_place = {n for n, mapping in enumerate(mappings) if _jax.is_whole_memory(mapping)}
    params, private = _share_safely(params, operands.outputs, aliased, in_place)
    first, num_prefetched = len(operands.prefetch) + grid_spec.num_inputs, len(operands.prefetch)
    wide = _wide_outputs(jaxpr, operands.outputs, first, private, aliased)
    same = {i: output for i, output in aliases if output in in_place and i >= num_prefetched}
    return params, _OutputPlaces(private, wide, in_place, same)


def _share_safely(
    params: dict, outputs, aliased: set[int], in_place: set[int]
) -> tuple[dict, tuple[int, ...]]:
    """(CompilerParams, outputs that go to scratch) such that parallel programs write no common block.

    On a TPU each core has its own copy of a block, so authors declare dimensions parallel over
    which one block serves as scratch. Here such a block becomes scratch, and the last program
    writes it out. A dimension over which another output's blocks stay the same runs in order.
    Outputs `in_place` have no blocks: cores share them, as threads do here.
    """
    semantics = params["cpu"].dimension_semantics if params else None
    if semantics is None or "parallel" not in semantics:
        return params, ()
    moves = [
        None
        if None in output.starts
        else frozenset().union(*(start.symbols for start in output.starts))
        for output in outputs
    ]
    moves = [None if output in in_place else symbols for output, symbols in enumerate(moves)]
    private = tuple(
        output
        for output, symbols in enumerate(moves)
        if symbols == frozenset() and output not in aliased
    )
    rest = [
        symbols
        for output, symbols in enumerate(moves)
        if output not in private and symbols is not None
    ]
    shared = {
        axis for axis in range(len(semantics)) if any(axis not in symbols for symbols in rest)
    }
    semantics = tuple(
        "arbitrary" if axis in shared and word == "parallel" else word
        for axis, word in enumerate(semantics)
    )
    return params | {"cpu": params["cpu"].replace(dimension_semantics=semantics)}, private


# Programs with these take turns.
ONE_BY_ONE = {"debug_print", "check", *ATOMICS}


def _in_any_order(
    params: dict, outputs, grid: tuple[int, ...], vmapped: tuple[int, ...], jaxpr
) -> dict:
    """CompilerParams of a kernel for Triton, whose programs have no order: parallel, if blocks of results allow it.

    A program that has the whole of a result is taken to store to other elements of it than other programs do.
    """
    batch = frozenset(vmapped)

    def chooses(mapping) -> bool:
        return all(
            dim.size == size or (start is not None and start.symbols <= batch)
            for dim, size, start in zip(mapping.dims, mapping.array.shape, mapping.starts)
        )

    apart = all(
        output.moves_apart(axis) or (axis not in batch and chooses(output))
        for output in outputs
        for axis in range(len(grid))
    )
    if not apart or any(eqn.primitive.name in ONE_BY_ONE for eqn in equations(jaxpr)):
        return params
    return params | {"cpu": params["cpu"].replace(dimension_semantics=("parallel",) * len(grid))}


def _in_order(params: dict) -> dict:
    """CompilerParams without parallel dimensions."""
    semantics = params["cpu"].dimension_semantics if params else None
    words = semantics and tuple("arbitrary" if word == "parallel" else word for word in semantics)
    return params | {"cpu": params["cpu"].replace(dimension_semantics=words)} if words else params


def _wide_outputs(
    jaxpr, outputs, first: int, private: tuple[int, ...], aliased: set[int]
) -> tuple[int, ...]:
    """Outputs with blocks wider than their arrays that the body reads back: there is no memory for what is outside."""
    read = _jax.read_inputs(jaxpr)
    wide = (
        any(dim.size > size for dim, size in zip(output.dims, output.array.shape))
        for output in outputs
    )
    return tuple(
        number
        for number, is_wide in enumerate(wide)
        if is_wide and first + number in read and number not in private and number not in aliased
    )


def _body(
    jaxpr,
    importer: Importer,
    scoped: dict,
    num_sizes: int,
    inputs,
    outputs,
    scratch,
    held: _OutputPlaces,
    rank,
) -> jex.ClosedJaxpr:
    """The translated body over Refs (*inputs, *outputs, *scratch, *scoped allocations).

    Outputs that are `held` live in the first scratch buffers.
    """
    num_in, num_blocks = len(inputs), len(inputs) + len(outputs)

    def run(*refs):
        operands, results, memory = (
            list(refs[: num_in - num_sizes]),
            list(refs[num_in:num_blocks]),
            refs[num_blocks:],
        )
        for i, output in held.same.items():
            operands[i] = results[output]
        last_values = {
            number: (results[number], memory[k])
            for k, number in enumerate((*held.private, *held.wide))
        }
        for output, (_, copy) in last_values.items():
            results[output] = copy
        rest = iter(memory[len(scratch) :])
        importer.scoped = {key: [next(rest) for _ in group] for key, group in scoped.items()}
        if GENERATOR in scoped:
            (importer.generator,) = importer.scoped[GENERATOR]
            if not scoped[GENERATOR][0].scoped:
                primitives.when(primitives.is_first_program(range(rank)))(
                    partial(prng_state.clear, importer.generator)
                )
        passed = zip(jaxpr.invars, (*operands, *results, *memory[len(last_values) : len(scratch)]))
        # Scalars that a pl.kernel closes over are operands, and values in its body.
        importer.run(jaxpr, (), [ref if _jax.is_ref(var.aval) else ref[...] for var, ref in passed])
        for output in held.wide:
            target, source = last_values[output]
            target[...] = source[...]
        if held.private:
            _when_last(rank, [last_values[number] for number in held.private])

    types = [(mapping.ref_shape, mapping.array.dtype) for mapping in (*inputs, *outputs)]
    types += [
        (buf.shape, buf.dtype)
        for buf in (*scratch, *(buf for group in scoped.values() for buf in group))
    ]
    with jax.enable_x64(True):  # every type is explicit by now
        closed = jax.make_jaxpr(run)(*[_jax.ref_aval(*type_) for type_ in types])
    return canonical_body(fold_constant_masks(atomics.expand(closed)))


def _when_last(rank: int, pairs) -> None:
    """The last program copies each (target, source)."""
    last: jax.Array | np.bool_ = np.bool_(True)
    for axis in range(rank):
        last = last & (primitives.program_id(axis) == primitives.num_programs(axis) - 1)

    @primitives.when(last)
    def _():
        for target, source in pairs:
            target[...] = source[...]


# --- block mappings
# ------------------------------------------------------------------------------------------------


def _mapping(mapping, grid: tuple[int, ...], prefetch: list[ArrayType], at: str) -> BlockMapping:
    origin = str(mapping.origin)
    if mapping.transforms:
        raise UnsupportedOp(
            f"memory transforms of {origin}",
            at=at,
            why=f"{mapping.transforms}",
            hint="they only mean something on a GPU",
        )
    array = _array(mapping.array_aval, at)
    dims = tuple(
        _dim(size, extent, origin, at) for size, extent in zip(mapping.block_shape, array.shape)
    )
    dims += tuple(Blocked(size) for size in array.shape[len(dims) :])  # a key's words
    return BlockMapping(origin, array, dims, _index_map(mapping, dims, grid, prefetch))


def _dim(dim, extent: int, origin: str, at: str) -> BlockDim:
    pallas = _jax.pallas()
    match dim:
        case pallas.Squeezed():
            return Squeezed()
        case pallas.BoundedSlice(block_size=n):
            return bounded_slices.element_of(bounded_slices.BoundedSlice(int(n)))
        case pallas.Element(block_size=n, padding=(low, high)):
            return Element(int(n), (int(low), int(high)))
        case pallas.Blocked(block_size=n) if n <= extent:
            return Blocked(int(n))
        case pallas.Blocked(block_size=n):  # one block that reaches over the array's end
            return Element(int(n), (0, int(n) - extent))
    raise UnsupportedOp(
        f"block dimension {dim} of {origin}",
        at=at,
        hint="int, None, Blocked, Squeezed, Element or BoundedSlice",
    )


def _padding_before(dim: BlockDim) -> int:
    """Elements of padding before the array, from which on Pallas counts."""
    return dim.padding[0] if isinstance(dim, Element) else 0


def _indices(mapping, grid: tuple[int, ...], args) -> list:
    """Results of the index map: a scalar per dimension, a Slice for a BoundedSlice."""
    closed = mapping.index_map_jaxpr
    indices = Importer(tuple(range(len(grid))), sizes=grid).run(closed.jaxpr, closed.consts, args)
    return list(jax.tree.unflatten(mapping.index_map_out_tree, indices))


def _slice_sizes(
    grid_spec, grid: tuple[int, ...], prefetch: list[ArrayType], num_sizes: int
) -> dict[int, Callable]:
    """Number of a Ref with BoundedSlice dimensions -> function that `trace.limits_of` takes."""
    sizes = {}
    for n, mapping in enumerate(grid_spec.block_mappings):
        if any(isinstance(size, _jax.pallas().BoundedSlice) for size in mapping.block_shape):
            has_axis = [
                not isinstance(size, _jax.pallas().Squeezed) for size in mapping.block_shape
            ]
            ref = len(prefetch) + n + (num_sizes if n >= grid_spec.num_inputs else 0)
            sizes[ref] = lambda *args, block_map=mapping, has_axis=has_axis: {
                sum(has_axis[:axis]): jax.numpy.asarray(index.size, np.int32)
                for axis, index in enumerate(_indices(block_map, grid, args))
                if _jax.is_slice(index)
            }
    return sizes


def _index_map(
    mapping, dims: tuple[BlockDim, ...], grid: tuple[int, ...], prefetch: list[ArrayType]
) -> jex.ClosedJaxpr:
    """i32 grid indices and prefetched Refs -> one i32 per dimension."""
    types = [jax.core.ShapedArray((), np.dtype(np.int32))] * len(grid) + [
        _jax.ref_aval(array_type.shape, array_type.dtype) for array_type in prefetch
    ]

    def run(*args):
        starts = (
            index.start if _jax.is_slice(index) else index
            for index in _indices(mapping, grid, args)
        )
        starts = (jax.lax.convert_element_type(i, np.int32) for i in starts)
        starts = [
            i - np.int32(low) if (low := _padding_before(dim)) else i
            for i, dim in zip(starts, dims)
        ]
        return starts + [np.int32(0)] * (len(dims) - len(starts))

    with jax.enable_x64(True):
        return canonical_index_map(jax.make_jaxpr(run)(*types), grid)


def held_like(x, dtype):
    """x as the other side holds it: narrow floats and packed integers a byte each, keys words in the kernel."""
    if x.dtype == dtype:
        return x
    if is_key(x.dtype):
        return jax.random.key_data(x)
    if is_key(dtype):
        return prng_keys.keys_of(x, dtype)
    return held(x, dtype)
