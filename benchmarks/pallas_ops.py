"""The kernels that ship with JAX, native against JAX's interpreter: `python -m benchmarks.pallas_ops [names] [--write]`.

Every operation runs as its authors wrote it (jax.experimental.pallas.ops), once compiled by pbkern and once by JAX's
interpreter, which is what `interpret=True` means on a CPU: a program of XLA. Both results, and the native one against plain
JAX, are compared before anything is timed; then all three are called in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.gpu import (
    attention,
    decode_attention,
    layer_norm,
    paged_attention,
    rms_norm,
    softmax,
)
from jax.experimental.pallas.ops.tpu import flash_attention, matmul
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention as tpu_paged_attention
from jax.experimental.pallas.ops.tpu.random import philox, threefry
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

import pbkern.pallas
from pbkern.core.jaxprs.retracing import retrace
from pbkern.core.machine import Machine

from .run import relative_error, versions

ROUNDS, SECONDS = 15, 4.0
DOCUMENT = pathlib.Path(__file__).parent.parent / "docs" / "pallas-ops.md"


@dataclasses.dataclass(frozen=True)
class Operation:
    """One call: `function(*arguments())`, and `plain`, the same in plain JAX.

    `operations` counts a multiply-add as two, an operation of integers as one; 0 where arithmetic is not what takes time.
    `nbytes`: of operands and results, each once, where that takes longer. `tolerance` bounds the largest
    difference between results, relative to the largest element. `has_interpreter`: whether JAX's interpreter runs it.
    """

    name: str
    function: Callable
    plain: Callable | None
    arguments: Callable[[], tuple]
    operations: float = 0
    tolerance: float = 2e-3
    has_interpreter: bool = True
    nbytes: float = 0


def normal(*shape: int, seed: int = 0, scale: float = 1.0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, jnp.float32)


def three(*shape: int, scale: float = 1.0) -> Callable[[], tuple]:
    return lambda: tuple(normal(*shape, seed=s, scale=scale) for s in range(3))


def gradient(f: Callable) -> Callable:
    """Of the sum of squares with respect to all arguments."""
    return lambda *a: jax.grad(lambda *b: (f(*b) ** 2).sum(), tuple(range(len(a))))(*a)


def plain_attention(q, k, v, scale: float = 1.0, causal: bool = False):
    """[..., heads, length, width]"""
    scores = jnp.einsum("...qd,...kd->...qk", q, k) * scale
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("...qk,...kd->...qd", jax.nn.softmax(scores, -1), v)


def splash(q, k, v):
    heads, length, _ = q.shape
    mask = splash_attention_mask.MultiHeadMask(
        [splash_attention_mask.CausalMask((length, length)) for _ in range(heads)]
    )
    return splash_attention_kernel.make_splash_mha_single_device(mask)(q, k, v)


SIZES = np.array([300, 100, 424, 200], np.int32)


def plain_grouped(x, w):
    return jnp.concatenate(
        [part @ w[n] for n, part in enumerate(jnp.split(x, np.cumsum(SIZES)[:-1]))]
    )


def paged():
    table = jnp.asarray(np.random.default_rng(3).permutation(256).reshape(4, 64), jnp.int32)
    pages = [normal(4, 256, 16, 128, seed=s) for s in (1, 2)]
    return normal(4, 16, 128), *pages, table, jnp.array([1000, 333, 64, 777], jnp.int32)


def plain_paged(q, k_pages, v_pages, table, lengths):
    k, v = (jnp.moveaxis(p[:, table], 1, 0).reshape(4, 4, 1024, 128) for p in (k_pages, v_pages))
    scores = jnp.einsum("bhgd,bhkd->bhgk", q.reshape(4, 4, 4, 128), k)
    scores = jnp.where(jnp.arange(1024) < lengths[:, None, None, None], scores, -jnp.inf)
    return jnp.einsum("bhgk,bhkd->bhgd", jax.nn.softmax(scores, -1), v).reshape(4, 16, 128)


def _mha(causal: bool) -> Callable:
    return lambda q, k, v: attention.mha(q, k, v, None, causal=causal)


def _mha_plain(causal: bool) -> Callable:
    return lambda q, k, v: attention.mha_reference(q, k, v, None, causal=causal)


def _flash(q, k, v):
    return flash_attention.flash_attention(q, k, v, causal=True, sm_scale=0.1)


def _flash_plain(q, k, v):
    return plain_attention(q, k, v, 0.1, True)


def _norm_arguments() -> tuple:
    return normal(2, 128, 1024), normal(1024, seed=1), normal(1024, seed=2)


KEY = np.array([7, 11], np.uint32)
NUMBERS = 1024 * 1024
ROWS = 16  # of a product in decode and paged attention, whether there are as many heads or not
# Operations per number. Threefry: 20 rounds of an addition, a rotation and an exclusive or, 5 additions of two keys. Philox: 10
# rounds of two wide products, of which a vector's are two instructions each, and two exclusive ors, of three numbers at once.
THREEFRY, PHILOX = 20 * 3 + 5 * 2, 10 * (2 * 2 + 2)
FORWARD = 4 * 4 * 1024 * 1024 * 64  # two products per head, 4 heads of 1024 tokens, 64 wide
CAUSAL = 4 * 4 * 1024 * 1024 * 128 / 2
OPERATIONS = (
    Operation("gpu attention mha", _mha(False), _mha_plain(False), three(1, 1024, 4, 64), FORWARD),
    Operation("gpu attention mha, causal", _mha(True), _mha_plain(True), three(1, 1024, 4, 64), FORWARD / 2),
    Operation("gpu attention mha, forward and backward", gradient(_mha(False)), gradient(_mha_plain(False)),
              three(1, 1024, 4, 64), FORWARD * 4.5, 1e-2),
    Operation("gpu decode attention mqa", decode_attention.mqa, decode_attention.mqa_reference,
              lambda: (normal(8, 16, 128), normal(8, 2048, 128, seed=1), normal(8, 2048, 128, seed=2)),
              4 * 8 * 16 * 2048 * 128),
    Operation("gpu decode attention gqa", decode_attention.gqa, decode_attention.gqa_reference,
              lambda: (normal(4, 32, 128), normal(4, 2048, 4, 128, seed=1), normal(4, 2048, 4, 128, seed=2)),
              4 * 4 * 4 * ROWS * 2048 * 128, nbytes=2 * 4 * 2048 * 4 * 128 * 4),
    Operation("gpu paged attention", lambda *a: paged_attention.paged_attention(*a, k_splits=4), plain_paged, paged,
              4 * 4 * ROWS * 128 * (1024 + 384 + 128 + 896), nbytes=2 * 4 * 128 * (1000 + 333 + 64 + 777) * 4),
    Operation("tpu paged attention", lambda q, k, v, table, lengths: tpu_paged_attention(
                  q * 0.1, k, v, lengths, table, pages_per_compute_block=8),
              lambda q, *rest: plain_paged(q * 0.1, *rest), paged, 4 * 16 * 128 * (1000 + 333 + 64 + 777), 1e-2, False),
    Operation("gpu layer_norm", layer_norm.layer_norm, layer_norm.layer_norm_reference, _norm_arguments),
    Operation("gpu layer_norm, forward and backward", gradient(layer_norm.layer_norm),
              gradient(layer_norm.layer_norm_reference), _norm_arguments, 0, 1e-2),
    Operation("gpu rms_norm", rms_norm.rms_norm, rms_norm.rms_norm_reference, _norm_arguments),
    Operation("gpu rms_norm, forward and backward", gradient(rms_norm.rms_norm), gradient(rms_norm.rms_norm_reference),
              _norm_arguments, 0, 1e-2),
    Operation("gpu softmax", softmax.softmax, jax.nn.softmax, lambda: (normal(512, 2048),)),
    Operation("tpu matmul", lambda x, y: matmul.matmul(x, y, block_shape=(256, 256), block_k=256), jnp.matmul,
              lambda: (normal(1024, 1024), normal(1024, 1024, seed=1)), 2 * 1024**3),
    Operation("tpu flash attention, causal", _flash, _flash_plain, three(1, 4, 1024, 128), CAUSAL),
    Operation("tpu flash attention, forward and backward", gradient(_flash), gradient(_flash_plain),
              three(1, 4, 1024, 128, scale=0.5), CAUSAL * 4.5, 1e-2),
    Operation("tpu splash attention, causal", splash, lambda q, k, v: plain_attention(q, k, v, 1.0, True),
              three(4, 1024, 128, scale=0.3), CAUSAL),
    Operation("tpu splash attention, forward and backward", gradient(splash),
              gradient(lambda q, k, v: plain_attention(q, k, v, 1.0, True)), three(4, 1024, 128, scale=0.3),
              CAUSAL * 4.5, 1e-2),
    Operation("tpu megablox gmm", lambda x, w: gmm(x, w, jnp.asarray(SIZES)), plain_grouped,
              lambda: (normal(1024, 512), normal(4, 512, 512, seed=1)), 2 * 1024 * 512 * 512),
    Operation("tpu megablox gmm, forward and backward", gradient(lambda x, w: gmm(x, w, jnp.asarray(SIZES))),
              gradient(plain_grouped), lambda: (normal(1024, 512), normal(4, 512, 512, seed=1)), 6 * 1024 * 512 * 512, 1e-2),
    Operation("tpu random threefry", lambda k: threefry.threefry_2x32_count(k, (1024, 1024), (1024, 1024), (256, 256)), None,
              lambda: (jnp.asarray(KEY),), THREEFRY * NUMBERS),
    Operation("tpu random philox", lambda k: philox.philox_4x32_count(k, (1024, 1024)), None, lambda: (jnp.asarray(KEY),),
              PHILOX * NUMBERS),
)  # fmt: skip


# --- measuring ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    """Median seconds of processor time per call of each way, all threads together, which other work on the machine disturbs
    least; `difference`: native from interpreted, `error`: native from plain JAX."""

    name: str
    difference: float | None
    error: float | None
    operations: float
    nbytes: float
    medians: dict[str, float]

    @property
    def speedup(self) -> float | None:
        """How many times less the native call takes than the interpreter's, if there is one."""
        return (
            self.medians["interpreted"] / self.medians["native"]
            if "interpreted" in self.medians
            else None
        )

    def speedup_at_peak(self, machine: Machine) -> float | None:
        """How many times less a call would take that did nothing but its operations, or moving its data, with all cores."""
        bandwidth = (
            machine.l3_bandwidth if self.nbytes <= machine.l3_bytes else machine.dram_bandwidth
        )
        least = (
            max(self.operations / machine.flops("float32"), self.nbytes / bandwidth) * machine.cores
        )
        return (
            self.medians["interpreted"] / least if "interpreted" in self.medians and least else None
        )


