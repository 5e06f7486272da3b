"""Kernel on NumPy arrays: the oracle that every target is tested against.

Grid, blocks, Refs, bounds and control flow are NumPy and Python; the other equations run one at a
time, elementwise and shape ones in NumPy (core/ops/elementwise.py), the rest through JAX's eager
`bind` on the CPU.

What is unspecified elsewhere shows here as poison (NaN, the smallest signed and largest unsigned
integer, True): reads outside the array in edge blocks and padding, scratch and results before they
are written. Stores outside the array are dropped. An index outside the *block* raises
OutOfBoundsError, a failed check CheckError. Programs run in row-major order; if CompilerParams
declare grid dimensions parallel, two programs that differ there and write one element of a result
raise RaceError, and scratch is poisoned between them.

An aliased operand and result are one array. Blocks are read when a program starts and written when
it ends.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.errors import KernelError, OutOfBoundsError, RaceError, UndefinedReadError
from pbkern.core.jaxprs.calls import called_jaxpr
from pbkern.core.jaxprs.walks import literal_value, variables_read
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.core.ops.elementwise_row import is_evaluated
from pbkern.core.ops.views import VIEWS
from pbkern.dsl.primitives.breakpoint import stop
from pbkern.dsl.primitives.grid import NUMPY as GRID_RULES
from pbkern.dsl.primitives.ref_access import (
    GatheredIndex,
    Point,
    Range,
    RefAccess,
    is_ref_access,
    value_access,
)
from pbkern.dsl.text.repro import attach

from . import checks
from .conditional_results import unsure_results
from .kernel import Blocked, BlockMapping, Kernel, Scratch, Squeezed


@_jax.hides_own_frames
def interpret(kernel: Kernel, *arrays, check_races: bool = True) -> list[np.ndarray]:
    """Runs every program of `kernel` in order and returns its results.

    Raises OutOfBoundsError for an index outside a block, UndefinedReadError for an element of scratch
    or of a result that is read before it is stored to and, with `check_races`, RaceError for two
    parallel programs that write one element.

    Args:
      kernel: the Kernel.
      *arrays: one per entry of kernel.in_types, of that shape and dtype.
      check_races: two parallel programs that write one element are an error.

    Examples:
      >>> @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((4,), "float32"))
      ... def doubled(x, o):
      ...     o[...] = 2 * x[...]
      >>> traced = doubled.trace(jnp.ones(4))
      >>> pbkern.interpret(traced, np.arange(4, dtype=np.float32))[0].tolist()
      [0.0, 2.0, 4.0, 6.0]
    """
    programs, *last = kernel.stages
    results = _interpret_stage(programs, arrays[: len(programs.inputs)], check_races)
    for stage in last:
        results = _interpret_stage(stage, (*results, *arrays[len(programs.inputs) :]), check_races)
    return results


def _interpret_stage(kernel: Kernel, arrays: Sequence, check_races: bool) -> list[np.ndarray]:
    inputs = [np.array(array) for array in arrays]
    for n, (operand, type_) in enumerate(zip(inputs, kernel.in_types)):
        if operand.shape != type_.shape or operand.dtype != type_.dtype:
            raise KernelError(
                f"operand {n} of kernel `{kernel.name}`",
                why=f"is {operand.dtype}{list(operand.shape)}, takes {type_}",
            )
    unsure = unsure_results(kernel)
    outputs = [
        np.full(out_type.shape, 0 if n in unsure else poison(out_type.dtype), out_type.dtype)
        for n, out_type in enumerate(kernel.out_types)
    ]
    for i, output in kernel.aliases:
        outputs[output] = inputs[i]
    defined: list = [
        np.full(out_type.shape, n in unsure, bool) for n, out_type in enumerate(kernel.out_types)
    ]
    for _, output in kernel.aliases:
        defined[output][...] = True
    if not _is_checked(kernel):
        defined = [None] * len(outputs)
    cpu = jax.local_devices(backend="cpu")[0]
    try:
        with jax.enable_x64(True), jax.default_device(cpu), np.errstate(all="ignore"):
            parallel = parallel_dims(kernel) if check_races else ()
            _run_grid(kernel, inputs, outputs, defined, parallel)
    except Exception as e:
        attach(e, kernel, arrays, interpreted=True, check_races=check_races)
        raise
    return outputs


def poison(dtype) -> np.generic:
    """Value of unspecified elements of a dtype: NaN, the smallest signed, largest unsigned integer, or True."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return np.True_
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return dtype.type(info.min if dtype.kind == "i" else info.max)
    if jax.numpy.issubdtype(dtype, jax.numpy.integer):  # int4 and its like
        return dtype.type(jax.numpy.iinfo(dtype).min)
    return dtype.type(np.nan)


