"""Kernels that are broken on purpose: each is refused with what is wrong, the line, the values and what to try."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import pbkern
from pbkern import errors
from pbkern.cpu import CompilerParams

F32 = jnp.float32
X = np.arange(64, dtype="f4").reshape(8, 8)
ROWS = pbkern.BlockSpec((2, 8), lambda i: (i, 0))
FIRST_ROWS = pbkern.BlockSpec((2, 8), lambda i: (0, 0))
PARALLEL = CompilerParams(dimension_semantics=("parallel",))
TWO_ROWS = jax.ShapeDtypeStruct((2, 8), F32)
SCRATCH = [pbkern.Scratch((2, 8), np.dtype("f4"))]
INTEGERS = [pbkern.Scratch((2, 8), np.dtype("i4"))]


def call(body, *operands, out=X, jit=False, **options):
    """Makes a kernel over blocks of two rows and calls it on X."""
    options = {"grid": (4,), "in_specs": [ROWS], "out_specs": ROWS} | options
    kernel = pbkern.kernel(body, out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype), **options)
    return (jax.jit(kernel) if jit else kernel)(*(operands or (X,)))


def copy(x, o):
    o[...] = x[...]


def accumulate(x, o):
    @pbkern.when(pbkern.program_id(0) == 0)
    def _():
        o[...] = jnp.zeros_like(o)

    o[...] += x[...]


def carry(x, o, t):
    @pbkern.when(pbkern.program_id(0) == 0)
    def _():
        t[...] = jnp.zeros_like(t)

    t[...] += x[...]
    o[...] = t[...]


def add_to_scratch(x, o, t):
    t[...] += 1
    o[...] = x[...] + t[...]


def read_scratch_in_a_loop(x, o, t):
    def turn(k, _):
        t[k, :] = t[k, :] + x[k, :]

    lax.fori_loop(0, 2, turn, None)
    o[...] = t[...]


def branch_on_scratch(x, o, t):
    o[...] = x[...]

    @pbkern.when(t[0, 0] > 0)
    def _():
        o[...] = -x[...]


def sometimes(first):
    def body(x, o):
        @pbkern.when(pbkern.program_id(0) >= first)
        def _():
            o[...] = x[...]

    return body


def store(value, where=...):
    def body(x, o):
        o[where] = value(x)

    return body


def python_if(x, o):
    if x[0, 0] > 0:
        o[...] = x[...]


def python_range(x, o):
    for _ in range(pbkern.program_id(0)):
        o[...] = x[...]


def assigned(x, o):
    o = x[...]  # noqa: F841


def loop_that_changes_shape(x, o):
    o[...] = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0], x[...]), (0, x[0]))[1]


TABLE = jnp.arange(8.0)
KERNEL, OPTION, BOUNDS, UNDEFINED = (
    errors.KernelError,
    errors.OptionError,
    errors.OutOfBoundsError,
    errors.UndefinedReadError,
)
MISTAKES = {
    # races
    "a block for all programs": (
        KERNEL,
        "run in parallel write the same",
        lambda: call(copy, out=TWO_ROWS, out_specs=FIRST_ROWS, compiler_params=PARALLEL),
    ),
    "sums over parallel programs": (
        KERNEL,
        "run in parallel write the same",
        lambda: call(accumulate, out=TWO_ROWS, out_specs=FIRST_ROWS, compiler_params=PARALLEL),
    ),
    "no spec for a result": (
        KERNEL,
        "run in parallel write the same",
        lambda: call(copy, out=TWO_ROWS, out_specs=None, compiler_params=PARALLEL),
    ),
    "blocks that overlap": (
        KERNEL,
        "they overlap",
        lambda: call(
            copy,
            out=jax.ShapeDtypeStruct((5, 8), F32),
            out_specs=pbkern.BlockSpec((pbkern.Element(2), 8), lambda i: (i, 0)),
            compiler_params=PARALLEL,
        ),
    ),
    "scratch carried along a parallel dimension": (
        KERNEL,
        r'scratch 0 .* is read before .*"parallel"',
        lambda: call(carry, scratch_shapes=SCRATCH, compiler_params=PARALLEL),
    ),
    # what is not defined
    "scratch is read first": (
        KERNEL,
        "scratch 0 of kernel .* is read before",
        lambda: call(add_to_scratch, scratch_shapes=SCRATCH),
    ),
    "integers of scratch are read first": (
        KERNEL,
        "scratch 0 of kernel .* is read before",
        lambda: call(add_to_scratch, scratch_shapes=INTEGERS),
    ),
    "scratch is read first in a loop": (
        KERNEL,
        "scratch 0 of kernel .* is read before",
        lambda: call(read_scratch_in_a_loop, scratch_shapes=SCRATCH),
    ),
    "a branch on scratch": (
        KERNEL,
        "scratch 0 of kernel .* is read before",
        lambda: call(branch_on_scratch, scratch_shapes=INTEGERS),
    ),
    "a result is read first": (
        KERNEL,
        "output 0 .* is read before",
        lambda: call(lambda x, o: o.__setitem__(..., o[...] + x[...])),
    ),
    "stored by some programs": (
        KERNEL,
        "keep program .0,. from storing",
        lambda: call(sometimes(1)),
    ),
    "stored by no program": (KERNEL, "keep program .0,. from storing", lambda: call(sometimes(9))),
    "half a block": (
        KERNEL,
        "leaves a part of each block",
        lambda: call(store(lambda x: x[0:1], np.s_[0:1])),
    ),
    "no store": (KERNEL, "is never stored to", lambda: call(lambda x, o: None)),
    "a name is assigned": (KERNEL, "is never stored to", lambda: call(assigned)),
    # places
    "too few programs": (KERNEL, "leaves a part of output", lambda: call(copy, grid=(3,))),
    "too many programs": (KERNEL, "lie outside the array", lambda: call(copy, grid=(5,))),
    "an index map counts elements": (
        KERNEL,
        "lie outside the array",
        lambda: call(copy, in_specs=[pbkern.BlockSpec((2, 8), lambda i: (2 * i, 0))]),
    ),
    "a negative block": (
        KERNEL,
        "lie outside the array",
        lambda: call(copy, in_specs=[pbkern.BlockSpec((2, 8), lambda i: (i - 1, 0))]),
    ),
    "a halo without padding": (
        KERNEL,
        "lie outside the array",
        lambda: call(
            store(lambda x: x[0:2] + x[1:3]),
            in_specs=[pbkern.BlockSpec((pbkern.Element(3), 8), lambda i: (2 * i, 0))],
        ),
    ),
    "a slice outside": (KERNEL, "outside its Ref", lambda: call(store(lambda x: x[2:4]))),
    "a point outside": (KERNEL, "lies outside", lambda: call(store(lambda x: 1.0, np.s_[2, 0]))),
    "a computed slice outside": (
        BOUNDS,
        "outside the block",
        lambda: call(store(lambda x: x[pbkern.ds(pbkern.program_id(0), 2)]), interpret=True),
    ),
    "a table that points outside": (
        BOUNDS,
        "leaves the array",
        lambda: call(
            lambda table, x, o: copy(x, o),
            jnp.array([0, 1, 2, 7]),
            X,
            in_specs=[pbkern.BlockSpec((2, 8), lambda i, table: (table[i], 0))],
            out_specs=pbkern.BlockSpec((2, 8), lambda i, table: (i, 0)),
            num_scalar_prefetch=1,
            interpret=True,
        ),
    ),
    # shapes and types
    "a store of another shape": (
        KERNEL,
        "shape is not that",
        lambda: call(store(lambda x: jnp.zeros((3, 8)))),
    ),
    "a store of another shape, jitted": (
        KERNEL,
        "shape is not that",
        lambda: call(store(lambda x: jnp.zeros((3, 8))), jit=True),
    ),
    "a store of another type": (
        KERNEL,
        "another dtype",
        lambda: call(store(lambda x: x[...].astype(jnp.int32))),
    ),
    "a store of another type, jitted": (
        KERNEL,
        "another dtype",
        lambda: call(store(lambda x: x[...].astype(jnp.float16)), jit=True),
    ),
    "arithmetic on a Ref": (KERNEL, "arithmetic on a Ref", lambda: call(store(lambda x: x + 1))),
    "a function of a Ref": (
        KERNEL,
        "where a value belongs",
        lambda: call(store(lambda x: jnp.exp(x)), jit=True),
    ),
    "a Ref in a Ref": (KERNEL, "a Ref stored into a Ref", lambda: call(store(lambda x: x))),
    "Python's if": (KERNEL, "Python control flow", lambda: call(python_if, jit=True)),
    "Python's range": (KERNEL, "Python integer", lambda: call(python_range)),
    "Python's float": (
        KERNEL,
        "Python number",
        lambda: call(store(lambda x: x[...] * float(x[0, 0]))),
    ),
    "a function of NumPy": (
        KERNEL,
        "NumPy function",
        lambda: call(store(lambda x: np.exp(x[...]))),
    ),
    "a result that is returned": (KERNEL, "returns a value", lambda: call(lambda x, o: x[...])),
    "a body without Refs for results": (
        KERNEL,
        "does not take its 2 Refs",
        lambda: call(lambda x: None),
    ),
    "a loop that changes its carry": (
        KERNEL,
        "cannot be traced",
        lambda: call(loop_that_changes_shape),
    ),
    "an array from outside": (
        KERNEL,
        "array constant",
        lambda: call(store(lambda x: x[...] * TABLE)),
    ),
    "too many operands": (KERNEL, "in_specs has 1 entries", lambda: call(copy, X, X)),
    # words
    "a misspelt word": (
        OPTION,
        "bad value",
        lambda: CompilerParams(dimension_semantics=("paralell",)),
    ),
    "a misspelt word for NVIDIA": (
        OPTION,
        "bad value",
        lambda: pbkern.nvgpu.CompilerParams(dimension_semantics=("paralell",)),
    ),
    "a misspelt word for AMD": (
        OPTION,
        "bad value",
        lambda: pbkern.amdgpu.CompilerParams(dimension_semantics=("paralell",)),
    ),
    "too many words": (
        KERNEL,
        "does not fit the grid",
        lambda: call(copy, compiler_params=CompilerParams(dimension_semantics=("parallel",) * 2)),
    ),
    "a target that there is not": (
        KERNEL,
        "target that there is not",
        lambda: call(copy, compiler_params={"nvgpuu": PARALLEL}),
    ),
    "an alias of an operand that it lacks": (
        KERNEL,
        "that it lacks",
        lambda: call(copy, input_output_aliases={1: 0}),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_is_named_with_line_values_and_a_remedy(name):
    error, message, make = MISTAKES[name]
    with pytest.raises(error, match="(?s)" + message) as raised:
        make()
    rows = str(raised.value)
    for label in ("why", "try") if error is BOUNDS else ("at", "why", "try"):
        assert f"\n  {label:4} " in rows, rows
    if error is not BOUNDS:
        assert "test_broken_kernels.py:" in rows


def undefined_in_a_branch(dtype):
    def body(x, o, t):
        @pbkern.when(x[0, 0] > 8)
        def _():
            t[...] = jnp.zeros_like(t)

        o[...] = x[...] + t[0, 0]

    scratch = [pbkern.Scratch((2, 8), np.dtype(dtype))]
    return call(body, scratch_shapes=scratch, interpret=True)


@pytest.mark.parametrize("dtype", ["f4", "i4", "bool"])
def test_what_values_decide_is_found_by_the_interpreter(dtype):
    with pytest.raises(
        UNDEFINED, match=r"scratch 0.*\n.*test_broken_kernels.py(?s:.*)program \(0,\)"
    ):
        undefined_in_a_branch(dtype)


@pytest.mark.parametrize("word", ["paralell", 3])
def test_words_in_parameters_of_pallas(word):
    spec = pl.BlockSpec((2, 8), lambda i: (i, 0))
    with pbkern.pallas.installed(), pytest.raises(errors.UnsupportedOp, match="means nothing"):
        pl.pallas_call(
            copy,
            grid=(4,),
            in_specs=[spec],
            out_specs=spec,
            out_shape=jax.ShapeDtypeStruct(X.shape, F32),
            compiler_params=pltpu.CompilerParams(dimension_semantics=(word,)),
        )(X)


def test_parameters_for_another_target_are_named():
    params = pbkern.nvgpu.CompilerParams(num_warps=4)
    with pytest.warns(UserWarning, match="`copy` .* are for `nvgpu`: it is compiled for `cpu`"):
        call(copy, compiler_params=params)
    both = {"nvgpu": params, "cpu": PARALLEL}
    np.testing.assert_array_equal(call(copy, compiler_params=both), X)
