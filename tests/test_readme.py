"""The README's Python runs, from top to bottom in one program, and prints what the README says it prints."""

import os
import pathlib
import re
import subprocess
import sys

README = pathlib.Path(__file__).parent.parent / "README.md"


def snippets(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


def test_snippets_run_in_order(tmp_path):
    program = tmp_path / "readme.py"
    program.write_text("\n".join(snippets("python")))
    command = [sys.executable, program]
    environment = os.environ | {"PYTHONPATH": str(README.parent)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for printed in snippets("text"):
        assert printed in done.stdout


def test_links_lead_to_files():
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target


def test_tables_are_those_of_their_dataclasses():
    """And every option has a row."""
    from pbkern.core.options import CompileOptions

    command = [sys.executable, README.parent / "scripts" / "readme_tables.py"]
    environment = os.environ | {"PYTHONPATH": str(README.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    table = README.read_text().split("<!-- table: options -->")[1].split("<!-- end -->")[0]
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.*?) \|", table, re.M))))
    assert named == set(CompileOptions.__dataclass_fields__)