def parallel_dims(kernel: Kernel) -> tuple[int, ...]:
    """Grid dimensions that some target's CompilerParams declare parallel."""
    dims: set[int] = set()
    for params in kernel.compiler_params.values():
        semantics = getattr(params, "dimension_semantics", None) or ()
        dims |= {
            n
            for n, word in enumerate(semantics)
            if str(getattr(word, "value", word)).lower() == "parallel"
        }
    return tuple(sorted(dims))


# --- one program
# -------------------------------------------------------------------------------------------------


@dataclass
class RefMemory:
    """Memory that a Ref refers to in one program: a block or scratch, and which of its positions are inside the array."""

    name: str
    data: np.ndarray
    inside: tuple[slice, ...]  # per Ref dimension
    defined: np.ndarray | None = None  # which elements were stored to; None: all are defined
    written: np.ndarray | None = None  # which elements this program stored; None: not recorded

    @property
    def label(self) -> str:
        """The body's own name for the Ref, if it is known."""
        match = re.search(r"`(\w+)`", self.name)
        return match[1] if match else self.name

    def note_store(self, where: tuple) -> None:
        for marked in (self.defined, self.written):
            if marked is not None:
                marked[where] = True

    def in_bounds(self, axis: int) -> np.ndarray:
        bounds = np.zeros(self.data.shape[axis], bool)
        bounds[self.inside[axis]] = True
        return bounds


@dataclass(frozen=True)
class ProgramState:
    index: tuple[int, ...]
    grid: tuple[int, ...]
    refs: tuple[RefMemory, ...] = ()
    kernel: str = ""


def _run_grid(
    kernel: Kernel, inputs: list, outputs: list, defined: list, parallel: tuple[int, ...]
) -> None:
    writers = (
        [np.full(type_.shape, -1, np.int64) for type_ in kernel.out_types] if parallel else None
    )
    scratch: list[RefMemory] = []
    coordinates = None
    sizes = dict(kernel.dynamic_grid)
    grid = tuple(
        min(int(inputs[sizes[axis]]), size) if axis in sizes else size
        for axis, size in enumerate(kernel.grid)
    )
    for index in itertools.product(*map(range, grid)):
        if coordinates != (coordinates := tuple(index[dim] for dim in parallel)) or not scratch:
            scratch = [
                _undefined(f"scratch {n}", spec, _is_checked(kernel))
                for n, spec in enumerate(kernel.scratch)
            ]
        windows = [
            _window(operand, index, inputs[: kernel.num_scalar_prefetch])
            for operand in kernel.inputs + kernel.outputs
        ]
        whole = [None] * len(inputs) + defined
        mappings = kernel.inputs + kernel.outputs
        buffers = [
            _read_block(*block, record=bool(parallel) and n >= len(inputs))
            for n, block in enumerate(zip(mappings, inputs + outputs, whole, windows))
        ]
        refs = buffers + scratch
        _run(
            kernel.body.jaxpr,
            kernel.body.consts,
            refs,
            ProgramState(index, grid, tuple(refs), kernel.name),
        )
        for n in range(len(outputs)):
            buffer, window = buffers[len(inputs) + n], windows[len(inputs) + n]
            if writers is not None:
                _check_race(kernel, n, buffer, window, writers[n], index, parallel)
            _write_block(outputs[n], buffer.data, buffer, window)
            if buffer.defined is not None:
                _write_block(defined[n], buffer.defined, buffer, window)


def _is_checked(kernel: Kernel) -> bool:
    """Whether reads of undefined elements are errors.

    Kernels of the fuser compute edges of blocks that nothing needs, and Pallas kernels may merge
    what is not defined with what is.
    """
    return bool(kernel.defined_at) and kernel.origin == "written by hand"


def _undefined(name: str, spec: Scratch, is_checked: bool) -> RefMemory:
    data = np.full(spec.shape, poison(spec.dtype), spec.dtype)
    inside = tuple(slice(0, size) for size in spec.shape)
    return RefMemory(name, data, inside, np.zeros(spec.shape, bool) if is_checked else None)


@dataclass(frozen=True)
class Window:
    """The part of a block inside its array: `array` slices there, `block` slices in the block with squeezed dims kept."""

    array: tuple[slice, ...]
    block: tuple[slice, ...]


