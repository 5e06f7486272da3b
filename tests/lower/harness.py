"""Compiles one elementwise expression and runs it on NumPy arrays, at any lane count."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile

import ml_dtypes
import numpy as np

from pbkern.lower.mlir.element_types import mlir_type, storage_el
from pbkern.lower.mlir.operation import lines
from pbkern.lower.mlir.ops import Ssa
from pbkern.lower.mlir.text import Text
from pbkern.targets.cpu.math.table import AVX512, X86
from pbkern.targets.mlir import bindings

found = bindings()
ir, passmanager, register, ExecutionEngine = (
    found.ir,
    found.passmanager,
    found.register,
    found.engine.ExecutionEngine,
)

PASSES = (
    "canonicalize,cse,convert-vector-to-scf,expand-strided-metadata,lower-affine,convert-scf-to-cf,"
    "convert-vector-to-llvm,convert-math-to-llvm,convert-arith-to-llvm,convert-index-to-llvm,"
    "finalize-memref-to-llvm,convert-func-to-llvm{use-bare-ptr-memref-call-conv=1},convert-cf-to-llvm,"
    "convert-ub-to-llvm,reconcile-unrealized-casts,canonicalize,cse"
)


@functools.cache
def context():
    ctx, registry = ir.Context(), ir.DialectRegistry()
    register.register_dialects(registry)
    ctx.append_dialect_registry(registry)
    register.register_llvm_translations(ctx)
    return ctx


def loop_text(
    expression,
    in_dtypes,
    out_dtype,
    lanes: int,
    *,
    avx512: bool = False,
    approx: bool = False,
) -> str:
    """A function that applies `expression(builder, *values)` to n elements, n a multiple of the lanes."""
    text = Text(approx=approx, contract=True, math=AVX512 if avx512 else X86)
    body, b = text.top, text.builder(text.top, lanes)
    kinds = [f"memref<1073741824x{mlir_type(storage_el(d))}>" for d in (*in_dtypes, out_dtype)]
    names = [f"%a{i}" for i in range(len(in_dtypes))] + ["%out"]
    values = []
    for name, kind, dtype in zip(names, kinds, in_dtypes):
        el = storage_el(dtype)
        if lanes:
            loaded = text.load_vector(body, (name, "%i"), kind, el, lanes)
        else:
            loaded = Ssa(text.put(body, "memref.load", (name, "%i"), kind), el, 0)
        values.append(b.from_storage(loaded, dtype))
    out = b.to_storage(expression(b, *values), out_dtype)
    if lanes:
        text.store_vector(body, out, ("%out", "%i"), kinds[-1])
    else:
        body.add("memref.store", (out.name, "%out", "%i"), kinds[-1])
    arguments = ", ".join(f"{name}: {kind}" for name, kind in zip(names, kinds))
    hoisted = "\n".join(constant.head for constant in text.constants.values())
    return f"""func.func @loop({arguments}, %n: index) {{
{hoisted}
%zero = arith.constant 0 : index
%step = arith.constant {lanes or 1} : index
scf.for %i = %zero to %n step %step {{
{chr(10).join(lines(body.operations))}
}}
return
}}"""


class Compiled:
    """A compiled loop: call it with input arrays of one dtype list, get the output array."""

    def __init__(self, expression, in_dtypes, out_dtype, lanes=16, opt=2, **options):
        self.in_dtypes, self.out_dtype = [np.dtype(d) for d in in_dtypes], np.dtype(out_dtype)
        self.lanes = lanes
        self.text = loop_text(expression, in_dtypes, out_dtype, lanes, **options)
        with context(), ir.Location.unknown():
            module = ir.Module.parse(self.text)
            passmanager.PassManager.parse(f"builtin.module({PASSES})").run(module.operation)
            for op in module.body.operations:
                _only_llvm(op.operation)
            getter = ir.Module.parse(
                "llvm.func @loop()\nllvm.func @address() -> !llvm.ptr {\n"
                "%0 = llvm.mlir.addressof @loop : !llvm.ptr\nllvm.return %0 : !llvm.ptr }"
            )
            module.body.append(list(getter.body.operations)[1].detach_from_parent())
            self.engine = ExecutionEngine(module, opt_level=opt)
            self.engine.initialize()
        address = ctypes.c_void_p()
        packed = (ctypes.c_void_p * 1)(ctypes.addressof(address))
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.engine.raw_lookup("address"))(packed)
        count = len(in_dtypes) + 1
        self.function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * count, ctypes.c_int64)(
            address.value
        )

    def __call__(self, *arrays):
        n = len(arrays[0])
        padded = -(-n // (self.lanes or 1)) * (self.lanes or 1)
        inputs = []
        for a, dtype in zip(arrays, self.in_dtypes):
            copy = np.zeros(padded, dtype)
            copy[:n] = a
            inputs.append(copy)
        out = np.zeros(padded, self.out_dtype)
        self.function(*[a.ctypes.data for a in inputs], out.ctypes.data, padded)
        return out[:n]

    def assembly(self) -> str:
        with tempfile.NamedTemporaryFile(suffix=".o") as f:
            self.engine.dump_to_object_file(f.name)
            run = subprocess.run(
                ["objdump", "-d", "--no-show-raw-insn", f.name], capture_output=True, text=True
            )
        return run.stdout.split("<loop>:")[1].split("\n\n")[0]


def _only_llvm(op):
    """Translation of any other dialect crashes the process."""
    assert op.name.startswith("llvm."), op.name
    for region in op.regions:
        for block in region:
            for inner in block.operations:
                _only_llvm(inner.operation)


def same(x, y) -> np.ndarray:
    """Where two arrays agree in every bit; any NaN equals any other."""
    x, y = np.asarray(x), np.asarray(y)
    if x.dtype.kind in "biu":
        return x == y
    wide = (x.astype(np.float64), y.astype(np.float64))
    return ((wide[0] == wide[1]) & (np.signbit(wide[0]) == np.signbit(wide[1]))) | (
        np.isnan(wide[0]) & np.isnan(wide[1])
    )


bfloat16 = np.dtype(ml_dtypes.bfloat16)
