"""Values of reports -> one page of HTML, whose style and program are page.css and page.js beside this file."""

from __future__ import annotations

import html
import importlib.resources
import json
from collections.abc import Sequence
from typing import Any

DOCUMENT = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main></main>
<script type="application/json" id="contents">{contents}</script>
<script>
{program}</script>
</body>
</html>
"""


def page(reports: Sequence[dict[str, Any]]) -> str:
    """The document that shows one report, or two beside each other."""
    title = " and ".join(report["name"] for report in reports)
    return DOCUMENT.format(
        title=html.escape(f"{title} - pbkern"),
        style=_file("page.css"),
        contents=_in_script(reports),
        program=_file("page.js"),
    )


def _in_script(values: Any) -> str:
    """JSON that no text in it can end: `<` is written as an escape, as the HTML standard advises for scripts."""
    return json.dumps(values, separators=(",", ":")).replace("<", "\\u003c")


def _file(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