def interpreted(f: Callable, arguments: Sequence) -> Callable:
    """f with interpret=True in each of its pallas_calls."""

    def rewrite(eqn, *operands):
        if eqn.primitive.name != "pallas_call":
            return None
        return eqn.primitive.bind(*operands, **(eqn.params | {"interpret": True}))

    closed = retrace(jax.make_jaxpr(f)(*arguments), rewrite)
    return jax.jit(lambda *a: jax.extend.core.jaxpr_as_fun(closed)(*a))


def measure(op: Operation, rounds: int, seconds: float) -> Row:
    """Checks and times one operation. Raises AssertionError where results disagree."""
    arguments = op.arguments()
    ways = {"native": jax.jit(op.function)}
    if op.has_interpreter:
        ways["interpreted"] = interpreted(op.function, arguments)
    if op.plain is not None:
        ways["plain"] = jax.jit(op.plain)
    results = {
        name: jax.tree.leaves(jax.block_until_ready(f(*arguments))) for name, f in ways.items()
    }
    difference = (
        relative_error(results["native"], results["interpreted"]) if op.has_interpreter else None
    )
    error = relative_error(results["native"], results["plain"]) if "plain" in results else None
    assert difference is None or difference <= op.tolerance, (
        f"{op.name}: native and interpreted differ by {difference:.1e}"
    )
    assert error is None or error <= op.tolerance, (
        f"{op.name}: native and plain JAX differ by {error:.1e}"
    )
    times: dict[str, list[float]] = {name: [] for name in ways}
    begin = time.perf_counter()
    while len(times["native"]) < 3 or (
        len(times["native"]) < rounds and time.perf_counter() - begin < seconds
    ):
        for name, f in ways.items():
            start = time.process_time()
            jax.block_until_ready(f(*arguments))
            times[name].append(time.process_time() - start)
    return Row(
        op.name,
        difference,
        error,
        op.operations,
        op.nbytes,
        {name: statistics.median(t) for name, t in times.items()},
    )


