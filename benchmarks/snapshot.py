"""One hash per workload of everything the compiler makes of it: proof that a move changed no behaviour.

    python snapshot.py write before.json [words] [--sets bench,survey,examples,pallas] [--objects] [--texts folder]
    ... the move ...
    python snapshot.py write after.json  [the same arguments]
    python snapshot.py compare before.json after.json        exit status 1 if anything differs, with the first stage that does

Run from the root of a checkout (its `benchmarks` and `examples` are read). Use one machine, one Python and one jax for both:
the file names them, and `compare` refuses snapshots of different ones. Nothing is executed; without --objects nothing is
compiled by LLVM either.

Each workload has one hash per stage, in the order of the data's way, so that a difference names the stage that made it:

    jaxpr     the simplified function, as the fuser left it
    plan      the explanation (what was fused, prices) and the host programs
    kernels   each kernel as DSL source, and its canonical content (digest)
    nests     loop nests of each kernel, after all rewrites
    mlir      text of kernels and of host functions: all that MLIR and LLVM are given
    objects   (--objects) bytes of the object files

As a pytest plugin it records the MLIR of every program that a test compiles, hand-written kernels included:

    PYTHONPATH=<folder of this file> SNAPSHOT_OUT=tests.json python -m pytest -p snapshot -p no:xdist tests/native
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import platform
import re
import runpy
import sys
import time

if __name__ in (
    "__main__",
    "snapshot",
):  # a program, or a plugin of pytest; tests import single functions
    # What is on disk was made by another version of the sources.
    os.environ.setdefault("PBKERN_CACHE", "0")
    sys.path.insert(0, os.getcwd())  # this checkout's pbkern, whichever is installed

import jax
import numpy as np

import pbkern
from pbkern.core.machine import Machine
from pbkern.targets import backend, get_target

STAGES = ("jaxpr", "plan", "kernels", "nests", "mlir", "objects")
SETS = ("bench", "survey", "examples", "pallas")


# --- texts -> hashes ----------------------------------------------------------------------------------------------------

# What may differ between processes although the code is the same: addresses of Python objects in printed parameters.
ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
# A move renames modules; printed parameters may name functions of pbkern by module.
MODULE = re.compile(r"<function ([\w.<>]+) at [^>]*>")


def digest(text: str | bytes) -> str:
    if isinstance(text, str):
        text = text.replace(os.getcwd() + os.sep, "")  # checkouts in two places agree
        text = ADDRESS.sub("0x", MODULE.sub(r"<function \1>", text)).encode()
    return hashlib.sha256(text).hexdigest()[:16]


def texts_of_program(program, options, objects: bool) -> dict[str, str | bytes]:
    """nests, mlir (and objects) of one HostProgram."""
    target = get_target(options.target)
    if objects:
        compiled = target.compile(program, options)
        lowered = compiled.lowered
    else:
        lowered = backend.lowered(program, target.backend, options)
    found: dict[str, str | bytes] = {
        "nests": "\n\n".join(f"{k.name}:\n{k.nests}" for k in lowered.lowered),
        "mlir": f"{lowered.kernels}\n{lowered.host}",
    }
    if objects:
        found["objects"] = b"\0".join(compiled.code.objects)
    return found


def joined(parts: list[dict[str, str | bytes]]) -> dict[str, str | bytes]:
    found: dict[str, str | bytes] = {}
    for part in parts:
        for stage, text in part.items():
            found[stage] = found[stage] + text if stage in found else text
    return found


def texts_of(function, args: tuple, kwargs: dict, objects: bool) -> dict[str, str | bytes]:
    """Every stage of a decorated function for arguments like these."""
    if not hasattr(function, "build"):
        function = pbkern.jit(function)
    build, options = function.build(args, kwargs)
    kernels = build.plan.kernels()
    # str(jaxpr) of functions with custom rules names Python objects; the canonical digests of kernels do not.
    sources = "\n".join(f"{k.source()}\n{digest(repr(k.content))}" for k in kernels)
    found: dict[str, str | bytes] = {
        "jaxpr": build.record.text("jaxpr"),
        "plan": build.record.text("plan"),
        "kernels": sources,
    }
    return found | joined([texts_of_program(p, options, objects) for p in build.plan.programs()])


# --- workloads ----------------------------------------------------------------------------------------------------------


def bench():
    """The benchmark table, at full and at small size."""
    from benchmarks.workloads import WORKLOADS

    for w in WORKLOADS.values():
        for size in ("full", "small"):
            specs = getattr(w, size)
            args = [jax.ShapeDtypeStruct(s.shape, np.int32 if s.high else s.dtype) for s in specs]
            yield f"bench.{w.name}.{size}", w.function, args, {}, False


def survey():
    """The survey's cases."""
    from benchmarks import survey as module

    for name, (function, *specs) in module.cases(()).items():
        args = []
        for spec in specs:
            dtype, sizes = module.SPEC.fullmatch(spec).groups()[:2]
            args.append((tuple(int(s) for s in sizes.split(",") if s), module.DTYPES[dtype]))
        wide = any(s.startswith(("f64", "i64")) for s in specs)
        yield f"survey.{name}", function, args, {}, wide


