"""MLIR's Python bindings: found once, loaded on first compile. Text -> passes -> LLVM dialect -> object file.

A real `mlir` package is preferred; otherwise the bindings inside the torch-mlir wheel are used,
which is upstream MLIR and needs no torch. Nothing else in pbkern imports either.

Several threads may compile. What takes long, passes and code generation, is called through ctypes,
which lets other Python threads run meanwhile; the bindings' own methods do not. Whatever uses the
context takes turns: parsers and passes load dialects into it. Code generation has an LLVM context
of its own and takes no turn.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import os
import pathlib
import resource
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import IO, cast

from pbkern.core.errors import InternalError, TargetError

PACKAGES = ("mlir", "torch_mlir")
# Passes that are nested in functions run on several of them at a time. Blocks need no
# simplification: lowering makes none that are equal or unreachable. Before conversion nothing is simplified: emitters write
# no operation twice, and what is left the last passes simplify to the same instructions.
CANONICALIZE = "canonicalize{region-simplify=disabled},cse"
KERNEL_PASSES = (
    "func.func(convert-scf-to-cf,convert-vector-to-llvm{reassociate-fp-reductions=1},"
    "convert-math-to-llvm,convert-arith-to-llvm),finalize-memref-to-llvm,"
    "convert-func-to-llvm{use-bare-ptr-memref-call-conv=1},convert-cf-to-llvm,convert-ub-to-llvm,"
    f"reconcile-unrealized-casts,llvm.func({CANONICALIZE})"
)
HOST_PASSES = (
    "convert-scf-to-cf,convert-arith-to-llvm,convert-func-to-llvm{use-bare-ptr-memref-call-conv=1},convert-cf-to-llvm,"
    "reconcile-unrealized-casts"
)
# The attribute of scf.for that passes leave at branches.
LOOP_MARK = "llvm.loop_annotation"
_turn = threading.RLock()
# LLVM's names: a processor, the one to schedule for, and instruction sets that code may use.
Processor = tuple[str, str, tuple[str, ...]]


@functools.cache
def bindings() -> SimpleNamespace:
    """Modules ir, passmanager, execution_engine and registration.

    Raises TargetError if neither package is there.
    """
    for package in PACKAGES:
        try:
            with _own_symbols():
                return SimpleNamespace(
                    ir=importlib.import_module(f"{package}.ir"),
                    passmanager=importlib.import_module(f"{package}.passmanager"),
                    engine=importlib.import_module(f"{package}.execution_engine"),
                    register=importlib.import_module(
                        f"{package}._mlir_libs._mlirRegisterEverything"
                    ),
                )
        except ImportError:
            continue
    raise TargetError(
        "MLIR's Python bindings are not installed",
        why="neither `mlir` nor `torch_mlir` can be imported",
        hint="pip install torch-mlir==20261001 (MLIR only; torch is not needed)",
    )


@contextlib.contextmanager
def _own_symbols() -> Iterator[None]:
    """Libraries that are loaded inside find their own symbols first, and show them to no others.

    TensorFlow's library exports the LLVM that it contains: bindings that found it would register
    LLVM's command line options in it once more, which ends the process.
    """
    before = sys.getdlopenflags()
    sys.setdlopenflags(
        os.RTLD_NOW | os.RTLD_LOCAL | getattr(os, "RTLD_DEEPBIND", 0)
    )  # glibc has the last
    try:
        yield
    finally:
        sys.setdlopenflags(before)


def installed() -> tuple:
    """Facts that tell one installation of the bindings from another, without importing them: libraries, sizes, dates."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in spec.submodule_search_locations or () if spec else ():
            libraries = sorted((pathlib.Path(folder) / "_mlir_libs").glob("*.so*"))
            if libraries:
                return package, tuple(
                    (library.name, library.stat().st_size, library.stat().st_mtime_ns)
                    for library in libraries
                )
    return ()


@functools.cache
def context():
    """One context for all compilations, with every dialect and the LLVM translations."""
    api = bindings()
    ctx = api.ir.Context()
    registry = api.ir.DialectRegistry()
    api.register.register_dialects(registry)
    ctx.append_dialect_registry(registry)
    api.register.register_llvm_translations(ctx)
    return ctx


