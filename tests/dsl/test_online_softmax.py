"""Derivatives of kernels that carry an online softmax over blocks of keys, against plain functions in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.dsl.transformations.backward import backward_plan, final_states
from pbkern.dsl.transformations.last_maxima import online_softmax

from .differentiable_kernels import BS, Case, numbers, order, s
from .test_derivatives import close, exactly, floats_of, of_floats, pulled

HEADS, TOKENS, COLUMNS, BLOCK = 2, 48, 8, 16
LARGE = -1e30
GRID = (HEADS, TOKENS // BLOCK, TOKENS // BLOCK)
QUERIES = BS((None, BLOCK, COLUMNS), lambda h, i, j: (h, i, 0))
KEYS = BS((None, BLOCK, COLUMNS), lambda h, i, j: (h, j, 0))
ROWS = BS((None, BLOCK), lambda h, i, j: (h, i))


def scores_of(q, k, causal=True, fill=LARGE):
    """Scores of this program's block."""
    row, column = pbkern.program_id(1), pbkern.program_id(2)
    scores = jnp.dot(q, k.T, preferred_element_type=jnp.float32) * COLUMNS**-0.5
    if not causal:
        return scores, jnp.ones((BLOCK, BLOCK), bool)
    rows = row * BLOCK + jax.lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), 0)
    columns = column * BLOCK + jax.lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), 1)
    return jnp.where(rows >= columns, scores, fill), rows >= columns


def is_first():
    return pbkern.program_id(2) == 0


def is_last():
    return pbkern.program_id(2) == pbkern.num_programs(2) - 1


def is_needed(causal=True):
    return pbkern.program_id(2) <= pbkern.program_id(1) if causal else True


def reset(m, l, acc, fill=LARGE):
    @pbkern.when(is_first())
    def _():
        m[...] = jnp.full_like(m, fill)
        l[...] = jnp.zeros_like(l)
        acc[...] = jnp.zeros_like(acc)


def when_needed(skip):
    """Runs a step in programs whose scores are not all masked, or in each of them."""
    return pbkern.when(is_needed()) if skip else lambda step: step()


def columns_of_rows(q, k, v, o, m, l, acc, *, causal=True, skip=True, fill=LARGE):
    """Scratch of one column; `l` and `acc` first."""
    reset(m, l, acc, fill)

    @when_needed(causal and skip)
    def _():
        scores, _ = scores_of(q[...], k[...], causal, fill)
        new = jnp.maximum(m[...], scores.max(1, keepdims=True))
        p, shrunk = jnp.exp(scores - new), jnp.exp(m[...] - new)
        l[...] = l[...] * shrunk + p.sum(1, keepdims=True)
        acc[...] = acc[...] * shrunk + jnp.dot(
            p.astype(v.dtype), v[...], preferred_element_type=jnp.float32
        )
        m[...] = new

    @pbkern.when(is_last())
    def _():
        o[...] = (acc[...] / l[...]).astype(o.dtype)


