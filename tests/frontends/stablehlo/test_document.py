"""docs/tensorflow-and-stablehlo.md: its snippets run, and its list of operations is the importer's."""

import collections
import os
import pathlib
import re
import subprocess
import sys

import pytest

from pbkern.frontends.stablehlo import importer
from pbkern.frontends.stablehlo.table import names

DOCUMENT = pathlib.Path(__file__).parents[3] / "docs" / "tensorflow-and-stablehlo.md"
HEADING = "## Operations\n"


def operations() -> str:
    """The list as the document has it."""
    assert importer.import_program  # registers the rules
    by_dialect = collections.defaultdict(list)
    for name in names():
        dialect, _, operation = name.partition(".")
        by_dialect[dialect].append(f"`{operation}`")
    return (
        "\n\n".join(f"`{d}`: {', '.join(found)}." for d, found in sorted(by_dialect.items())) + "\n"
    )


def test_operations_are_listed(pytestconfig):
    text = DOCUMENT.read_text()
    before, _, listed = text.partition(HEADING)
    if pytestconfig.getoption("--update-golden"):
        DOCUMENT.write_text(f"{before}{HEADING}\n{operations()}")
    else:
        assert listed.strip() == operations().strip(), "run with --update-golden"


def test_snippets_run(tmp_path):
    pytest.importorskip("tensorflow")
    program = tmp_path / "document.py"
    program.write_text(
        "\n".join(
            re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
        )
    )
    environment = os.environ | {"PYTHONPATH": str(DOCUMENT.parents[1]), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
