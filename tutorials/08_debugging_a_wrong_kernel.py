"""Debugging a wrong kernel.

A kernel that compiles may still be wrong: it reads past its block, sums what does not exist, or races with its neighbour.
Native code shows that as wrong numbers. This tutorial finds three such mistakes, in the order in which one would try.
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

import pbkern

x = np.random.default_rng(0).standard_normal((60, 128)).astype(np.float32)
rows = pbkern.BlockSpec((16, 128), lambda i: (i, 0))
whole = pbkern.BlockSpec((1, 128), lambda i: (0, 0))
sums = jax.ShapeDtypeStruct((1, 128), jnp.float32)
in_order = pbkern.cpu.CompilerParams(dimension_semantics=("arbitrary",))


# First try: a column sum of 60 rows in blocks of 16. Compiled, the result may even look right.


@pbkern.kernel(
    grid=(4,), in_specs=[rows], out_specs=whole, out_shape=sums, compiler_params=in_order
)
def first(x_ref, o_ref):
    @pbkern.when(pbkern.program_id(0) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += x_ref[...].sum(0, keepdims=True)


# The interpreter poisons what is unspecified: rows 60 to 63 of the last block are NaN there, and so is the sum.

(found,) = pbkern.interpret(first.trace(x), x)
print("column sums, interpreted:", found[0, :3])
assert np.isnan(found).all()

# Where does it come from? A breakpoint in the body stops the interpreter in Python's debugger with the Refs at hand. (This
# program has nobody at the keyboard, so it puts a function in the debugger's place.)


@pbkern.kernel(
    grid=(4,), in_specs=[rows], out_specs=whole, out_shape=sums, compiler_params=in_order
)
def watched(x_ref, o_ref):
    @pbkern.when(jnp.isnan(x_ref[...]).any())
    def _():
        pbkern.breakpoint(pbkern.in_bounds(x_ref, 0))

    o_ref[...] = x_ref[...].sum(0, keepdims=True)


def look():
    seen = sys._getframe(1).f_locals  # in pdb: p program, p refs["x_ref"], p values
    nan_rows = np.isnan(seen["refs"]["x_ref"]).any(1)
    print("program", seen["program"], "reads NaN in rows", np.flatnonzero(nan_rows), "of its block")
    assert (nan_rows == ~seen["values"][0]).all()  # just those that `in_bounds` excludes


sys.breakpointhook = look
pbkern.interpret(watched.trace(x), x)


# The cure is to ask `in_bounds`. Second try: now with threads, since sums of rows are independent, are they not?


def column_sums(x_ref, o_ref):
    @pbkern.when(pbkern.program_id(0) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += jnp.where(pbkern.in_bounds(x_ref, 0)[:, None], x_ref[...], 0).sum(
        0, keepdims=True
    )


def make(body, semantics):
    params = semantics and pbkern.cpu.CompilerParams(dimension_semantics=semantics)
    return pbkern.kernel(
        body, grid=(4,), in_specs=[rows], out_specs=whole, out_shape=sums, compiler_params=params
    )


try:
    pbkern.interpret(make(column_sums, ("parallel",)).trace(x), x)
except pbkern.errors.RaceError as e:
    print(e)
else:
    raise AssertionError("four programs write one block")

# They all write one block. Without the promise, the compiler finds out: it runs the dimension in order, and says why.

good = make(column_sums, None)
print(pbkern.jit(lambda x: good(x)).explain(x).written[0])
np.testing.assert_allclose(good(x)[0], x.sum(0), rtol=1e-4, atol=1e-4)


# Third: an assumption about values. The kernel takes square roots; somebody passes negative numbers. A check says so, in
# compiled code too, where the call fails once all programs are done.


@pbkern.kernel(
    grid=(4,),
    in_specs=[rows],
    out_specs=rows,
    out_shape=jax.ShapeDtypeStruct((60, 128), jnp.float32),
)
def roots(x_ref, o_ref):
    inside = pbkern.in_bounds(x_ref, 0)[:, None]
    least = jnp.where(inside, x_ref[...], jnp.inf).min()
    pbkern.check(least >= 0, "square root of {}", least)
    o_ref[...] = jnp.sqrt(x_ref[...])


np.testing.assert_allclose(roots(np.abs(x)), np.sqrt(np.abs(x)), rtol=1e-5)
try:
    roots(x)
except pbkern.errors.CheckError as e:
    print(e)
    failure = e
else:
    raise AssertionError("x has negative elements")

# The last row of the message is a file: one program with the kernel's source and these operands, which fails in the same
# way. It can be sent to somebody, edited and run again.

done = subprocess.run([sys.executable, failure.repro], capture_output=True, text=True)
print(done.stderr.splitlines()[-4:])
assert "CheckError: square root of -" in done.stderr
failure.repro.unlink()
