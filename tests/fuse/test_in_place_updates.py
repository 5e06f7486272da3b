"""Updates of small windows: which of them copy nothing, and that they compute what JAX computes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import pbkern
from pbkern.dsl.host_program import Cond, Copy, HostWhile, Loop
from pbkern.fuse.partition.in_place_updates import InPlaceUpdates

from .checking import check, ints, planned, rand

CACHE = rand(64, 5)
ROWS = rand(7, 5, seed=1)


def put(a, row, at):
    return lax.dynamic_update_slice(a, row[None], (at, 0))


def scan(step, *carry):
    """The function (cache, rows) -> a scan of `step` over the rows, with the row's number in the carry."""

    def f(a, rows):
        (a, *rest, _), out = lax.scan(step, (a, *carry, jnp.int32(3)), rows)
        return a, *rest, out

    return f


def updated_and_read(c, row):
    a, at = c
    a = put(a, row, at)
    return (a, at + 1), a.sum(0)


def read_and_updated(c, row):
    a, at = c
    return (put(a, row + a[at - 1], at), at + 1), a[at]


def two_windows(c, row):
    a, at = c
    a = put(put(a, row, at), 2 * row, at + 1)
    return (a, at + 1), a @ row


def outside(c, row):
    a, at = c
    return (put(a, row, at * 40 - 200), at + 1), None


def columns(c, row):
    a, at = c
    return (lax.dynamic_update_slice(a, a[:3, 2:3] + row[0], (at * 2, at)), at + 1), a[:, 1].sum()


def points(c, row):
    a, at = c
    return (a.at[at, 2].set(row[0]).at[at + 1, 1].add(row[1]), at + 1), a[at]


def branches(c, row):
    a, at = c
    a = lax.cond(row[0] > 0, lambda a: put(a, row, at), lambda a: a, a)
    return (a, at + 1), a.sum(0)


def either_branch(c, row):
    a, at = c
    a = lax.cond(row[0] > 0, lambda a: put(a, row, at), lambda a: put(a, -row, at + 9), a)
    return (a, at + 1), a.sum(0)


def loop_in_loop(c, row):
    a, at = c
    a = lax.fori_loop(0, 4, lambda k, a: put(a, row + k, at + k * 3), a)
    return (a, at + 1), a.sum(0)


def beside_a_large_carry(c, row):
    a, u, at = c
    u = 0.5 * (jnp.roll(u, 1) + u)
    return (put(a, u[:5] + row, at), u, at + 1), None


def counted(a, rows):
    return lax.while_loop(
        lambda c: c[1] < 6, lambda c: (put(c[0], rows[c[1]], 8 * c[1]), c[1] + 1), (a, jnp.int32(0))
    )


def until(a, rows):
    return lax.while_loop(
        lambda c: c[0].sum() < 1e3,
        lambda c: (put(c[0], 40 + rows[c[1] % 7], 3 * c[1]), c[1] + 1),
        (a, jnp.int32(0)),
    )


def one_line(a, rows):
    return lax.scan(
        lambda c, row: ((c[0].at[c[1]].set(row.sum()), c[1] + 2), c[0][0]),
        (a[:, 0], jnp.int32(1)),
        rows,
    )


