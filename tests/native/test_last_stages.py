"""Kernels with a last stage as machine code: called alone, under transformations, in control flow, with aliased arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.core.errors import CheckError
from pbkern.dsl.checks import check

from .running import native

N, PROGRAMS = 1 << 16, 16
rng = np.random.default_rng(0)


def s(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def f32(*shape):
    return rng.standard_normal(shape).astype(np.float32)


@pbkern.kernel(out_shape=(s(), s(N)), input_output_aliases={1: 1})
def mean_and_rest(parts, half, bias, mean, half_too):
    mean[...] = parts[...].sum() / N + bias[...]


@pbkern.kernel(
    grid=(PROGRAMS,), in_specs=[pbkern.BlockSpec((N // PROGRAMS,), lambda i: (i,))],
    out_specs=(pbkern.BlockSpec((1,), lambda i: (i,)), pbkern.BlockSpec((N // PROGRAMS,), lambda i: (i,))),
    out_shape=(s(PROGRAMS), s(N)), finish=mean_and_rest, input_output_aliases={0: 1},
)  # fmt: skip
def mean_and_half(x, part, half):
    part[0] = x[...].sum()
    half[...] = x[...] / 2


def in_double(x, bias):
    return np.asarray(x, np.float64).mean(-1) + bias, np.asarray(x) / 2


def close(got, want):
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


def test_alone_and_interpreted():
    x, bias = f32(N), np.float32(3)
    close(mean_and_half(x, bias), in_double(x, bias))
    k = mean_and_half.trace(x, bias)
    close(native(k, x, bias), pbkern.interpret(k, x, bias))


def test_an_updated_operand_is_the_callers_only_if_it_is_given_up():
    x = jnp.asarray(f32(N))
    before, at = np.array(x), x.unsafe_buffer_pointer()
    close(mean_and_half(x, jnp.float32(0)), in_double(before, 0))
    np.testing.assert_array_equal(x, before)
    _, half = jax.jit(lambda x: mean_and_half(x, jnp.float32(0)), donate_argnums=0)(x)
    assert half.unsafe_buffer_pointer() == at
    np.testing.assert_array_equal(half, before / 2)


def test_vmap():
    x, bias = f32(3, N), f32(3)
    close(jax.vmap(mean_and_half)(x, bias), in_double(x, bias))
    close(
        jax.vmap(mean_and_half, (None, 0))(x[0], bias),
        (in_double(x[0], bias)[0], np.stack([x[0] / 2] * 3)),
    )


def test_in_a_fused_function_and_its_control_flow():
    def f(x, bias, flag):
        bias, x = lax.fori_loop(0, 3, lambda _, c: mean_and_half(c[1], c[0]), (bias, x))
        means, _ = lax.scan(
            lambda c, y: (c + mean_and_half(y, c)[0], None), bias, jnp.stack([x, 2 * x])
        )
        return lax.cond(flag, lambda: mean_and_half(x, means)[0], lambda: means), x

    x, bias = f32(N), np.float32(1)
    for flag in (True, False):
        mean = x.astype(np.float64).mean()
        want = 1 + mean * 1.75
        want = 2 * (2 * want + mean / 8) + mean / 4
        want = want + mean / 8 if flag else want
        close(pbkern.jit(f)(x, bias, flag), (want, x / 8))


@pytest.mark.parametrize("programs", [0, 1])
def test_one_program_and_none(programs):
    @pbkern.kernel(out_shape=s())
    def total(parts, out):
        out[...] = parts[...].sum()

    @pbkern.kernel(grid=(programs,), out_shape=s(programs), finish=total)
    def first(x, part):
        part[0] = x[0]

    assert first(np.full(2, 7, np.float32)) == 7 * programs


def test_a_failed_check_of_the_last_stage_is_raised():
    @pbkern.kernel(out_shape=s())
    def positive(parts, out):
        check(parts[0] > 0, "a sum of {}", parts[0])
        out[...] = parts[0]

    @pbkern.kernel(grid=(2,), in_specs=[pbkern.BlockSpec((4,), lambda i: (i,))],
                   out_specs=pbkern.BlockSpec((1,), lambda i: (i,)), out_shape=s(2), finish=positive)  # fmt: skip
    def sums(x, part):
        part[0] = x[...].sum()

    assert sums(np.ones(8, np.float32)) == 4
    with pytest.raises(CheckError, match="a sum of -4"):
        sums(-np.ones(8, np.float32))
