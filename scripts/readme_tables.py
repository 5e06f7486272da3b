"""Tables of the README, made of the dataclasses that they describe.

    python scripts/readme_tables.py            exit status 1 if a table of the README differs
    python scripts/readme_tables.py --write    writes them

A table lies between two comments of the README: `<!-- table: options -->` and `<!-- end -->`.
"""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import re
import sys

from pbkern.core.config import VARIABLES
from pbkern.core.options import CompileOptions

README = pathlib.Path(__file__).parent.parent / "README.md"
REGION = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def options() -> str:
    """A row per entry of CompileOptions' docstring."""
    defaults = {f.name: f.default for f in dataclasses.fields(CompileOptions)}
    rows = []
    for names, text in _entries(CompileOptions):
        default = ", ".join(dict.fromkeys(f"`{defaults[name]!r}`" for name in names))
        # "bool, default False. Omits ..." -> type "bool", meaning "Omits ..."
        described = re.match(r"(.*?), default [^.:]*[.:] (.*)", text)
        kind, meaning = described.groups() if described else ("", text)
        meaning = meaning[:1].upper() + meaning[1:]
        rows.append((", ".join(f"`{name}`" for name in names), kind, default, meaning))
    return _table(("option", "type", "default", "meaning"), rows)


def environment() -> str:
    """A row per variable."""
    rows = [
        (f"`{v.name}`", _shown(v.default), f"{v.meaning[:1].upper()}{v.meaning[1:]} ({v.takes})")
        for v in VARIABLES
    ]
    return _table(("environment variable", "default", "meaning"), rows)


TABLES = {"options": options, "environment": environment}


def _entries(cls: type) -> list[tuple[list[str], str]]:
    """(names, text) per entry of the section Attributes of a class's docstring."""
    text = inspect.getdoc(cls) or ""
    body = text.split("Attributes:\n")[1].partition("\n\n")[0]
    joined = re.sub(r"\n {4,}", " ", body)
    found = [line.strip().partition(": ") for line in joined.split("\n") if line.strip()]
    return [(names.split(", "), meaning) for names, _, meaning in found]


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return f"`{int(default)}`"
    return "none" if default in (None, ()) else f"`{default}`"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(c.replace("|", "or") for c in line) + " |\n" for line in lines)


def written(text: str) -> str:
    """The README with its tables made anew."""
    return REGION.sub(lambda found: found[1] + TABLES[found[2]]() + found[4], text)


if __name__ == "__main__":
    before = README.read_text()
    if sys.argv[1:] == ["--write"]:
        README.write_text(written(before))
    elif written(before) != before:
        sys.exit("a table of the README differs: python scripts/readme_tables.py --write")
