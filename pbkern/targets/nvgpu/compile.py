"""MLIR of one kernel for threads -> LLVM IR -> PTX. Neither a GPU nor a CUDA toolkit is needed."""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any

from pbkern.core.errors import InternalError, TargetError
from pbkern.targets import llvm_literals, mlir
from pbkern.targets.simt.emit import ThreadFunction

from .devices import DeviceKind

TRIPLE = "nvptx64-nvidia-cuda"
# The CPU's kernel passes for one function, with places of 32 or 64 bits, and the operations that only this target has.
PASSES = (
    "func.func({canonicalize},loop-invariant-code-motion,convert-scf-to-cf,convert-vector-to-llvm,convert-math-to-llvm,convert-arith-to-llvm{{{bits}}}),"
    "finalize-memref-to-llvm{{{bits}}},convert-func-to-llvm{{use-bare-ptr-memref-call-conv=1 {bits}}},"
    "convert-cf-to-llvm{{{bits}}},convert-ub-to-llvm,convert-nvvm-to-llvm,reconcile-unrealized-casts,llvm.func({canonicalize}),"
    "ensure-debug-info-scope-on-llvm-func"
)


@functools.cache
def llvm() -> Any:
    """llvmlite's bindings with the NVPTX back end ready. Raises TargetError where llvmlite is not installed."""
    try:
        binding = importlib.import_module("llvmlite.binding")
    except ImportError:
        raise TargetError("llvmlite is not installed", why="it makes the code of GPUs",
                          hint="pip install 'pbkern[cuda]'") from None
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    return binding


def llvm_ir(function: ThreadFunction) -> str:
    """LLVM IR of a kernel. Raises InternalError."""
    m = mlir.bindings()
    passes = PASSES.format(canonicalize=mlir.CANONICALIZE, bits=f"index-bitwidth={function.index_bits}")
    module = mlir.run_passes(mlir.parse(function.text), passes)
    mlir.check_lowered(module, ("llvm.", "nvvm."))
    translate = importlib.import_module(f"{m.ir.__name__.rpartition('.')[0]}.dialects.llvm").translate_module_to_llvmir
    with mlir.context():
        for op in module.body.operations:
            if op.operation.name == "llvm.func" and len(op.operation.regions[0].blocks):
                op.operation.attributes["nvvm.kernel"] = m.ir.UnitAttr.get()
                op.operation.attributes["nvvm.reqntid"] = m.ir.DenseI32ArrayAttr.get([function.threads])
        return translate(module.operation)


def ptx(ir: str, kind: DeviceKind) -> str:
    """PTX of LLVM IR for a device. Raises InternalError where code would call functions that no device has."""
    binding = llvm()
    machine = binding.Target.from_triple(TRIPLE).create_target_machine(cpu=kind.architecture, features=f"+ptx{kind.ptx}", opt=3)
    try:
        module = binding.parse_assembly(llvm_literals.readable(ir))
    except RuntimeError as e:
        raise InternalError("LLVM IR of a kernel does not parse", why=str(e)[:1000]) from None
    module.triple, module.data_layout = TRIPLE, str(machine.target_data)
    module.verify()
    builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    text = machine.emit_assembly(module)
    missing = re.search(r"\.extern \.func .*?([\w.$]+)\s*(?:\(|;)", text)
    if missing:
        raise InternalError(f"code of a kernel calls `{missing[1]}`", why="no device has such a function")
    return re.sub(r"(\.target \w+), debug", r"\1", text)