def _window(mapping: BlockMapping, index: tuple[int, ...], prefetched: list) -> Window:
    array, block = [], []
    for n, (dim, extent, start) in enumerate(
        zip(mapping.dims, mapping.array.shape, block_starts(mapping, index, prefetched))
    ):
        low, high = min(max(start, 0), extent), max(min(start + dim.size, extent), 0)
        is_empty = extent == 0 and start == 0
        if isinstance(dim, (Blocked, Squeezed)) and not is_empty and not 0 <= start < extent:
            raise OutOfBoundsError(
                f"index map of {mapping.origin} leaves the array in program {index}",
                why=f"array {mapping.array}, dimension {n}: first element {start}",
                hint="block indices start at 0 and end before the array does",
            )
        high = max(low, high)
        array.append(slice(low, high))
        block.append(slice(low - start, high - start) if high > low else slice(0, 0))
    return Window(tuple(array), tuple(block))


def block_starts(mapping: BlockMapping, index: tuple[int, ...], prefetched: list) -> list[int]:
    """First element of program `index`'s block per array dimension; `prefetched`: arrays that the index map may read."""
    affine = [start for start in mapping.starts if start is not None]
    if len(affine) == len(mapping.starts):
        return [start.evaluate(dict(enumerate(index))) for start in affine]
    tables = [RefMemory(f"prefetched operand {n}", array, ()) for n, array in enumerate(prefetched)]
    args = [np.int32(position) for position in index] + tables
    args = args[: len(mapping.index_map.jaxpr.invars)]
    starts = _run(mapping.index_map.jaxpr, mapping.index_map.consts, args, ProgramState(index, ()))
    return [
        int(i) * (dim.size if isinstance(dim, Blocked) else 1)
        for i, dim in zip(starts, mapping.dims)
    ]


def _read_block(
    mapping: BlockMapping,
    array: np.ndarray,
    defined: np.ndarray | None,
    window: Window,
    record: bool,
) -> RefMemory:
    block = np.full(tuple(dim.size for dim in mapping.dims), poison(array.dtype), array.dtype)
    block[window.block] = array[window.array]
    axes = [n for n, dim in enumerate(mapping.dims) if not isinstance(dim, Squeezed)]
    data = block.reshape(mapping.ref_shape)
    inside = tuple(window.block[axis] for axis in axes)
    if defined is not None:  # outside of the array, what a read returns is not specified
        in_block = np.ones(block.shape, bool)
        in_block[window.block] = defined[window.array]
        defined = in_block.reshape(mapping.ref_shape)
    written = np.zeros(mapping.ref_shape, bool) if record else None
    return RefMemory(mapping.origin, data, inside, defined, written)


def _write_block(array: np.ndarray, data: np.ndarray, buffer: RefMemory, window: Window) -> None:
    array[window.array] = data[buffer.inside].reshape(array[window.array].shape)


def _check_race(
    kernel: Kernel,
    output: int,
    buffer: RefMemory,
    window: Window,
    writers: np.ndarray,
    index,
    parallel,
) -> None:
    """Marks the elements that this program wrote. An element of a program with another parallel coordinate is a race."""
    view = writers[window.array]
    assert buffer.written is not None, "recorded where races are looked for"
    written = buffer.written[buffer.inside].reshape(view.shape)
    numbers_before = view[written]
    numbers = np.unique(numbers_before[numbers_before >= 0])
    for number in numbers:
        other = np.unravel_index(number, kernel.grid)
        if any(other[dim] != index[dim] for dim in parallel):
            where = np.argwhere(written & (view == number))[0]
            element = tuple(int(span.start + i) for span, i in zip(window.array, where))
            raise RaceError(
                f"two parallel programs of kernel `{kernel.name}` write one element of {kernel.outputs[output].origin}",
                at=kernel.defined_at or None,
                why=f"programs {tuple(map(int, other))} and {index}, element {element}, parallel dimensions {parallel}",
                hint='declare the dimension "arbitrary", or give each program its own block',
            )
    view[written] = np.ravel_multi_index(index, kernel.grid)


# --- equations
# ---------------------------------------------------------------------------------------------------


def _run(jaxpr: jex.Jaxpr, consts: Sequence, args: Sequence, program: ProgramState) -> list:
    env = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, args))

    def read(atom):
        return literal_value(atom) if isinstance(atom, jex.Literal) else env[atom]

    used = variables_read(jaxpr)
    for eqn in jaxpr.eqns:
        operands = [read(var) for var in eqn.invars]
        if is_ref_access(eqn):
            access = value_access(eqn, operands)
            results = _access(eqn, access, program, not used.isdisjoint(eqn.outvars))
        else:
            results = _equation(eqn, operands, program)
        env.update(zip(eqn.outvars, results))
    return [read(var) for var in jaxpr.outvars]


