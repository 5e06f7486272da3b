"""pbkern.testing: each assertion passes where it should and says why where it fails."""

import jax
import jax.numpy as jnp
import pytest

import pbkern
from pbkern.core.errors import OptionError
from pbkern.testing import assert_fused, assert_kernels, assert_roofline


def softmax(x):
    return jax.nn.softmax(x)


def two_products(a, b):
    return jnp.tanh(a @ b) @ b


def with_fft(x):
    return jnp.abs(jnp.fft.fft(x * 2)) + 1


X = jnp.ones((64, 48))


def test_counts_kernels_of_decorated_and_plain_functions():
    assert_kernels(softmax, (X,), 1)
    assert_kernels(pbkern.jit(softmax), (X,), 1)


def test_wrong_count_lists_the_kernels():
    with pytest.raises(
        AssertionError, match=r"softmax: 1 kernel, expected 2\n  softmax_\w+: .*exp"
    ):
        assert_kernels(softmax, (X,), 2)


def test_rejected_fusions_are_listed():
    types = (jax.ShapeDtypeStruct((1024, 1024), jnp.float32),) * 2
    assert_fused(two_products, types, kernels=2)
    with pytest.raises(
        AssertionError,
        match=r"two_products: 2 kernels, at most 1 expected\n[\s\S]*not fused: tanh: ",
    ):
        assert_fused(two_products, types, kernels=1)


def test_operations_left_to_xla_are_named_with_line_and_reason():
    assert_fused(softmax, (X,))
    said = r"with_fft: 1 operation left to XLA, none expected\n[\s\S]*  fft at .*test_testing.py"
    with pytest.raises(AssertionError, match=said):
        assert_fused(with_fft, (X,))
    with pytest.raises(AssertionError, match=said):
        assert_kernels(with_fft, (X,), 2)


def test_roofline_reports_time_limit_and_terms():
    assert_roofline(softmax, (X,), 1e-6)
    with pytest.raises(
        AssertionError, match=r"softmax: \d+% of the machine's limit, expected 100000%"
    ) as e:
        assert_roofline(softmax, (X,), 1000.0, flops=1e6, nbytes=24_576, calls=3)
    for words in ("measured", "for 1.00 Mflop", "for 0.02 MB", "machine"):
        assert words in str(e.value)


def test_roofline_takes_a_positive_fraction():
    with pytest.raises(OptionError, match="must be positive"):
        assert_roofline(softmax, (X,), 0.0)
