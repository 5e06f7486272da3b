"""One kernel on the CPU, as PTX, in the simulator; and a race that somebody planted, and how it is found.

Needs `pip install 'pbkern[cuda]'`, which brings llvmlite. No GPU and no CUDA.
"""

import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np

import pbkern

if importlib.util.find_spec("llvmlite") is None:
    print("llvmlite is not installed: nothing to see")
    sys.exit()

x = np.random.default_rng(0).standard_normal((8, 512), dtype=np.float32)


def softmax(x):
    return jax.nn.softmax(x, -1)


# The same function for two devices. The CPU's runs; the GPU's is PTX, and the simulator runs that, one NumPy lane per thread.

on_cpu = pbkern.jit(softmax)(x)
simulated = pbkern.simulate(softmax, x, device="h100")
np.testing.assert_allclose(simulated.results, on_cpu, rtol=1e-5)
print(simulated.kernels[0].source().split("def ")[1])
print(
    "\n".join(
        line
        for line in simulated.ptx[0].splitlines()
        if "ld.global" in line or "bar.sync" in line or "shfl" in line
    )
)

# Threads of a warp add up by shuffles; warps wait for each other at barriers and meet in shared memory. What a GPU would have
# moved:

print(simulated.counts)
assert simulated.counts.sectors <= 1.1 * simulated.counts.fewest_sectors


# Now a kernel whose author says that no barriers are needed. They are: a thread reads what another one has written.


@pbkern.kernel(
    out_shape=jax.ShapeDtypeStruct((512,), jnp.float32),
    scratch_shapes=[pbkern.Scratch((512,), jnp.float32)],
    compiler_params=pbkern.nvgpu.CompilerParams(unsafe_no_auto_barriers=True),
)
def turned(x_ref, o_ref, t_ref):
    t_ref[...] = jnp.exp(x_ref[...])
    o_ref[...] = t_ref[...][::-1] + t_ref[...]


try:
    pbkern.simulate(turned, x[0])
except pbkern.errors.SimulationError as e:
    print(e)
    assert e.kind == "race"
else:
    raise AssertionError("threads race")
