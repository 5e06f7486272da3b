"""docs/torch.md: its program runs and prints what it says, and its table of operators is the code's."""

import contextlib
import io
import pathlib
import re

import pytest

torch = pytest.importorskip("torch")

from pbkern.frontends.torch import aten  # noqa: E402

PAGE = (pathlib.Path(__file__).parents[3] / "docs" / "torch.md").read_text()


def test_the_program_runs():
    fences = [
        re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
        for kind in ("python", "text")
    ]
    (program,), (printed,) = fences
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(program, "docs/torch.md", "exec"), {"__name__": "page"})
    assert re.sub(r"grid \[.*\]", "", out.getvalue()) == re.sub(
        r"grid \[.*\]", "", printed
    )  # grids depend on the machine


def test_the_table_of_operators_is_current():
    assert aten.listed() in PAGE, "paste pbkern.frontends.torch.aten.listed() into docs/torch.md"
    assert (
        sum(len(line.split("`")) // 2 for line in aten.listed().splitlines())
        == len(aten.names())
        > 300
    )
