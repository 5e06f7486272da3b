"""The tree is the diagram: layers point one way, no import circle of modules or of a folder's entries, small rooms that say
what they do, and names of files in documents that exist. Imports inside functions count too."""

import ast
import collections
import functools
import pathlib
import re
import tomllib

import pytest

import pbkern

ROOT = pathlib.Path(pbkern.__file__).parent
PROJECT = ROOT.parent
# Layer -> the layers that its modules may import beside their own. Public names at the top may import all.
BELOW = {
    "core": set(),
    "dsl": {"core"},
    "fuse": {"core", "dsl"},
    "lower": {"core", "dsl"},
    "simulate": {"core"},
    "targets": {"core", "dsl", "fuse", "lower", "simulate"},  # fuse: what its cost model prices
    "frontends": {"core", "dsl", "targets"},  # targets: what other systems' CompilerParams become
    "api": {"core", "dsl", "fuse", "lower", "targets", "frontends", "simulate"},
    "aot": {"core", "dsl", "fuse", "lower", "targets", "frontends", "api"},
    "cli": {
        "core",
        "dsl",
        "fuse",
        "lower",
        "targets",
        "frontends",
        "api",
        "aot",
        "public",
        "simulate",
    },
    "public": {
        "core",
        "dsl",
        "fuse",
        "lower",
        "targets",
        "frontends",
        "api",
        "aot",
        "cli",
        "simulate",
    },
}
MOST_ENTRIES = 15
FILES = sorted(ROOT.rglob("*.py"))
FOLDERS = sorted({p.parent for p in FILES})


def module_of(path: pathlib.Path) -> tuple[str, ...]:
    """Parts of a module's name below pbkern; () is pbkern itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def layer_of(module: tuple[str, ...]) -> str:
    if module[:1] in (("_jax",), ("_user_lines",)):
        return "core"
    return module[0] if module and module[0] in BELOW else "public"


@functools.cache
def tree_of(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports_of(path: pathlib.Path) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """(line, module below pbkern) of every import from pbkern; for names of packages, the submodule they name."""
    package = path.relative_to(ROOT).parts[:-1]
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + tuple(
                node.module.split(".") if node.module else ()
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pbkern":
            base = tuple(node.module.split(".")[1:])
        elif isinstance(node, ast.Import):
            ours = (a.name.split(".") for a in node.names if a.name.split(".")[0] == "pbkern")
            found += [(node.lineno, tuple(parts[1:])) for parts in ours]
            continue
        else:
            continue
        for alias in node.names:
            inner = ROOT.joinpath(*base, alias.name)
            is_module = inner.is_dir() or inner.with_suffix(".py").exists()
            found.append((node.lineno, (*base, alias.name) if is_module else base))
    return tuple(found)


def circles(graph: dict) -> list[list]:
    """Strongly connected components of more than one node (Tarjan 1972)."""
    index, low, stack, found = {}, {}, [], []

    def visit(v):
        index[v] = low[v] = len(index)
        stack.append(v)
        for w in sorted(graph.get(v, ())):
            if w not in index:
                visit(w)
                low[v] = min(low[v], low[w])
            elif w in stack:
                low[v] = min(low[v], index[w])
        if low[v] == index[v]:
            component = [stack.pop()]
            while component[-1] != v:
                component.append(stack.pop())
            found.extend([sorted(component)] if len(component) > 1 else [])

    for v in sorted(graph):
        if v not in index:
            visit(v)
    return found


def test_imports_point_one_way():
    back = []
    for path in FILES:
        own = layer_of(module_of(path))
        for line, target in imports_of(path):
            other = layer_of(target)
            if other != own and other not in BELOW[own]:
                back.append(
                    f"{path.relative_to(ROOT)}:{line}: {own} imports {'.'.join(target) or 'pbkern'} ({other})"
                )
    assert not back, "\n".join(back)


def test_modules_form_no_import_circle():
    graph = {module_of(p): {t for _, t in imports_of(p) if t != module_of(p)} for p in FILES}
    assert not circles(graph)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: str(p.relative_to(PROJECT)))
def test_entries_of_a_folder_form_no_circle(folder):
    depth = len(folder.relative_to(ROOT).parts)
    graph = collections.defaultdict(set)
    for path in FILES:
        module = module_of(path)
        if path.is_relative_to(folder) and len(module) > depth:
            for _, target in imports_of(path):
                if (
                    len(target) > depth
                    and target[:depth] == module[:depth]
                    and target[depth] != module[depth]
                ):
                    graph[module[depth]].add(target[depth])
    assert not circles(graph)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: str(p.relative_to(PROJECT)))
def test_rooms_are_small_and_say_what_they_do(folder):
    entries = [
        p for p in folder.iterdir() if p.name not in ("__init__.py", "__pycache__", "py.typed")
    ]
    assert len(entries) <= MOST_ENTRIES or folder == ROOT, (
        f"{len(entries)} entries: which of them are one room?"
    )
    assert ast.get_docstring(tree_of(folder / "__init__.py")), f"{folder} does not say what it is"


def test_private_jax_has_one_importer():
    found = []
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if any(n.split(".")[:2] == ["jax", "_src"] for n in names):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {place.partition(":")[0] for place in found} == {"_jax.py"}, found


SCAN_COUNTS = {"num_carry", "num_consts"}


def raw_counts_of_scans(tree: ast.Module) -> list[int]:
    """Lines that read numbers of a scan's operands from `eqn.params`, where jax 0.11 has none."""

    def is_raw(value: ast.expr, raw: set[str]) -> bool:
        is_params = isinstance(value, ast.Attribute) and value.attr == "params"
        return is_params or (isinstance(value, ast.Name) and value.id in raw)

    lines = []
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        raw = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and is_raw(node.value, set())
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        lines += [
            node.lineno
            for node in ast.walk(function)
            if isinstance(node, ast.Subscript)
            and isinstance(node.slice, ast.Constant)
            and node.slice.value in SCAN_COUNTS
            and is_raw(node.value, raw)
        ]
    return lines


