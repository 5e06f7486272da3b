"""Tests of this folder need TensorFlow; without it they are skipped."""

import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow", reason="needs the extra `tf`")