def vectors(q, k, v, o, lse, m, l, acc):
    """Scratch of one dimension, and the logarithm of the sum of exponentials as a result."""
    reset(m, l, acc, -jnp.inf)

    @when_needed(True)
    def _():
        scores, _ = scores_of(q[...], k[...], fill=-jnp.inf)
        old = m[...]
        m[...] = jnp.maximum(jnp.max(scores, axis=-1), old)
        shrunk = jnp.exp(old - m[...])
        p = jnp.exp(scores - m[...][:, None])
        acc[...] = shrunk[:, None] * acc[...] + p @ v[...]
        l[...] = shrunk * l[...] + p.sum(-1)

    @pbkern.when(pbkern.program_id(2) >= TOKENS // BLOCK - 1)
    def _():
        o[...] = acc[...] / l[...][:, None]
        lse[...] = m[...] + jnp.log(l[...])


def wide(q, k, v, o, m, l, acc):
    """Scratch as wide as a vector of a TPU, weights that are masked, and a quotient that divides by no zero."""
    reset(m, l, acc)
    width = m.shape[1]

    @when_needed(True)
    def _():
        scores, is_seen = scores_of(q[...], k[...])
        old = m[...]
        new = jnp.maximum(old, jnp.max(scores, 1)[:, None])
        p = jnp.where(is_seen, jnp.exp(scores - jnp.tile(new, (1, BLOCK // width))), 0.0)
        shrunk = jnp.exp(old - new)
        m[...] = new
        l[...] = shrunk * l[...] + jnp.sum(p, 1)[:, None]
        acc[...] = acc[...] * jax.lax.broadcast_in_dim(shrunk[:, 0], acc.shape, (0,)) + p @ v[...]

    @pbkern.when(is_last())
    def _():
        total = l[:, :1]
        o[...] = acc[...] * (1.0 / jnp.where(total == 0.0, 1.0, total))


def powers_of_two(q, k, v, o, m, l, acc):
    reset(m, l, acc, -jnp.inf)

    @when_needed(False)
    def _():
        scores, _ = scores_of(q[...] * 1.4426950408889634, k[...], fill=-jnp.inf)
        new = jnp.maximum(m[...], scores.max(1, keepdims=True))
        p, shrunk = jnp.exp2(scores - new), jnp.exp2(m[...] - new)
        l[...] = l[...] * shrunk + p.sum(1, keepdims=True)
        acc[...] = acc[...] * shrunk + jnp.dot(p, v[...])
        m[...] = new

    @pbkern.when(is_last())
    def _():
        o[...] = acc[...] / l[...]


def loop_over_parts(q, k, v, o, m, l, acc):
    """Each program goes over the keys of its block in parts."""
    reset(m, l, acc)
    part = BLOCK // 2

    @when_needed(True)
    def _():
        def step(n, carry):
            scores, _ = scores_of(q[...], k[...])
            scores = jax.lax.dynamic_slice_in_dim(scores, n * part, part, 1)
            old, total, result = carry
            new = jnp.maximum(old, scores.max(1, keepdims=True))
            p, shrunk = jnp.exp(scores - new), jnp.exp(old - new)
            values = jax.lax.dynamic_slice_in_dim(v[...], n * part, part, 0)
            return new, total * shrunk + p.sum(1, keepdims=True), result * shrunk + p @ values

        m[...], l[...], acc[...] = jax.lax.fori_loop(0, 2, step, (m[...], l[...], acc[...]))

    @pbkern.when(is_last())
    def _():
        o[...] = acc[...] / l[...]


def normalized(q, k, v, o, m, l, acc, *, spelled):
    """The accumulator is divided by the sum in each step, as in the first paper on FlashAttention."""
    reset(m, l, acc, LARGE)

    @when_needed(True)
    def _():
        scores, _ = scores_of(q[...], k[...])
        new = jnp.maximum(m[...], scores.max(1, keepdims=True))
        p, shrunk = jnp.exp(scores - new), jnp.exp(m[...] - new)
        total = l[...] * shrunk + p.sum(1, keepdims=True)
        acc[...] = spelled(acc[...], shrunk * l[...], p @ v[...], total)
        m[...], l[...] = new, total

    @pbkern.when(is_last())
    def _():
        o[...] = acc[...]


def guarded(old, weight, added, total):
    """As in JAX's kernel for TPUs."""
    inverse = jnp.where(total == 0.0, 1.0, 1.0 / total)
    return old * jnp.broadcast_to(weight * inverse, old.shape) + added * inverse


def guarded_divisor(old, weight, added, total):
    return (weight * old + added) / jnp.where(total > 0, total, 1.0)


def normalized_vectors(q, k, v, o, m, l, acc):
    """The same in scratch of one dimension, in a loop over parts of a block."""
    reset(m, l, acc)
    part = BLOCK // 2

    @when_needed(True)
    def _():
        def step(n, carry):
            scores, _ = scores_of(q[...], k[...])
            scores = jax.lax.dynamic_slice_in_dim(scores, n * part, part, 1)
            old, sums, result = carry
            new = jnp.maximum(old, scores.max(1))
            p = jnp.exp(scores - new[:, None])
            rest = jnp.exp(old - new) * sums
            total = rest + p.sum(1)
            values = jax.lax.dynamic_slice_in_dim(v[...], n * part, part, 0)
            return new, total, result * (rest / total)[:, None] + (p / total[:, None]) @ values

        m[...], l[...], acc[...] = jax.lax.fori_loop(0, 2, step, (m[...], l[...], acc[...]))

    @pbkern.when(is_last())
    def _():
        o[...] = acc[...]


def plain(q, k, v, causal=True, with_sum=False):
    scores = jnp.einsum("hqd,hkd->hqk", q, k) * COLUMNS**-0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), scores, -jnp.inf)
    result = jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores), v)
    return (result, jax.nn.logsumexp(scores, -1)) if with_sum else result


def case(body, function=plain, scratch=((BLOCK, 1), (BLOCK, 1)), results=1, dtype=np.float32):
    first = jax.ShapeDtypeStruct((HEADS, TOKENS, COLUMNS), dtype)
    kernel = pbkern.kernel(
        body, name="attention", grid=GRID, in_specs=[QUERIES, KEYS, KEYS],
        out_specs=[QUERIES, *[ROWS] * (results - 1)] if results > 1 else QUERIES,
        out_shape=[first, *[s(HEADS, TOKENS)] * (results - 1)] if results > 1 else first,
        scratch_shapes=[pbkern.Scratch(shape, jnp.float32) for shape in (*scratch, (BLOCK, COLUMNS))],
        compiler_params=order("parallel", "parallel", "arbitrary"),
    )  # fmt: skip
    operands = tuple(numbers(HEADS, TOKENS, COLUMNS, seed=n).astype(dtype) for n in range(3))
    return Case(kernel, function, operands)


FORMS = {
    "columns": lambda: case(columns_of_rows),
    "all blocks": lambda: case(functools.partial(columns_of_rows, skip=False)),
    "minus infinity": lambda: case(functools.partial(columns_of_rows, fill=-jnp.inf)),
    "no mask": lambda: case(
        functools.partial(columns_of_rows, causal=False), functools.partial(plain, causal=False)
    ),
    "vectors": lambda: case(
        vectors, functools.partial(plain, with_sum=True), ((BLOCK,), (BLOCK,)), results=2
    ),
    "wide": lambda: case(wide, scratch=((BLOCK, 8), (BLOCK, 8))),
    "powers of two": lambda: case(powers_of_two),
    "loop over parts": lambda: case(loop_over_parts),
    "normalized": lambda: case(
        functools.partial(normalized, spelled=lambda old, w, added, l: (w * old + added) / l)
    ),
    "normalized, apart": lambda: case(
        functools.partial(normalized, spelled=lambda old, w, added, l: old * (w / l) + added / l)
    ),
    "normalized, by inverses": lambda: case(functools.partial(normalized, spelled=guarded)),
    "normalized, guarded": lambda: case(functools.partial(normalized, spelled=guarded_divisor)),
    "normalized vectors": lambda: case(normalized_vectors, scratch=((BLOCK,), (BLOCK,))),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMS)
def test_no_states_are_saved(name):
    """The derivative is that of the plain function, and reads the last maximum where it would read those on the way."""
    form = FORMS[name]()
    close(pulled(of_floats(form.kernel, form), floats_of(form)), exactly(pulled, form))
    kernel = form.traced()
    finals = final_states(kernel, form.active)
    assert finals[:2] == (0, 1)
    assert backward_plan(kernel, form.active, None, finals).saved == ()


def test_sixteen_bits():
    """Maxima, sums and the derivative's probabilities are float32; operands and result are bfloat16."""
    form = case(columns_of_rows, dtype=jnp.bfloat16)
    wide_operands = [np.asarray(x, np.float64) for x in form.operands]
    with jax.enable_x64(True):
        want = jax.grad(lambda *xs: (plain(*xs) ** 2).sum(), (0, 1, 2))(*wide_operands)
    got = jax.grad(lambda *xs: (form.kernel(*xs).astype(jnp.float32) ** 2).sum(), (0, 1, 2))(
        *map(jnp.asarray, form.operands)
    )
    for found, exact in zip(got, want):
        error = abs(np.asarray(found, np.float64) - np.asarray(exact)).max()
        assert error <= 2**-6 * abs(np.asarray(exact)).max()  # some times bfloat16's spacing
    kernel = form.traced()
    assert backward_plan(kernel, (True,) * 3, None, final_states(kernel, (True,) * 3)).saved == ()


@pytest.mark.parametrize("name", ["columns", "normalized, by inverses"])
def test_gradients_of_stacked_operands_and_of_gradients(name):
    form = FORMS[name]()
    xs = [np.stack([x, x[::-1]]) for x in form.operands]

    def moved(function):
        def gradient(*xs):
            return jax.grad(lambda *xs: (function(*xs) ** 2).sum(), (0, 1, 2))(*xs)

        def twice(q, k, v):
            return jax.grad(lambda q: sum((g * g).sum() for g in gradient(q, k, v)))(q)

        return jax.vmap(gradient)(*xs), twice(*form.operands)

    with jax.enable_x64(True):
        xs = [np.asarray(x, np.float64) for x in xs]
        form = form._replace(operands=tuple(np.asarray(x, np.float64) for x in form.operands))
        want = jax.tree.map(np.asarray, moved(plain))
    form = FORMS[name]()
    xs = [x.astype(np.float32) for x in xs]
    for got, exact in zip(jax.tree.leaves(moved(form.kernel)), jax.tree.leaves(want), strict=True):
        assert abs(np.asarray(got) - exact).max() <= 1e-5 * abs(exact).max()


# --- kernels whose results depend on the maxima, or on sums on the way
# ------------------------------------------------------------------------------------------------


def programs(q, k, v, step, restarts=(0,)):
    """What a step leaves of (maxima, sums, products) in each program: a line's programs for each head and block of rows."""
    for head in range(HEADS):
        for row in range(TOKENS // BLOCK):
            states, line = None, []
            for column in range(TOKENS // BLOCK):
                if column in restarts:
                    states = (
                        jnp.full((BLOCK, 1), LARGE, q.dtype),
                        jnp.zeros((BLOCK, 1), q.dtype),
                        jnp.zeros((BLOCK, COLUMNS), q.dtype),
                    )
                own, seen = (slice(n * BLOCK, (n + 1) * BLOCK) for n in (row, column))
                scores = q[head, own] @ k[head, seen].T * COLUMNS**-0.5
                states = step(scores, v[head, seen], *states)
                line.append(states)
            yield line


def softmax_step(scores, v, m, l, acc):
    new = jnp.maximum(m, scores.max(1, keepdims=True))
    p, shrunk = jnp.exp(scores - new), jnp.exp(m - new)
    return new, l * shrunk + p.sum(1, keepdims=True), acc * shrunk + p @ v


def step_without_scaling(scores, v, m, l, acc):
    new, l, _ = softmax_step(scores, v, m, l, acc)
    return new, l, acc + jnp.exp(scores - new) @ v


def step_with_halves(scores, v, m, l, acc):
    """Sums and products are scaled by different powers."""
    new = jnp.maximum(m, scores.max(1, keepdims=True))
    p, shrunk = jnp.exp(scores - new), jnp.exp(0.5 * (m - new))
    return new, l * shrunk + p.sum(1, keepdims=True), acc * shrunk + p @ v


def step_of_columns(scores, v, m, l, acc):
    """What a row was scaled by scales a column."""
    new, l, _ = softmax_step(scores, v, m, l, acc)
    shrunk = jnp.exp(m - new)[:COLUMNS].T
    return new, l, acc * shrunk + jnp.exp(scores - new) @ v


def step_divided_before(scores, v, m, l, acc):
    """The accumulator is divided by the sum before what is added to it."""
    new, total, _ = softmax_step(scores, v, m, l, acc)
    p = jnp.exp(scores - new)
    return new, total, (acc * l * jnp.exp(m - new) + p @ v) / (total - p.sum(1, keepdims=True) / 2)


def step_averaged(scores, v, m, l, acc):
    """The old accumulator counts as much as the new part."""
    new, total, _ = softmax_step(scores, v, m, l, acc)
    p = jnp.exp(scores - new)
    return new, total, 0.5 * acc + p @ v / total


def step_with_other_inverses(scores, v, m, l, acc):
    """What divides some rows is twice the sum."""
    new, total, _ = softmax_step(scores, v, m, l, acc)
    inverse = jnp.where(total > 2.0, 1 / total, 0.5 / total)
    return new, total, (acc * l * jnp.exp(m - new) + jnp.exp(scores - new) @ v) * inverse


def quotient(m, l, acc):
    return acc / l


def body_of(step, stored, restarts=(0,), at=(TOKENS // BLOCK - 1,)):
    def body(q, k, v, o, m, l, acc):
        column = pbkern.program_id(2)
        is_start = functools.reduce(lambda a, b: a | b, [column == n for n in restarts])

        @pbkern.when(is_start)
        def _():
            m[...] = jnp.full_like(m, LARGE)
            l[...] = jnp.zeros_like(l)
            acc[...] = jnp.zeros_like(acc)

        scores, _ = scores_of(q[...], k[...], causal=False)
        m[...], l[...], acc[...] = step(scores, v[...], m[...], l[...], acc[...])
        for n, place in enumerate(at):

            @pbkern.when(column == place)
            def _(n=n):
                o[n] = stored(m[...], l[...], acc[...])

    return body


DEPENDENT = {
    "sums themselves": (softmax_step, lambda m, l, acc: acc, (0,), (2,)),
    "maxima and quotients": (softmax_step, lambda m, l, acc: acc / l + m, (0,), (2,)),
    "a threshold of the maxima": (
        softmax_step, lambda m, l, acc: jnp.where(m > 0.5, acc / l, 2 * acc / l), (0,), (2,),
    ),
    "without scaling": (step_without_scaling, quotient, (0,), (2,)),
    "halves": (step_with_halves, quotient, (0,), (2,)),
    "columns for rows": (step_of_columns, quotient, (0,), (2,)),
    "two softmaxes in a line": (softmax_step, quotient, (0, 2), (1, 2)),
    "other divisors": (step_divided_before, lambda m, l, acc: acc, (0,), (2,)),
    "other inverses": (step_with_other_inverses, lambda m, l, acc: acc, (0,), (2,)),
    "averages": (step_averaged, lambda m, l, acc: acc, (0,), (2,)),
    "quotients on the way": (softmax_step, quotient, (0,), (0, 1, 2)),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DEPENDENT)
def test_other_recurrences_save_their_states(name):
    step, stored, restarts, at = DEPENDENT[name]

    def function(q, k, v):
        lines = programs(q, k, v, step, restarts)
        return jnp.stack([jnp.stack([stored(*line[n]) for n in at]) for line in lines])

    blocks = TOKENS // BLOCK
    kernel = pbkern.kernel(
        body_of(step, stored, restarts, at), name="recurrence", grid=GRID, in_specs=[QUERIES, KEYS, KEYS],
        out_specs=BS((None, len(at), BLOCK, COLUMNS), lambda h, i, j: (h * blocks + i, 0, 0, 0)),
        out_shape=s(HEADS * blocks, len(at), BLOCK, COLUMNS),
        scratch_shapes=[pbkern.Scratch((BLOCK, n), jnp.float32) for n in (1, 1, COLUMNS)],
    )  # fmt: skip
    operands = tuple(numbers(HEADS, TOKENS, COLUMNS, seed=n) for n in range(3))
    form = Case(kernel, function, operands)
    close(pulled(kernel, operands), exactly(pulled, form))
    assert final_states(form.traced(), form.active) == ()


def test_rows_without_a_score_are_those_of_the_states():
    """Sums of no exponentials are zero; the quotient that divides by one there has no derivative."""
    seen = jnp.arange(BLOCK) % 4 != 1

    def body(q, k, v, which, o, m, l, acc):
        reset(m, l, acc)
        scores, _ = scores_of(q[...], k[...], causal=False)
        mask = jnp.broadcast_to(which[...][:, None] > 0, scores.shape)
        scores = jnp.where(mask, scores, LARGE)
        new = jnp.maximum(m[...], scores.max(1, keepdims=True))
        p = jnp.where(mask, jnp.exp(scores - new), 0.0)
        shrunk = jnp.exp(m[...] - new)
        l[...] = l[...] * shrunk + p.sum(1, keepdims=True)
        acc[...] = acc[...] * shrunk + p @ v[...]
        m[...] = new

        @pbkern.when(is_last())
        def _():
            o[...] = acc[...] / jnp.where(l[...] == 0.0, 1.0, l[...])

    kernel = pbkern.kernel(
        body, name="masked", grid=GRID, in_specs=[QUERIES, KEYS, KEYS, BS()], out_specs=QUERIES,
        out_shape=s(HEADS, TOKENS, COLUMNS),
        scratch_shapes=[pbkern.Scratch((BLOCK, n), jnp.float32) for n in (1, 1, COLUMNS)],
    )  # fmt: skip

    def function(q, k, v):
        rows = jnp.tile(seen, TOKENS // BLOCK)[:, None]
        return jnp.where(rows, plain(q, k, v, causal=False), 0.0)

    operands = tuple(numbers(HEADS, TOKENS, COLUMNS, seed=n) for n in range(3))
    form = Case(lambda *xs: kernel(*xs, seen.astype(np.float32)), function, operands)
    close(pulled(form.kernel, operands), exactly(pulled, form))
    traced = kernel.trace(*operands, seen.astype(np.float32))
    assert final_states(traced, (True, True, True, False))[0] == 0


def test_one_softmax_is_found_among_others():
    form = FORMS["columns"]()
    softmax = online_softmax(form.traced())
    assert (softmax.line, softmax.maximum, softmax.products) == ((2,), 0, (1, 2))