def test_numbers_of_a_scans_operands_are_those_of_params_of():
    wrong = {
        str(p.relative_to(ROOT)): lines
        for p in FILES
        if p.name != "_jax.py" and (lines := raw_counts_of_scans(tree_of(p)))
    }
    assert not wrong
    text = "def f(eqn):\n    params = eqn.params\n    return params['num_carry'], eqn.params['num_consts']"
    assert raw_counts_of_scans(ast.parse(text)) == [3, 3]


def test_modules_say_what_they_do():
    silent = [str(p.relative_to(ROOT)) for p in FILES if not ast.get_docstring(tree_of(p))]
    assert not silent


MENTION = re.compile(r"(?<![\w./-])((?:[\w-]+/)*\w+\.py)\b(?!:\d)")
# Names that examples and messages invent; JAX's own suite is named by `*_test.py`.
INVENTED = {
    "model.py",
    "file.py",
    "script.py",
    "program.py",
    "setup.py",
    "FILE.py",
    "c.py",
    "prog.py",
    "kernels.py",
    "net.py",
}


def mentioned(path: pathlib.Path) -> list[str]:
    """Names of Python files in a document, or in a module's docstrings and comments."""
    text = path.read_text()
    if path.suffix == ".py":
        tree = tree_of(path)
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        parts = [ast.get_docstring(n) or "" for n in ast.walk(tree) if isinstance(n, documented)]
        parts += [line.partition("# ")[2] for line in text.split("\n") if "# " in line]
        text = "\n".join(parts)
    return [
        name
        for name in MENTION.findall(text)
        if name.rsplit("/")[-1] not in INVENTED and not name.endswith("_test.py")
    ]


