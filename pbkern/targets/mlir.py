"""MLIR's Python bindings: found once, loaded on first compile. Text -> passes -> LLVM dialect -> machine code.

A real `mlir` package is preferred; otherwise the bindings inside the torch-mlir wheel are used, which is upstream
MLIR and needs no torch. Nothing else in pbkern imports either.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from types import SimpleNamespace

from ..errors import InternalError, TargetError

KERNEL_PASSES = (
    "canonicalize,cse,convert-vector-to-scf,expand-strided-metadata,lower-affine,convert-scf-to-cf,"
    "convert-vector-to-llvm{reassociate-fp-reductions=1},convert-math-to-llvm,convert-arith-to-llvm,convert-index-to-llvm,"
    "finalize-memref-to-llvm,convert-func-to-llvm{use-bare-ptr-memref-call-conv=1},convert-cf-to-llvm,convert-ub-to-llvm,"
    "reconcile-unrealized-casts,canonicalize,cse"
)
HOST_PASSES = (
    "convert-scf-to-cf,convert-arith-to-llvm,convert-func-to-llvm{use-bare-ptr-memref-call-conv=1},convert-cf-to-llvm,"
    "reconcile-unrealized-casts"
)


@functools.cache
def bindings() -> SimpleNamespace:
    """Modules ir, passmanager, execution_engine and registration. Raises TargetError if neither package is there."""
    for package in ("mlir", "torch_mlir"):
        try:
            ir = importlib.import_module(f"{package}.ir")
            return SimpleNamespace(
                ir=ir,
                passmanager=importlib.import_module(f"{package}.passmanager"),
                engine=importlib.import_module(f"{package}.execution_engine"),
                register=importlib.import_module(f"{package}._mlir_libs._mlirRegisterEverything"),
            )
        except ImportError:
            continue
    raise TargetError("MLIR's Python bindings are not installed", why="neither `mlir` nor `torch_mlir` can be imported",
                      hint="pip install torch-mlir==20261001 (MLIR only; torch is not needed)")


@functools.cache
def context():
    """One context for all compilations, with every dialect and the LLVM translations."""
    m = bindings()
    ctx = m.ir.Context()
    registry = m.ir.DialectRegistry()
    m.register.register_dialects(registry)
    ctx.append_dialect_registry(registry)
    m.register.register_llvm_translations(ctx)
    return ctx


def parse(text: str):
    """Module of a text. Raises InternalError with the parser's diagnostic."""
    m = bindings()
    with context():
        try:
            return m.ir.Module.parse(text)
        except m.ir.MLIRError as e:
            raise InternalError("generated MLIR does not parse", why=str(e)[:2000]) from None


def run_passes(module, passes: str):
    """Runs a pass list in place. Raises InternalError with the diagnostics."""
    m = bindings()
    with context():
        try:
            m.passmanager.PassManager.parse(f"builtin.module({passes})").run(module.operation)
        except m.ir.MLIRError as e:
            raise InternalError("a pass failed", why=str(e)[:2000]) from None
    return module


def join(module, other) -> None:
    """Moves the definitions of `other` into `module`; declarations that `module` defines are dropped."""
    m = bindings()
    with context(), m.ir.Location.unknown():
        have = {op.attributes["sym_name"].value for op in module.body.operations if "sym_name" in op.attributes}
        for op in list(other.body.operations):
            if op.attributes["sym_name"].value not in have:
                module.body.append(op.detach_from_parent())


def check_lowered(module) -> None:
    """Translation of anything but LLVM dialect can end the process: look first. Raises InternalError."""

    def visit(op) -> None:
        for region in op.regions:
            for block in region:
                for o in block.operations:
                    if not o.operation.name.startswith("llvm."):
                        raise InternalError(f"operation {o.operation.name} was not lowered")
                    visit(o.operation)

    with context():
        visit(module.operation)


class Loaded:
    """Machine code of a module, resident for as long as this object."""

    def __init__(self, module, opt_level: int, symbols: dict[str, int] | None = None):
        m = bindings()
        with context():
            self.engine = m.engine.ExecutionEngine(module, opt_level=opt_level)
            for name, address in (symbols or {}).items():
                self.engine.register_runtime(name, ctypes.CFUNCTYPE(None)(address))
            self.engine.initialize()

    def address(self, getter: str) -> int:
        """C address that the function `getter() -> ptr` of the module returns."""
        result = ctypes.c_void_p()
        packed = (ctypes.c_void_p * 1)(ctypes.addressof(result))
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.engine.raw_lookup(getter))(packed)
        return result.value or 0

    def object_code(self, path: str) -> None:
        self.engine.dump_to_object_file(path)
