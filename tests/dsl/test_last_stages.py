"""Kernels with a last stage: interpretation, text, vmap, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core.errors import CheckError, KernelError, RaceError
from pbkern.dsl import same_kernel
from pbkern.dsl.body_checks.verify import verify
from pbkern.dsl.checks import check

rng = np.random.default_rng(0)
BLOCK = 32


def s(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def f32(*shape):
    return rng.standard_normal(shape).astype(np.float32)


@pbkern.kernel(out_shape=s())
def total(parts, out):
    out[...] = parts[...].sum()


def sum_of_squares(n, finish=total, **options):
    blocks = pbkern.cdiv(n, BLOCK)

    def sum_of_squares(x, part):
        inside = pbkern.in_bounds(x, 0)
        part[0] = jnp.where(inside, x[...] * x[...], 0).sum()

    return pbkern.kernel(
        sum_of_squares, grid=(blocks,), in_specs=[pbkern.BlockSpec((BLOCK,), lambda i: (i,))],
        out_specs=pbkern.BlockSpec((1,), lambda i: (i,)), out_shape=s(blocks), finish=finish, **options,
    )  # fmt: skip


@pytest.mark.parametrize("n", [32, 33, 100])
def test_runs_once_after_all_programs(n):
    x = f32(n)
    (got,) = pbkern.interpret(sum_of_squares(n).trace(x), x)
    np.testing.assert_allclose(got, (x.astype(np.float64) ** 2).sum(), rtol=1e-5)


def test_runs_where_there_are_no_programs():
    @pbkern.kernel(grid=(0,), out_shape=s(0), finish=total)
    def nothing(x, part):
        part[0] = x[0]

    assert pbkern.interpret(nothing.trace(f32(1)), f32(1))[0] == 0


@pbkern.kernel(out_shape=[s(), s(100)], input_output_aliases={1: 1})
def scaled_total(parts, doubled, scale, out, doubled_too):
    out[...] = parts[...].sum() * scale[0]


@pbkern.kernel(
    grid=(5,), in_specs=[pbkern.BlockSpec((20,), lambda i: (i,))],
    out_specs=[pbkern.BlockSpec((1,), lambda i: (i,)), pbkern.BlockSpec((20,), lambda i: (i,))],
    out_shape=[s(5), s(100)], finish=scaled_total,
)  # fmt: skip
def doubled_and_total(x, part, doubled):
    part[0] = x[...].sum()
    doubled[...] = 2 * x[...]


def test_operands_of_its_own_and_results_that_the_programs_made():
    x, scale = f32(100), f32(1)
    k = doubled_and_total.trace(x, scale)
    assert k.in_types == tuple(m.array for m in (*k.inputs, k.finish.inputs[2]))
    assert k.shared == ()
    out, doubled = pbkern.interpret(k, x, scale)
    np.testing.assert_allclose(out, x.astype(np.float64).sum() * scale[0], rtol=1e-5)
    np.testing.assert_array_equal(doubled, 2 * x)


@pytest.mark.parametrize(
    ("f", "args"), [(sum_of_squares(100), (f32(100),)), (doubled_and_total, (f32(100), f32(1)))]
)
def test_the_text_rebuilds_both_stages(f, args):
    k = f.trace(*args)
    again = pbkern.rebuild(k.source())
    assert same_kernel(k, again)
    assert again.source() == k.source()
    assert again.content == k.content
    for a, b in zip(pbkern.interpret(k, *args), pbkern.interpret(again, *args), strict=True):
        np.testing.assert_array_equal(a, b)
    other = dataclasses.replace(k, finish=dataclasses.replace(k.finish, name="another"))
    assert not same_kernel(k, other)
    assert not same_kernel(k, k.stages[0])
    assert k.content != k.stages[0].content


def test_aliases_lead_through_the_last_stage():
    """The programs update x, which the last stage hands on; nothing else of what they write is the caller's."""

    @pbkern.kernel(out_shape=[s(), s(8)], input_output_aliases={1: 1, 2: 0})
    def count(parts, x, before, out, x_too):
        out[...] += parts[...].sum()

    @pbkern.kernel(grid=(8,), in_specs=[pbkern.BlockSpec((1,), lambda i: (i,))],
                   out_specs=[pbkern.BlockSpec((1,), lambda i: (i,))] * 2, out_shape=[s(8), s(8)],
                   input_output_aliases={0: 1}, finish=count)  # fmt: skip
    def add_one(x, part, y):
        part[0] = x[0]
        y[0] = x[0] + 1

    x = np.arange(8, dtype=np.float32)
    k = add_one.trace(x, np.float32(5))
    assert k.shared == ((0, 1), (1, 0))
    out, y = pbkern.interpret(k, x, np.float32(5))
    assert out == 33
    assert (y == x + 1).all()


def test_vmap_batches_both_stages():
    x, scales = f32(3, 100), f32(3, 1)

    def interpreted(*args):
        return pbkern.call_kernel(doubled_and_total.trace(*args), *args, interpret=True)

    out, doubled = jax.vmap(interpreted)(x, scales)
    np.testing.assert_allclose(out, x.astype(np.float64).sum(1) * scales[:, 0], rtol=1e-4)
    np.testing.assert_array_equal(doubled, 2 * x)
    out, doubled = jax.vmap(interpreted, (None, 0))(x[0], scales)
    np.testing.assert_allclose(out, x[0].astype(np.float64).sum() * scales[:, 0], rtol=1e-4)
    assert doubled.shape == (3, 100)


def test_races_and_failed_checks_are_found():
    @pbkern.kernel(out_shape=s())
    def positive(parts, out):
        check(parts[0] > 0, "a sum of {}", parts[0])
        out[...] = parts[0]

    k = sum_of_squares(100, positive).trace(np.zeros(100, np.float32))
    with pytest.raises(CheckError, match="a sum of 0"):
        pbkern.interpret(k, np.zeros(100, np.float32))
    params = pbkern.cpu.CompilerParams(dimension_semantics=("parallel",))

    @pbkern.kernel(grid=(4,), out_shape=s(1), finish=total, compiler_params=params)
    def racing(part):
        part[0] = 1.0

    with pytest.raises(RaceError):
        pbkern.interpret(racing.trace())


def test_wrong_last_stages():
    x = f32(100)

    wrong_type = pbkern.kernel(
        lambda p, o: o.__setitem__(..., p[0]), out_shape=s(), in_types=[s(7)], name="seven"
    ).trace()
    with pytest.raises(KernelError, match="does not take what its programs make"):
        verify(dataclasses.replace(sum_of_squares(100).trace(x), finish=wrong_type))
    with pytest.raises(KernelError, match="is not a kernel"):
        sum_of_squares(100, finish=lambda parts, out: None)
    with pytest.raises(KernelError, match="have one name"):
        sum_of_squares(100, name="total").trace(x)
    twice = pbkern.kernel(
        lambda t, o: o.__setitem__(..., t[0]), out_shape=s(), finish=total, name="twice"
    )
    with pytest.raises(KernelError, match="has a last stage"):
        sum_of_squares(100, finish=twice).trace(x)

    def of_any(*refs):
        refs[-1][0] = refs[0][0]

    with pytest.raises(KernelError, match="how many operands"):
        pbkern.kernel(of_any, grid=(1,), out_shape=s(1), finish=total).trace(x)