def examples():
    """Decorated functions of examples/, on the arguments that their own `__main__` passes to `compare`."""
    sys.path.insert(0, "examples")
    import compare as module

    calls: list[tuple] = []
    kept, module.compare = module.compare, lambda f, *args, **_: calls.append((f, args))
    try:
        for path in sorted(pathlib.Path("examples").glob("jax_*.py")):
            calls.clear()
            runpy.run_path(str(path), run_name="__main__")
            for n, (f, args) in enumerate(calls):
                yield f"examples.{path.stem}.{f.__name__}.{n}", f, args, {}, False
    finally:
        module.compare = kept


def pallas(objects: bool):
    """The kernels that ship with JAX, imported from pl.pallas_call: {name: texts}. They are compiled (by LLVM as well)."""
    import pbkern.pallas
    from benchmarks import pallas_ops

    operations = next(
        v
        for v in vars(pallas_ops).values()
        if isinstance(v, (tuple, list)) and v and isinstance(v[0], pallas_ops.Operation)
    )
    pbkern.pallas.install()
    for op in operations:
        with Recorder() as recorder:
            jax.jit(op.function).lower(*op.arguments()).compile()
        yield f"pallas.{op.name}", joined([recorder.texts(c, objects) for c in recorder.compiled])
    pbkern.pallas.uninstall()


class Recorder:
    """Keeps every program that the target compiles inside a `with` block."""

    def __init__(self) -> None:
        self.compiled: list = []

    def __enter__(self) -> Recorder:
        self.kind = type(get_target("cpu"))
        self.kept = self.kind.compile
        recorder = self

        def compile(target, program, options):
            made = recorder.kept(target, program, options)
            recorder.compiled.append(made)
            return made

        self.kind.compile = compile
        return self

    def __exit__(self, *error) -> None:
        self.kind.compile = self.kept

    @staticmethod
    def texts(compiled, objects: bool = True) -> dict[str, str | bytes]:
        found: dict[str, str | bytes] = {
            "plan": str(compiled.program),
            "nests": "\n\n".join(f"{k.name}:\n{k.nests}" for k in compiled.lowered.lowered),
            "mlir": f"{compiled.lowered.kernels}\n{compiled.lowered.host}",
        }
        if objects:
            found["objects"] = b"\0".join(compiled.code.objects)
        return found


def environment() -> dict[str, str]:
    """What both snapshots must share."""
    machine = get_target("cpu").machine()
    known = {
        f.name: getattr(machine, f.name) for f in dataclasses.fields(Machine)
    }  # not what later versions know besides
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpy": np.__version__,
        "machine": digest(str(Machine(**known))),
        "threads": str(os.environ.get("PBKERN_NUM_THREADS", machine.cores)),
    }


def _on(machine: str):
    """Plans and kernels for another machine than the one at hand; nothing is run."""
    from tests.lowered import on

    return on() if machine == "table" else contextlib.nullcontext()


def _argument(a):
    return (
        jax.ShapeDtypeStruct(*a)
        if isinstance(a, tuple) and len(a) == 2 and isinstance(a[0], tuple)
        else a
    )