def _equation(eqn, operands: list, program: ProgramState) -> Sequence:
    name = eqn.primitive.name
    if name in CONTROL_FLOW:
        return CONTROL_FLOW[name](eqn, operands, program)
    if name in GRID_RULES:
        return [GRID_RULES[name](program, *operands, **eqn.params)]
    if name == "check_failed":
        raise checks.error(eqn, program.kernel, program.index, operands)
    if name == "breakpoint":
        stop(eqn, program.index, {ref.label: ref.data for ref in program.refs}, operands)
        return []
    inner = called_jaxpr(eqn)
    if inner is not None:
        return _run(inner.jaxpr, inner.consts, operands, program)
    result = numpy_result(eqn, operands)
    if result is not None:
        return [result if eqn.outvars[0].aval.shape else result[()]]
    return list(map(np.asarray, _jax.bind_again(eqn, operands)))


def numpy_result(eqn, operands: Sequence) -> np.ndarray | None:
    """The result of an elementwise equation, or of one that moves elements; None for any other, and for types left to JAX."""
    name = eqn.primitive.name
    row = ELEMENTWISE.get(name)
    if (row is None or row.reports) and name not in SHAPE_RULES:
        return None
    arrays, dtype = list(map(np.asarray, operands)), eqn.outvars[0].aval.dtype
    if row is None:
        is_covered = all(array.dtype.kind in "biuf" for array in arrays)
        return np.asarray(SHAPE_RULES[name](eqn.params, *arrays), dtype) if is_covered else None
    if not is_evaluated(row, [*(array.dtype for array in arrays), dtype]):
        return None
    return row.evaluated(arrays, eqn.params, dtype)


# Equations that move elements, for speed: no compilation per shape.
SHAPE_RULES: dict[str, Callable] = {
    **VIEWS,
    "concatenate": lambda params, *xs: np.concatenate(xs, params["dimension"]),
}


# --- control flow
# ------------------------------------------------------------------------------------------------


def _cond(eqn, operands: list, program: ProgramState) -> Sequence:
    branches = eqn.params["branches"]
    branch = branches[min(max(int(operands[0]), 0), len(branches) - 1)]
    return _run(branch.jaxpr, branch.consts, operands[1:], program)


def _while(eqn, operands: list, program: ProgramState) -> Sequence:
    params = eqn.params
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    first = params["cond_nconsts"] + params["body_nconsts"]
    cond_consts, body_consts, carry = (
        operands[: params["cond_nconsts"]],
        operands[params["cond_nconsts"] : first],
        operands[first:],
    )
    while _run(cond.jaxpr, cond.consts, [*cond_consts, *carry], program)[0]:
        carry = _run(body.jaxpr, body.consts, [*body_consts, *carry], program)
    return carry


def _scan(eqn, operands: list, program: ProgramState) -> Sequence:
    params = _jax.params_of(eqn)
    body, first = params["jaxpr"], params["num_consts"] + params["num_carry"]
    consts, carry, xs = (
        operands[: params["num_consts"]],
        operands[params["num_consts"] : first],
        operands[first:],
    )
    steps = range(params["length"])
    stacked = [
        np.empty(var.aval.shape, var.aval.dtype) for var in eqn.outvars[params["num_carry"] :]
    ]
    for step in reversed(steps) if params["reverse"] else steps:
        out = _run(body.jaxpr, body.consts, [*consts, *carry, *(x[step] for x in xs)], program)
        carry = out[: params["num_carry"]]
        for ys, y in zip(stacked, out[params["num_carry"] :]):
            ys[step] = y
    return [*carry, *stacked]


CONTROL_FLOW = {"cond": _cond, "while": _while, "scan": _scan}

# --- Ref accesses
# ------------------------------------------------------------------------------------------------


def _access(eqn, access: RefAccess, program: ProgramState, is_used: bool) -> Sequence:
    buffer: RefMemory = access.ref
    if access.mask is None:
        where = _subscript(eqn, access.indices, buffer, None, program)
        if access.kind == "add" or is_used:
            _check_defined(eqn, buffer, where, program)
        return _plain(access, buffer, where)
    where = _subscript(eqn, access.indices, buffer, np.asarray(access.mask), program)
    mask = np.asarray(access.mask)
    positions = tuple(np.broadcast_to(index, mask.shape)[mask] for index in where)
    if access.kind == "load":
        _check_defined(eqn, buffer, positions, program)
        return [np.where(mask, buffer.data[where], access.other)]
    buffer.data[positions] = np.asarray(access.value)[mask]
    buffer.note_store(positions)
    return []


