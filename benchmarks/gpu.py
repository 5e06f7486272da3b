"""Kernels for GPUs without one: what their assemblers say of them, and what the simulator counts.

    python -m benchmarks.gpu --assemble [names]    registers and spills of every workload's kernels, per architecture
    python -m benchmarks.gpu --count [names]       sectors beside the fewest possible, and beside those of inputs and outputs
    python -m benchmarks.gpu --device [names]      on a machine with a GPU: bandwidth beside jax.jit, results beside NumPy's

The first needs ptxas for NVIDIA's architectures, and an lld (ziglang) for AMD's.
"""

import argparse
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import pbkern
from benchmarks.workloads import WORKLOADS, Workload
from pbkern.core.options import CompileOptions
from pbkern.errors import TargetError
from pbkern.targets import get_target
from pbkern.targets.amdgpu import compile as amd
from pbkern.targets.nvgpu import ptxas

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100", "gfx942")


# --- what assemblers say --------------------------------------------------------------------------------------------


def codes(w: Workload, target: str, device: str) -> Iterator:
    """Code of each kernel of a workload at full size."""
    types = [jax.ShapeDtypeStruct(s.shape, s.dtype if not s.high else jnp.int32) for s in w.full]
    build, _ = pbkern.jit(w.function, compile_options={"target": target}).build(tuple(types), {})
    for program in build.plan.programs():
        yield from (
            get_target(target)
            .compile(program, CompileOptions(target=target, device=device))
            .distinct()
        )


def assemble(names: list[str], architectures: Sequence[str] = ARCHITECTURES) -> int:
    """A row per kernel and architecture; the number of kernels that spill registers or of which the assembler warns."""
    targets = {
        device: "amdgpu" if device.startswith("gfx") else "nvgpu" for device in architectures
    }
    if "nvgpu" in targets.values() and ptxas.find() is None:
        raise TargetError(
            "ptxas was not found",
            why="it assembles for NVIDIA's architectures",
            hint="pip install nvidia-cuda-nvcc",
        )
    if "amdgpu" in targets.values():
        amd.lld()
    print(
        f"{'workload':22} {'kernel':36} {'architecture':12} {'registers':>9} {'spilled':>8} {'shared':>8} {'global':>10}"
    )
    rows = spilled = warned = 0
    for name in names:
        for device, target in targets.items():
            for code in codes(WORKLOADS[name], target, device):
                a, f = code.assembled, code.function
                rows += 1
                spilled += a.spill_bytes > 0
                warnings = getattr(a, "warnings", ())  # of ptxas; lld has none
                warned += bool(warnings)
                print(
                    f"{name:22} {f.name[:36]:36} {device:12} {a.registers:9} {a.spill_bytes:8} {f.shared_bytes:8} "
                    f"{f.global_bytes * f.blocks:10}"
                )
                for warning in warnings:
                    print(f"    {warning}")
    print(f"{rows} kernels: {spilled} spill registers, assemblers warn of {warned}")
    return spilled + warned


# --- what the simulator counts --------------------------------------------------------------------------------------


def unsharp(image: jax.Array) -> jax.Array:
    return WORKLOADS["unsharp"].function(image)


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    at = jnp.arange(q.shape[0])
    scores = jnp.where(at[:, None] >= at[None], q @ k.T / 8, -1e30)
    return jax.nn.softmax(scores, -1) @ v


def gradient_of_softmax(x: jax.Array, g: jax.Array) -> jax.Array:
    return jax.vjp(lambda x: jax.nn.softmax(x, -1), x)[1](g)[0]


def one_hot_loss(x: jax.Array, y: jax.Array) -> jax.Array:
    return -(jax.nn.log_softmax(x, -1) * y).sum(-1).mean()


@dataclass(frozen=True)
class Counted:
    """A function at a size that fills a GPU and that the simulator takes seconds for.

    Attributes:
      most_bytes: of the bytes of inputs and outputs, what its blocks may ask memory for.
      most_sectors: of the fewest sectors, what warps may ask for; more where rows begin anywhere in
        a sector.
      most_conflicts: of the passes over banks of shared memory, what may be beyond the fewest; more
        where few elements go through it, as in second stages.
    """

    function: Callable
    shapes: tuple[tuple[int, ...], ...]
    most_bytes: float = 1.1
    most_conflicts: float = 0.05
    most_sectors: float = 1.1


def turned(shape: tuple[int, ...], *order: int, **limits: float) -> Counted:
    """A transpose that computes something, so that no view is left of it."""
    return Counted(lambda x: jnp.transpose(x, order) + 1, (shape,), **limits)