@functools.cache
def known_names() -> frozenset[str]:
    """Every way to name a file of the project: its path, and the ends of its path."""
    folders = ("pbkern", "tests", "benchmarks", "tutorials", "examples", "scripts")
    kept = [p for d in folders for p in (PROJECT / d).rglob("*.py")]
    names = set()
    for p in kept:
        parts = p.relative_to(PROJECT).parts
        names |= {"/".join(parts[n:]) for n in range(len(parts))}
    return frozenset(names)


TEXTS = {
    "pbkern": FILES,
    "documents": [
        *(PROJECT / n for n in ("README.md", "CONTRIBUTING.md")),
        *(PROJECT / "docs").rglob("*.md"),
    ],
    "tests": [*(PROJECT / "tests").rglob("*.py")],
    "benchmarks": [*(PROJECT / "benchmarks").rglob("*.py")],
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", TEXTS)
def test_files_that_texts_mention_exist(kind):
    paths = sorted(TEXTS[kind])
    missing = [
        f"{p.relative_to(PROJECT)}: {name}"
        for p in paths
        for name in mentioned(p)
        if name not in known_names()
    ]
    assert not missing, "\n".join(missing)


CPU_WORDS = re.compile(r"avx512|vnni|vector_bits|l1_bytes")


@pytest.mark.parametrize("layer", ["lower", "fuse"])
def test_what_targets_share_knows_none_of_them(layer):
    files = [p for p in FILES if module_of(p)[:1] == (layer,)]
    said = {
        str(p.relative_to(ROOT)): found
        for p in files
        if (found := set(CPU_WORDS.findall(p.read_text())))
    }
    assert files
    assert not said
    imports = [
        str(p.relative_to(ROOT))
        for p in files
        for _, target in imports_of(p)
        if layer_of(target) == "targets"
    ]
    assert not imports, f"{', '.join(imports)} import targets"


# Folder of a target -> folders and files of targets/ that it may not import. All others are shared rooms.
TARGETS = {
    "cpu": {"simt", "nvgpu", "amdgpu"},
    "simt": {"cpu", "nvgpu", "amdgpu"},  # of GPUs, which both vendors' may import
    "nvgpu": {"cpu", "amdgpu"},
    "amdgpu": {"cpu", "nvgpu"},
}


def siblings(imports: dict[pathlib.Path, tuple]) -> list[str]:
    """Imports of targets from targets beside them, and from rooms that all of them share."""
    found = []
    for path, targets in imports.items():
        module = module_of(path)
        if len(module) < 2 or module[0] != "targets":  # targets/__init__.py finds them by name
            continue
        forbidden = TARGETS.get(module[1], set(TARGETS))
        found += [
            f"{path.relative_to(ROOT)}:{line}: {module[1]} imports {'.'.join(target)}"
            for line, target in targets
            if len(target) > 1 and target[0] == "targets" and target[1] in forbidden
        ]
    return found


def test_no_target_imports_a_sibling():
    assert {p.name for p in (ROOT / "targets").iterdir() if (p / "target.py").exists()} == set(
        TARGETS
    )
    found = siblings({path: imports_of(path) for path in FILES})
    assert not found, "\n".join(found)


def test_imports_of_siblings_are_found():
    targets = ROOT / "targets"
    imports = {
        targets / "nvgpu" / "x.py": ((1, ("targets", "simt", "target")), (2, ("targets", "cpu"))),
        targets / "host" / "x.py": ((3, ("targets", "cpu", "passes")), (4, ("targets", "llvm"))),
        targets / "__init__.py": ((5, ("targets", "amdgpu", "target")),),
    }
    assert siblings(imports) == [
        "targets/nvgpu/x.py:2: nvgpu imports targets.cpu",
        "targets/host/x.py:3: host imports targets.cpu.passes",
    ]


def test_imports_are_found_and_have_layers():
    found = imports_of(ROOT / "lower" / "build.py")
    assert any(t[:2] == ("lower", "nest") for _, t in found)
    assert layer_of(("dsl", "kernel")) == "dsl"
    assert layer_of(("_jax",)) == "core"
    assert layer_of(()) == "public"
    assert circles({1: {2}, 2: {3}, 3: {1}, 4: {1}}) == [[1, 2, 3]]


# Openings that need the name beside them to be understood.
UNCLEAR_OPENINGS = re.compile(r"(Of|As|Those|Whose|By|With|Where|What|How|The same)\b")


def test_docstrings_begin_with_a_verb_or_with_the_name_of_a_thing():
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node)
                if text and UNCLEAR_OPENINGS.match(text):
                    found.append(f"{path}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")
    assert not found, "\n".join(found)


