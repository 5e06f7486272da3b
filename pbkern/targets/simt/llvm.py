"""MLIR of one kernel for threads -> LLVM IR -> code for a device, by LLVM in a child process. A GPU is not needed."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence

from pbkern.targets import mlir
from pbkern.targets.llvm import literals, process

from .emit.kernel import ThreadFunction

# The level of LLVM's passes and of its code generation, 0 to 3, for GPUs.
DEVICE_OPT_LEVEL = 3
_KERNEL = re.compile(r"^define [^@]*_kernel void @([\w.$]+)", re.MULTILINE)
# The CPU's kernel passes for one function, with places of 32 or 64 bits, and the operations that
# only a vendor has. Vectors are converted while loops and branches have no blocks: that pass merges
# equal blocks, which then take arrays as arguments.
_PASSES = (
    "func.func({canonicalize},loop-invariant-code-motion,convert-vector-to-llvm,convert-scf-to-cf,convert-math-to-llvm,"
    "convert-arith-to-llvm{{{bits}}}),"
    "finalize-memref-to-llvm{{{bits}}},convert-func-to-llvm{{use-bare-ptr-memref-call-conv=1 {bits}}},"
    "convert-cf-to-llvm{{{bits}}},convert-ub-to-llvm,{vendor}reconcile-unrealized-casts,llvm.func({canonicalize}),"
    "ensure-debug-info-scope-on-llvm-func"
)


def require_llvmlite() -> str:
    """llvmlite's version. Raises TargetError where it is not installed."""
    return process.require_llvmlite(
        "GPUs", "pip install 'pbkern[cuda]', or 'pbkern[amd]' for AMD GPUs"
    )


def ir_of(function: ThreadFunction, vendor: tuple[str, ...], attributes: Mapping[str, str]) -> str:
    """LLVM IR of a kernel. Raises InternalError.

    Args:
      function: the kernel.
      vendor: passes for operations that only a vendor has.
      attributes: of the kernel in the LLVM dialect, as MLIR text.
    """
    api = mlir.bindings()
    passes = _PASSES.format(
        canonicalize=mlir.CANONICALIZE,
        bits=f"index-bitwidth={function.index_bits}",
        vendor="".join(f"{pass_name}," for pass_name in vendor),
    )
    module = mlir.run_passes(mlir.parse(function.text), passes)
    mlir.check_lowered(module, ("llvm.", "nvvm.", "rocdl."))
    translate = importlib.import_module(
        f"{api.ir.__name__.rpartition('.')[0]}.dialects.llvm"
    ).translate_module_to_llvmir
    with mlir.context():
        for op in module.body.operations:
            if op.operation.name == "llvm.func" and len(op.operation.regions[0].blocks):
                for name, value in attributes.items():
                    op.operation.attributes[name] = api.ir.Attribute.parse(value)
        return translate(module.operation)


def code(ir: str, triple: str, kinds: Sequence[str], **machine: str) -> dict[str, bytes]:
    """ "asm", "obj" or both of a kernel's LLVM IR; `machine`: further arguments of LLVM's target machine, such as cpu.

    Raises TargetError without llvmlite, InternalError for what LLVM refuses.
    """
    require_llvmlite()
    name = _KERNEL.search(ir)
    request = {
        "triple": triple,
        "level": DEVICE_OPT_LEVEL,
        "machine": machine,
        "kinds": list(kinds),
        "library": None,
    }
    what = f"kernel `{name[1]}`" if name else "a text"
    return process.code(request, [[literals.readable(ir)]], f"{what} for {triple}")