COUNTED = {
    "elementwise": Counted(lambda x, y: jnp.tanh(x) * jnp.exp(-y * y) + x, ((1024, 2048),) * 2),
    "softmax": Counted(WORKLOADS["softmax"].function, ((2048, 1024),)),
    "layer_norm": Counted(WORKLOADS["layer_norm"].function, ((16384, 128), (128,), (128,))),
    "rms_norm": Counted(WORKLOADS["rms_norm"].function, ((16384, 128), (128,))),
    "cross_entropy": Counted(one_hot_loss, ((1024, 1000),) * 2),
    "sum": Counted(lambda x: x.sum(), ((2048, 2048),)),
    "long_softmax": Counted(WORKLOADS["softmax"].function, ((528, 16384),)),
    "logsumexp": Counted(lambda x: jax.nn.logsumexp(x, -1), ((528, 16384),)),
    "running_max": Counted(lambda x: jax.nn.logsumexp(x, -1), ((1056, 16384),)),
    "masked_lse": Counted(
        lambda x: jax.nn.logsumexp(jnp.where(x > 0, x, -jnp.inf), -1), ((528, 16384),)
    ),
    "softmax_grad": Counted(gradient_of_softmax, ((1024, 1024),) * 2),
    "rows_of_ten": Counted(lambda x: x.sum(1), ((65536, 10),), most_conflicts=1),
    "loss_of_ten": Counted(
        lambda x: jax.nn.logsumexp(x, -1).sum(), ((65536, 10),), most_conflicts=1
    ),
    "rows_of_1023": Counted(lambda x: x.sum(1), ((2048, 1023),)),
    "odd_logsumexp": Counted(lambda x: jax.nn.logsumexp(x, -1), ((528, 16383),)),
    "column_sum": Counted(lambda x: x.sum(0), ((2048, 2048),), most_conflicts=1),
    "tall_sum": Counted(lambda x: x.sum(0), ((16384, 128),), most_conflicts=1),
    "wide_sum": Counted(lambda x: x.sum(0), ((128, 16384),), most_conflicts=1),
    "narrow_sum": Counted(lambda x: x.sum(0), ((65536, 3),), most_conflicts=1),
    "column_max": Counted(lambda x: x.max(0), ((1000, 1000),), most_conflicts=1),
    "transpose": Counted(lambda x: x.T + 0, ((2048, 2048),)),
    "turned_add": Counted(lambda x, y: x.T + y, ((1024, 1024),) * 2),
    "turned_1000": turned((1000, 1000), 1, 0),
    "turned_odd": turned((2047, 1023), 1, 0),
    "turned_700": turned((300, 700), 1, 0, most_conflicts=0.1),
    "turned_wide": turned((64, 16384), 1, 0),
    "turned_tall": turned((16384, 64), 1, 0, most_conflicts=1),
    "turned_long": turned((100000, 128), 1, 0),
    "turned_planes": turned((3, 65536), 1, 0, most_conflicts=1),
    "turned_pixels": turned((65536, 3), 1, 0),
    "to_nchw": turned((8, 56, 56, 64), 0, 3, 1, 2, most_conflicts=0.1),
    "to_nhwc": turned((8, 64, 56, 56), 0, 2, 3, 1, most_conflicts=0.25),
    "rgb_planes": turned((8, 128, 128, 3), 0, 3, 1, 2),
    "heads": turned((4, 256, 8, 64), 0, 2, 1, 3),
    "blur": Counted(WORKLOADS["blur_slices"].function, ((3, 516, 1028),)),
    "unsharp": Counted(unsharp, ((1080, 1920, 3),)),
    "matmul_gelu": Counted(
        WORKLOADS["matmul_bias_gelu"].function, ((256, 256), (256, 256), (256,)), np.inf
    ),
    "attention": Counted(
        lambda q, k, v: jax.nn.softmax(q @ k.T / 8, -1) @ v, ((128, 64),) * 3, np.inf
    ),
    "causal": Counted(causal_attention, ((512, 64),) * 3, np.inf),
}


def count(names: list[str]) -> int:
    """A row per function; the number of them that ask for more than they may."""
    rng, above = np.random.default_rng(0), 0
    print(
        f"{'function':14} kernels {'sectors/fewest':>15} {'bytes/needed':>13} {'conflicts':>10} {'seconds':>8}"
    )
    for name in names:
        c = COUNTED[name]
        args = [rng.standard_normal(s).astype(np.float32) for s in c.shapes]
        start = time.perf_counter()
        found = pbkern.simulate(c.function, *args, check=False)
        counts, needed = (
            found.counts,
            sum(np.asarray(a).nbytes for a in (*args, *jax.tree.leaves(found.results))),
        )
        sectors, moved = counts.sectors / counts.fewest_sectors, counts.sectors * 32 / needed
        conflicts = counts.bank_conflicts / max(counts.shared_accesses, 1)
        high = c.most_bytes < np.inf and (
            sectors > c.most_sectors or moved > c.most_bytes or conflicts > c.most_conflicts
        )
        above += high
        print(
            f"{name:14} {len(found.kernels):7} {sectors:15.2f} {moved:13.2f} {conflicts:10.1%} "
            f"{time.perf_counter() - start:8.1f}{'  *' if high else ''}"
        )
    print(f"{above} functions ask for more than they may (*)")
    return above


# --- on a device ----------------------------------------------------------------------------------------------------


