"""LLVM IR -> object file, assembly or IR of a whole library, by llvmlite in a child process.

LLVM ends its process on some errors: here that is an error with its message. Code is position independent, for the small code
model; only the names in `keep` are global, and the same text gives the same bytes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

from pbkern.core.errors import InternalError, TargetError
from pbkern.targets.cpu.devices import Device

from .entry import Entry
from .variant import Variant

CHILD = pathlib.Path(__file__).with_name("llvm_child.py")
# A large library takes seconds; LLVM that does not come back is stopped.
SECONDS = 600


def require_llvmlite() -> None:
    """Raises TargetError where llvmlite is not installed."""
    if importlib.util.find_spec("llvmlite") is None:
        raise TargetError("llvmlite is not installed", why="it makes the code of libraries", hint="pip install 'pbkern[aot]'")


def emitted(entry: Entry, variants: Sequence[Variant | None], device: Device, kinds: Sequence[str]) -> dict[str, bytes]:
    """The whole library in each of `kinds`: "obj", "asm" or "llvm". Raises InternalError with what LLVM says.

    device: any of the library's, for the triple.
    """
    modules: list[tuple[list[str], list[bool], str | None]]
    modules = [([p.text for p in v.parts], [p.has_scalar_loops for p in v.parts], entry.main(n))
               for n, v in enumerate(variants) if v is not None]  # fmt: skip
    modules.append(([entry.text()], [False], None))
    texts = [[t.encode() for t in texts] for texts, _, _ in modules]
    request = {
        "sizes": [list(map(len, m)) for m in texts], "scalar": [scalar for _, scalar, _ in modules],
        "names": [name for _, _, name in modules], "keep": entry.keep, "triple": device.triple, "kinds": list(kinds),
        "cpu": "x86-64" if device.is_x86 else "generic",
    }  # fmt: skip
    sent = b"".join([json.dumps(request).encode(), b"\n", *(t for m in texts for t in m)])
    answer = _child(sent)
    head, _, rest = answer.partition(b"\n")
    found = {}
    for kind, size in json.loads(head).items():
        found[kind], rest = rest[:size], rest[size:]
    return found


def _child(sent: bytes) -> bytes:
    require_llvmlite()
    spec = importlib.util.find_spec("llvmlite")
    assert spec is not None and spec.origin is not None
    environment = dict(os.environ, PYTHONPATH=str(pathlib.Path(spec.origin).parents[1]))
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(CHILD)], input=sent, capture_output=True, timeout=SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        raise InternalError("LLVM did not finish a library", why=f"it was stopped after {SECONDS} s") from None
    if done.returncode or not done.stdout:
        said = done.stderr.decode(errors="replace").strip()
        raise InternalError("LLVM made no code of a library", why=f"exit status {done.returncode}: {said[-1500:]}")
    return done.stdout
