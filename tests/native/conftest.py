"""Fixtures of tests that run native code."""

import jax
import numpy as np
import pytest


@pytest.fixture
def rng():
    return np.random.default_rng(5)


@pytest.fixture
def wide_types():
    with jax.enable_x64(True):
        yield