def write(
    path: pathlib.Path,
    words: list[str],
    sets: list[str],
    objects: bool,
    folder: pathlib.Path | None,
) -> int:
    found: dict[str, dict[str, str]] = {}
    began, failed = time.perf_counter(), 0

    def keep(name: str, texts: dict[str, str | bytes]) -> None:
        found[name] = {s: digest(texts[s]) for s in STAGES if s in texts}
        for stage, text in texts.items() if folder is not None else ():
            place = folder / name.replace("/", "_")
            place.mkdir(parents=True, exist_ok=True)
            (place / stage).write_bytes(text if isinstance(text, bytes) else text.encode())

    for kind in sets:
        if kind == "pallas":
            for name, texts in pallas(objects):
                keep(name, texts)
            continue
        for name, function, args, kwargs, wide in globals()[kind]():
            if words and not any(w in name for w in words):
                continue
            try:
                with jax.enable_x64(wide):
                    keep(name, texts_of(function, tuple(map(_argument, args)), kwargs, objects))
            except (
                Exception
            ) as e:  # a case that is refused is recorded as such: the message is behaviour too
                failed += 1
                found[name] = {
                    "error": digest(f"{type(e).__name__}: {e}"),
                    "message": f"{type(e).__name__}: {e}"[:200],
                }
    path.write_text(
        json.dumps({"environment": environment(), "hashes": found}, indent=1, sort_keys=True) + "\n"
    )
    whole = digest(json.dumps(found, sort_keys=True))
    print(
        f"{len(found)} workloads ({failed} refused), {time.perf_counter() - began:.0f} s, all of them: {whole}"
    )
    return 0


def compare(before: pathlib.Path, after: pathlib.Path) -> int:
    a, b = (json.loads(p.read_text()) for p in (before, after))
    if a["environment"] != b["environment"]:
        print(f"not comparable: {a['environment']} and {b['environment']}")
        return 2
    x, y = a["hashes"], b["hashes"]
    wrong = [f"{n}: only in {before if n in x else after}" for n in sorted(x.keys() ^ y.keys())]
    for name in sorted(x.keys() & y.keys()):
        stages = [s for s in (*STAGES, "error") if x[name].get(s) != y[name].get(s)]
        if stages:
            wrong.append(f"{name}: differs from stage `{stages[0]}` on ({', '.join(stages)})")
    print("\n".join(wrong) or f"identical: {len(x)} workloads")
    return 1 if wrong else 0


# --- pytest plugin ------------------------------------------------------------------------------------------------------

_modules: list[
    str
] = []  # digests of the MLIR modules that the present test has had parsed, from any thread
_tests: dict[str, dict[str, str]] = {}


def pytest_configure(config) -> None:
    if not os.environ.get("SNAPSHOT_OUT"):
        return
    from pbkern.targets import mlir

    parse = mlir.parse

    def recorded(text, *args, **kwargs):
        _modules.append(digest(text))
        return parse(text, *args, **kwargs)

    mlir.parse = recorded


def pytest_runtest_teardown(item) -> None:
    if _modules:  # parts of a program are parsed by threads, in any order
        _tests[item.nodeid] = {"mlir": digest(" ".join(sorted(_modules)))}
        _modules.clear()


def pytest_sessionfinish() -> None:
    if os.environ.get("SNAPSHOT_OUT"):
        path = pathlib.Path(os.environ["SNAPSHOT_OUT"])
        path.write_text(
            json.dumps({"environment": environment(), "hashes": _tests}, indent=1, sort_keys=True)
            + "\n"
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    w = commands.add_parser("write")
    w.add_argument("path", type=pathlib.Path)
    w.add_argument("words", nargs="*")
    w.add_argument("--sets", default="bench,survey,examples", help=f"of {', '.join(SETS)}")
    w.add_argument(
        "--machine",
        choices=("this", "table"),
        default="this",
        help="table: for the machine of the documents, with AVX-512; not with pallas, --objects",
    )
    w.add_argument(
        "--objects", action="store_true", help="compile as well, and hash the object files"
    )
    w.add_argument(
        "--texts",
        type=pathlib.Path,
        help="keep the texts below this folder, to be compared with diff -r",
    )
    c = commands.add_parser("compare")
    c.add_argument("before", type=pathlib.Path)
    c.add_argument("after", type=pathlib.Path)
    given = parser.parse_args(argv)
    if given.command == "compare":
        return compare(given.before, given.after)
    with _on(given.machine):
        return write(given.path, given.words, given.sets.split(","), given.objects, given.texts)


if __name__ == "__main__":
    sys.exit(main())