FORMS = {
    "updated and read": scan(updated_and_read),
    "read and updated": scan(read_and_updated),
    "two windows that overlap": scan(two_windows),
    "outside": scan(outside),
    "columns": scan(columns),
    "points": scan(points),
    "a branch": scan(branches),
    "either branch": scan(either_branch),
    "a loop in a loop": scan(loop_in_loop),
    "beside a large carry": scan(beside_a_large_carry, jnp.arange(5000.0)),
    "a while that counts": counted,
    "a while": until,
    "one line": one_line,
    "made in place": lambda a, rows: put(counted(a, rows)[0], rows[0], 63),
    "several at once": jax.vmap(scan(updated_and_read), (0, None)),
}
# An old value is read beside the new one.
COPYING = {
    "both": scan(lambda c, row: ((b := put(c[0], row, c[1]), c[1] + 1), (b * c[0]).sum())),
    "old one kept": lambda a, rows: lax.scan(
        lambda c, row: ((put(c[0], row, c[2]), c[0] + 1, c[2] + 1), None),
        (a, a, jnp.int32(0)),
        rows,
    ),
    "exchanged": lambda a, rows: lax.scan(
        lambda c, row: ((c[1], put(c[0], row, c[2]), c[2] + 1), None),
        (a, a + 1, jnp.int32(0)),
        rows,
    ),
    "in a branch, and read": scan(
        lambda c, row: (
            (lax.cond(row[0] > 0, lambda a: put(a, row, c[1]), lambda a: a, c[0]), c[1] + 1),
            c[0].sum(),
        )
    ),
}


def copied_in_loops(program, shape: tuple) -> list:
    """Copies of arrays of a shape, and kernels that store such arrays without an alias, which each step of a loop repeats."""
    repeated: list = []

    def visit(steps, inside):
        for step in steps:
            match step:
                case Loop(steps=inner):
                    visit(inner, True)
                case HostWhile(condition=condition, steps=inner):
                    visit((*condition, *inner), True)
                case Cond(branches=branches):
                    for branch in branches:
                        visit(branch, inside)
                case Copy(source=source):
                    if inside and source.type.shape == shape:
                        repeated.append(step)
                case _:
                    over = {result for _, result in step.kernel.aliases}
                    large = [
                        result
                        for n, result in enumerate(step.results)
                        if n not in over and result.type.shape == shape
                    ]
                    if inside and large:
                        repeated.append(step)

    visit(program.steps, False)
    return repeated


def compare(f, *args, **options):
    compiled, want = pbkern.jit(f, **options), jax.jit(f)(*args)
    got = compiled(*args)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)
    return compiled


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FORMS)
def test_loops_update_windows_in_place(name):
    batched = name == "several at once"
    cache = jnp.stack([CACHE, 2 * CACHE, -CACHE]) if batched else CACHE
    compare(FORMS[name], cache, ROWS)
    plan = check(FORMS[name], cache, ROWS)
    (program,) = plan.programs()
    shape = cache[:, 0].shape if name == "one line" else cache.shape
    assert not copied_in_loops(program, shape), program


@pytest.mark.parametrize("name", COPYING)
def test_what_is_read_beside_the_update_is_copied(name):
    compare(COPYING[name], CACHE, ROWS)


def donated(a, q, row, at):
    before = a[at].sum()
    a = put(a, row, at)
    return a, a @ q, before


def test_a_donated_array_is_updated_in_place():
    q, row = rand(5, seed=2), ROWS[0]
    for at in (-3, 0, 17, 63, 64, 99):
        a = jnp.array(CACHE)
        want, place = jax.jit(donated)(CACHE, q, row, at), a.unsafe_buffer_pointer()
        compiled = pbkern.jit(donated, donate_argnums=0)
        copied = [k for k in compiled.kernels(a, q, row, at) if not k.aliases]
        assert all(t.shape != a.shape for k in copied for t in k.out_types)
        got = compiled(a, q, row, at)
        assert a.is_deleted()
        assert got[0].unsafe_buffer_pointer() == place
        for x, y in zip(got, want):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def written_layers(a, rows, at):
    """A scan over layers that takes slices of a cache and gives them back, each with a line of its own."""

    def layer(total, given):
        lines, row = given
        lines = put(lines, row, at)
        return total + jnp.tanh(lines).sum(), lines

    return lax.scan(layer, jnp.float32(0), (a, rows))


def written_by_steps(a, rows, at):
    """A loop over steps, each of which writes a line of every layer."""
    return lax.fori_loop(0, 3, lambda n, a: a.at[:, at + n].set(rows * n), a), rows.sum()


