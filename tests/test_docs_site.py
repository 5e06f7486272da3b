"""The documentation builds as a site without a warning, and every public name has a page with a docstring."""

import inspect
import os
import pathlib
import subprocess
import sys
import types

import pytest

import pbkern

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.parametrize("name", pbkern.__all__)
def test_public_names_have_docstrings(name):
    value = getattr(pbkern, name)
    text = inspect.getdoc(value)
    assert text
    if not isinstance(value, types.ModuleType):
        assert len(text) > 30, text


@pytest.mark.slow
def test_the_site_builds():
    for module in ("mkdocs", "mkdocstrings"):
        pytest.importorskip(module)
    command = [sys.executable, ROOT / "scripts" / "docs_site.py", "--without-output"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in pbkern.__all__:
        assert (ROOT / "build" / "site" / "reference" / f"{name}.html").exists(), name
