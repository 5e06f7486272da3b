"""Transposes of a contraction's operands become its dimension numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.fuse.indexing.transposed_operands import fold_transposes


def folded(f, *shapes):
    args = [jax.ShapeDtypeStruct(s, "float32") for s in shapes]
    return fold_transposes(jax.make_jaxpr(f)(*args))


def names(closed) -> list[str]:
    return [e.primitive.name for e in closed.jaxpr.eqns]


@pytest.mark.parametrize(("left", "right"), [(True, False), (False, True), (True, True)])
def test_transposes_of_matrices_are_folded(left, right):
    def f(a, b):
        return (a.T if left else a) @ (b.T if right else b)

    closed = folded(f, (5, 3) if left else (3, 5), (4, 5) if right else (5, 4))
    assert names(closed) == ["dot_general"]
    assert closed.jaxpr.eqns[0].params["dimension_numbers"][0] == (
        (0 if left else 1,),
        (1 if right else 0,),
    )


def test_what_others_read_stays():
    closed = folded(lambda a, b: (a.T @ b, a.T), (5, 3), (5, 4))
    assert sorted(names(closed)) == ["dot_general", "transpose"]
    product = next(e for e in closed.jaxpr.eqns if e.primitive.name == "dot_general")
    assert product.invars[0] is closed.jaxpr.invars[0]


@pytest.mark.parametrize(("order", "is_folded"), [((0, 2, 1), True), ((2, 1, 0), False)])
def test_batch_dimensions_do_not_move(order, is_folded):
    shape = [2, 3, 5]  # batch, rows, depth as the product reads them
    stored = tuple(shape[order.index(d)] for d in range(3))
    closed = folded(lambda a, b: a.transpose(order) @ b, stored, (2, 5, 4))
    assert ("transpose" not in names(closed)) == is_folded


def test_products_with_vectors_stay():
    assert names(folded(lambda a, v: a.T @ v, (5, 3), (5,))) == ["transpose", "dot_general"]


def test_free_dimensions_keep_their_order():
    def f(a, b):
        return jnp.einsum("mkn,kp->mnp", a.transpose(2, 1, 0), b)

    assert "transpose" in names(folded(f, (2, 5, 3), (5, 4)))


def test_numbers_are_the_same():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((3, 9, 7)).astype("f"), rng.standard_normal((3, 5, 9)).astype("f")

    def f(a, b):
        return jnp.sin(a).transpose(0, 2, 1) @ b.transpose(0, 2, 1)

    want = np.sin(a.astype("d")).transpose(0, 2, 1) @ b.astype("d").transpose(0, 2, 1)
    np.testing.assert_allclose(pbkern.jit(f)(a, b), want, rtol=1e-5, atol=1e-5)
