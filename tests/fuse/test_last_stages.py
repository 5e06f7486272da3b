"""Small groups that combine what another kernel found become its last stage (fuse/partition/final_reductions.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.testing import assert_kernels
from tests.lowered import on

from .checking import check, ints, planned, rand
from .workloads import f32, i32


def labels(x, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], 1).mean()


def one_hot(x, p):
    return -(p * jax.nn.log_softmax(x)).sum(-1).mean()


def huber(x, y):
    d = jnp.abs(x - y)
    return jnp.where(d < 1, 0.5 * d * d, d - 0.5).mean()


def binary(x, y):
    return (jax.nn.softplus(x) - x * y).mean()


def divergence(x, y):
    return (jax.nn.softmax(x) * (jax.nn.log_softmax(x) - jax.nn.log_softmax(y))).sum(-1).mean()


def extrema_and_mean(x, y):
    return x.min(), x.max(), (x * y).mean()


SHAPE = (1030, 604)
# name -> (function, whether its second operand are labels)
ONE_KERNEL = {
    "labels": (labels, True),
    "labels and gradient": (jax.value_and_grad(labels), True),
    "one-hot": (one_hot, False),
    "mse": (lambda x, y: ((x - y) ** 2).mean(), False),
    "huber": (huber, False),
    "binary": (binary, False),
    "divergence": (divergence, False),
    "variance": (lambda x, y: jnp.var(x + y), False),
    "mean": (lambda x, y: jnp.mean(x), False),
    "norm": (lambda x, y: jnp.linalg.norm(x), False),
    "several results": (extrema_and_mean, False),
    "inner product": (lambda x, y: jnp.vdot(x, y) * 2, False),
    "greatest": (lambda x, y: jnp.argmax(x.reshape(-1)), False),
    "reshaped parts": (lambda x, y: x.sum(1).reshape(-1, 1).max(), False),
}


def operands(labelled, dtype="float32"):
    """More than one program has to do."""
    x = rand(*SHAPE, dtype=dtype)
    return x, ints(SHAPE[0], high=SHAPE[1]) if labelled else rand(*SHAPE, dtype=dtype, seed=1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ONE_KERNEL)
def test_one_kernel(name):
    f, labelled = ONE_KERNEL[name]
    with on():
        assert_kernels(f, (f32(4096, 2048), i32(4096) if labelled else f32(4096, 2048)), 1)
    (kernel,) = planned(f, *operands(labelled)).kernels()
    again = pbkern.rebuild(kernel.source())
    assert kernel.num_programs > 1
    assert kernel.finish is not None
    assert again.content == kernel.content


@pytest.mark.parametrize("name", ["one-hot", "variance", "several results", "reshaped parts"])
def test_equals_jax(name):
    check(ONE_KERNEL[name][0], *operands(False), kernels=1)


def test_half_precision():
    half = jax.ShapeDtypeStruct((4096, 32000), jnp.bfloat16)
    assert_kernels(labels, (half, i32(4096)), 1)
    x, y = operands(True, "bfloat16")
    np.testing.assert_allclose(
        pbkern.jit(labels)(x, y), labels(x.astype(jnp.float32), y), rtol=1e-2
    )


def test_machine_code_agrees_with_float64():
    def f(x, y):
        log_p = x - np.log(np.exp(x).sum(1, keepdims=True))
        return -log_p[np.arange(len(y)), y].mean(), x.min(), x.var()

    x, y = operands(True)
    want = f(np.asarray(x, np.float64), np.asarray(y))
    got = pbkern.jit(lambda x, y: (labels(x, y), x.min(), x.var()))(x, y)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def normalised_steps(x, y):
    """A reduction of everything in each step of a loop, which the next step reads, and in branches."""

    def step(_, carry):
        x, size = carry
        return x / (1 + size), jnp.sqrt((x * x).sum())

    x, size = lax.fori_loop(0, 3, step, (x, jnp.float32(0)))
    _, means = lax.scan(lambda c, s: (c + (x * s).mean(), (x - c).mean()), size, jnp.arange(3.0))
    return lax.cond(means[0] > 0, lambda: ((x - y) ** 2).mean(), lambda: (x + y).max()), means, x


@pytest.mark.parametrize("f", [normalised_steps, jax.vmap(huber), jax.vmap(jax.grad(huber))])
def test_in_control_flow_and_under_vmap(f):
    x, y = rand(2, 331, 307), rand(2, 331, 307, seed=1)
    want = jax.tree.leaves(jax.jit(f)(x, y))
    for g, w in zip(jax.tree.leaves(pbkern.jit(f)(x, y)), want, strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("last_reads_it", [False, True])
def test_donated_operands_are_updated_in_place(last_reads_it):
    """The programs write their blocks of x and the sums, unless the last stage is still to read x as it was."""

    def step(x, g):
        size = g.sum(1, keepdims=True)
        return x - 0.1 * g * size, size.max() + (x[0, 0] if last_reads_it else 0)

    x, g = operands(False)
    want, place = jax.jit(step)(x, g), x.unsafe_buffer_pointer()
    compiled = pbkern.jit(step, donate_argnums=0)
    (kernel,) = compiled.kernels(x, g)
    assert kernel.finish is not None
    assert bool(kernel.shared) == (not last_reads_it)
    got = compiled(x, g)
    assert last_reads_it or got[0].unsafe_buffer_pointer() == place
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


def test_values_that_others_read_stay_results():
    def f(x):
        rows = x.max(1)
        return rows, rows.sum(), jnp.sort(rows)

    assert [len(k.out_types) for k in planned(f, f32(4096, 1024)).kernels()] == [2, 1]
    check(lambda x: f(x)[:2], rand(*SHAPE), kernels=1)


def test_two_arrays_end_in_one_last_stage():
    plan = check(lambda x, y: x.sum() / y.max(), rand(*SHAPE), rand(1701, 403), kernels=2)
    assert sum(k.finish is not None for k in plan.kernels()) == 1


def test_what_stays_a_kernel_of_its_own():
    x = f32(4096, 2048)
    between = planned(lambda x: x.max(1).sum() + jnp.sort(x.max(1))[0], x)
    assert all(k.finish is None or "sort" not in k.source() for k in between.kernels())
    sorted_rows = planned(
        lambda x: jnp.sort(x.max(1)), f32(1 << 18, 256)
    )  # too much for one thread beside a launch
    assert len(sorted_rows.kernels()) == 2
    assert not any(k.finish for k in sorted_rows.kernels())
    for option in ("disable_affine_fusion", "disable_reduce_reduce_fusion"):
        assert not any(k.finish for k in planned(jnp.mean, x, **{option: True}).kernels())
    left = planned(
        lambda x: x.sum() + lax.tan(x[0, 0]),
        x,
        supports=lambda e: "no" if e.primitive is lax.tan_p else None,
    )
    assert left.left_to_xla()
    assert not any(k.finish for k in left.kernels())


def test_the_report_tells_the_last_stage():
    explanation = planned(jnp.mean, f32(4096, 2048)).explanation
    (kernel,) = explanation.kernels
    assert [op for op, _ in kernel.ops] == ["partial_reduce"]
    assert [op for op, _ in kernel.finish] == ["reduce_sum", "mul"]
    assert "last stage: reduce_sum, mul" in str(explanation)
    assert "not fused" not in str(explanation)