def test_class_names_are_used_once():
    """CompilerParams is the public name of each target's choices, by specification."""
    names = collections.Counter(
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in names.items() if count > 1} <= {"CompilerParams"}


def test_variables_have_words_for_names():
    """One letter is for loop indices, and for the conventions of mathematics, jaxprs and NumPy."""
    names = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arg):
                names.append(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.append(node.id)
    letters = [name for name in names if len(name) == 1 and name != "_"]
    assert len(letters) <= 0.10 * len(names)


def test_lines_are_short():
    """The 95th percentile of the widths of lines that are not empty; the formatter breaks code at 100 columns."""
    widths = sorted(
        len(line) for path in FILES for line in path.read_text().splitlines() if line.strip()
    )
    assert widths[int(0.95 * len(widths))] < 100


def assigned_at_top(tree: ast.Module) -> list[tuple[ast.expr, ast.expr, ast.stmt]]:
    """(target, value, statement) of each assignment outside functions and classes."""
    return [
        (target, node.value, node)
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]


def is_numeric(value: ast.expr) -> bool:
    """Whether an expression is arithmetic on numbers and names, or a call of np, int or float on such arithmetic."""
    if isinstance(value, ast.Call):
        maker = value.func.value if isinstance(value.func, ast.Attribute) else value.func
        makes = isinstance(maker, ast.Name) and maker.id in ("np", "math", "int", "float")
        return makes and any(map(is_numeric, value.args))
    if isinstance(value, ast.BinOp):
        parts = (value.left, value.right)
        return any(map(is_numeric, parts)) and all(
            is_numeric(part) or isinstance(part, ast.Name | ast.Attribute) for part in parts
        )
    if isinstance(value, ast.UnaryOp):
        return is_numeric(value.operand)
    return isinstance(value, ast.Constant) and type(value.value) in (int, float, complex)


def without_comment(text: str) -> list[str]:
    """Names of numeric constants that have a comment neither in their lines nor in the line above."""
    found, lines = [], text.split("\n")
    for target, value, node in assigned_at_top(ast.parse(text)):
        above = lines[node.lineno - 2] if node.lineno > 1 else ""
        said = (above.startswith("# ") and "# ---" not in above) or any(
            " #" in line for line in lines[node.lineno - 1 : node.end_lineno]
        )
        if is_numeric(value) and not said:
            found.append(ast.unparse(target))
    return found


def test_constants_are_assigned_one_by_one():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        for target, _, node in assigned_at_top(tree_of(path))
        if isinstance(target, ast.Tuple | ast.List)
    ]
    assert not found, "\n".join(found)


def test_numeric_constants_have_comments():
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in FILES
        for name in without_comment(path.read_text())
    ]
    assert not found, "\n".join(found)


def comment_above(lines: list[str], line: int) -> str:
    """The comment that ends in the line above a line, which is counted from 1."""
    first = line - 1
    while first > 0 and lines[first - 1].startswith("# ") and "# ---" not in lines[first - 1]:
        first -= 1
    return " ".join(text[2:] for text in lines[first : line - 1])


def test_comments_of_numeric_constants_begin_with_the_name_of_a_thing():
    found = []
    for path in FILES:
        lines = path.read_text().split("\n")
        for target, value, node in assigned_at_top(tree_of(path)):
            if is_numeric(value) and UNCLEAR_OPENINGS.match(comment_above(lines, node.lineno)):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(target)}")
    assert not found, "\n".join(found)


