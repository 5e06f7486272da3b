"""Runs code that multiplies tiles (AMX) on any x86-64: amx_instructions.c does what the processor does not."""

import contextlib
import ctypes
import dataclasses
import functools
import pathlib
import platform
import shutil
import subprocess
import tempfile
from unittest import mock

from pbkern import config
from pbkern.targets import mlir
from pbkern.targets.cpu.machines.detect import detected_machine, present
from pbkern.targets.cpu.machines.machine import CpuMachine
from pbkern.targets.host.processor import cpu_flags, cpuinfo, may_use_tiles

SOURCE = pathlib.Path(__file__).with_name("amx_instructions.c")
FEATURES = "amx-tile", "amx-bf16", "amx-int8"
KINDS = "configurations", "loads", "stores", "zeros", "products"


def is_here() -> bool:
    """Whether the processor has the instructions, and this process may use them."""
    return {"amx_tile", "amx_bf16", "amx_int8"} <= cpu_flags(cpuinfo()) and may_use_tiles()


def can_run() -> bool:
    """Whether they can be run here."""
    on_linux = platform.system() == "Linux" and platform.machine() in ("x86_64", "AMD64")
    return on_linux and (is_here() or shutil.which("cc") is not None)


def machine() -> CpuMachine:
    """This machine with tiles, and the caches of those that have them."""
    caches = {"l1_bytes": 48 << 10, "l2_bytes": 2 << 20}
    return dataclasses.replace(detected_machine(), amx_bf16=True, amx_int8=True, **caches)


@functools.cache
def _executor() -> ctypes.CDLL:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="pbkern_amx_"))
    library = folder / "amx.so"
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-o", str(library), str(SOURCE)], check=True)
    executor = ctypes.CDLL(str(library))
    assert executor.amx_install() == 0
    return executor


@contextlib.contextmanager
def tiles():
    """Code is made for a machine with tiles, and runs. Yields a function: the instructions executed so far, by kind.

    On a processor that has them, where nothing counts, the function returns {}.
    """
    cpu = "pbkern.targets.cpu"
    with contextlib.ExitStack() as stack:
        for module in ("target", "backend"):
            name = f"{cpu}.{module}.jit_machine"
            stack.enter_context(mock.patch(name, return_value=machine()))
        if is_here():
            yield dict
            return
        # One thread at a time: some systems tell another thread than the one that has stopped.
        stack.enter_context(config.override(num_threads=1))
        counts = (ctypes.c_long * len(KINDS)).in_dll(_executor(), "amx_counts")
        counts[:] = [0] * len(KINDS)
        stack.enter_context(mock.patch.object(mlir, "object_code", _object_code))
        yield lambda: dict(zip(KINDS, counts))


_real_object_code = mlir.object_code


def _object_code(module, *arguments) -> bytes:
    """LLVM selects instructions of tiles, beside the processor's own, though the processor at hand has none."""
    features = present(cpu_flags(cpuinfo())).union(FEATURES)
    names = ", ".join(f'"+{feature}"' for feature in sorted(features))
    with mlir.context():
        features = mlir.bindings().ir.Attribute.parse(f"#llvm.target_features<[{names}]>")
        for function in module.body.operations:
            function.attributes["target_features"] = features
    return _real_object_code(module, *arguments)
