"""Derived backward kernels beside those by hand: eight kernels, whole gradients and backward passes alone.

    python -m benchmarks.derived_kernels [--rounds 40] [kernel ...]

Of each kernel: the largest error of either gradient against the plain function in float64, relative to its largest
element; the least milliseconds of calls that take turns; and the ratio of derived to by hand. A backward pass by hand
keeps what it pleases of the forward pass: results, sums of rows, operands.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import pbkern

F32 = jnp.float32
BS = pbkern.BlockSpec
MASKED = -1e30
# Rounds of calls that take turns.
ROUNDS = 40


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, F32)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def order(*words: str) -> pbkern.cpu.CompilerParams:
    return pbkern.cpu.CompilerParams(dimension_semantics=words)


@dataclass(frozen=True)
class Case:
    """A kernel, one with a backward pass by hand, the plain function, and operands; `fixed` of them have no derivative."""

    kernel: Callable
    by_hand: Callable
    plain: Callable
    operands: Sequence[np.ndarray]
    fixed: int = 0


def with_rule(forward: Callable, backward: Callable) -> Callable:
    """A function with a backward pass by hand.

    Args:
      forward: operands -> result, residuals.
      backward: residuals, the result's cotangent -> the operands' cotangents.
    """

    @jax.custom_vjp
    def function(*operands):
        return forward(*operands)[0]

    function.defvjp(forward, backward)
    return function


# --- programs that share nothing
# ------------------------------------------------------------------------------------------------


def layer_norm(rows: int = 1024, columns: int = 512, block: int = 32) -> Case:
    """By hand: the operands are kept, and each program adds up its part of scale's and bias's cotangents."""

    def normalized(x):
        centred = x - x.mean(1, keepdims=True)
        deviation = jax.lax.rsqrt((centred * centred).mean(1, keepdims=True) + 1e-6)
        return centred * deviation, deviation

    def plain(x, scale, bias):
        return normalized(x)[0] * scale + bias

    def body(x, scale, bias, out):
        out[...] = plain(x[...], scale[...], bias[...])

    def backward_body(x, scale, cotangent, of_x, of_scale, of_bias):
        values, deviation = normalized(x[...])
        scaled = cotangent[...] * scale[...]
        along = (scaled * values).mean(1, keepdims=True)
        of_x[...] = (scaled - scaled.mean(1, keepdims=True) - values * along) * deviation
        of_scale[...] = (cotangent[...] * values).sum(0, keepdims=True)
        of_bias[...] = cotangent[...].sum(0, keepdims=True)

    tile, whole = BS((block, columns), lambda i: (i, 0)), BS((1, columns), lambda i: (0, 0))
    part = BS((None, 1, columns), lambda i: (i, 0, 0))
    options = {"grid": (rows // block,), "compiler_params": order("parallel")}
    kernel = pbkern.kernel(
        body,
        in_specs=[tile, whole, whole],
        out_specs=tile,
        out_shape=struct(rows, columns),
        **options,
    )
    parts = struct(rows // block, 1, columns)
    backward_kernel = pbkern.kernel(
        backward_body, in_specs=[tile, whole, tile], out_specs=[tile, part, part],
        out_shape=[struct(rows, columns), parts, parts], **options,
    )  # fmt: skip

    def backward(kept, cotangent):
        of_x, of_scale, of_bias = backward_kernel(*kept, cotangent)
        return of_x, of_scale.sum(0), of_bias.sum(0)

    by_hand = with_rule(lambda x, scale, bias: (kernel(x, scale, bias), (x, scale)), backward)
    operands = numbers(rows, columns), numbers(1, columns, seed=1), numbers(1, columns, seed=2)
    return Case(kernel, by_hand, plain, operands)


def softmax(rows: int = 512, columns: int = 512, block: int = 32) -> Case:
    """By hand: the result is kept, and no exponential is computed again."""

    def body(x, out):
        exponentials = jnp.exp(x[...] - x[...].max(1, keepdims=True))
        out[...] = exponentials / exponentials.sum(1, keepdims=True)

    def backward_body(result, cotangent, of_x):
        along = (result[...] * cotangent[...]).sum(1, keepdims=True)
        of_x[...] = result[...] * (cotangent[...] - along)

    tile = BS((block, columns), lambda i: (i, 0))
    options = {"out_specs": tile, "out_shape": struct(rows, columns), "grid": (rows // block,)}
    kernel = pbkern.kernel(body, in_specs=[tile], **options)
    backward_kernel = pbkern.kernel(backward_body, in_specs=[tile, tile], **options)

    def forward(x):
        result = kernel(x)
        return result, result

    by_hand = with_rule(forward, lambda result, cotangent: (backward_kernel(result, cotangent),))
    return Case(kernel, by_hand, jax.nn.softmax, (numbers(rows, columns),))


def stencil(size: int = 2**19, block: int = 2**13) -> Case:
    """By hand: the operands are kept; the cotangent is padded, so that blocks of it with a halo say what each element gets."""

    def terms(x, weights):
        return x[:-2] * weights[0] + x[1:-1] ** 2 * weights[1] + jnp.sin(x[2:]) * weights[2]

    def body(x, weights, out):
        out[...] = terms(x[...], weights[...])

    def backward_body(x, weights, cotangent, of_x, of_weights):
        # Element i of the block gets from results i, i - 1 and i - 2; two more of the cotangent come first.
        here, before, first = cotangent[2:], cotangent[1 : block + 1], cotangent[:block]
        values = x[...]
        of_x[...] = (
            here * weights[0]
            + 2 * values * before * weights[1]
            + jnp.cos(values) * first * weights[2]
        )
        of_weights[0] = (values * here).sum()
        of_weights[1] = (values * values * before).sum()
        of_weights[2] = (jnp.sin(values) * first).sum()

    blocks = size // block
    tile = BS((block,), lambda i: (i,))
    halo = BS((pbkern.Element(block + 2),), lambda i: (i * block,))
    kernel = pbkern.kernel(
        body, grid=(blocks,), in_specs=[halo, BS()], out_specs=tile, out_shape=struct(size)
    )
    backward_kernel = pbkern.kernel(
        backward_body, grid=(blocks + 1,), in_specs=[tile, BS(), halo],
        out_specs=[tile, BS((None, 3), lambda i: (i, 0))],
        out_shape=[struct(size + block), struct(blocks + 1, 3)],
    )  # fmt: skip

    def backward(kept, cotangent):
        x, weights = kept
        padded = jnp.pad(cotangent, (2, block))
        of_x, parts = backward_kernel(jnp.pad(x, (0, block - 2)), weights, padded)
        return of_x[: size + 2], parts.sum(0)

    by_hand = with_rule(lambda x, weights: (kernel(x, weights), (x, weights)), backward)
    return Case(kernel, by_hand, terms, (numbers(size + 2), numbers(3, seed=1)))


# --- programs that carry sums
# ------------------------------------------------------------------------------------------------


def matmul(size: int = 512, block: int = 128) -> Case:
    """By hand: the result is kept, which tanh's derivative reads, and two products are computed."""

    def product(body, name, turned):
        """A product of tiles, of which `turned` operands are transposed, that sums over the last dimension of the grid."""

        def summed(*refs):
            *operands, out, total = refs

            @pbkern.when(pbkern.program_id(2) == 0)
            def _():
                total[...] = jnp.zeros_like(total)

            total[...] += body(*(ref[...] for ref in operands))

            @pbkern.when(pbkern.program_id(2) == pbkern.num_programs(2) - 1)
            def _():
                out[...] = jnp.tanh(total[...] * 0.05) if name == "matmul" else total[...]

        maps = {
            "left": lambda i, j, k: (i, k),
            "left turned": lambda i, j, k: (k, i),
            "right": lambda i, j, k: (k, j),
            "right turned": lambda i, j, k: (j, k),
        }
        shape = (block, block)
        return pbkern.kernel(
            summed, name=name, grid=(size // block,) * 3, in_specs=[BS(shape, maps[word]) for word in turned],
            out_specs=BS(shape, lambda i, j, k: (i, j)), out_shape=struct(size, size),
            scratch_shapes=[pbkern.Scratch(shape, F32)], compiler_params=order("parallel", "parallel", "arbitrary"),
        )  # fmt: skip

    def before_tanh(result, cotangent):
        return cotangent * (1 - result * result) * 0.05

    kernel = product(lambda a, b: a @ b, "matmul", ("left", "right"))
    of_left = product(
        lambda result, cotangent, b: before_tanh(result, cotangent) @ b.T,
        "of_left", ("left", "left", "right turned"),
    )  # fmt: skip
    of_right = product(
        lambda a, result, cotangent: a.T @ before_tanh(result, cotangent),
        "of_right", ("left turned", "right", "right"),
    )  # fmt: skip

    def forward(a, b):
        result = kernel(a, b)
        return result, (a, b, result)

    def backward(kept, cotangent):
        a, b, result = kept
        return of_left(result, cotangent, b), of_right(a, result, cotangent)

    operands = numbers(size, size), numbers(size, size, seed=1)
    return Case(kernel, with_rule(forward, backward), lambda a, b: jnp.tanh(a @ b * 0.05), operands)


def prefix_sum(rows: int = 4096, columns: int = 256, block: int = 256) -> Case:
    """Squares of running sums. By hand: the sums are kept, as a second result of the forward kernel."""

    def body_with(keeps_sums: bool):
        def body(x, out, *rest):
            *kept, carried = rest

            @pbkern.when(pbkern.program_id(0) == 0)
            def _():
                carried[...] = jnp.zeros_like(carried)

            sums = jnp.cumsum(x[...], 0) + carried[...]
            out[...] = sums * sums
            if keeps_sums:
                kept[0][...] = sums
            carried[...] = sums[block - 1 :]

        return body

    def backward_body(sums, cotangent, of_x, carried):
        @pbkern.when(pbkern.program_id(0) == 0)
        def _():
            carried[...] = jnp.zeros_like(carried)

        doubled = 2 * sums[...] * cotangent[...]
        total = jax.lax.cumsum(doubled, 0, reverse=True) + carried[...]
        of_x[...] = total
        carried[...] = total[:1]

    blocks = rows // block
    tile = BS((block, columns), lambda i: (i, 0))
    backwards = BS((block, columns), lambda i: (blocks - 1 - i, 0))
    result = struct(rows, columns)
    options = {"grid": (blocks,), "scratch_shapes": [pbkern.Scratch((1, columns), F32)]}
    kernel = pbkern.kernel(
        body_with(False), in_specs=[tile], out_specs=tile, out_shape=result, **options
    )
    with_sums = pbkern.kernel(
        body_with(True), in_specs=[tile], out_specs=[tile, tile], out_shape=[result] * 2, **options
    )
    backward_kernel = pbkern.kernel(
        backward_body, in_specs=[backwards] * 2, out_specs=backwards, out_shape=result, **options
    )
    by_hand = with_rule(
        lambda x: tuple(with_sums(x)), lambda sums, cotangent: (backward_kernel(sums, cotangent),)
    )
    return Case(kernel, by_hand, lambda x: jnp.cumsum(x, 0) ** 2, (numbers(rows, columns),))


def attention(heads: int = 2, tokens: int = 512, columns: int = 64, block: int = 64) -> Case:
    """Causal, with an online softmax. By hand: result and log-sum-exp are kept; one kernel of five products."""
    blocks, scale = tokens // block, columns**-0.5

    def scores(q, k, row, column):
        rows = row * block + jax.lax.broadcasted_iota(jnp.int32, (block, block), 0)
        keys = column * block + jax.lax.broadcasted_iota(jnp.int32, (block, block), 1)
        return jnp.where(rows >= keys, jnp.dot(q * scale, k.T), MASKED)

    def body_with(keeps_sums: bool):
        def body(q, k, v, out, *rest):
            *kept, largest, total, acc = rest
            row, column = pbkern.program_id(1), pbkern.program_id(2)

            @pbkern.when(column == 0)
            def _():
                largest[...] = jnp.full_like(largest, MASKED)
                total[...] = jnp.zeros_like(total)
                acc[...] = jnp.zeros_like(acc)

            @pbkern.when(column <= row)
            def _():
                values = scores(q[...], k[...], row, column)
                now = jnp.maximum(largest[...], values.max(1, keepdims=True))
                weights, shrunk = jnp.exp(values - now), jnp.exp(largest[...] - now)
                total[...] = total[...] * shrunk + weights.sum(1, keepdims=True)
                acc[...] = acc[...] * shrunk + jnp.dot(weights, v[...])
                largest[...] = now

            @pbkern.when(column == pbkern.num_programs(2) - 1)
            def _():
                out[...] = acc[...] / total[...]
                if keeps_sums:
                    kept[0][...] = largest[...] + jnp.log(total[...])

        return body

    def backward_body(q, k, v, out, cotangent, sums, of_q, of_k, of_v, total_k, total_v):
        column, row = pbkern.program_id(1), pbkern.program_id(2)

        @pbkern.when((row == 0) & (column == 0))
        def _():
            of_q[...] = jnp.zeros_like(of_q)

        @pbkern.when(row == 0)
        def _():
            total_k[...] = jnp.zeros_like(total_k)
            total_v[...] = jnp.zeros_like(total_v)

        @pbkern.when(column <= row)
        def _():
            weights = jnp.exp(scores(q[...], k[...], row, column) - sums[...])
            along = (cotangent[...] * out[...]).sum(1, keepdims=True)
            of_scores = weights * (jnp.dot(cotangent[...], v[...].T) - along)
            total_v[...] += jnp.dot(weights.T, cotangent[...])
            total_k[...] += jnp.dot(of_scores.T, q[...]) * scale
            of_q[pbkern.ds(row * block, block)] += jnp.dot(of_scores, k[...]) * scale

        @pbkern.when(row == blocks - 1)
        def _():
            of_k[...] = total_k[...]
            of_v[...] = total_v[...]

    def plain(q, k, v):
        allowed = jnp.tril(jnp.ones((tokens, tokens), bool))
        values = jnp.where(allowed, jnp.einsum("hqd,hkd->hqk", q, k) * scale, -jnp.inf)
        return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(values), v)

    def of_rows(width, is_turned=False):
        """Blocks of rows: the grid's second dimension, or its third."""
        return BS((None, block, width), lambda h, i, j: (h, j if is_turned else i, 0))

    def forward_kernel(keeps_sums: bool):
        q, k = of_rows(columns), of_rows(columns, True)
        return pbkern.kernel(
            body_with(keeps_sums), name="attention", grid=(heads, blocks, blocks), in_specs=[q, k, k],
            out_specs=[q, of_rows(1)] if keeps_sums else q,
            out_shape=[whole, struct(heads, tokens, 1)] if keeps_sums else whole,
            scratch_shapes=[pbkern.Scratch((block, width), F32) for width in (1, 1, columns)],
            compiler_params=order("parallel", "parallel", "arbitrary"),
        )  # fmt: skip

    whole = struct(heads, tokens, columns)
    kernel, with_sums = forward_kernel(False), forward_kernel(True)
    q, k = of_rows(columns, True), of_rows(columns)
    backward_kernel = pbkern.kernel(
        backward_body, name="attention_backward", grid=(heads, blocks, blocks),
        in_specs=[q, k, k, q, q, of_rows(1, True)],
        out_specs=[BS((None, tokens, columns), lambda h, i, j: (h, 0, 0)), k, k], out_shape=[whole] * 3,
        scratch_shapes=[pbkern.Scratch((block, columns), F32)] * 2,
        compiler_params=order("parallel", "arbitrary", "arbitrary"),
    )  # fmt: skip

    def forward(q, k, v):
        result, sums = with_sums(q, k, v)
        return result, (q, k, v, result, sums)

    def backward(kept, cotangent):
        *operands, sums = kept
        return tuple(backward_kernel(*operands, cotangent, sums))

    operands = [numbers(heads, tokens, columns, seed=seed) for seed in range(3)]
    return Case(kernel, with_rule(forward, backward), plain, operands)