class _Name(ctypes.Structure):
    """MlirStringRef."""

    _fields_ = [("characters", ctypes.c_char_p), ("length", ctypes.c_size_t)]

    @classmethod
    def of(cls, text: str) -> _Name:
        data = text.encode()
        return cls(data, len(data))


@functools.cache
def _c() -> ctypes.CDLL:
    """MLIR's C interface. Handles, and structures that hold one pointer, are pointers to ctypes."""
    # Looking a name up in a library of the bindings searches those that it links to.
    library = ctypes.CDLL(bindings().register.__file__)
    for name, result, arguments in (
        ("mlirPassManagerRunOnOp", ctypes.c_int8, (ctypes.c_void_p, ctypes.c_void_p)),
        ("mlirExecutionEngineRegisterSymbol", None, (ctypes.c_void_p, _Name, ctypes.c_void_p)),
        ("mlirExecutionEngineLookup", ctypes.c_void_p, (ctypes.c_void_p, _Name)),
        ("mlirOperationGetAttributeByName", ctypes.c_void_p, (ctypes.c_void_p, _Name)),
        ("mlirOperationGetRegion", ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_ssize_t)),
        ("mlirRegionGetFirstBlock", ctypes.c_void_p, (ctypes.c_void_p,)),
        ("mlirBlockGetNextInRegion", ctypes.c_void_p, (ctypes.c_void_p,)),
        ("mlirBlockGetTerminator", ctypes.c_void_p, (ctypes.c_void_p,)),
        (
            "mlirOperationSetAttributeByName",
            None,
            (ctypes.c_void_p, _Name, ctypes.c_void_p),
        ),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _handle(value) -> int:
    """The C handle of a bindings' object, for as long as that lives."""
    capsule, api = value._CAPIPtr, ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = (
        ctypes.c_char_p,
        (ctypes.py_object,),
    )
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    return api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule))


def parse(text: str):
    """Module of a text. Raises InternalError with the parser's diagnostic."""
    api = bindings()
    with _turn, context():
        try:
            return api.ir.Module.parse(text)
        except api.ir.MLIRError as e:
            raise InternalError("generated MLIR does not parse", why=str(e)[:2000]) from None


def run_passes(module, passes: str):
    """Runs a pass list in place. Raises InternalError; the diagnostics of a pass are on stderr.

    The module is verified once, at the end: verification after each pass takes nearly as long as
    the passes themselves.
    """
    api = bindings()
    with _turn, context():
        try:
            manager = api.passmanager.PassManager.parse(f"builtin.module({passes})")
            manager.enable_verifier(False)
            if not _c().mlirPassManagerRunOnOp(_handle(manager), _handle(module.operation)):
                raise InternalError("a pass failed", why="MLIR's messages are on stderr")
            module.operation.verify()
        except api.ir.MLIRError as e:
            raise InternalError(
                "passes made a module that is not well-formed", why=str(e)[:2000]
            ) from None
    return module


def _functions(module) -> list:
    """The operations of a module's own block, symbols all of them.

    A walk makes plain operations. Iteration over a block would make instances of the dialects' Python classes, whose modules
    take 50 ms to import.
    """
    walk = bindings().ir.WalkResult
    top: list = []

    def visit(op):
        if op.name == "builtin.module":
            return walk.ADVANCE
        top.append(op)
        return walk.SKIP

    module.operation.walk(visit, bindings().ir.WalkOrder.PRE_ORDER)
    return top


def keep_loops(module) -> None:
    """Hands marks of loops, as scf.for has them, on to LLVM, in a module of LLVM's dialect.

    MLIR's C interface copies the attribute. The bindings would look for its Python class, in modules that take 70 ms to import.
    """
    capi = _c()
    mark, annotation = _Name.of(LOOP_MARK), _Name.of("loop_annotation")
    with _turn, context():
        for function in _functions(module):
            region = capi.mlirOperationGetRegion(_handle(function), 0) if function.regions else None
            block = capi.mlirRegionGetFirstBlock(region) if region else None
            while block:
                branch = capi.mlirBlockGetTerminator(block)
                attribute = branch and capi.mlirOperationGetAttributeByName(branch, mark)
                if attribute:
                    capi.mlirOperationSetAttributeByName(branch, annotation, attribute)
                block = capi.mlirBlockGetNextInRegion(block)