def written_until(a, rows, at):
    return lax.while_loop(
        lambda carry: carry[1] < at,
        lambda carry: (carry[0].at[:, carry[1]].add(rows), carry[1] + 1),
        (a, 0),
    )


def written_if(a, rows, at):
    """A branch that hands the array on beside one whose loop writes to it."""
    return lax.cond(at > 5, lambda a: written_by_steps(a, rows, at)[0], lambda a: a, a), rows.sum()


def written_and_read(a, rows, at):
    """What the loop began with is read before it."""
    before = (a * 2).sum(1)
    return *written_by_steps(a, rows, at), before


LOOPS = [written_layers, written_by_steps, written_until, written_if, written_and_read]


@pytest.mark.parametrize("f", LOOPS)
def test_loops_write_to_donated_arrays(f):
    rows = jnp.stack([ROWS[0], 2 * ROWS[0], -ROWS[0]])
    compiled = pbkern.jit(f, donate_argnums=0)
    for at in (0, 4, 40):
        a = jnp.stack([CACHE, 2 * CACHE, -CACHE])
        want, place = jax.jit(f)(a, rows, at), a.unsafe_buffer_pointer()
        got = compiled(a, rows, at)
        assert a.is_deleted()
        results = jax.tree.leaves(got)
        assert place in [x.unsafe_buffer_pointer() for x in results]
        for x, y in zip(results, jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("f", LOOPS)
def test_loops_leave_arrays_that_are_not_donated(f):
    rows, a = jnp.stack([ROWS[0], 2 * ROWS[0], -ROWS[0]]), jnp.stack([CACHE, 2 * CACHE, -CACHE])
    inner = pbkern.jit(f, donate_argnums=0)
    want = jax.jit(f)(a, rows, 7)
    for g in (pbkern.jit(f), jax.jit(lambda *args: (inner(*args), args[0] + 1)[0])):
        for x, y in zip(jax.tree.leaves(g(a, rows, 7)), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)
        np.testing.assert_array_equal(a, jnp.stack([CACHE, 2 * CACHE, -CACHE]))


@pbkern.kernel(
    grid=(),
    in_specs=[pbkern.BlockSpec()] * 3,
    out_specs=[pbkern.BlockSpec()],
    out_shape=jax.ShapeDtypeStruct(CACHE.shape, CACHE.dtype),
    input_output_aliases={2: 0},
)
def written(at, row, a, out):
    out[pbkern.ds(at[...], 1), :] = row[...] + out[pbkern.ds(at[...], 1), :]


def put_by_hand(a, row, at):
    return written(jnp.asarray(at, jnp.int32), row[None], a)


def put_by_jax(a, row, at):
    return a.at[at].add(row)


# name -> (function of what writes a row, an array, rows and a place; whether it copies no array)
BY_HAND = {
    "loop": (
        lambda put, a, rows, at: lax.fori_loop(0, 5, lambda n, a: put(a, rows[n], at + n), a),
        True,
    ),
    "scan": (
        lambda put, a, rows, at: lax.scan(
            lambda a, row: (put(put(a, row, at), row, at + 1), row.sum()), a, rows
        ),
        True,
    ),
    "branch": (
        lambda put, a, rows, at: lax.cond(
            at > 3, lambda a: put(a, rows[0], at), lambda a: put(a, rows[1], 0), a
        ),
        True,
    ),
    "twice": (lambda put, a, rows, at: put(put(a, rows[0], at), rows[1], at + 1), True),
    "of what a kernel made": (lambda put, a, rows, at: (put(a * 2, rows[0], at), at), True),
    "read before": (lambda put, a, rows, at: ((a * 2).sum(), put(a, rows[0], at)), True),
    "read by what follows": (lambda put, a, rows, at: (b := put(a, rows[0], at), b * a), False),
    "a result as well": (lambda put, a, rows, at: (put(a, rows[0], at), a), False),
    "result of two": (lambda put, a, rows, at: (put(a, rows[0], at), put(a, rows[1], at)), False),
}


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("donated", [False, True])
def test_kernels_that_alias_an_operand(name, donated):
    """They write over it where nobody reads it later, and where it is donated."""
    f, in_place = BY_HAND[name]
    for at in (0, 7):
        a = jnp.array(CACHE)
        place = a.unsafe_buffer_pointer()
        want = jax.tree.leaves(jax.jit(f, static_argnums=0)(put_by_jax, a, ROWS, at))
        ours = pbkern.jit(functools.partial(f, put_by_hand), donate_argnums=0 if donated else ())
        got = jax.tree.leaves(ours(a, ROWS, at))
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)
        if donated and in_place and name != "of what a kernel made":
            assert place in [x.unsafe_buffer_pointer() for x in got if x.shape == CACHE.shape]
        if not donated:
            np.testing.assert_array_equal(a, CACHE)


