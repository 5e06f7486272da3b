"""MLIR of one kernel for threads -> LLVM IR -> llvmlite's module, optimised for a device. Needs neither a GPU nor its tools."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

from pbkern.core.errors import InternalError, TargetError
from pbkern.targets import llvm_literals, mlir

from .emit.kernel import ThreadFunction

# The CPU's kernel passes for one function, with places of 32 or 64 bits, and the operations that only a vendor has. Vectors are
# converted while loops and branches have no blocks: that pass merges equal blocks, which then take arrays as arguments.
_PASSES = (
    "func.func({canonicalize},loop-invariant-code-motion,convert-vector-to-llvm,convert-scf-to-cf,convert-math-to-llvm,"
    "convert-arith-to-llvm{{{bits}}}),"
    "finalize-memref-to-llvm{{{bits}}},convert-func-to-llvm{{use-bare-ptr-memref-call-conv=1 {bits}}},"
    "convert-cf-to-llvm{{{bits}}},convert-ub-to-llvm,{vendor}reconcile-unrealized-casts,llvm.func({canonicalize}),"
    "ensure-debug-info-scope-on-llvm-func"
)


@functools.cache
def binding() -> Any:
    """llvmlite's bindings with the back ends of GPUs ready. Raises TargetError where llvmlite is not installed."""
    try:
        found = importlib.import_module("llvmlite.binding")
    except ImportError:
        raise TargetError("llvmlite is not installed", why="it makes the code of GPUs",
                          hint="pip install 'pbkern[cuda]' or 'pbkern[amd]'") from None
    found.initialize_all_targets()
    found.initialize_all_asmprinters()
    return found


def ir_of(function: ThreadFunction, vendor: tuple[str, ...], attributes: Mapping[str, str]) -> str:
    """LLVM IR of a kernel. Raises InternalError.

    Args:
      vendor: passes for operations that only a vendor has. attributes: of the kernel in the LLVM dialect, as MLIR text.
    """
    m = mlir.bindings()
    passes = _PASSES.format(canonicalize=mlir.CANONICALIZE, bits=f"index-bitwidth={function.index_bits}",
                            vendor="".join(f"{p}," for p in vendor))
    module = mlir.run_passes(mlir.parse(function.text), passes)
    mlir.check_lowered(module, ("llvm.", "nvvm.", "rocdl."))
    translate = importlib.import_module(f"{m.ir.__name__.rpartition('.')[0]}.dialects.llvm").translate_module_to_llvmir
    with mlir.context():
        for op in module.body.operations:
            if op.operation.name == "llvm.func" and len(op.operation.regions[0].blocks):
                for name, value in attributes.items():
                    op.operation.attributes[name] = m.ir.Attribute.parse(value)
        return translate(module.operation)


def optimised(ir: str, triple: str, **target: Any) -> tuple[Any, Any]:
    """(LLVM's target machine, the module after its passes); `target`: further arguments of the machine, such as cpu. Raises
    InternalError."""
    b = binding()
    machine = b.Target.from_triple(triple).create_target_machine(opt=3, **target)
    try:
        module = b.parse_assembly(llvm_literals.readable(ir))
    except RuntimeError as e:
        raise InternalError("LLVM IR of a kernel does not parse", why=str(e)[:1000]) from None
    module.triple, module.data_layout = triple, str(machine.target_data)
    module.verify()
    builder = b.create_pass_builder(machine, b.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    return machine, module
