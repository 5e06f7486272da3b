"""Tests of this folder need TensorFlow; without it they are skipped."""

import contextlib
import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
with contextlib.suppress(
    ImportError
):  # some builds of Torch load Triton, whose LLVM must not be TensorFlow's
    import torch._dynamo as _first

    assert _first
tf = pytest.importorskip("tensorflow", reason="needs the extra `tf`")
