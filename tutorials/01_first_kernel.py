"""A first kernel, written by hand.

A kernel is a Python function over Refs. A Ref is a block of an array that the function may read and write; a grid says
how many times the function runs, and a BlockSpec says which block each run sees. Nothing else exists inside: no
pointers, no threads, no loop over the grid.
"""

import jax
import jax.numpy as jnp
import numpy as np

import pbkern

# Sixteen rows per program, and every column. The index map turns a grid index into a block index: program 3 sees
# block (3, 0), which is rows 48 to 63.

rows = pbkern.BlockSpec((16, 128), lambda i: (i, 0))


@pbkern.kernel(
    grid=(4,),
    in_specs=[rows, pbkern.BlockSpec()],  # BlockSpec() is the whole array, for every program
    out_specs=rows,
    out_shape=jax.ShapeDtypeStruct((60, 128), jnp.float32),
)
def scale_rows(x, scale, out):
    out[...] = x[...] * scale[...]


# The result is an ordinary function of arrays. Its code was generated for the shapes of this call.

x = np.random.default_rng(0).standard_normal((60, 128), np.float32)
scale = np.linspace(0, 1, 128, dtype=np.float32).reshape(1, 128)
out = scale_rows(x, scale)
np.testing.assert_allclose(out, x * scale, rtol=1e-6)

# The array has 60 rows, and four blocks of 16 are 64. The last block reaches over the edge: reads there return
# anything, writes there are dropped. A kernel that only maps elements need not care. One that sums must: it asks
# `in_bounds` which rows exist.


@pbkern.kernel(
    grid=(4,),
    in_specs=[rows],
    out_specs=pbkern.BlockSpec((1, 128), lambda i: (0, 0)),
    out_shape=jax.ShapeDtypeStruct((1, 128), jnp.float32),
    compiler_params=pbkern.cpu.CompilerParams(dimension_semantics=("arbitrary",)),
)
def column_sums(x, out):
    @pbkern.when(pbkern.program_id(0) == 0)
    def _():
        out[...] = jnp.zeros_like(out)

    inside = pbkern.in_bounds(x, 0)[:, None]
    out[...] += jnp.where(inside, x[...], 0.0).sum(0, keepdims=True)


np.testing.assert_allclose(column_sums(x)[0], x.sum(0), rtol=1e-4, atol=1e-4)

# All four programs wrote the same block, one after the other. That is what "arbitrary" means: this grid dimension runs
# in order on one thread. "parallel" would promise that programs do not depend on each other, and license threads.
#
# The interpreter runs a kernel on NumPy arrays, slowly and strictly. It checks every access and finds programs that
# write one element although they were called parallel, which compiled code cannot.

promised = pbkern.kernel(
    column_sums.body,
    grid=(4,),
    in_specs=[rows],
    out_specs=pbkern.BlockSpec((1, 128), lambda i: (0, 0)),
    out_shape=jax.ShapeDtypeStruct((1, 128), jnp.float32),
    compiler_params=pbkern.cpu.CompilerParams(dimension_semantics=("parallel",)),
)
try:
    pbkern.interpret(promised.trace(x), x)
except pbkern.errors.RaceError as e:
    print(e)

# Programs on several threads can sum if each writes what it found to a place of its own. A last stage, which runs once
# when all programs are done, then adds that up. It is a kernel of one program, whose first operands are what the others
# wrote; together they are one kernel still, and what lies between them is never an array of ours.


@pbkern.kernel(out_shape=jax.ShapeDtypeStruct((1, 128), jnp.float32))
def total(parts, out):
    out[...] = parts[...].sum(0, keepdims=True)


@pbkern.kernel(
    grid=(4,),
    in_specs=[rows],
    out_specs=pbkern.BlockSpec((1, 128), lambda i: (i, 0)),
    out_shape=jax.ShapeDtypeStruct((4, 128), jnp.float32),
    finish=total,
)
def column_sums_on_threads(x, part):
    inside = pbkern.in_bounds(x, 0)[:, None]
    part[...] = jnp.where(inside, x[...], 0.0).sum(0, keepdims=True)


np.testing.assert_allclose(column_sums_on_threads(x)[0], x.sum(0), rtol=1e-4, atol=1e-4)

# A traced kernel prints as source of the same language. Running that source gives an equal kernel: what is printed
# is what is compiled.

kernel = scale_rows.trace(x, scale)
print(kernel.source())
again = pbkern.rebuild(kernel.source())
np.testing.assert_array_equal(pbkern.call_kernel(again, x, scale)[0], out)