def set_processor(module, cpu: str, tune: str, features: Iterable[str]) -> None:
    """Functions of a module in LLVM's dialect have these instruction sets and no others; LLVM's names."""
    ir, listed = bindings().ir, ", ".join(f'"+{feature}"' for feature in features)
    with _turn, context():
        attributes = {
            "target_cpu": ir.StringAttr.get(cpu),
            "tune_cpu": ir.StringAttr.get(tune),
        }
        if listed:
            attributes["target_features"] = ir.Attribute.parse(f"#llvm.target_features<[{listed}]>")
        for op in _functions(module):
            if op.name == "llvm.func" and op.regions[0].blocks:
                for name, value in attributes.items():
                    op.attributes[name] = value


def join(module, other) -> None:
    """Moves the definitions of `other` into `module`; declarations that `module` defines are dropped."""
    with _turn, context(), bindings().ir.Location.unknown():
        present = _functions(module)
        have = {op.attributes["sym_name"].value for op in present if "sym_name" in op.attributes}
        for op in _functions(other):
            if op.attributes["sym_name"].value in have:
                continue
            if present:
                op.move_after(present[-1])
            else:
                module.body.append(op)
            present.append(op)


def check_lowered(module, dialects: tuple[str, ...] = ("llvm.",)) -> None:
    """Translation of anything but LLVM dialect, and a device's own, can end the process: look first.

    Raises InternalError.
    """
    walk = bindings().ir.WalkResult
    not_lowered: list[str] = []

    def visit(op):
        if not op.name.startswith(dialects) and op.name != "builtin.module":
            not_lowered.append(op.name)
        return walk.ADVANCE

    with _turn, context():
        module.operation.walk(visit, bindings().ir.WalkOrder.PRE_ORDER)
    if not_lowered:
        raise InternalError(f"operation {not_lowered[0]} was not lowered")


def llvm_ir(module) -> str:
    """Text of LLVM IR, as this MLIR's LLVM prints it, of a module that `check_lowered` has accepted."""
    translate = importlib.import_module(
        f"{bindings().ir.__name__.rpartition('.')[0]}.dialects.llvm"
    ).translate_module_to_llvmir
    with _turn, context():
        return translate(module.operation)


def object_code(module, opt_level: int, function: str, symbols: Mapping[str, int]) -> bytes:
    """The module's ELF object file.

    Args:
      module: in the LLVM dialect.
      opt_level: LLVM's, 0 to 3.
      function: one that the module defines: looking it up makes the engine compile.
      symbols: addresses of the functions that the module declares, which the engine wants to know
        beforehand.
    """
    api, capi = bindings(), _c()
    with _turn, context():
        engine = api.engine.ExecutionEngine(module, opt_level=opt_level)
    for name, address in symbols.items():
        capi.mlirExecutionEngineRegisterSymbol(_handle(engine), _Name.of(name), address)
    engine.initialize()
    if not capi.mlirExecutionEngineLookup(_handle(engine), _Name.of(function)):
        raise InternalError(f"LLVM made no code for `{function}`", why="its messages are on stderr")
    with _file_in_memory() as (path, file):
        engine.dump_to_object_file(path)
        return file.read()


# Taken while the process's limit of the size of files is another one.
_one_limit = threading.Lock()


@contextlib.contextmanager
def _file_in_memory() -> Iterator[tuple[str, IO[bytes]]]:
    """A file's path and the file. LLVM ends the process where it cannot write: disks may be full, files limited in size."""
    if not hasattr(os, "memfd_create"):  # not on Linux
        with tempfile.NamedTemporaryFile(suffix=".o") as file:
            yield file.name, cast(IO[bytes], file)
        return
    with _one_limit, open(os.memfd_create("pbkern.o"), "rb") as file:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        try:
            yield f"/proc/self/fd/{file.fileno()}", file
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