# --- programs that other operands direct
# ------------------------------------------------------------------------------------------------


def segment_sum(rows: int = 4096, columns: int = 128, segments: int = 256) -> Case:
    """Sums of squares of rows, whose segments are prefetched. By hand: the operands are kept."""
    segment_of = np.sort(np.random.default_rng(3).integers(0, segments, rows)).astype(np.int32)
    segment_of[:: rows // segments] = np.arange(segments)
    segment_of.sort()

    def body(segment, x, out):
        here = pbkern.program_id(0)

        @pbkern.when((here == 0) | (segment[here] != segment[jnp.maximum(here - 1, 0)]))
        def _():
            out[...] = jnp.zeros_like(out)

        out[...] += x[...] * x[...]

    def backward_body(segment, x, cotangent, of_x):
        of_x[...] = 2 * x[...] * cotangent[...]

    row = BS((1, columns), lambda i, segment: (i, 0))
    summed = BS((1, columns), lambda i, segment: (segment[i], 0))

    def prefetched(body, in_specs, out_specs, out_shape):
        spec = pbkern.GridSpec(
            grid=(rows,), in_specs=in_specs, out_specs=out_specs, num_scalar_prefetch=1
        )
        return pbkern.kernel(body, grid_spec=spec, out_shape=out_shape)

    kernel = prefetched(body, [row], summed, struct(segments, columns))
    backward_kernel = prefetched(backward_body, [row, summed], row, struct(rows, columns))
    by_hand = with_rule(
        lambda segment, x: (kernel(segment, x), (segment, x)),
        lambda kept, cotangent: (None, backward_kernel(*kept, cotangent)),
    )

    def plain(segment, x):
        return jax.ops.segment_sum(x * x, segment, segments)

    return Case(kernel, by_hand, plain, (segment_of, numbers(rows, columns)), fixed=1)


def histogram(size: int = 2**16, bins: int = 64, block: int = 2**12) -> Case:
    """Sums of squared weights, by atomic additions. By hand: the operands are kept, and a gather."""

    def body(bin_of, weight, out):
        @pbkern.when(pbkern.program_id(0) == 0)
        def _():
            out[...] = jnp.zeros_like(out)

        pbkern.atomic_add(out, bin_of[...], weight[...] ** 2)

    def backward_body(bin_of, weight, cotangent, of_weight):
        of_weight[...] = 2 * weight[...] * cotangent[bin_of[...]]

    tile = BS((block,), lambda i: (i,))
    grid = (size // block,)
    kernel = pbkern.kernel(
        body, grid=grid, in_specs=[tile, tile], out_specs=BS(), out_shape=struct(bins)
    )
    backward_kernel = pbkern.kernel(
        backward_body,
        grid=grid,
        in_specs=[tile, tile, BS()],
        out_specs=tile,
        out_shape=struct(size),
    )
    by_hand = with_rule(
        lambda bin_of, weight: (kernel(bin_of, weight), (bin_of, weight)),
        lambda kept, cotangent: (None, backward_kernel(*kept, cotangent)),
    )
    bin_of = np.random.default_rng(1).integers(0, bins, size).astype(np.int32)

    def plain(bin_of, weight):
        return jnp.zeros(bins, weight.dtype).at[bin_of].add(weight**2)

    return Case(kernel, by_hand, plain, (bin_of, numbers(size)), fixed=1)


CASES = {
    case.__name__: case
    for case in (
        layer_norm, softmax, matmul, attention, stencil, prefix_sum, segment_sum, histogram,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """The largest errors, and milliseconds of whole gradients and of backward passes: derived, by hand."""

    errors: tuple[float, float]
    gradients: tuple[float, float]
    backward: tuple[float, float]


def measured(case: Case, rounds: int) -> Row:
    """Errors and times of both gradients of a kernel."""
    floats = list(map(jnp.asarray, case.operands[case.fixed :]))
    fixed = tuple(map(jnp.asarray, case.operands[: case.fixed]))
    exact, cotangent = _exactly(case)
    gradients, backward, errors = [], [], []
    for function in (case.kernel, case.by_hand):
        pulled = pbkern.jit(functools.partial(_pulled, function, fixed))
        results = pulled(cotangent, *floats)
        errors.append(
            max(
                float(abs(np.asarray(x, np.float64) - want).max() / abs(want).max())
                for x, want in zip(results, exact, strict=True)
            )
        )
        _, pull = pbkern.jit(lambda *xs, f=function: jax.vjp(functools.partial(f, *fixed), *xs))(
            *floats
        )
        gradients.append(functools.partial(pulled, cotangent, *floats))
        backward.append(functools.partial(pbkern.jit(lambda pull, g: pull(g)), pull, cotangent))
    times = _least_milliseconds([*gradients, *backward], rounds)
    return Row((errors[0], errors[1]), (times[0], times[1]), (times[2], times[3]))


def _pulled(function: Callable, fixed: Sequence, cotangent, *floats):
    return jax.vjp(functools.partial(function, *fixed), *floats)[1](cotangent)


def _exactly(case: Case) -> tuple[list[np.ndarray], jax.Array]:
    """(the plain function's cotangents in float64, the cotangent of its result)."""
    with jax.enable_x64(True):
        floats = [jnp.asarray(x, jnp.float64) for x in case.operands[case.fixed :]]
        fixed = case.operands[: case.fixed]
        result, pull = jax.vjp(functools.partial(case.plain, *fixed), *floats)
        cotangent = numbers(*result.shape, seed=9)
        exact = list(map(np.asarray, pull(jnp.asarray(cotangent, jnp.float64))))
    return exact, jnp.asarray(cotangent)


def _least_milliseconds(calls: Sequence[Callable], rounds: int) -> list[float]:
    """Least time of each of the calls, which take turns."""
    for call in calls:
        jax.block_until_ready(call())
    times = np.zeros((rounds, len(calls)))
    for turn in range(rounds):
        for n, call in enumerate(calls):
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[turn, n] = time.perf_counter() - start
    return (times.min(axis=0) * 1e3).tolist()


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row per kernel."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kernels", nargs="*", help="of " + ", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of calls that take turns")
    parsed = parser.parse_args(arguments)
    print("kernel       errors              gradient ms             backward ms")
    print("             derived   by hand   derived by hand ratio   derived by hand ratio")
    for name in parsed.kernels or CASES:
        row = measured(CASES[name](), parsed.rounds)
        columns = [f"{name:12}", *(f"{error:.1e} " for error in row.errors)]
        for derived, by_hand in (row.gradients, row.backward):
            columns.append(f"{derived:8.3f} {by_hand:7.3f} {derived / by_hand:5.2f}")
        print(" ".join(columns), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
