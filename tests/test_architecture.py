"""Imports point one way: foundation -> dsl -> fuse, lower -> targets -> frontends -> api; local imports count too."""

import ast
import pathlib

import pytest

import pbkern

ROOT = pathlib.Path(pbkern.__file__).parent
# layer -> the layers that its modules may import beside their own; the API may import all.
BELOW = {
    "foundation": set(),
    "dsl": {"foundation"},
    "fuse": {"foundation", "dsl"},
    "lower": {"foundation", "dsl"},
    "targets": {"foundation", "dsl", "lower"},
    "frontends": {"foundation", "dsl", "targets"},  # targets: what other systems' CompilerParams become
    "api": {"foundation", "dsl", "fuse", "lower", "targets", "frontends"},
}
FOUNDATION = set(
    "errors rules jaxprs affine machine _jax config options cache collector contexts progress "
    "scatter gathers reshapes top_k sorting named".split()
)
FOLDERS = set(BELOW) - {"foundation", "api"}
FILES = sorted(ROOT.rglob("*.py"))


def layer_of(parts: tuple[str, ...]) -> str:
    """Layer of a module below pbkern; what is no folder's and no foundation is the API."""
    first = parts[0] if parts else "__init__"
    if first in FOLDERS:
        return first
    return "foundation" if first in FOUNDATION else "api"


def imports_of(path: pathlib.Path):
    """(line, module path below pbkern) of every import from pbkern; for names of packages, the submodule they name."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + tuple(node.module.split(".") if node.module else ())
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pbkern":
            base = tuple(node.module.split(".")[1:])
        elif isinstance(node, ast.Import):
            ours = (a.name.split(".") for a in node.names if a.name.split(".")[0] == "pbkern")
            yield from ((node.lineno, tuple(parts[1:])) for parts in ours)
            continue
        else:
            continue
        for alias in node.names:
            inner = ROOT.joinpath(*base, alias.name)
            is_module = inner.is_dir() or inner.with_suffix(".py").exists()
            yield node.lineno, (*base, alias.name) if is_module else base


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    own = layer_of(path.relative_to(ROOT).with_suffix("").parts)
    back = []
    for line, target in imports_of(path):
        other = layer_of(target)
        if other != own and other not in BELOW[own]:
            back.append(f"{path.relative_to(ROOT)}:{line}: {own} imports {'.'.join(target) or 'pbkern'} ({other})")
    assert not back, "\n".join(back)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_private_jax_has_one_importer(path):
    if path.name == "_jax.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
        assert not any(n.split(".")[:2] == ["jax", "_src"] for n in names), f"{path.name}:{node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_say_what_they_do(path):
    if path.read_text().strip():
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_imports_are_found_and_have_layers():
    found = list(imports_of(ROOT / "lower" / "host.py"))
    assert ("dsl", "host") in [t for _, t in found]
    assert layer_of(("dsl", "host")) == "dsl" and layer_of(("api",)) == "api" and layer_of(()) == "api"