@pytest.mark.parametrize("name", ["loop", "scan", "of what a kernel made"])
def test_kernels_that_alias_an_operand_copy_none_in_loops(name):
    plan = planned(functools.partial(BY_HAND[name][0], put_by_hand), CACHE, ROWS, 3)
    (program,) = plan.programs()
    assert not copied_in_loops(program, CACHE.shape), program
    copies = [step for step in program.all_steps() if isinstance(step, Copy)]
    assert all(step.source.buffer.startswith("in") for step in copies), program


def put_in_a_loop(a, row, at):
    return lax.fori_loop(0, 3, lambda n, a: a.at[at + n].set(row * n), a)


def singular_values(a):
    """XLA computes them."""
    return jnp.linalg.svd(a, compute_uv=False)


def read_by_xla_later(put, a, row, at):
    x = jnp.sin(a)
    return (put(x, row, at) * 2).sum(1), singular_values(x)


def made_and_read_by_xla(put, a, row, at):
    x = jnp.linalg.qr(a)[0]
    return put(x, row, at), singular_values(x)


def read_by_xla_between(put, a, row, at):
    x = jnp.sin(a)
    y = put(x, row, at)
    return y.sum(0) + singular_values(x), y.max()


def view_read_by_xla_later(put, a, row, at):
    x = jnp.sin(a)
    return (put(x, row, at) * 2).sum(1), singular_values(x.reshape(32, 10))


@pytest.mark.parametrize("put", [put_by_hand, put_by_jax, put_in_a_loop])
@pytest.mark.parametrize(
    "f",
    [read_by_xla_later, made_and_read_by_xla, read_by_xla_between, view_read_by_xla_later],
)
def test_what_xla_still_reads_is_not_touched(f, put):
    """XLA's part of a program runs behind the part with the update."""
    args = CACHE, ROWS[0], 5
    reference = put_by_jax if put is put_by_hand else put
    want = jax.jit(functools.partial(f, reference))(*args)
    for x, y in zip(pbkern.jit(functools.partial(f, put))(*args), want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_an_array_that_others_still_hold_is_not_touched():
    q, row, a = rand(5, seed=2), ROWS[0], jnp.array(CACHE)
    inner = pbkern.jit(donated, donate_argnums=0)
    for f in (pbkern.jit(donated), jax.jit(lambda *args: (inner(*args), args[0] + 1)[0])):
        for x, y in zip(f(a, q, row, 9), jax.jit(donated)(a, q, row, 9)):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)
        np.testing.assert_array_equal(a, CACHE)


def test_loops_in_loops_are_looked_through_once(monkeypatch):
    """Each loop is asked about each of its results, and not again by every loop around it."""
    asked = []
    of = InPlaceUpdates.of
    monkeypatch.setattr(
        InPlaceUpdates, "of", lambda self, *args: asked.append(args) or of(self, *args)
    )

    def nested(depth):
        if not depth:
            return lambda k, c: tuple(x.at[k % 9].add(1.0) for x in c)
        return lambda k, c: lax.fori_loop(0, 3, nested(depth - 1), c)

    counts = []
    for depth in (3, 6):
        asked.clear()
        planned(lambda *c, depth=depth: nested(depth)(0, c), *(rand(16, 3) for _ in range(4)))
        counts.append(len(asked))
    assert counts[1] < 5 * counts[0]


