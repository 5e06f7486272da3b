"""Reading `explain`: what was fused, what was not, and what either cost.

`f.explain(*args)` makes the plan for these argument types and reports it. It compiles nothing and runs nothing unless
asked to measure, so types alone will do for arguments.
"""

import jax
import jax.numpy as jnp

import pbkern
from pbkern.core.errors import UnsupportedOp
from pbkern.testing import assert_fused, assert_kernels


@pbkern.jit
def mlp(x, w1, b1, w2, b2):
    return jax.nn.gelu(x @ w1 + b1) @ w2 + b2


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


types = (f32(512, 768), f32(768, 3072), f32(3072), f32(3072, 768), f32(768))
plan = mlp.explain(*types)

# str(plan) is the whole report. Its first line counts kernels and operations left to XLA.

print(str(plan).splitlines()[0])
assert len(plan.kernels) == 2
assert not plan.left

# Each kernel comes with its grid, the model's prediction of its time and how near that is to the machine's limit, the
# bytes that it must move, its arithmetic, and how much of it is done more than once ("recompute").

for k in plan.kernels:
    print(
        f"{k.name}: {k.cost.seconds * 1e6:.0f} us, {k.cost.share_of_limit:.0%} of the limit, grid {k.grid}"
    )
    print("   ", ", ".join(op for op, _ in k.ops))

# A prediction is one half. With measure=True each kernel is compiled and run alone on random operands of its sizes, and the
# report has both times. (Nothing else in this file compiles anything.)

for k in mlp.explain(*types, measure=True).kernels:
    print(f"{k.name}: {k.cost.seconds * 1e6:.0f} us predicted, {k.measured * 1e6:.0f} us measured")

# Each edge between an operation and one that reads its result was either fused or not, and says why. The gelu is
# computed in the first product's kernel, as its last step. It is not computed in the second one: every column block of
# that product would compute it again. In the report, what was not fused comes first: that is where there may be
# something to gain. Fusions that were accepted are counted; verbose=True lists them, with their prices.

for e in plan.edges:
    if not e.fused and not e.superseded:
        print(f"not fused: {e.producer.primitive.name}: {e.why}")

print(next(line for line in str(plan).splitlines() if line.startswith("  fused: ")))
assert len(str(mlp.explain(*types, verbose=True)).splitlines()) > len(str(plan).splitlines())

# Some operations no kernel can contain. They stay with XLA in the same program, and the report says which and why.


@pbkern.jit
def spectrum(x):
    return jnp.log1p(jnp.abs(jnp.fft.rfft(x * jnp.hanning(x.shape[-1]))))


for left in spectrum.explain(f32(64, 1024)).left:
    print(f"XLA: {left.op} at {left.at}: {left.why}")

# Where that must not happen, strict_target makes it an error.

try:
    pbkern.jit(spectrum, compile_options={"strict_target": True})(jnp.ones((64, 1024)))
except UnsupportedOp as e:
    print(str(e).splitlines()[0])

# What is worth knowing is worth keeping: these assertions belong in the tests of a program that depends on fusion.

assert_kernels(mlp, types, 2)
assert_fused(mlp, types)
