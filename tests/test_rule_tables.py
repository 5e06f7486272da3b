"""Rules register when their package is imported: no table has fewer entries because of what was imported before."""

import json
import pathlib
import subprocess
import sys

import pbkern

# Table -> (module that is imported alone, fewest entries).
TABLES = {
    "pbkern.dsl.text.spelling:rules": ("pbkern.dsl.text", 100),
    "pbkern.fuse.access.rules:rules": ("pbkern.fuse.access", 100),
    "pbkern.lower.math.elementwise:RULES": ("pbkern.lower.math", 70),
    "pbkern.lower.rules.contractions:CONTRACTIONS": ("pbkern.lower.rules", 18),
    "pbkern.lower.rules.control_flow:RULES": ("pbkern.lower.rules", 3),
    "pbkern.lower.rules.views:RULES": ("pbkern.lower.rules", 18),
    "pbkern.frontends.torch.aten.table:TABLE": ("pbkern.frontends.torch.aten", 350),
    "pbkern.frontends.pallas.body:RULES": ("pbkern.frontends.pallas.call", 40),
    "pbkern.frontends.stablehlo.table:RULES": ("pbkern.frontends.stablehlo.importer", 130),
    "pbkern.frontends.stablehlo.table:CHECKS": ("pbkern.frontends.stablehlo.importer", 6),
}
# Argument: [[modules of ours that a process imports, tables that it counts], ...]. Each is forked from one that has imported
# what all need of others.
COUNT = """
import importlib, json, os, sys
import jax, torch, jax.experimental.pallas, jax.extend.core
for imported, tables in json.loads(sys.argv[1]):
    sys.stdout.flush()
    if os.fork():
        os.wait()
        continue
    for m in imported:
        importlib.import_module(m)
    found = {}
    for table in tables:
        module, _, name = table.partition(":")
        rules = getattr(importlib.import_module(module), name)
        found[table] = {n: rules.get(n).__module__ for n in rules}
    print(json.dumps(found), flush=True)
    os._exit(0)
"""


def rules_with(imports: list[list[str]]) -> list[dict[str, dict[str, str]]]:
    """For each list, table -> rule -> module that has it, in a process that imports these modules and no others."""
    wanted = [
        (m, list(TABLES) if len(m) > 1 else [t for t, (alone, _) in TABLES.items() if [alone] == m])
        for m in imports
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COUNT, json.dumps(wanted)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == len(imports), done.stderr
    return list(map(json.loads, done.stdout.splitlines()))


def modules() -> list[str]:
    """All but those that import TensorFlow, which takes seconds and has no tables."""
    root = pathlib.Path(pbkern.__file__).parent
    paths = (p.relative_to(root.parent).with_suffix("").parts for p in sorted(root.rglob("*.py")))
    return [".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in paths
            if parts[-1] != "__main__" and parts[:3] != ("pbkern", "frontends", "tf")]  # fmt: skip


def test_rules_register_with_their_package():
    """Others may add rules for primitives of their own where they define those."""
    every, *each = rules_with(
        [modules(), *([m] for m in sorted({alone for alone, _ in TABLES.values()}))]
    )
    first = {table: rules for tables in each for table, rules in tables.items()}
    for table, (_, least) in TABLES.items():
        before, package = first[table], table.rpartition(".")[0]
        late = {
            name for name, module in every[table].items() if module.startswith(package)
        } - before.keys()
        assert not late, f"{table}: {sorted(late)} register only with other modules"
        assert len(before) >= least, table


def test_every_table_is_counted():
    root = pathlib.Path(pbkern.__file__).parent
    made = {p for p in root.rglob("*.py") if "= RuleTable(" in p.read_text()}
    named = {t.partition(":")[0] for t in TABLES}
    assert {".".join(p.relative_to(root.parent).with_suffix("").parts) for p in made} == named