MEMORY_BOUND = (
    "blur_slices",
    "unsharp",
    "harris",
    "softmax",
    "layer_norm",
    "rms_norm",
    "elementwise",
    "sum_of_squares",
    "cross_entropy",
    "jacobi_at",
)


def least_seconds(
    call: Callable[[], object], wait: Callable[[object], object], calls: int
) -> float:
    """Seconds of a call when several follow one another, so that launches overlap; the least of five rounds."""
    wait(call())
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            result = call()
        wait(result)
        rounds.append((time.perf_counter() - start) / calls)
    return min(rounds)


def error_of(w: Workload, device: jax.Device) -> float:
    """Of the results at small size against float64, relative to the largest."""
    small = w.arguments(w.small)
    got = pbkern.jit(w.function, compile_options={"target": "nvgpu"})(
        *jax.device_put(small, device)
    )
    wide = [
        np.asarray(a, np.float64) if np.asarray(a).dtype.kind == "f" else np.asarray(a)
        for a in small
    ]
    want = w.numpy(*wide)
    return max(
        float(np.abs(np.asarray(g, np.float64) - x).max() / max(np.abs(x).max(), 1e-30))
        for g, x in zip(jax.tree.leaves(got), jax.tree.leaves(want))
    )


def torch_seconds(w: Workload, arguments: Sequence[jax.Array], calls: int) -> float:
    """Of torch.compile on its own CUDA device; not a number where it has none, or lacks the function."""
    try:
        import torch

        from benchmarks import torch_peers
    except ImportError:
        return np.nan
    f = torch_peers.compiled(w.name) if torch.cuda.is_available() else None
    if f is None:
        return np.nan
    call = functools.partial(f, *(torch_peers.tensor(a).cuda() for a in arguments))
    return least_seconds(call, lambda _: torch.cuda.synchronize(), calls)


def rate(w: Workload, seconds: float) -> str:
    """Of a call: TFLOP/s of a workload that arithmetic bounds, otherwise GB/s; empty for no time."""
    if np.isnan(seconds):
        return ""
    if w.name in MEMORY_BOUND:
        return f"{w.compulsory_bytes / seconds / 1e9:.0f} GB/s"
    return f"{w.flops / seconds / 1e12:.2f} TFLOP/s"


def on_device(names: list[str], full: bool = True, calls: int = 20, peers: bool = True) -> int:
    """A row per workload, as a table for the documents; the number of wrong results and of failures.

    Args:
      names: of workloads.
      full: or at small size.
      calls: of each program, one after the other.
      peers: measure jax.jit and torch.compile as well.
    """
    device, wrong = jax.devices(get_target("nvgpu").platform)[0], 0
    day = time.strftime("%d %B %Y")
    print(
        f"{device.device_kind}, jax {jax.__version__}, {day}: arguments and results, each once, or arithmetic, per second.\n"
    )
    print(
        "| workload | pbkern | jax.jit | torch.compile | error |\n| --- | ---: | ---: | ---: | ---: |"
    )
    for name in names:
        try:
            row, good = measured(WORKLOADS[name], device, full, calls, peers)
        except Exception as failure:
            row, good = f"failed: {type(failure).__name__}: {str(failure)[:300]!r} | | |", False
        wrong += not good
        print(f"| {name} | {row} |", flush=True)
    print(f"\n{wrong} results are wrong or missing")
    return wrong


def measured(
    w: Workload, device: jax.Device, full: bool, calls: int, peers: bool
) -> tuple[str, bool]:
    """The cells of a workload's row, and whether its results are right; arguments as of on_device."""
    error = error_of(w, device)
    drawn = w.arguments(w.full if full else w.small)
    args = jax.device_put(drawn, device)
    ours = pbkern.jit(w.function, compile_options={"target": "nvgpu"})
    seconds = [
        least_seconds(functools.partial(f, *args), jax.block_until_ready, calls)
        for f in (ours, *([jax.jit(w.function)] if peers else []))
    ]
    seconds += [torch_seconds(w, drawn, calls)] if peers else [np.nan, np.nan]
    right = error <= w.tolerance
    shown = " | ".join(rate(w, s) for s in seconds)
    return f"{shown} | {error:.1e}{'' if right else ' WRONG'}", right


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--assemble", action="store_true")
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--device", action="store_true")
    parser.add_argument(
        "--architectures",
        default=",".join(ARCHITECTURES),
        help="of --assemble, separated by commas",
    )
    parser.add_argument(
        "--small", action="store_true", help="with --device: small arguments, few calls"
    )
    parser.add_argument("--ours", action="store_true", help="with --device: no peers")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    bad = 0
    if options.assemble:
        bad += assemble(options.names or list(WORKLOADS), options.architectures.split(","))
    if options.count:
        bad += count(options.names or list(COUNTED))
    if options.device:
        bad += on_device(
            options.names or list(MEMORY_BOUND),
            not options.small,
            2 if options.small else 20,
            not options.ours,
        )
    if not (options.assemble or options.count or options.device):
        parser.print_help()
    return min(bad, 1)


if __name__ == "__main__":
    raise SystemExit(main())