# ---- random steps: statements over two arrays, the step's row and its number ------------------------------------------


def block(a, row, at):
    return lax.dynamic_update_slice(a, jnp.outer(row[:2], row[:2]), (at, at - 1))


STATEMENTS = {
    "put": lambda a, b, row, at, old: (put(a, row, at), b),
    "block": lambda a, b, row, at, old: (block(a, row, at), b),
    "set": lambda a, b, row, at, old: (a.at[at, 1].set(row[0]), b),
    "add": lambda a, b, row, at, old: (a.at[at].add(row), b),
    "add twice": lambda a, b, row, at, old: (a.at[jnp.array([at, at])].add(row), b),
    "shift": lambda a, b, row, at, old: (put(a, a[at - 1] + row, at), b),
    "swap": lambda a, b, row, at, old: (put(put(a, a[0], at), a[at % len(a)], 0), b),
    "put the sum": lambda a, b, row, at, old: (put(a, a.sum(0) % 7, at), b),
    "put in the other": lambda a, b, row, at, old: (a, b.at[at].set(a[0, 0])),
    "read the other": lambda a, b, row, at, old: (put(a, b[:3] + row, at), b),
    "put the old": lambda a, b, row, at, old: (put(a, old[at % len(a)], 1), b),
    "branch": lambda a, b, row, at, old: (
        lax.cond(row[0] > 0, lambda a: put(a, row, at), lambda a: put(put(a, row, 0), row, at), a),
        b,
    ),
    "loop": lambda a, b, row, at, old: (
        lax.fori_loop(0, 3, lambda k, a: put(a, a[k] + row, at - k), a),
        b,
    ),
    "whole": lambda a, b, row, at, old: ((a + row) % 16, b),
    "whole other": lambda a, b, row, at, old: (a, (b + b[::-1]) % 16),
}
READS = {
    "nothing": lambda a, b, old: jnp.float32(0),
    "new": lambda a, b, old: a.sum(0) + b[0],
    "old": lambda a, b, old: old[1],
    "both": lambda a, b, old: (a * old).sum(1)[:2],
}


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(STATEMENTS)), min_size=1, max_size=4),
    st.sampled_from(sorted(READS)),
    st.sampled_from(["scan", "reverse", "while", "donated"]),
    st.integers(9, 25),
    st.integers(-30, 30),
)
def test_random_updates(names, read, form, rows, start):
    """Numbers are small integers, so that sums are exact."""

    def step(a, b, row, at):
        old = a
        for name in names:
            a, b = STATEMENTS[name](a, b, row, at, old)
        return a, b, READS[read](a, b, old)

    def f(a, b, xs, at):
        if form == "donated":
            return step(a, b, xs[0], at)
        if form == "while":
            return lax.while_loop(
                lambda c: c[3] < 5,
                lambda c: (*step(c[0], c[1], xs[c[3]], c[2])[:2], c[2] + 2, c[3] + 1),
                (a, b, at, jnp.int32(0)),
            )

        def body(c, row):
            a, b, out = step(c[0], c[1], row, c[2])
            return (a, b, c[2] + 3), out

        return lax.scan(body, (a, b, at), xs, reverse=form == "reverse")

    def whole(*shape, seed):
        return ints(*shape, low=-4, high=5, seed=seed).astype(jnp.float32)

    args = whole(rows, 3, seed=0), whole(rows + 2, seed=1), whole(5, 3, seed=2), jnp.int32(start)
    want = jax.jit(f)(*args)
    give = {"donate_argnums": (0, 1)} if form == "donated" else {}
    got = pbkern.jit(f, **give)(*jax.tree.map(jnp.array, args))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(x, y)
