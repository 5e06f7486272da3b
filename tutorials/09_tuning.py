"""Tuning: measured times in place of predicted ones, and what is kept between processes.

The cost model predicts well enough to decide what to fuse. Which of ten block sizes is fastest on this machine it can
only guess. `pbkern.tune` tries them.
"""

import jax
import jax.numpy as jnp
import numpy as np

import pbkern
from pbkern.core import config
from pbkern.core.process import disk_cache as cache


@pbkern.jit
def normalised(x, gain):
    """float32[n, m], float32[m] -> float32[n, m]."""
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * gain


x = jax.random.normal(jax.random.key(0), (2048, 512))
gain = jnp.ones(512)
before = np.asarray(normalised(x, gain))

# The model's own choice, with its prediction beside the time of the kernel alone.

plan = normalised.explain(x, gain, measure=True)
for k in plan.kernels:
    print(
        f"{k.name}: grid {k.grid}, {k.cost.seconds * 1e6:.0f} us predicted, {k.measured * 1e6:.0f} us measured"
    )

# Other blocks and prefetch distances are compiled and measured, each kernel alone and the most promising ones in turn.
# A candidate whose results differ by more than rounding is refused. At last the whole function runs with and without
# what was chosen, and nothing is kept that is not faster then. The budget is in seconds; 30 is the default.

result = pbkern.tune(normalised, x, gain, budget=3)
assert not result.improved or result.after < result.before

# From here on the function has what was found, and so has every function that is the same program: the choice belongs
# to what is computed, not to this object.

np.testing.assert_allclose(normalised(x, gain), before, rtol=1e-4, atol=1e-5)
print("blocks of", [m.ref_shape for m in normalised.kernels(x, gain)[0].inputs])

# It is kept on disk, by program and machine, beside compiled code. Another process that needs this function neither
# tunes nor compiles: `pbkern cache where` prints the folder, `size` what it holds, and `clear` empties it.

store = cache.current()
if store is not None:  # None: PBKERN_CACHE=0
    print(f"{len(store.entries())} entries, {store.size() / 1024:.0f} KB in {store.folder}")

# Tests that count kernels or compare times should not depend on what some other process has found:

with config.override(cache=False):
    print(pbkern.jit(lambda x: jnp.tanh(x) * 2)(x)[0, :3])

# What a function needs of memory is known without running it, from types alone.

print(normalised.memory_analysis(x, gain))