def _plain(access: RefAccess, buffer: RefMemory, where: tuple) -> Sequence:
    before = np.array(buffer.data[where]) if access.kind != "add" else None
    if access.kind == "load":
        return [before]
    if access.kind == "add":
        assert access.value is not None
        np.add.at(buffer.data, where, access.value)
    else:
        buffer.data[where] = access.value
    buffer.note_store(where)
    return [before] if access.kind == "store" else []


def _check_defined(eqn, buffer: RefMemory, where: tuple, program: ProgramState) -> None:
    if buffer.defined is None or np.all(buffer.defined[where]):
        return
    element = np.argwhere(~np.atleast_1d(buffer.defined[where]))[0]
    raise UndefinedReadError(
        f"{buffer.name} is read before anything is stored to it",
        at=_jax.user_line(eqn),
        why=f"element {tuple(map(int, element))} of the part that is read, program {program.index}",
        hint="store to it first; scratch starts undefined, in each program along a parallel dimension",
    )


def _subscript(
    eqn, indices: tuple, buffer: RefMemory, mask: np.ndarray | None, program: ProgramState
) -> tuple:
    """NumPy subscript of an access after its bounds check: slices and arrays, or with `mask` arrays only.

    Masked-off positions may be anywhere; they are replaced by 0.
    """
    shape = buffer.data.shape
    if mask is None and not any(isinstance(i, GatheredIndex) for i in indices):
        for axis, index in enumerate(indices):
            first, last = (
                (index.at, index.at)
                if isinstance(index, Point)
                else (index.start, index.start + (index.size - 1) * index.stride)
            )
            if not (int(first) >= 0 and int(last) < shape[axis]) and not (
                isinstance(index, Range) and index.size == 0
            ):
                raise _out_of_bounds(eqn, buffer, axis, int(first), int(last), program)
        return tuple(
            int(i.at)
            if isinstance(i, Point)
            else slice(int(i.start), int(i.start) + i.size * i.stride, i.stride)
            for i in indices
        )
    positions = _positions(indices)
    full = np.broadcast_shapes(*(position.shape for position in positions)) if positions else ()
    taking_part = np.ones(full, bool) if mask is None else mask
    checked = []
    for axis, coordinate in enumerate(positions):
        coordinate = np.broadcast_to(coordinate, full)
        bad = taking_part & ((coordinate < 0) | (coordinate >= shape[axis]))
        if bad.any():
            value = int(coordinate[bad].ravel()[0])
            raise _out_of_bounds(eqn, buffer, axis, value, value, program)
        checked.append(np.where(taking_part, coordinate, 0))
    return tuple(checked)


def _positions(indices: tuple) -> list[np.ndarray]:
    """Per Ref dimension the positions read, as arrays that broadcast to the value's shape."""
    advanced = [dim for dim, i in enumerate(indices) if not isinstance(i, Range)]
    gathered = (
        np.broadcast_shapes(*(np.shape(indices[dim].at) for dim in advanced)) if advanced else ()
    )
    together = not advanced or advanced == list(range(advanced[0], advanced[-1] + 1))
    ranges_before = (
        sum(isinstance(i, Range) for i in indices[: advanced[0]]) if advanced and together else 0
    )
    rank = len(gathered) + len(indices) - len(advanced)
    places, seen = [], 0
    for index in indices:
        layout = [1] * rank
        if isinstance(index, Range):
            axis = seen if seen < ranges_before else seen + len(gathered)
            layout[axis], seen = index.size, seen + 1
            places.append((int(index.start) + np.arange(index.size) * index.stride).reshape(layout))
        else:
            layout[ranges_before : ranges_before + len(gathered)] = gathered
            places.append(np.broadcast_to(np.asarray(index.at, np.int64), gathered).reshape(layout))
    return places


def _out_of_bounds(
    eqn, buffer: RefMemory, axis: int, first: int, last: int, program: ProgramState
) -> OutOfBoundsError:
    touched = f"index {first}" if first == last else f"indices {first} to {last}"
    return OutOfBoundsError(
        f"access outside the block of {buffer.name}",
        at=_jax.user_line(eqn),
        why=f"dimension {axis} of shape {buffer.data.shape}, {touched}, program {program.index}",
        hint="mask the access (pbkern.load(..., mask=...)) or enlarge the block (pbkern.Element with padding)",
    )
