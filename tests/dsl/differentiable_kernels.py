"""Kernels as people write them, without rules for derivatives, beside the plain functions that say what they mean."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pbkern

BS = pbkern.BlockSpec
MASKED = -1e30


class Case(NamedTuple):
    kernel: Callable
    plain: Callable
    operands: tuple

    @property
    def floats(self) -> tuple[int, ...]:
        return tuple(n for n, x in enumerate(self.operands) if x.dtype.kind == "f")

    @property
    def active(self) -> tuple[bool, ...]:
        return tuple(n in self.floats for n in range(len(self.operands)))

    def traced(self):
        return self.kernel.trace(*self.operands)


def s(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def order(*words):
    return pbkern.cpu.CompilerParams(dimension_semantics=words)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def layer_norm(rows=50, columns=32, block=16):
    def body(x, scale, bias, o):
        centered = x[...] - x[...].mean(1, keepdims=True)
        variance = (centered * centered).mean(1, keepdims=True)
        o[...] = centered * jax.lax.rsqrt(variance + 1e-6) * scale[...] + bias[...]

    def plain(x, scale, bias):
        centered = x - x.mean(1, keepdims=True)
        variance = (centered * centered).mean(1, keepdims=True)
        return centered * jax.lax.rsqrt(variance + 1e-6) * scale + bias

    tile, whole = BS((block, columns), lambda i: (i, 0)), BS((1, columns), lambda i: (0, 0))
    kernel = pbkern.kernel(
        body, name="layer_norm", grid=(pbkern.cdiv(rows, block),), in_specs=[tile, whole, whole], out_specs=tile,
        out_shape=s(rows, columns), compiler_params=order("parallel"),
    )  # fmt: skip
    return Case(kernel, plain, (numbers(rows, columns), numbers(1, columns), numbers(1, columns)))


def softmax(rows=19, columns=33, block=8):
    def body(x, o):
        exponentials = jnp.exp(x[...] - x[...].max(1, keepdims=True))
        o[...] = exponentials / exponentials.sum(1, keepdims=True)

    tile = BS((block, columns), lambda i: (i, 0))
    kernel = pbkern.kernel(
        body, name="softmax", grid=(pbkern.cdiv(rows, block),), in_specs=[tile], out_specs=tile,
        out_shape=s(rows, columns),
    )  # fmt: skip
    return Case(kernel, jax.nn.softmax, (numbers(rows, columns),))


def whole_softmax():
    """No block reaches over an edge, so that the derivative reads the result."""
    return softmax(rows=16, columns=9)


def matmul(size=48, block=16):
    """The sum over a sequential dimension lives in scratch."""

    def body(a, b, o, acc):
        @pbkern.when(pbkern.program_id(2) == 0)
        def _():
            acc[...] = jnp.zeros_like(acc)

        acc[...] += jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

        @pbkern.when(pbkern.program_id(2) == pbkern.num_programs(2) - 1)
        def _():
            o[...] = jnp.tanh(acc[...] * 0.05)

    shape = (block, block)
    kernel = pbkern.kernel(
        body, name="matmul", grid=(size // block,) * 3, out_shape=s(size, size),
        in_specs=[BS(shape, lambda i, j, k: (i, k)), BS(shape, lambda i, j, k: (k, j))],
        out_specs=BS(shape, lambda i, j, k: (i, j)), scratch_shapes=[pbkern.Scratch(shape, jnp.float32)],
        compiler_params=order("parallel", "parallel", "arbitrary"),
    )  # fmt: skip
    operands = numbers(size, size), numbers(size, size, seed=1)
    return Case(kernel, lambda a, b: jnp.tanh(a @ b * 0.05), operands)


def matmul_in_results(size=32, block=8):
    """The sum over a sequential dimension lives in the result."""

    def body(a, b, o):
        @pbkern.when(pbkern.program_id(2) == 0)
        def _():
            o[...] = jnp.zeros_like(o)

        o[...] += a[...] @ jnp.sin(b[...])

    shape = (block, block)
    kernel = pbkern.kernel(
        body, name="matmul_in_results", grid=(size // block,) * 3, out_shape=s(size, size),
        in_specs=[BS(shape, lambda i, j, k: (i, k)), BS(shape, lambda i, j, k: (k, j))],
        out_specs=BS(shape, lambda i, j, k: (i, j)), compiler_params=order("parallel", "parallel", "arbitrary"),
    )  # fmt: skip
    operands = numbers(size, size), numbers(size, size, seed=1)
    return Case(kernel, lambda a, b: a @ jnp.sin(b), operands)


def attention(heads=2, tokens=48, columns=8, block=16):
    """Causal, with an online softmax: three buffers are carried over blocks of keys."""
    scale = columns**-0.5

    def body(q, k, v, o, largest, total, acc):
        row, column = pbkern.program_id(1), pbkern.program_id(2)

        @pbkern.when(column == 0)
        def _():
            largest[...] = jnp.full_like(largest, MASKED)
            total[...] = jnp.zeros_like(total)
            acc[...] = jnp.zeros_like(acc)

        @pbkern.when(column <= row)
        def _():
            rows = row * block + jax.lax.broadcasted_iota(jnp.int32, (block, block), 0)
            columns = column * block + jax.lax.broadcasted_iota(jnp.int32, (block, block), 1)
            scores = jnp.where(rows >= columns, jnp.dot(q[0] * scale, k[0].T), MASKED)
            now = jnp.maximum(largest[...], scores.max(1, keepdims=True))
            weights, shrunk = jnp.exp(scores - now), jnp.exp(largest[...] - now)
            total[...] = total[...] * shrunk + weights.sum(1, keepdims=True)
            acc[...] = acc[...] * shrunk + jnp.dot(weights, v[0])
            largest[...] = now

        @pbkern.when(column == pbkern.num_programs(2) - 1)
        def _():
            o[0] = acc[...] / total[...]

    def plain(q, k, v):
        scores = jnp.einsum("hqd,hkd->hqk", q, k) * scale
        scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, MASKED)
        return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores), v)

    queries = BS((1, block, columns), lambda h, i, j: (h, i, 0))
    keys = BS((1, block, columns), lambda h, i, j: (h, j, 0))
    kernel = pbkern.kernel(
        body, name="attention", grid=(heads, tokens // block, tokens // block), in_specs=[queries, keys, keys],
        out_specs=queries, out_shape=s(heads, tokens, columns),
        scratch_shapes=[pbkern.Scratch((block, width), jnp.float32) for width in (1, 1, columns)],
        compiler_params=order("parallel", "parallel", "arbitrary"),
    )  # fmt: skip
    return Case(kernel, plain, tuple(numbers(heads, tokens, columns, seed=n) for n in range(3)))


def stencil(size=70, block=16):
    """Blocks of the operand overlap."""

    def body(x, w, o):
        o[...] = x[:block] * w[0] + x[1 : block + 1] ** 2 * w[1] + jnp.sin(x[2:]) * w[2]

    def plain(x, w):
        return x[:-2] * w[0] + x[1:-1] ** 2 * w[1] + jnp.sin(x[2:]) * w[2]

    halo = BS((pbkern.Element(block + 2, (0, block)),), lambda i: (i * block,))
    kernel = pbkern.kernel(
        body, name="stencil", grid=(pbkern.cdiv(size - 2, block),), in_specs=[halo, BS()],
        out_specs=BS((block,), lambda i: (i,)), out_shape=s(size - 2),
    )  # fmt: skip
    return Case(kernel, plain, (numbers(size), numbers(3)))


def prefix_sum(rows=32, columns=8, block=8, square=True):
    """The last sum goes on to the next step."""

    def body(x, o, carried):
        @pbkern.when(pbkern.program_id(0) == 0)
        def _():
            carried[...] = jnp.zeros_like(carried)

        sums = jnp.cumsum(x[...], 0) + carried[...]
        o[...] = sums * sums if square else sums
        carried[...] = sums[block - 1 :]

    tile = BS((block, columns), lambda i: (i, 0))
    kernel = pbkern.kernel(
        body, name="prefix_sum", grid=(rows // block,), in_specs=[tile], out_specs=tile, out_shape=s(rows, columns),
        scratch_shapes=[pbkern.Scratch((1, columns), jnp.float32)],
    )  # fmt: skip
    return Case(kernel, lambda x: jnp.cumsum(x, 0) ** 2, (numbers(rows, columns),))


def recurrence(rows=32, columns=16, block=4):
    """The state of each step is what the next one multiplies."""

    def body(x, w, o, state):
        @pbkern.when(pbkern.program_id(0) == 0)
        def _():
            state[...] = jnp.zeros_like(state)

        state[...] = jnp.tanh(state[...] * w[...] + x[...].sum(0, keepdims=True) * 0.2)
        o[...] = state[...] * x[...]

    def plain(x, w):
        def step(state, part):
            state = jnp.tanh(state * w + part.sum(0, keepdims=True) * 0.2)
            return state, state * part

        parts = x.reshape(rows // block, block, columns)
        return jax.lax.scan(step, jnp.zeros((1, columns), x.dtype), parts)[1].reshape(x.shape)

    tile, whole = BS((block, columns), lambda i: (i, 0)), BS((1, columns), lambda i: (0, 0))
    kernel = pbkern.kernel(
        body, name="recurrence", grid=(rows // block,), in_specs=[tile, whole], out_specs=tile,
        out_shape=s(rows, columns), scratch_shapes=[pbkern.Scratch((1, columns), jnp.float32)],
        compiler_params=order("arbitrary"),
    )  # fmt: skip
    return Case(kernel, plain, (numbers(rows, columns), numbers(1, columns)))


def segment_sum(columns=8):
    """A prefetched operand says where each row is added."""
    segments, count = np.array([0, 0, 1, 1, 1, 2, 3, 3, 3, 3], np.int32), 4

    def body(segment, x, o):
        here = pbkern.program_id(0)

        @pbkern.when((here == 0) | (segment[here] != segment[jnp.maximum(here - 1, 0)]))
        def _():
            o[...] = jnp.zeros_like(o)

        o[...] += x[...] * x[...]

    spec = pbkern.GridSpec(
        grid=(len(segments),), in_specs=[BS((1, columns), lambda i, segment: (i, 0))],
        out_specs=BS((1, columns), lambda i, segment: (segment[i], 0)), num_scalar_prefetch=1,
    )  # fmt: skip
    kernel = pbkern.kernel(body, name="segment_sum", grid_spec=spec, out_shape=s(count, columns))

    def plain(segment, x):
        return jax.ops.segment_sum(x * x, segment, count)

    return Case(kernel, plain, (segments, numbers(len(segments), columns)))


def picked_rows(columns=8):
    """A prefetched operand says which row each program reads; some are read twice, some by nobody."""
    rows = np.array([3, 0, 3, 5], np.int32)

    def body(row, x, o):
        o[...] = jnp.exp(x[...])

    spec = pbkern.GridSpec(
        grid=(len(rows),), in_specs=[BS((1, columns), lambda i, row: (row[i], 0))],
        out_specs=BS((1, columns), lambda i, row: (i, 0)), num_scalar_prefetch=1,
    )  # fmt: skip
    kernel = pbkern.kernel(body, name="picked_rows", grid_spec=spec, out_shape=s(4, columns))
    return Case(kernel, lambda row, x: jnp.exp(x[row]), (rows, numbers(6, columns)))


def histogram(size=32, block=8, bins=5):
    def body(bin_of, weight, o):
        @pbkern.when(pbkern.program_id(0) == 0)
        def _():
            o[...] = jnp.zeros_like(o)

        pbkern.atomic_add(o, bin_of[...], weight[...] ** 2)

    tile = BS((block,), lambda i: (i,))
    kernel = pbkern.kernel(
        body, name="histogram", grid=(size // block,), in_specs=[tile, tile], out_specs=BS(), out_shape=s(bins),
    )  # fmt: skip
    bin_of = np.random.default_rng(1).integers(0, bins, size).astype(np.int32)

    def plain(bin_of, weight):
        return jnp.zeros(bins, weight.dtype).at[bin_of].add(weight**2)

    return Case(kernel, plain, (bin_of, numbers(size)))


def loops(rows=12, columns=8):
    """A loop of known length over rows, and a condition of a value."""

    def body(x, o):
        @pbkern.loop(0, rows, init=jnp.ones(columns, jnp.float32))
        def product(row, carry):
            return carry * jnp.cos(x[row])

        o[...] = product

        @pbkern.when(x[0, 0] > 0)
        def _():
            o[...] = product * x[1]

    def plain(x):
        product = jnp.cos(x).prod(0)
        return jnp.where(x[0, 0] > 0, product * x[1], product)

    kernel = pbkern.kernel(body, name="loops", out_shape=s(columns))
    return Case(kernel, plain, (abs(numbers(rows, columns)),))


def rounds_of_programs(rows=6, columns=8):
    """A loop whose length is the program's number, and one that a prefetched number ends."""
    lengths = np.random.default_rng(2).integers(-1, 4, rows).astype(np.int32)

    def body(length, x, o):
        row = pbkern.program_id(0)

        @pbkern.loop(0, row + 1, init=jnp.ones(columns, jnp.float32))
        def product(here, carry):
            return carry * jnp.cos(x[here]) + x[here]

        @pbkern.loop(1, jnp.minimum(length[row], 3), init=product)
        def power(turn, carry):
            return carry * product * turn

        o[0] = power

    spec = pbkern.GridSpec(
        grid=(rows,), in_specs=[BS()], out_specs=BS((1, columns), lambda i, length: (i, 0)),
        num_scalar_prefetch=1,
    )  # fmt: skip
    kernel = pbkern.kernel(
        body, name="rounds_of_programs", grid_spec=spec, out_shape=s(rows, columns)
    )

    def plain(length, x):
        products = [jnp.ones(columns, x.dtype)]
        for row in range(rows):
            products.append(products[-1] * jnp.cos(x[row]) + x[row])
        rows_of = zip(products[1:], lengths)
        return jnp.stack([p ** max(min(n, 3), 1) * max(min(n, 3) - 1, 1) for p, n in rows_of])

    return Case(kernel, plain, (lengths, numbers(rows, columns)))


