"""Bodies of thousands of equations: right, and lowered with work in proportion to their length, which is counted."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.lower.nest import effects
from pbkern.lower.nest.ir import MAX_HEIGHT
from pbkern.lower.passes import merge_nests, uniform_axes
from pbkern.lower.passes.strips import strip_mining
from pbkern.lower.values import pending_reads
from pbkern.targets.cpu.codegen import outlining
from pbkern.targets.cpu.codegen.kernel import lower_kernel
from pbkern.targets.cpu.emit.nests import CpuNestEmitter

from .running import native

SHAPE = (8, 48)
X = np.random.default_rng(0).normal(size=SHAPE).astype("f")


def kernel(body, n, *arrays):
    """A kernel of one program whose body takes `n`, the arrays' Refs and one for a result like X."""

    def run(*refs):
        body(n, *refs)

    return pbkern.kernel(run, out_shape=jax.ShapeDtypeStruct(SHAPE, "f")).trace(*arrays)


def chain(n, x, o):
    """Sums and products of the last few values: an expression as tall as it is long."""
    draw, values = random.Random(0), [x[...]]
    while len(values) < n:
        a, b = draw.choice(values[-4:]), draw.choice(values[-12:])
        values.append(jnp.maximum(a, b * 0.5) - 0.1 if len(values) % 2 else a * 0.9 + b * 0.1)
    o[...] = values[-1]


