"""explain lists hand-written and Pallas kernels, and says of each grid dimension how it runs and why."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plt

import pbkern
import pbkern.pallas

X = np.arange(32, dtype="f4")
ROWS = pbkern.BlockSpec((8,), lambda i, *_: (i,))
SHAPE = jax.ShapeDtypeStruct((32,), jnp.float32)


def lines_of(kernel, *args):
    (written,) = pbkern.jit(lambda *a: kernel(*a)).explain(*args).written
    return written.lines


def copy(x_ref, o_ref, *rest):
    o_ref[...] = x_ref[...]


def copy_counted(x_ref, count_ref, o_ref):
    o_ref[...] = x_ref[...]


def summed_anew(x_ref, o_ref, sum_ref, axis=1):
    @pbkern.when(pbkern.program_id(axis) == 0)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    sum_ref[...] += x_ref[...]
    o_ref[...] = sum_ref[...]


def summed(x_ref, o_ref, sum_ref):
    summed_anew(x_ref, o_ref, sum_ref, axis=0)


def make(body=copy, **options):
    return pbkern.kernel(
        body, **{"grid": (4,), "in_specs": [ROWS], "out_specs": ROWS, "out_shape": SHAPE} | options
    )


CASES = [
    ({}, ["parallel, proved: its programs write disjoint blocks"]),
    (
        {"compiler_params": pbkern.cpu.CompilerParams(dimension_semantics=("parallel",))},
        ['parallel, declared "parallel"'],
    ),
    (
        {"compiler_params": pbkern.cpu.CompilerParams(dimension_semantics=("arbitrary",))},
        ['in order, declared "arbitrary"'],
    ),
    ({"scratch_shapes": [((8,), "f4")]}, ["parallel, proved"]),
    (
        {"scratch_shapes": [((8,), "f4")], "body": summed},
        ["in order, because scratch 0 is kept from program to program"],
    ),
    (
        {"scratch_shapes": [((8,), "f4")], "body": summed_anew, "grid": (4, 3)},
        ["parallel, proved", "in order, because scratch 0"],
    ),
    (
        {
            "scratch_shapes": [((8,), "f4")],
            "body": functools.partial(summed_anew, axis=0),
            "grid": (4, 3),
        },
        ["in order, because scratch 0", "in order, because scratch 0"],
    ),
    (
        {"grid": (4, 3)},
        ["parallel, proved", "in order, because blocks of output 0 are the same along it"],
    ),
    ({"grid": (4, 1)}, ["parallel, proved", "parallel, a single program"]),
    (
        {"out_specs": pbkern.BlockSpec((8,), lambda i: (i + i // 4,))},
        ["in order, because blocks of output 0 are not proved"],
    ),
    (
        {"input_output_aliases": {0: 0}, "in_specs": [pbkern.BlockSpec((8,), lambda i: (3 - i,))]},
        ["in order, because programs may read of input 0 what others write through output 0"],
    ),
]


@pytest.mark.parametrize(("options", "want"), CASES)
def test_how_each_grid_dimension_runs_and_why(options, want):
    found = lines_of(make(**options), X)
    assert len(found) == len(want)
    for axis, (line, words) in enumerate(zip(found, want)):
        assert line.startswith(f"grid dimension {axis} of ")
        assert words in line


def test_a_dimension_of_dynamic_size_runs_in_order():
    (line,) = lines_of(
        make(body=copy_counted, in_specs=[ROWS, pbkern.BlockSpec()], dynamic_grid={0: 1}),
        X,
        np.int32(2),
    )
    assert line == "grid dimension 0 of dynamic size: in order, because an operand gives its size"


def plus_one(x_ref, o_ref):
    o_ref[...] = x_ref[...] + 1


@pbkern.jit
def mixed(x):
    spec = pl.BlockSpec((8,), lambda i: (i,))
    y = pl.pallas_call(
        plus_one, out_shape=SHAPE, grid=(4,), in_specs=[spec], out_specs=spec, name="plus_one"
    )(x)
    apart = pbkern.cpu.CompilerParams(num_threads=1)
    return jnp.sin(make(compiler_params=apart)(y)) * 2


def test_both_kinds_are_listed_with_line_and_grid():
    plan = mixed.explain(X)
    assert [(w.name, w.origin, w.grid) for w in plan.written] == [
        ("plus_one", "Pallas", (4,)),
        ("copy", "written by hand", (4,)),
    ]
    assert all("test_explain.py" in w.at for w in plan.written)
    assert all(str(w) in str(plan) for w in plan.written)
    assert "kernel(s) and 2 that you wrote" in str(plan)
    assert plan.left == ()


def test_pallas_calls_of_jax_are_named_as_such():
    pbkern.pallas.uninstall()
    try:
        pallas, own = mixed.explain(X + 0).written
        assert pallas.lines == ("is JAX's: pbkern.pallas.install() compiles it",)
        assert own.lines
    finally:
        pbkern.pallas.install()


def test_kernels_in_loops_are_found():
    kernel = make()
    f = pbkern.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, v: kernel(v), x))
    assert [w.name for w in f.explain(X).written] == ["copy"]


def scaled(stride_ref, x_ref, o_ref, *, atomic=False):
    at = pl.program_id(0) * stride_ref[0] + jnp.arange(8)
    if atomic:
        plt.atomic_add(o_ref, (at,), x_ref[at])
    else:
        o_ref[at] = x_ref[at] * 2


@pytest.mark.parametrize(("options", "words"), [({}, "parallel"), ({"atomic": True}, "in order")])
def test_programs_for_triton_have_no_order(options, words):
    """What they store to by index, they choose; what they update, they take turns at."""
    call = pl.pallas_call(functools.partial(scaled, **options), out_shape=SHAPE, grid=(4,),
                          compiler_params=plt.CompilerParams(num_warps=2))  # fmt: skip
    with pbkern.pallas.installed():
        (line,) = lines_of(call, np.full(1, 8, "i4"), X)
        assert words in line
        if not options:
            np.testing.assert_array_equal(jax.jit(call)(np.full(1, 8, "i4"), X), X * 2)


def test_blocks_that_several_programs_for_triton_write_keep_their_order():
    call = pl.pallas_call(copy, out_shape=SHAPE, grid=(4, 3), in_specs=[pl.BlockSpec((8,), lambda i, j: (i,))],
                          out_specs=pl.BlockSpec((8,), lambda i, j: (i,)), compiler_params=plt.CompilerParams())  # fmt: skip
    with pbkern.pallas.installed():
        assert ["in order" in line for line in lines_of(call, X)] == [False, True]


def test_pallas_calls_that_are_not_compiled():
    interpreted = pl.pallas_call(plus_one, out_shape=SHAPE, interpret=True)
    with pbkern.pallas.installed():
        assert lines_of(interpreted, X) == ("runs in JAX's interpreter, as interpret= asks for",)
        (line,) = lines_of(
            pl.pallas_call(
                plus_one, out_shape=SHAPE, compiler_params=pltpu.CompilerParams(collective_id=1)
            ),
            X,
        )
    assert line.startswith("cannot be compiled: ")
    assert "collective_id" in line
