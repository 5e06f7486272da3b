"""LLVM IR -> object file, assembly or IR of a whole library, by LLVM in a child process (targets/llvm/process.py).

Code is position independent, for the small code model; only the names in `keep` are global, and the
same text gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from pbkern.targets.cpu.machines.devices import CpuDevice
from pbkern.targets.llvm import process

from .entry import Entry

# The level of LLVM's passes and of its code generation, 0 to 3, for libraries.
LIBRARY_OPT_LEVEL = 2


def require_llvmlite() -> None:
    """Raises TargetError where llvmlite is not installed."""
    process.require_llvmlite("libraries", "pip install 'pbkern[aot]'")


def emitted(
    entry: Entry,
    device: CpuDevice,
    kinds: Sequence[str],
) -> dict[str, bytes]:
    """The whole library in each of `kinds`: "obj", "asm" or "llvm".

    Raises InternalError with what LLVM says.

    device: any of the library's, for the triple.
    """
    require_llvmlite()
    modules: list[tuple[list[str], list[bool], str | None]]
    modules = [
        (
            [part.text for part in variant.parts],
            [part.has_scalar_loops for part in variant.parts],
            name,
        )
        for name, variant in entry.mains
    ]
    modules.append(([entry.text()], [False], None))
    library = {
        "scalar": [scalar for _, scalar, _ in modules],
        "names": [name for _, _, name in modules],
        "keep": entry.keep,
    }
    machine = {
        "cpu": "x86-64" if device.is_x86 else "generic",
        "features": "",
        "reloc": "pic",
        "codemodel": "small",
    }
    request = {
        "triple": device.triple,
        "level": LIBRARY_OPT_LEVEL,
        "machine": machine,
        "kinds": list(kinds),
        "library": library,
    }
    return process.code(request, [texts for texts, _, _ in modules], "a library")
