"""An image pipeline: stencils of stencils in one kernel, with overlapping blocks.

Unsharp masking blurs an image in two directions and adds back what the blur took away. Executed as written, it makes
about thirty whole images on the way. The interesting part is what happens at the borders of blocks.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

import pbkern
from pbkern.testing import assert_kernels

weights = np.array([1, 4, 6, 4, 1], np.float32) / 16


def unsharp(image):
    """float32[h, w] -> float32[h - 4, w - 4]."""
    h, w = image.shape
    columns = sum(weights[i] * image[:, i : w - 4 + i] for i in range(5))
    blurred = sum(weights[i] * columns[i : h - 4 + i] for i in range(5))
    centre = image[2:-2, 2:-2]
    return jnp.where(jnp.abs(centre - blurred) < 0.01, centre, 1.5 * centre - 0.5 * blurred)


image = jnp.asarray(np.random.default_rng(0).random((1024, 1024), np.float32))
sharpened = pbkern.jit(unsharp)
np.testing.assert_allclose(sharpened(image), jax.jit(unsharp)(image), atol=1e-6)
assert_kernels(sharpened, (image,), 1)

# A program that makes n rows of the result needs n + 4 rows of the image. The kernel's block of the input is
# therefore an Element block: its index map counts in elements, and blocks overlap. The four rows that neighbours both
# read are its halo.

(kernel,) = sharpened.kernels(image)
(block,) = kernel.inputs
print(kernel.source().split("def ")[0])
print(f"block of the input {block.ref_shape}, of the result {kernel.outputs[0].ref_shape}")
assert block.ref_shape[0] > kernel.outputs[0].ref_shape[0]

# A halo costs arithmetic: the horizontal blur of these rows is computed by both programs. `recompute` is the ratio of
# operations done to operations needed. The planner chose the height so that this costs less than a trip to memory.

(report,) = sharpened.explain(image).kernels
print(f"recompute {report.cost.recompute:.2f}, {report.cost.bytes_moved / 1e6:.1f} MB moved")
assert 1 < report.cost.recompute < 1.5

# Padding makes no extra pass either. Rows outside the image become a comparison of indices inside the kernel.

padded = pbkern.jit(lambda image: unsharp(jnp.pad(image, 2)))
np.testing.assert_allclose(padded(image), jax.jit(unsharp)(jnp.pad(image, 2)), atol=1e-6)
assert_kernels(padded, (image,), 1)

# How long do they take? Calls in turn, the least of ten.


def least(f):
    times = []
    for _ in range(10):
        start = time.perf_counter()
        jax.block_until_ready(f(image))
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


plain = jax.jit(unsharp)
print(f"pbkern {least(sharpened):.2f} ms, jax.jit {least(plain):.2f} ms")
