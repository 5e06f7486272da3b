"""Eject, edit, adopt: what fusion made becomes source, the source is edited, and the function takes it back.

A fused kernel is a program like one written by hand. Its block sizes are constants, its operands have the names of the
function's arguments.
"""

import pathlib
import re
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

import pbkern


@pbkern.jit
def normalised(x, scale):
    """float32[n, m], float32[m] -> float32[n, m]."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


x = jax.random.normal(jax.random.key(0), (4000, 256))
scale = jnp.linspace(0.5, 2, 256)
want = normalised(x, scale)

(kernel,) = normalised.kernels(x, scale)
text = kernel.source()
print(text)

# Each number that follows from the size of a block is an expression of the constant at the top, so that one edit gives
# another kernel that is right. `rebuild` makes it of the text, or of the text and other values of its constants.

larger = pbkern.rebuild(text, ROWS=100)
assert larger.grid == (40,)
np.testing.assert_allclose(larger(x, scale), want, rtol=1e-5)
np.testing.assert_allclose(jax.jit(larger)(x, scale), want, rtol=1e-5)

# The function calls it in place of its own. Types are compared, and results on random operands.

mine = normalised.with_kernels({kernel.name: larger})
np.testing.assert_allclose(mine(x, scale), want, rtol=1e-5)
assert mine.kernels(x, scale)[0].grid == (40,)

# An edit that changes results is refused. The message has the first element that differs.

wrong = pbkern.rebuild(text.replace("lax.rsqrt(", "1.01 * lax.rsqrt("))
try:
    normalised.with_kernels({kernel.name: wrong})(x, scale)
    raise AssertionError("it was adopted")
except pbkern.errors.KernelError as error:
    print(error)

# Derivatives stay: those of the function's definition, or those of a rule that the kernel brings (jax.custom_vjp).


def loss(f):
    return lambda x: (f(x, scale) ** 2).sum()


np.testing.assert_allclose(jax.grad(loss(mine))(x), jax.grad(loss(normalised))(x), atol=1e-5)

# A whole function is ejected as one module: its kernels, and the program that calls them. It needs pbkern, jax and numpy
# alone, and runs as it is. `adopt` takes the kernels of such a module back, and checks each.


@pbkern.jit
def ranks(x, scale):
    return jnp.argsort(normalised(x, scale).sum(1))


with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "ranks.py"
    module = pbkern.eject(ranks, x, scale, path=path)
    print(module[module.index("def ranks") :])
    sizes = re.findall(r"^(\w+) = (\d+)  #", module, re.MULTILINE)
    for name, size in sizes:
        module = module.replace(f"{name} = {size} ", f"{name} = {int(size) * 2} ")
    path.write_text(module)
    adopted = pbkern.adopt(ranks, path)
    print(f"adopted with twice {', '.join(f'{name} = {size}' for name, size in sizes)}")
    np.testing.assert_array_equal(adopted(x, scale), ranks(x, scale))

# From a shell: pbkern eject file.py:ranks -o ranks_kernels.py, and, to check and time what was edited,
# pbkern adopt file.py:ranks ranks_kernels.py.
