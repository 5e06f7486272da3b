"""The documentation as a site: pages of docs/, the README, tutorials with their output, a page per public name.

    python scripts/docs_site.py [--without-output]     writes build/pages and builds build/site with mkdocs

A warning of mkdocs is an error. --without-output leaves out running the tutorials, which takes a minute.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import types

import pbkern

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES, SITE = ROOT / "build" / "pages", ROOT / "build" / "site"
# Title of a section -> its pages, as files below docs/ or the root.
SECTIONS = {
    "Kernels": [
        "docs/pallas.md",
        "docs/pallas-compiler-params.md",
        "docs/pallas-ops.md",
        "docs/pallas-suite.md",
    ],
    "Front ends": ["docs/torch.md", "docs/tensorflow-and-stablehlo.md"],
    "Libraries": ["docs/aot.md"],
    "Figures": [
        "docs/benchmarks.md",
        *(
            f"docs/benchmarks/{page.name}"
            for page in sorted((ROOT / "docs" / "benchmarks").glob("*.md"))
        ),
        "docs/gpu.md",
    ],
    "Inside": ["docs/architecture.md", "CONTRIBUTING.md", "CHANGELOG.md"],
}
# Section of the README -> the page of its own that it is on the site.
README_PAGES = {
    "Seeing what it did": "explain.md",
    "Compile options": "options.md",
    "Limitations": "limits.md",
}
CONFIG = """\
site_name: pbkern
docs_dir: {pages}
site_dir: {site}
theme: readthedocs
strict: true
use_directory_urls: false
plugins:
  - search
  - autorefs
  - mkdocstrings:
      handlers:
        python:
          paths: [{root}]
          options:
            docstring_style: google
            # One entry may be about several parameters; types are those of the signature.
            docstring_options: {{warn_unknown_params: false, warn_missing_types: false}}
            show_root_heading: true
            show_source: false
            show_signature_annotations: true
            members_order: source
            filters: ["!^_"]
validation:
  links:
    anchors: warn
nav:
{nav}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--without-output", action="store_true")
    parsed = parser.parse_args()
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir(parents=True)
    nav = [("Start", "index.md")]
    sources = {"README.md": "index.md"}
    for files in SECTIONS.values():
        sources |= {file: pathlib.Path(file).name.lower() for file in files}
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    sources |= {str(p.relative_to(ROOT)): f"decisions/{p.name}" for p in decisions}
    tutorials = sorted((ROOT / "tutorials").glob("*.py"))
    sources |= {f"tutorials/{p.name}": f"tutorials/{p.stem}.md" for p in tutorials}
    for source, page in sources.items():
        path = ROOT / source
        if source == "README.md":
            write_readme(linked(path.read_text(), path, page, sources))
            continue
        if path.suffix == ".py":
            text = tutorial(path, run=not parsed.without_output)
        else:
            text = linked(path.read_text(), path, page, sources)
        write(page, text)
    nav += list(README_PAGES.items())
    nav.append(("Tutorials", [sources[f"tutorials/{p.name}"] for p in tutorials]))
    nav += [(title, [sources[file] for file in files]) for title, files in SECTIONS.items()]
    nav.append(("Reference", reference()))
    nav.append(("Decisions", [f"decisions/{p.name}" for p in decisions]))
    for image in (ROOT / "docs").rglob("*.png"):
        shutil.copy(image, PAGES)
    config = ROOT / "build" / "mkdocs.yml"
    config.write_text(CONFIG.format(pages=PAGES, site=SITE, root=ROOT, nav="\n".join(rows(nav))))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config]
    sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)


def write(page: str, text: str) -> None:
    path = PAGES / page
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def readme_page(anchor: str) -> str:
    """The page that has a section of the README."""
    pages = {re.sub(r"\W+", "-", title.lower()): page for title, page in README_PAGES.items()}
    return pages.get(anchor, "index.md")


def write_readme(text: str) -> None:
    """Writes the start page, and the sections of the README that are pages of their own."""
    head, *sections = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
    pages = {"index.md": head}
    for title, body in zip(sections[::2], sections[1::2]):
        page = README_PAGES.get(title, "index.md")
        level = "##" if page == "index.md" else "#"
        pages[page] = pages.get(page, "") + f"{level} {title}\n{body}"
    for page, body in pages.items():
        write(page, body)


def rows(nav: list) -> list[str]:
    """Lines of mkdocs' table of contents."""
    lines = []
    for title, pages in nav:
        if isinstance(pages, str):
            lines.append(f"  - {title}: {pages}")
            continue
        lines.append(f"  - {title}:")
        lines += [f"      - {page}" for page in pages]
    return lines


def linked(text: str, path: pathlib.Path, page: str, sources: dict[str, str]) -> str:
    """A page's text with links to other pages of the site; links to files outside of it become plain text."""

    def link(found: re.Match) -> str:
        label, target = found[1], found[2]
        if re.match(r"https?:", target) or (target.startswith("#") and page != "index.md"):
            return found[0]
        file, _, anchor = target.partition("#")
        source = os.path.normpath(path.parent / (file or path.name))
        if source.endswith(".png"):
            return found[0].replace(target, pathlib.Path(file).name)
        name = sources.get(os.path.relpath(source, ROOT))
        if name is None:
            return f"`{label.strip('`')}`"
        name = readme_page(anchor) if name == "index.md" else name
        there = os.path.relpath(name, pathlib.Path(page).parent)
        return f"[{label}]({there}{'#' + anchor if anchor else ''})"

    return re.sub(r"\[([^\]\n]+)\]\(([^)\s]+)\)", link, text)


def tutorial(path: pathlib.Path, run: bool) -> str:
    """A tutorial's prose, program and output."""
    source = path.read_text()
    prose = ast.get_docstring(ast.parse(source)) or path.stem
    title, _, rest = prose.partition("\n")
    program = source.split('"""', 2)[2].strip()
    parts = [f"# {title.rstrip('.')}", rest.strip(), f"```python\n{program}\n```"]
    if run:
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                [sys.executable, path],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            )
        parts += ["prints", f"```text\n{done.stdout.rstrip()}\n```"]
    return "\n\n".join(part for part in parts if part) + "\n"


def reference() -> list[str]:
    """Writes a page per public name, and returns them in order."""
    pages = []
    for name in pbkern.__all__:
        value = getattr(pbkern, name)
        if isinstance(value, types.ModuleType):
            path = value.__name__
        else:
            home = inspect.getmodule(inspect.unwrap(value)) if callable(value) else None
            path = f"{home.__name__}.{name}" if home and hasattr(home, name) else f"pbkern.{name}"
        write(f"reference/{name}.md", f"# pbkern.{name}\n\n::: {path}\n")
        pages.append(f"reference/{name}.md")
    return pages


if __name__ == "__main__":
    main()
