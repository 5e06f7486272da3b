"""Tuning a kernel of your own: any parameter of the function that makes it, measured, checked and remembered.

`pbkern.tune(f, x)` searches the kernels that fusion made (tutorial 09). For a kernel written by hand you say what may vary:
a function makes the kernel, its parameters are the space.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import pbkern

rows, columns = 1000, 512
x = jax.random.normal(jax.random.key(0), (rows, columns))


def softmax(ROWS=4):
    block = pbkern.BlockSpec((ROWS, columns), lambda i: (i, 0))

    @pbkern.kernel(
        grid=(pbkern.cdiv(rows, ROWS),),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((rows, columns), jnp.float32),
    )
    def softmax(x, o):
        weights = jnp.exp(x[...] - x[...].max(1, keepdims=True))
        o[...] = weights / weights.sum(1, keepdims=True)

    return softmax


# Names that are no parameters of the function are fields of CompilerParams. Candidates are tried in the order that the
# cost model prefers. One that fails, or whose results are not those of the default, is left out: here, -1 rows.

result = pbkern.tune(softmax, x, space={"ROWS": [4, 16, 64, -1], "num_threads": [1]}, budget=4)
assert result.after <= result.before
np.testing.assert_allclose(result.kernel(x), jax.nn.softmax(x), rtol=1e-4, atol=1e-7)
print("the best:", dict(result.best))

# What was found is on disk, by kernel, shapes and machine. The next search starts from it.

again = pbkern.tune(softmax, x, space={"ROWS": [4, 16, 64, -1], "num_threads": [1]}, budget=4)
assert again.after <= again.before

# Without a space there is nothing to search, and tune says so.

pbkern.tune(softmax(), x)

# Constants of a source are parameters as well.

(kernel,) = pbkern.jit(lambda x: jnp.exp(x) * 2 + x).kernels(x)
maker = functools.partial(pbkern.rebuild, kernel.source())
pbkern.tune(maker, x, space={"ROWS": [8, 32]}, budget=2)
