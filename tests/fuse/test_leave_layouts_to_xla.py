"""What only moves elements beside operations of XLA's is XLA's (fuse.moves.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy import linalg

import pbkern
from pbkern.core.errors import UnsupportedOp
from pbkern.fuse.partition.leave_layouts_to_xla import REASON, LeaveLayouts
from tests.arrays import array

from .checking import planned


def definite(n):
    a = np.random.default_rng(n).standard_normal((n, n))
    return array(a @ a.T / n + np.eye(n), jnp.float32)


def reasons(f, *args) -> dict[str, list[str]]:
    """Of what is left to XLA: reason -> operations."""
    found: dict[str, list[str]] = {}
    for x in planned(f, *args).left_to_xla():
        found.setdefault(x.why, []).append(x.op)
    return found


def wanted(f, *args):
    with jax.enable_x64(True):
        return np.asarray(f(*(jnp.asarray(np.asarray(a), jnp.float64) for a in args)))


def solved(a, b):
    return linalg.cho_solve(linalg.cho_factor(a + a.T + jnp.eye(a.shape[0], dtype=a.dtype)), b)


def factor(a):
    return lax.linalg.cholesky(a, symmetrize_input=False)


def turned_factor(a):
    return jnp.linalg.cholesky(a).T


def turned_operands(a, b):
    return linalg.solve_triangular(a.T, b.T[::-1].T, lower=True)


CASES = {
    "solved": (solved, 2),
    "turned_factor": (turned_factor, 1),
    "turned_operands": (turned_operands, 2),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("n", [33, 64])
@pytest.mark.parametrize("case", CASES)
def test_moves_beside_libraries_are_left(case, n):
    f, operands = CASES[case]
    args = (definite(n), definite(n + 100)[:n, :n])[:operands]
    assert "transpose" in reasons(f, *args)[REASON]
    np.testing.assert_allclose(pbkern.jit(f)(*args), wanted(f, *args), rtol=1e-3, atol=1e-4)


def test_arithmetic_is_ours():
    """The symmetric sum in front is a kernel; so are moves that it reads, or that read it."""

    def f(a):
        return jnp.linalg.cholesky((a + a.T).T).T * 2.0

    plan = planned(f, definite(40))
    assert REASON not in reasons(f, definite(40)), str(plan.explanation)
    assert len(plan.kernels()) == 2, str(plan.explanation)


@pytest.mark.parametrize("f", [lambda a: a.T[::-1], lambda a: jnp.tril(a).T], ids=["views", "mask"])
def test_moves_by_themselves_are_ours(f):
    plan = planned(f, definite(40))
    assert len(plan.kernels()) == 1
    assert not plan.left_to_xla()


@pytest.mark.parametrize("more", [0, 1])
def test_large_arrays_are_moved_by_all_cores_unless_they_turn(more):
    n = int((LeaveLayouts().most_bytes / 4) ** 0.5) + more
    a = jax.ShapeDtypeStruct((n, n), "float32")
    assert len(planned(lambda a: jnp.flip(factor(a)), a).kernels()) == more
    assert not planned(lambda a: factor(a).T, a).kernels()


def test_views_between_operations_of_xla_are_no_copies():
    """Of any size: XLA's reshapes are free."""

    def f(a):
        return lax.linalg.qr(lax.linalg.qr(a, full_matrices=False)[0].reshape(2, 300, 300))[0]

    plan = planned(f, jax.ShapeDtypeStruct((600, 300), "float32"))
    assert not plan.programs(), str(plan.explanation)


def test_report_says_why():
    f = pbkern.jit(turned_factor)
    assert f"XLA: transpose at {__file__}" in str(f.explain(definite(34)))
    assert REASON in str(f.explain(definite(34)))


def test_strict_targets_keep_them():
    f = pbkern.jit(turned_factor, compile_options=pbkern.CompileOptions(strict_target=True))
    with pytest.raises(UnsupportedOp, match="leaves 1 operation") as error:
        f(definite(34))
    assert REASON not in str(error.value)
