"""Statements of long bodies that are alike but for places are one function, which is passed where they differ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.lower.mlir.operation import Operation, Region, for_syntax
from pbkern.targets.cpu.codegen import outlining
from pbkern.targets.cpu.codegen.kernel import lower_kernel
from pbkern.targets.cpu.codegen.merge_functions import differences, form

from .running import native

RNG = np.random.default_rng(0)


def products(tiles, size):
    """A product whose loops over tiles are unrolled, as those of kernels for TPUs are."""

    def kernel(x, y, o):
        for i in range(tiles):
            for j in range(tiles):
                rows, columns = slice(i * size, i * size + size), slice(j * size, j * size + size)
                parts = [
                    x[rows, k * size : k * size + size] @ y[k * size : k * size + size, columns]
                    for k in range(tiles)
                ]
                o[rows, columns] = sum(jnp.tanh(p * 0.01) * (k + 1.0) for k, p in enumerate(parts))

    n = tiles * size
    x, y = RNG.standard_normal((2, n, n)).astype("f")
    return pbkern.kernel(kernel, out_shape=jax.ShapeDtypeStruct((n, n), "f")).trace(x, y), x, y


def wanted(x, y, tiles, size):
    n = tiles * size
    a = x.astype("f8").reshape(n, tiles, size)
    b = y.astype("f8").reshape(tiles, size, n)
    return sum(np.tanh(a[:, k] @ b[k] * 0.01) * (k + 1.0) for k in range(tiles))


def test_unrolled_products_are_right():
    k, x, y = products(4, 48)
    assert len(lower_kernel(k, "k").pieces) > 1
    np.testing.assert_allclose(native(k, x, y)[0], wanted(x, y, 4, 48), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_text_grows_less_than_the_body():
    few, many = (
        lower_kernel(products(n, 32)[0], "k").text.count("\n") for n in (3, 6)
    )  # 27 and 216 products
    assert many < 3 * few


@pytest.mark.parametrize("shortest", [1, 10**9])
def test_calls_of_copies_and_of_none_give_the_same(monkeypatch, shortest):
    monkeypatch.setattr(outlining, "SHORTEST_COPY", shortest)
    monkeypatch.setattr(outlining, "LONGEST_PIECE", 10)

    def kernel(index, x, o, s):
        for i in range(6):
            at = index[i]  # a scalar that later statements' places are made of
            s[...] = x[pl_slice(at)] * (i % 2 + 1.0)
            o[i] = jnp.cumsum(s[...]) if i % 3 else s[...] + s[...].sum()

    def pl_slice(at):
        return pbkern.ds(at * 40, 40)

    index, x = np.array([3, 0, 5, 1, 2, 2], np.int32), RNG.standard_normal(240).astype("f")
    out, scratch = jax.ShapeDtypeStruct((6, 40), "f"), [pbkern.Scratch((40,), "float32")]
    made = pbkern.kernel(kernel, out_shape=out, scratch_shapes=scratch)
    rows = [x[a * 40 : a * 40 + 40].astype("f8") * (i % 2 + 1) for i, a in enumerate(index)]
    want = [np.cumsum(r) if i % 3 else r + r.sum() for i, r in enumerate(rows)]
    np.testing.assert_allclose(
        native(made.trace(index, x), index, x)[0], want, rtol=1e-5, atol=1e-5
    )


CONSTANTS = {
    name: Operation("arith.constant", (), kind, f" {literal}", result=name)
    for name, literal, kind in (("%c4", "4", "index"), ("%c8", "8", "index"), ("%k", "4.0", "f32"))
}
VIEWS = {"%t1": "memref<64xf32>", "%t2": "memref<64xf32>", "%t3": "memref<9xf32>"}


def made(start, view, bound="%c4", value="%v1"):
    body = [
        Operation("arith.addi", (value, start), "index", result=f"{value}0"),
        Operation("memref.store", ("%k", view, f"{value}0"), VIEWS[view]),
    ]
    loop = Operation(
        "scf.for",
        (value, "%c4", bound, "%c4"),
        "",
        for_syntax([]),
        (Region(body),),
        arguments=(value,),
    )
    return form([loop], CONSTANTS, VIEWS, ["%a0"])


def test_twins_differ_in_places_and_scratch_buffers():
    first, second = made("%c4", "%t1"), made("%c8", "%t2", value="%v7")
    assert first.common == second.common
    found = differences([first, second], {"%t1": 64, "%t2": 512})
    assert len(found.places) == 1
    assert list(found.views) == ["%t1"]
    assert found.values == ((4, 64), (8, 512))


def test_bounds_and_types_are_not_places():
    first = made("%c4", "%t1")
    assert made("%c4", "%t1", bound="%c8").common != first.common
    assert made("%c4", "%t3").common != first.common
    assert form([Operation("func.call", (), "() -> ()", " @f()")], CONSTANTS, VIEWS, []) is None
