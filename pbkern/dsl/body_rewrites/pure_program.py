"""Body of a kernel -> one program as a pure function, which JAX differentiates.

Its operands are what a program sees: its place in the grid, which positions of its blocks are inside
their arrays, the blocks of operands, and the state: blocks of results, and scratch. It returns the
state that the program leaves behind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.jaxprs.calls import WITH_RULES, rules_kept
from pbkern.core.jaxprs.retracing import retrace, retrace_into
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.kernel import ArrayType, Kernel
from pbkern.dsl.primitives.ref_access import is_ref_access

from .contents import access_of, read, written
from .counted_indices import CountedIndices, rounds_of
from .derivative_refusals import refuse_arrays_of_indices
from .softmax_rules import with_softmax_rules

NUMBER = jax.core.ShapedArray((), np.dtype(np.int32))
# Equations that only report what happens: the kernel itself has done so.
REPORTS = ("check", "debug_print", "debug_callback", "breakpoint")
# An equation with a derivative of its own: JAX inlines it in branches and loops whose Refs become values.
closed_p = jex.Primitive("pbkern_closed")
closed_p.multiple_results = True
closed_p.def_abstract_eval(lambda *_, eqn: [_jax.fresh_aval(var.aval) for var in eqn.outvars])


@dataclass(frozen=True)
class PureProgram:
    """A program of a kernel as a function of values.

    Attributes:
      function: (a number per grid dimension, a bool array per dimension of each block, blocks of
        operands, state before) -> state after.
      state: types of the results' blocks, then of scratch.
    """

    function: jex.ClosedJaxpr
    state: tuple[ArrayType, ...]

    def __call__(self, place: Sequence, inside: Sequence, blocks: Sequence, state: Sequence):
        """The state after the program whose number along each grid dimension is in `place`."""
        return jex.jaxpr_as_fun(self.function)(*place, *inside, *blocks, *state)


@functools.lru_cache(maxsize=256)
def pure_program(kernel: Kernel) -> PureProgram:
    """The programs of a kernel without a last stage."""
    mappings, rank = (*kernel.inputs, *kernel.outputs), len(kernel.grid)
    num_sides = sum(len(m.ref_shape) for m in mappings)
    sides = [jax.core.ShapedArray((n,), np.dtype(bool)) for m in mappings for n in m.ref_shape]
    state = [(m.ref_shape, m.array.dtype) for m in kernel.outputs]
    state += [(buf.shape, buf.dtype) for buf in kernel.scratch]
    blocks = [jax.core.ShapedArray(m.ref_shape, m.array.dtype) for m in kernel.inputs]

    def run(*args):
        place, inside, refs = (
            args[:rank],
            args[rank : rank + num_sides],
            args[rank + num_sides :],
        )
        _trace(kernel, place, inside, refs)

    with jax.enable_x64(True), rules_kept():  # every type is explicit by now
        refs = [_jax.ref_aval(*type_) for type_ in state]
        traced = jax.make_jaxpr(run)(*[NUMBER] * rank, *sides, *blocks, *refs)
        contents, _ = _jax.needed_operands(_jax.of_contents(traced), [True] * len(state))
        function = with_softmax_rules(retrace(contents, _opened))
    return PureProgram(function, tuple(ArrayType(*type_) for type_ in state))


def _trace(kernel: Kernel, place: Sequence, inside: Sequence, memory: Sequence) -> None:
    """Traces the body on blocks of operands, which are values, and Refs of the state, which it takes and gives whole."""
    mappings = (*kernel.inputs, *kernel.outputs)
    ends = np.cumsum([0, *(len(m.ref_shape) for m in mappings)])
    numbers = {id(ref): n for n, ref in enumerate(memory)}
    counted = CountedIndices.of(kernel)

    def rewrite(eqn, *operands) -> list | None:
        name, params = eqn.primitive.name, eqn.params
        if name in WITH_RULES:
            return closed_p.bind(*operands, eqn=eqn)
        if name in REPORTS:
            return [None] * len(eqn.outvars)
        if name == "program_id":
            return [place[params["axis"]]]
        if name == "num_programs" and params["axis"] not in dict(kernel.dynamic_grid):
            return [np.int32(kernel.grid[params["axis"]])]
        if name == "in_bounds":
            number, axis = numbers[id(operands[0])], params["axis"]
            if number < len(mappings):
                return [inside[ends[number] + axis]]
            return [jnp.ones(operands[0].shape[axis : axis + 1], bool)]
        if name == "while" and (most := counted.most_rounds(eqn)) is not None:
            return _bounded(eqn, operands, most, rewrite)
        if is_ref_access(eqn):
            return _accessed(kernel, eqn, operands, counted)
        return folded(eqn, operands)

    retrace_into(kernel.differentiable.jaxpr, (), memory, rewrite)


def _opened(eqn, *operands) -> list | None:
    return _jax.bind_again(eqn.params["eqn"], operands) if eqn.primitive is closed_p else None


def _bounded(eqn, operands: Sequence, most: int, rewrite: Callable) -> list:
    """A loop of so many rounds at most as one of so many, the last of which may do nothing: it has a derivative."""
    rounds, params = rounds_of(eqn), eqn.params
    assert rounds is not None  # it has a largest number
    first = params["cond_nconsts"]
    end = first + params["body_nconsts"]
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    init = operands[end:]
    start = init[rounds.carry]

    def step(number, carries: tuple) -> tuple:
        now = [*carries]
        now[rounds.carry] = start + number.astype(start.dtype)
        (runs,) = retrace_into(condition.jaxpr, (), [*operands[:first], *now], rewrite)
        consts = operands[first:end]
        return lax.cond(
            runs,
            lambda: tuple(retrace_into(body.jaxpr, (), [*consts, *now], rewrite)),
            lambda: carries,
        )

    return list(lax.fori_loop(np.int32(0), np.int32(most), step, tuple(init)))


def _accessed(kernel: Kernel, eqn, operands: Sequence, counted: CountedIndices) -> list:
    """An access as one of all contents of a Ref; of operands there are only the contents."""
    ref = operands[0]
    is_operand = not _jax.is_ref(jax.typeof(ref))
    access = access_of(eqn, ref.shape, operands)
    walks = counted.walks(eqn, access)
    if access.kind == "store" and walks is None:
        refuse_arrays_of_indices(kernel, eqn, access)
    contents = ref if is_operand else ref[...]
    if access.kind == "load":
        return [read(contents, access, walks)]
    ref[...] = written(contents, access, walks)
    used = not all(map(_jax.is_dropped, eqn.outvars))
    return [read(contents, access, walks) if used else None for _ in eqn.outvars]


def folded(eqn, operands: Sequence) -> list | None:
    """Results of an equation of constants, as sizes of the grid make them."""
    if not operands or not all(isinstance(operand, np.generic) for operand in operands):
        return None
    with jax.ensure_compile_time_eval():
        results = _jax.bind_again(eqn, operands)
    return [np.asarray(result)[()] if result.ndim == 0 else result for result in results]