def masked_edges(size=37, block=8):
    """Masked accesses that reach outside, a strided one, and a sum of positions that are inside."""

    def body(x, o, part):
        inside = pbkern.in_bounds(x, 0)
        position = jax.lax.iota(jnp.int32, block)
        here = jnp.minimum(block, size - pbkern.program_id(0) * block)
        next_ = pbkern.load(x, pbkern.ds(1, block), mask=position < here - 1, other=2.0)
        pbkern.store(o, ..., jnp.where(inside, x[...], 0) * next_, mask=inside)
        part[0] = x[0:block:2].sum() * 0 + jnp.where(inside, x[...] ** 2, 0).sum()

    def plain(x):
        last = (jnp.arange(size) % block == block - 1) | (jnp.arange(size) == size - 1)
        squares = jnp.pad(x**2, (0, -size % block)).reshape(-1, block)
        return x * jnp.where(last, 2.0, jnp.roll(x, -1)), squares.sum(1)

    tile = BS((block,), lambda i: (i,))
    blocks = pbkern.cdiv(size, block)
    kernel = pbkern.kernel(
        body, name="masked_edges", grid=(blocks,), in_specs=[tile],
        out_specs=[tile, BS((1,), lambda i: (i,))], out_shape=[s(size), s(blocks)],
    )  # fmt: skip
    return Case(kernel, plain, (numbers(size),))


