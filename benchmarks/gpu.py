"""Kernels for NVIDIA GPUs without one: what ptxas says of them, and what the simulator counts.

    python -m benchmarks.gpu --assemble        registers and spills per architecture (needs ptxas)
    python -m benchmarks.gpu --count           sectors beside the fewest possible, bytes beside those of inputs and outputs
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import pbkern
from pbkern.api.simulation import ptx
from pbkern.targets.nvgpu import ptxas

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100")


def blur(x, w):
    rows, columns = x.shape[1] - 4, x.shape[2] - 4
    y = sum(w[k] * x[:, k : k + rows, :] for k in range(5))
    return sum(w[k] * y[:, :, k : k + columns] for k in range(5))


def layer_norm(x, scale, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * scale + bias


def rms_norm(x, scale):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


FUNCTIONS = {
    "elementwise": (lambda x, y: jnp.tanh(x) * jnp.exp(-y * y) + x, [(512, 1024)] * 2),
    "softmax": (lambda x: jax.nn.softmax(x, -1), [(512, 1024)]),
    "layer_norm": (layer_norm, [(512, 1024), (1024,), (1024,)]),
    "rms_norm": (rms_norm, [(512, 1024), (1024,)]),
    "cross_entropy": (lambda x, y: -(jax.nn.log_softmax(x, -1) * y).sum(-1).mean(), [(512, 1024)] * 2),
    "sum": (lambda x: x.sum(), [(512, 1024)]),
    "transpose": (lambda x: x.T + 0, [(512, 1024)]),
    "blur": (blur, [(3, 260, 516), (5,)]),
    "matmul": (lambda a, b, c: jax.nn.gelu(a @ b + c), [(256, 256), (256, 256), (256,)]),
    "attention": (lambda q, k, v: jax.nn.softmax(q @ k.T / 8, -1) @ v, [(128, 64)] * 3),
}


def arrays(shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def count() -> None:
    """A row per function. `needed`: bytes of inputs and outputs."""
    print(f"{'function':14} kernels {'sectors/fewest':>15} {'bytes/needed':>13} {'conflicts':>10}")
    for name, (f, shapes) in FUNCTIONS.items():
        args = arrays(shapes)
        found = pbkern.simulate(f, *args)
        c, needed = found.counts, sum(a.nbytes for a in (*args, *map(np.asarray, jax.tree.leaves(found.results))))
        conflicts = c.bank_conflicts / max(c.shared_accesses, 1)
        print(f"{name:14} {len(found.kernels):7} {c.sectors / c.fewest_sectors:15.2f} "
              f"{c.sectors * 32 / needed:13.2f} {conflicts:10.1%}")


def assemble() -> None:
    """A row per kernel and architecture."""
    print(f"{'function':14} {'architecture':12} {'registers':>9} {'spilled':>8} {'shared':>8}")
    for name, (f, shapes) in FUNCTIONS.items():
        args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
        for architecture in ARCHITECTURES:
            for text in ptx(f, *args, device=architecture):
                a = ptxas.assemble(text, architecture)
                print(f"{name:14} {architecture:12} {a.registers:9} {a.spill_bytes:8} {a.shared_bytes:8}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assemble", action="store_true")
    parser.add_argument("--count", action="store_true")
    options = parser.parse_args()
    if options.assemble:
        assemble()
    if options.count or not options.assemble:
        count()


if __name__ == "__main__":
    main()
