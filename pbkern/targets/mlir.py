"""MLIR's Python bindings: found once, loaded on first compile. Text -> passes -> LLVM dialect -> object file.

A real `mlir` package is preferred; otherwise the bindings inside the torch-mlir wheel are used, which is upstream
MLIR and needs no torch. Nothing else in pbkern imports either.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import pathlib
import tempfile
from collections.abc import Mapping
from types import SimpleNamespace

from ..errors import InternalError, TargetError

PACKAGES = ("mlir", "torch_mlir")
# The execution engine calls registered functions by their name with this in front.
ENGINE_PREFIX = "_mlir_ciface_"
# Passes that are nested in functions run on several of them at a time. Blocks need no simplification: lowering makes none
# that are equal or unreachable.
CANONICALIZE = "canonicalize{region-simplify=disabled},cse"
KERNEL_PASSES = (
    f"func.func({CANONICALIZE},convert-scf-to-cf,convert-vector-to-llvm{{reassociate-fp-reductions=1}},"
    "convert-math-to-llvm,convert-arith-to-llvm),finalize-memref-to-llvm,"
    "convert-func-to-llvm{use-bare-ptr-memref-call-conv=1},convert-cf-to-llvm,convert-ub-to-llvm,"
    f"reconcile-unrealized-casts,llvm.func({CANONICALIZE})"
)
HOST_PASSES = (
    "convert-scf-to-cf,convert-arith-to-llvm,convert-func-to-llvm{use-bare-ptr-memref-call-conv=1},convert-cf-to-llvm,"
    "reconcile-unrealized-casts"
)


@functools.cache
def bindings() -> SimpleNamespace:
    """Modules ir, passmanager, execution_engine and registration. Raises TargetError if neither package is there."""
    for package in PACKAGES:
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


def installed() -> tuple:
    """What tells one installation of the bindings from another, without importing them: libraries, sizes, dates."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in spec.submodule_search_locations or () if spec else ():
            libraries = sorted((pathlib.Path(folder) / "_mlir_libs").glob("*.so*"))
            if libraries:
                return package, tuple((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in libraries)
    return ()


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
    """Runs a pass list in place. Raises InternalError with the diagnostics.

    The module is verified once, at the end: verification after each pass takes as long as the passes themselves.
    """
    m = bindings()
    with context():
        try:
            manager = m.passmanager.PassManager.parse(f"builtin.module({passes})")
            manager.enable_verifier(False)
            manager.run(module.operation)
            module.operation.verify()
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


def object_code(module, opt_level: int, function: str, symbols: Mapping[str, int]) -> bytes:
    """The module's ELF object file.

    Args:
      function: one that the module defines: looking it up makes the engine compile.
      symbols: addresses of the functions that the module declares, which the engine wants to know beforehand.
    """
    m = bindings()
    with context():
        engine = m.engine.ExecutionEngine(module, opt_level=opt_level)
        for name, address in symbols.items():
            engine.register_runtime(name.removeprefix(ENGINE_PREFIX), ctypes.CFUNCTYPE(None)(address))
        engine.initialize()
        engine.raw_lookup(function)
        with tempfile.NamedTemporaryFile(suffix=".o") as file:
            engine.dump_to_object_file(file.name)
            return file.read()