def table(rows: Sequence[Row]) -> str:
    heads = ("operation", "native ms", "interpreter ms", "times faster", "at the peak", "plain JAX ms", "Gop/s per core",
             "difference")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", f"| --- |{' ---: |' * (len(heads) - 1)}"]
    machine = pbkern.cpu.machine()
    for r in rows:
        ms = {name: f"{1e3 * t:.2f}" for name, t in r.medians.items()}
        rate = f"{r.operations / r.medians['native'] / 1e9:.0f}" if r.operations else ""
        speedup = "" if r.speedup is None else f"{r.speedup:.1f}"
        difference = "" if r.difference is None else f"{r.difference:.0e}"
        most = r.speedup_at_peak(machine)
        possible = "" if most is None else f"{most:.1f}"
        cells = (
            r.name,
            ms["native"],
            ms.get("interpreted", ""),
            speedup,
            possible,
            ms.get("plain", ""),
            rate,
            difference,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def document(rows: Sequence[Row]) -> str:
    """The text of docs/pallas-ops.md."""
    about = "\n".join(f"- {name}: {value}" for name, value in versions().items())
    return f"""# The kernels that ship with JAX

Written by `python -m benchmarks.pallas_ops --write`. Operations of `jax.experimental.pallas.ops` run as they are, float32.
"native" is pbkern after `pbkern.pallas.install()`, "interpreter" is `interpret=True`, for which JAX makes a program of XLA's
operations, and "plain JAX" the same mathematics under `jax.jit`, without a kernel. Milliseconds of processor time, all
threads together: medians of calls that take turns in one process. "difference" is the largest between native and
interpreted results, relative to the largest element; results were also compared with plain JAX. Operations of a causal
attention are counted once per pair of tokens that attend; of products, those that the kernel asks for: decode and paged
attention pad to {ROWS} rows what has 8 or 4 heads.

"at the peak" is how many times faster than the interpreter a kernel could be at most: one that takes no time but for its
multiply-adds, on all cores at the processor's peak, or for moving its data once. Of the random numbers, operations of integers
are counted (threefry {THREEFRY}, philox {PHILOX} per number): the processor starts two vectors of those per cycle, and one of
multiply-adds, which count twice. The interpreter leaves products of blocks to XLA's matrix product.

{table(rows)}

Not in the table: `tpu.all_gather` and the Mosaic GPU kernels (`*_mgpu`), which need what a CPU has no counterpart of; the
interpreter does not run `tpu.paged_attention`, so that its row has no such column.

Measured with:

{about}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 1 if a result was wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pallas_ops", description=__doc__.splitlines()[0]
    )
    parser.add_argument("names", nargs="*", help="parts of names; default: all operations")
    parser.add_argument("--quick", action="store_true", help="three rounds each")
    parser.add_argument("--write", action="store_true", help=f"write docs/{DOCUMENT.name}")
    given = parser.parse_args(argv)
    rounds, seconds = (3, 0.0) if given.quick else (ROUNDS, SECONDS)
    rows, failed = [], False
    with pbkern.pallas.installed():
        for op in OPERATIONS:
            if given.names and not any(n in op.name for n in given.names):
                continue
            try:
                rows.append(measure(op, rounds, seconds))
                print(table(rows[-1:]).splitlines()[-1], flush=True)
            except AssertionError as e:
                failed = True
                print(e, flush=True)
            jax.clear_caches()
    if given.write:
        DOCUMENT.write_text(document(rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