def stores(n, x, o):
    """Slices that later ones are made of."""
    o[...] = x[...]
    for i in range(n // 4):
        o[i % 8] = o[(i + 3) % 8] * 0.5 + x[i % 8]


def sums(n, x, o):
    """Sums along one axis and the other."""
    v = x[...]
    for i in range(n // 4):
        v = v * 0.9 + v.sum(i % 2, keepdims=True) * 0.01
    o[...] = v


def indices(n, index, x, o):
    """Scalars that are made of each other; rows are read and written at each."""
    o[...] = x[...]
    at = index[0]
    for i in range(n // 8):
        at = (at * 5 + index[i % 8]) % 8
        o[at] = o[at] * 0.5 + x[i % 8]


def ordered(n, x, o):
    """Sorts between elementwise operations: scalar loops."""
    v = x[...]
    for i in range(n // 4):
        v = jnp.sort(v, axis=1) + v * (i + 1.0)
        v = v / jnp.abs(v).max(1, keepdims=True)
    o[...] = v


INDEX = np.random.default_rng(1).integers(0, 8, 8).astype(np.int32)
BODIES = {
    "chain": (chain, X),
    "stores": (stores, X),
    "sums": (sums, X),
    "indices": (indices, INDEX, X),
}


def made(name, n):
    body, *arrays = BODIES[name]
    return kernel(body, n, *arrays)


def check(k, *arrays):
    np.testing.assert_allclose(
        native(k, *arrays)[0], pbkern.interpret(k, *arrays)[0], rtol=2e-5, atol=2e-5
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BODIES)
def test_results(name):
    check(made(name, 400), *BODIES[name][1:])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BODIES)
def test_text_is_in_proportion(name):
    short, long = (lower_kernel(made(name, n), "k").text.count("\n") for n in (200, 800))
    assert long < 5 * short


def calls(monkeypatch, owner, function, name):
    """How often `function` is called while bodies of one length and of four times that length are lowered."""
    count = 0
    call = getattr(owner, function)

    def counted(*args):
        nonlocal count
        count += 1
        return call(*args)

    monkeypatch.setattr(owner, function, counted)
    counts = []
    for n in (200, 800):
        count = 0
        lower_kernel(made(name, n), "k")
        counts.append(count)
    return counts


@pytest.mark.parametrize("name", ["stores", "indices"])
def test_what_a_store_looks_at_is_in_proportion(monkeypatch, name):
    short, long = calls(monkeypatch, pending_reads.PendingReads, "_is_used", name)
    assert 0 < long < 5 * short


@pytest.mark.parametrize(
    ("owner", "function"),
    [(strip_mining, "accesses"), (uniform_axes, "_contradicted"), (merge_nests, "merge")],
)
def test_what_nests_look_at_is_in_proportion(monkeypatch, owner, function):
    short, long = calls(monkeypatch, owner, function, "sums")
    assert 0 < long < 5 * short


def test_expressions_have_a_largest_height(monkeypatch):
    heights = []
    emit = CpuNestEmitter.emit

    def measured(self, block, nest, *args):
        heights.extend(e.height for e in nest.expressions())
        return emit(self, block, nest, *args)

    monkeypatch.setattr(CpuNestEmitter, "emit", measured)
    lower_kernel(made("chain", 600), "k")
    assert MAX_HEIGHT / 3 < max(heights) <= MAX_HEIGHT


def test_long_bodies_are_cut_into_functions(monkeypatch):
    monkeypatch.setattr(outlining, "LONGEST_PIECE", 400)
    monkeypatch.setattr(outlining, "SHORTEST_PIECE", 100)
    k = made("sums", 400)
    lowered = lower_kernel(k, "k")
    assert lowered.main.text.count("func.call") > 5
    assert max(f.text.count("\n") for f in lowered.functions) < 1000
    check(k, X)


def test_scalar_loops_are_apart(monkeypatch):
    monkeypatch.setattr(outlining, "LONGEST_PIECE", 400)
    monkeypatch.setattr(outlining, "SHORTEST_PIECE", 20)
    k = kernel(ordered, 40, X)
    lowered = lower_kernel(k, "k")
    assert {f.has_scalar_loops for f in lowered.pieces} == {
        False,
        True,
    }
    assert not lowered.main.has_scalar_loops
    check(k, X)


def nested(n, x, o):
    """A loop around a long list of statements, in a long list."""

    def turn(i, v):
        for _ in range(n):
            v = v * 0.9 + v.sum(1, keepdims=True) * 0.01
        o[i % 8] = v[i % 8]
        return v

    sums(n, x, o)
    o[...] = jax.lax.fori_loop(0, 3, turn, x[...]) + o[...]
    sums(n, o, o)


def test_pieces_call_pieces(monkeypatch):
    monkeypatch.setattr(outlining, "LONGEST_PIECE", 300)
    monkeypatch.setattr(outlining, "SHORTEST_PIECE", 100)
    k = kernel(nested, 20, X)
    lowered = lower_kernel(k, "k")
    assert any(f.calls for f in lowered.pieces)
    check(k, X)


def test_shared_scalars_print():
    lowered = lower_kernel(made("indices", 400), "k")
    assert len(lowered.nests) < 100_000


def overwritten(n, x, o):
    o[...] = x[...]
    v = jnp.reshape(o[...] * 3.0, (4, 96))
    o[...] = jnp.reshape(o[...], (4, 96)).reshape(SHAPE) * 2.0
    kept = jnp.reshape(o[...], (4, 96))
    total = jnp.cumsum(kept, axis=1) * 0.0
    o[...] = jnp.zeros(SHAPE)
    o[...] = (kept + jnp.flip(kept, 1) + total + v).reshape(SHAPE)


def test_a_reshape_outlives_what_it_was_made_of():
    got = native(kernel(overwritten, 0, X), X)[0]
    kept = (X * 2).reshape(4, 96)
    want = kept + kept[:, ::-1] + (X * 3).reshape(4, 96)
    np.testing.assert_allclose(got, want.reshape(SHAPE), rtol=1e-5, atol=1e-5)


def test_what_statements_touch_is_looked_at_in_proportion_to_their_number(monkeypatch):
    """Loops with nests between them: what is touched around each run of nests is known from all statements at once."""

    def looked_at(times: int) -> int:
        def body(n, x, o):
            for k in range(times):
                o[k] = x[k] * 2 - x[k].max()
                o[k + times] = x[k] + o[k]
                lax.fori_loop(0, n[0], lambda i, _, k=k: o.__setitem__(k, o[k] + x[i]), None)

        shape = jax.ShapeDtypeStruct((2 * times, 256), "float32")
        kernel = pbkern.kernel(body, out_shape=shape).trace(
            jax.ShapeDtypeStruct((1,), "int32"), shape
        )
        seen, touched = [], effects.touched
        with monkeypatch.context() as m:
            m.setattr(effects, "touched", lambda stmts: seen.append(len(stmts)) or touched(stmts))
            lower_kernel(kernel, "k")
        return sum(seen)

    counts = looked_at(20), looked_at(40)
    assert counts[1] < 2.5 * counts[0], counts
