"""ptxas: PTX -> machine code, and what it says of registers and memory.

It is found in nvidia-cuda-nvcc's wheel, a toolkit, or PATH. What it made is kept on disk, by text,
architecture and version.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
import re
import shutil
import struct
import subprocess
import tempfile

from pbkern.core.errors import TargetError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.process import disk_cache

KIND = "cubin"
NUMBERS = struct.Struct(
    "<4q"
)  # of an entry on disk, before the warnings and the cubin; the last one: bytes of warnings
# Blocks of a kernel that a multiprocessor is to hold at least, in its text.
_RESIDENT_BLOCKS = r"\.minnctapersm (\d+)"
# Of lines that ptxas prints. Some of what slows code down is marked "info".
_WARNING = r"warning|performance loss|serialized"


@dataclass(frozen=True)
class Cubin:
    """Machine code of one kernel.

    Attributes:
      cubin: ELF file. registers: of a thread. spill_bytes: stored and loaded because registers did
        not suffice.
      shared_bytes: static, of a block. warnings: lines in which ptxas warns, or says that code is slower than its text asks
        for, as wgmma whose products wait for each other ("serialized").
    """

    cubin: bytes
    registers: int
    spill_bytes: int
    shared_bytes: int
    warnings: tuple[str, ...] = ()

    def entry(self) -> bytes:
        """The content of an entry on disk."""
        warnings = "\n".join(self.warnings).encode()
        numbers = self.registers, self.spill_bytes, self.shared_bytes, len(warnings)
        return NUMBERS.pack(*numbers) + warnings + self.cubin

    @classmethod
    def of_entry(cls, entry: bytes) -> Cubin:
        """Raises struct.error where it is no entry of ours."""
        registers, spills, shared, length = NUMBERS.unpack_from(entry)
        rest = entry[NUMBERS.size :]
        warnings = tuple(rest[:length].decode().splitlines())
        return cls(rest[length:], registers, spills, shared, warnings)


@functools.cache
def find() -> str | None:
    """Path of ptxas, or None."""
    return _find("ptxas")


@functools.cache
def _find(tool: str) -> str | None:
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in sorted(pathlib.Path(folder).glob(f"*/bin/{tool}")):
            if os.access(path, os.X_OK):
                return str(path)
    for root in filter(
        None, (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    ):
        path = pathlib.Path(root) / "bin" / tool
        if os.access(path, os.X_OK):
            return str(path)
    return shutil.which(tool)


def assemble(ptx: str, architecture: str) -> Cubin:
    """From disk, or by ptxas. Raises TargetError where ptxas is missing or rejects the text."""
    tool = find()
    if tool is None:
        raise TargetError(
            "ptxas was not found",
            why="it is neither in a wheel, nor in CUDA_HOME, nor in PATH",
            hint="pip install nvidia-cuda-nvcc",
        )
    store, key = (
        disk_cache.current(),
        disk_cache.digest((ptx, architecture, _version(tool), "fewest spills, warnings")),
    )
    payload = store.get(KIND, key) if store else None
    if store and payload is not None:
        try:
            return Cubin.of_entry(payload)
        except struct.error:  # no entry of ours: make it anew
            store.remove(KIND, key)
    code = _with_fewest_spills(tool, ptx, architecture)
    if store:
        store.put(KIND, key, code.entry())
    return code


@functools.cache
def _version(tool: str) -> str:
    return subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout


def _with_fewest_spills(tool: str, ptx: str, architecture: str) -> Cubin:
    """The code for as many resident blocks as the text asks for; for fewer, where registers do not suffice otherwise.

    How many suffice is estimated before (compile.py), for all architectures alike.
    """
    blocks = _number(_RESIDENT_BLOCKS, ptx)
    attempts = [_assembled(tool, ptx, architecture)]
    while attempts[-1].spill_bytes and blocks > 1:
        blocks -= 1
        fewer = re.sub(_RESIDENT_BLOCKS, f".minnctapersm {blocks}", ptx)
        attempts.append(_assembled(tool, fewer, architecture))
    return min(attempts, key=lambda code: code.spill_bytes)


def _assembled(tool: str, ptx: str, architecture: str) -> Cubin:
    with tempfile.TemporaryDirectory() as folder:
        source, result = pathlib.Path(folder) / "kernel.ptx", pathlib.Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        command = [tool, f"-arch={architecture}", "-v", str(source), "-o", str(result)]
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode:
            raise TargetError(
                "ptxas rejects a kernel",
                why=ran.stderr.strip()[:1000],
                hint=f"ptxas -arch={architecture}",
            )
        said = ran.stderr
        return Cubin(
            result.read_bytes(),
            _number(r"Used (\d+) registers", said),
            _number(r"(\d+) bytes spill stores", said) + _number(r"(\d+) bytes spill loads", said),
            _number(r"(\d+) bytes smem", said),
            tuple(line for line in said.splitlines() if re.search(_WARNING, line, re.IGNORECASE)),
        )


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0


def disassembled(cubin: bytes) -> str:
    """Machine code as nvdisasm prints it. Raises TargetError where that is not installed."""
    tool = _find("nvdisasm")
    if tool is None:
        raise TargetError(
            "machine code cannot be disassembled",
            why="nvdisasm was not found",
            hint="pip install nvidia-cuda-nvdisasm",
        )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, file.name], capture_output=True, text=True, check=True).stdout