def updated_in_place(rows=24, columns=8, block=8):
    """A result shares its operand's memory, and keeps rows that no program visits."""

    def body(x, y, o):
        o[...] = jnp.sin(x[...]) * y[...]

    tile = BS((block, columns), lambda i: (2 * i, 0))
    kernel = pbkern.kernel(
        body, name="updated_in_place", grid=(2,), in_specs=[tile, BS((block, columns), lambda i: (i, 0))],
        out_specs=tile, out_shape=s(rows, columns), input_output_aliases={0: 0},
    )  # fmt: skip

    def plain(x, y):
        new = jnp.sin(x[::1]) * jnp.concatenate([y[:block], y[:block], y[block:]])
        return jnp.concatenate([new[:block], x[block : 2 * block], new[2 * block :]])

    return Case(kernel, plain, (numbers(rows, columns), numbers(2 * block, columns, seed=1)))


def mean_of_squares(size=40, block=8):
    """A last stage adds up what the programs computed."""

    @pbkern.kernel(out_shape=s())
    def total(parts, o):
        o[...] = jnp.sqrt(parts[...].sum() / size)

    def body(x, o):
        o[0] = (x[...] ** 2).sum()

    kernel = pbkern.kernel(
        body, name="mean_of_squares", grid=(size // block,), in_specs=[BS((block,), lambda i: (i,))],
        out_specs=BS((1,), lambda i: (i,)), out_shape=s(size // block), finish=total,
    )  # fmt: skip
    return Case(kernel, lambda x: jnp.sqrt((x * x).mean()), (numbers(size),))


CASES = {
    case.__name__: case
    for case in (
        layer_norm, softmax, whole_softmax, matmul, matmul_in_results, attention, stencil, prefix_sum, recurrence, segment_sum,
        picked_rows, histogram, loops, rounds_of_programs, masked_edges, updated_in_place, mean_of_squares,
    )
}  # fmt: skip