def test_names_of_numeric_constants_are_used_once():
    places = collections.defaultdict(list)
    numeric = set()
    for path in FILES:
        for target, value, node in assigned_at_top(tree_of(path)):
            if isinstance(target, ast.Name):
                places[target.id].append(f"{path.relative_to(ROOT)}:{node.lineno}")
                numeric |= {target.id} if is_numeric(value) else set()
    shared = {name: at for name, at in places.items() if name in numeric and len(at) > 1}
    assert numeric
    assert not shared


# Folders whose files are passes. What decides in them is a field of a pass's record, which is shown and set by name.
PASS_FOLDERS = (
    *(
        f"fuse/{room}"
        for room in ("algebra complex indexing loops partition simplify split time_tiling".split())
    ),
    "lower/passes",
    "targets/cpu/locality",
    "targets/cpu/packing",
    "targets/simt/passes",
)
# Numbers there that decide nothing: sizes of words, of types, and of what the fields of a word hold.
FACTS = {
    "UINT32_VALUES",
    "PAIR",
    "QUAD",
    "SIGN_BITS",
    "ROW_PADDING_BYTES",
    "JOINT_BYTES",
    "TILES_ACROSS",
}


def test_thresholds_of_passes_are_fields():
    folders = [ROOT / folder for folder in PASS_FOLDERS]
    assert all(folder.is_dir() for folder in folders)
    numbers = {
        target.id
        for path in FILES
        if any(folder in path.parents for folder in folders)
        for target, value, _ in assigned_at_top(tree_of(path))
        if isinstance(target, ast.Name) and is_numeric(value)
    }
    assert numbers == FACTS


def test_the_rules_for_constants_find_what_breaks_them():
    assert without_comment("A = 1\n\nB = 2 << 20\nC = -np.int64(3)\n") == ["A", "B", "C"]
    assert without_comment("D = E * 2\n# Bytes.\nF = 4\nG = 5\n") == ["D", "G"]
    assert not without_comment("# Bytes.\nA = 1\nB = 2  # bytes\nC = np.dtype(bool)\nD = 'x' * n\n")
    lines = ["A = 1", "# Of a line,", "# bytes.", "B = 2"]
    assert comment_above(lines, 4) == "Of a line, bytes."
    assert not comment_above(lines, 1)
    targets = [target for target, *_ in assigned_at_top(ast.parse("A, B = 1, 2\nC: int = 3\n"))]
    assert [type(target) for target in targets] == [ast.Tuple, ast.Name]


# Words of this project's own for what the field has a term for, and the term.
PRIVATE_WORDS = {
    r"\bdeal(s|t)?\b": "thread mapping",
    r"\bsilence[sd]?\b": "masked out, hidden",
    r"\bmended\b": "fixed",
    r"\bplain(er)? way\b": "falls back",
    r"\basked for ahead\b": "prefetched",
}


@pytest.mark.parametrize("word", PRIVATE_WORDS)
def test_the_terms_of_the_field_are_used(word):
    texts = [*FILES, ROOT.parent / "README.md", ROOT.parent / "docs" / "architecture.md"]
    found = [
        f"{path.name}:{k}: {line.strip()}"
        for path in texts
        for k, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(word, line, re.IGNORECASE)
    ]
    assert not found, f"say {PRIVATE_WORDS[word]}:\n" + "\n".join(found)


def test_nests_are_taken_apart_by_their_fields():
    """Nodes of nests are typed (lower/nest/ir/): no places of tuples, no names of kinds."""
    found = [
        f"{path.relative_to(ROOT)}:{k}"
        for path in FILES
        for k, line in enumerate(path.read_text().splitlines(), 1)
        if ".info[" in line
    ]
    assert not found, "\n".join(found)


def test_the_emitter_of_the_cpu_is_composed():
    """Its parts are given to one another; none is a base class of another."""
    classes = [
        node
        for path in (ROOT / "targets" / "cpu" / "emit").rglob("*.py")
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef)
    ]
    assert len(classes) > 10
    assert not [node.name for node in classes if node.bases]


