"""Values of reports -> one page of HTML, whose style and program are page.css and page.js beside this file."""

from __future__ import annotations

import html
import importlib.resources
import json
from collections.abc import Sequence
from typing import Any

# Forms of a kernel that need no compilation.
SOURCE_ALONE = ("kernels",)
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
<script type="application/json" id="contents">{contents}</script>{graphs}
<script>
{program}</script>
</body>
</html>
"""


def page(reports: Sequence[dict[str, Any]], graphs: dict[str, Any] | None = None) -> str:
    """The document that shows one report, or two beside each other, or those of several graphs.

    graphs: name of a function, notes on it, and its graphs: number, kind, in_torch, and which of the
    reports are of its parts; their reports follow each other then.
    """
    title = " and ".join(report["name"] for report in reports) if graphs is None else graphs["name"]
    overview = (
        ""
        if graphs is None
        else f'\n<script type="application/json" id="graphs">{_in_script(graphs)}</script>'
    )
    return DOCUMENT.format(
        title=html.escape(f"{title} - pbkern"),
        style=_file("page.css"),
        contents=_in_script(reports),
        graphs=overview,
        program=_file("page.js"),
    )


def in_frame(document: str) -> str:
    """A page as a part of a notebook."""
    content = html.escape(document, quote=True)
    return f'<iframe srcdoc="{content}" style="width:100%;height:44em;border:0" title="pbkern report"></iframe>'


def _in_script(values: Any) -> str:
    """JSON that no text in it can end: `<` is written as an escape, as the HTML standard advises for scripts."""
    return json.dumps(values, separators=(",", ":")).replace("<", "\\u003c")


def _file(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
