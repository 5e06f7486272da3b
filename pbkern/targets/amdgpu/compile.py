"""MLIR of one kernel for threads -> LLVM IR -> object -> code object (hsaco). Needs llvmlite and an lld, no GPU and no ROCm."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from pbkern.core.errors import InternalError, TargetError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.targets.simt import llvm
from pbkern.targets.simt.emit.kernel import ThreadFunction

from .devices import AmdDeviceKind

TRIPLE = "amdgcn-amd-amdhsa"
# Code objects of version 5, which every runtime of ROCm since 5.7 loads: those of version 6 need
# ROCm 6.3, for nothing that these devices have. Source: LLVM, User Guide for AMDGPU Backend, code
# object metadata.
_VERSION = """
!llvm.module.flags = !{!1000000}
!1000000 = !{i32 1, !"amdhsa_code_object_version", i32 500}
"""
_FENCE = re.compile(r"call (\w+|<[^>]*>) @llvm\.arithmetic\.fence\.\w+\(")


@dataclass(frozen=True)
class CodeObject:
    """Machine code of one kernel.

    Attributes:
      text: as LLVM prints it. image: code object, ELF. registers: vector registers of a thread.
        spill_bytes: stored because registers did not suffice. shared_bytes: LDS of a workgroup.
    """

    text: str
    image: bytes
    registers: int
    spill_bytes: int
    shared_bytes: int


def llvm_ir(function: ThreadFunction) -> str:
    """LLVM IR of a kernel. Raises InternalError."""
    threads = f'"{function.threads},{function.threads}"'
    ir = llvm.ir_of(function, (), {"rocdl.kernel": "unit", "rocdl.flat_work_group_size": threads})
    return _without_fences(ir) + _VERSION


def _without_fences(ir: str) -> str:
    """LLVM 22 cannot select a fence of a value that is the same in all lanes.

    An empty instruction hides a value as well:

        call float @llvm.arithmetic.fence.f32(float %x)    ->    call float asm "", "=v,0"(float %x)

    "v": in vector registers. The product that it hides is not contracted with a sum; equal ones are
    still one.
    """
    return _FENCE.sub(r'call \1 asm "", "=v,0"(', ir)


def assemble(ir: str, kind: AmdDeviceKind) -> CodeObject:
    """Machine code of LLVM IR for a device.

    Raises TargetError without an lld, InternalError for calls of what no device has.
    """
    linker = lld()
    code = llvm.code(ir, TRIPLE, ["asm", "obj"], cpu=kind.architecture, features="", reloc="pic")
    text = code["asm"].decode()
    with tempfile.TemporaryDirectory() as folder:
        source, result = pathlib.Path(folder) / "kernel.o", pathlib.Path(folder) / "kernel.hsaco"
        source.write_bytes(code["obj"])
        command = [*linker, "-shared", "--no-undefined", str(source), "-o", str(result)]
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode:
            raise InternalError(
                "lld does not link the code of a kernel", why=ran.stderr.strip()[:1000]
            )
        return CodeObject(
            text,
            result.read_bytes(),
            _number(r"\.vgpr_count: +(\d+)", text),
            _number(r"\.private_segment_fixed_size: +(\d+)", text),
            _number(r"\.group_segment_fixed_size: +(\d+)", text),
        )


@functools.cache
def lld() -> tuple[str, ...]:
    """Command of LLVM's linker: ziglang's, ROCm's, or one in PATH. Raises TargetError."""
    if importlib.util.find_spec("ziglang"):
        return sys.executable, "-m", "ziglang", "ld.lld"
    for path in ("/opt/rocm/llvm/bin/ld.lld", shutil.which("ld.lld")):
        if path and pathlib.Path(path).exists():
            return (path,)
    raise TargetError(
        "code for AMD GPUs cannot be linked",
        why="there is neither ziglang, nor /opt/rocm, nor ld.lld in PATH",
        hint="pip install 'pbkern[amd]'",
    )


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0