def test_operations_are_emitted_in_parts():
    """The name of an operation holds no operands: a line of text in its place would print well, and hide what it reads."""
    lines = []
    for path in [*(ROOT / "lower").rglob("*.py"), *(ROOT / "targets").rglob("*.py")]:
        place = path.relative_to(ROOT)
        if place.parts[1] == "host" or place.name in ("launches.py", "handler.py"):
            continue  # the host's program is text, which nothing reads again
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and re.search(
                r"(put\w*|emit|add|Operation)$", ast.unparse(node.func)
            ):
                strings = [
                    part.value
                    for argument in node.args[:2]
                    if isinstance(argument, (ast.Constant, ast.JoinedStr))
                    for part in ast.walk(argument)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                ]
                if any(" " in text for text in strings[:1]):
                    lines.append(f"{place}:{node.lineno}")
    assert not lines


# Modules of lowering and of targets that use regular expressions -> what they read: texts that others write.
READERS_OF_TEXT = {
    "lower/nest/parse.py": "nests as text",
    "targets/amdgpu/compile.py": "LLVM IR as LLVM prints it",
    "targets/amdgpu/driver.py": "names of devices",
    "targets/cpu/machines/detect.py": "Linux's /proc and /sys",
    "targets/cpu/schedule/nest_schedule.py": "nests as text",
    "targets/host/objects/cache_key.py": "Linux's /proc",
    "targets/host/processor.py": "Linux's /proc",
    "targets/host/runtime/xla.py": "XLA's header",
    "targets/llvm/child.py": "LLVM IR as LLVM prints it",
    "targets/llvm/literals.py": "LLVM IR as MLIR prints it",
    "targets/nvgpu/compile.py": "PTX as LLVM prints it",
    "targets/nvgpu/ptxas.py": "messages of ptxas",
    "targets/simt/emit/nests.py": "places in the user's program",
    "targets/simt/llvm.py": "LLVM IR as MLIR prints it",
}


def test_no_regular_expression_reads_mlir_that_was_written_here():
    """Operations are records until a function is complete; what is printed is not read again."""
    readers = {
        str(path.relative_to(ROOT))
        for layer in ("lower", "targets")
        for path in (ROOT / layer).rglob("*.py")
        if any(
            isinstance(node, (ast.Import, ast.ImportFrom))
            and "re" in {getattr(node, "module", None), *(alias.name for alias in node.names)}
            for node in ast.walk(tree_of(path))
        )
    }
    assert readers == READERS_OF_TEXT.keys()


def test_types_are_checked_everywhere():
    """mypy takes every room by one rule, and none of the compiler's middle is excused from it line by line."""
    settings = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert settings.keys() <= {"python_version", "ignore_missing_imports"}, "no overrides"
    excused = [
        f"{path.relative_to(ROOT)}:{k}: {line.strip()}"
        for path in FILES
        if layer_of(module_of(path)) in ("core", "fuse", "lower")
        and path.name != "_jax.py"  # JAX's private modules have no types
        for k, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"#\s*(type: ignore|mypy:)", line)
    ]
    assert not excused, "\n".join(excused)


# Names that say how a value came about, not what it is.
UNTOLD_NAMES = {"found", "made", "kept", "own", "others"}


def assigned_names(tree: ast.Module) -> list[tuple[str, int]]:
    """(name, line) of each variable, parameter and attribute that a module binds, and of each function."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            names.append((node.arg, node.lineno))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append((node.id, node.lineno))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.append((node.attr, node.lineno))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.append((node.name, node.lineno))
    return names


def test_names_say_what_a_value_is():
    named = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in FILES
        for name, line in assigned_names(tree_of(path))
        if name in UNTOLD_NAMES
    ]
    assert not named, "name these by their role:\n" + "\n".join(named)


def test_bound_names_are_found():
    code = (
        "def kept(own, *others):\n    found: int = 1\n    self.made = [kept for kept in others]\n"
    )
    assert {name for name, _ in assigned_names(ast.parse(code))} == UNTOLD_NAMES
