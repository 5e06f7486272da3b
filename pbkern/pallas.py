"""pl.pallas_call on CPU, without a change to the kernels: `pbkern.pallas.install()`.

install() registers a CPU lowering of JAX's pallas_call primitive. Under jit, vmap, jvp, scan and friends a kernel is
imported (frontends/pallas.py), compiled and called like one written in pbkern. `interpret=True` and InterpretParams
still reach JAX's own interpreters. jax.export cannot carry machine code of this process: exported programs contain
JAX's interpretation of the kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
from jax.interpreters import mlir

from . import _jax, config
from .api import kernel_program
from .dsl import checks
from .dsl.kernel import Kernel
from .frontends.float8 import is_float8
from .frontends.pallas import import_call
from .jaxprs import fingerprint, inner_jaxprs
from .options import CompileOptions
from .targets import get_target
from .targets.cpu import compile as cpu_compile

_installed = False
_compiled: dict[tuple, cpu_compile.Compiled] = {}


def install() -> None:
    """From now on, pallas_call on CPU compiles to native code. Installing twice does nothing."""
    global _installed
    if not _installed:
        mlir.register_lowering(_jax.pallas().call_p, _lower, platform="cpu")
        _installed = True
        jax.clear_caches()  # programs lowered before would keep their old meaning


def uninstall() -> None:
    """pallas_call on CPU is JAX's again: an error without interpret=True."""
    global _installed
    if _installed:
        _jax.remove_cpu_lowering(_jax.pallas().call_p)
        _installed = False
        jax.clear_caches()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """install() for the duration of a `with` block."""
    before = _installed
    install()
    try:
        yield
    finally:
        if not before:
            uninstall()


def _lower(ctx, *nodes, interpret, **params):
    if interpret or _jax.is_for_export(ctx):
        return _jax.pallas().stock_lowering(ctx, *nodes, interpret=interpret or True, **params)
    imported = import_call(**params)
    kernel = imported.kernel
    compiled = compile_kernel(kernel)
    results = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in kernel.out_types]

    def call(*operands):
        held = [_held(operands[i], t.dtype) for i, t in zip(imported.operands, kernel.in_types)]
        program = jax.ffi.ffi_call(
            compiled.ffi_name, results, input_output_aliases=dict(kernel.aliases), has_side_effect=_prints(kernel.body.jaxpr)
        )
        found = checks.after([kernel], program(*held), held)
        return [_held(x, a.dtype) for x, a in zip(found, ctx.avals_out)]

    return mlir.lower_fun(call, multiple_results=True)(ctx, *nodes)


def _prints(jaxpr) -> bool:
    return any(e.primitive.name == "debug_print" or any(_prints(j.jaxpr) for j in inner_jaxprs(e)) for e in jaxpr.eqns)


def _held(x, dtype):
    """x as the other side holds it: 8-bit floats are bytes, packed integers a byte each in the kernel."""
    if x.dtype == dtype:
        return x
    bytes_only = is_float8(x.dtype) or is_float8(dtype)
    return jax.lax.bitcast_convert_type(x, dtype) if bytes_only else x.astype(dtype)


def compile_kernel(kernel: Kernel) -> cpu_compile.Compiled:
    """A program of one launch; equal kernels are compiled once."""
    key = content_key(kernel)
    if key not in _compiled:
        target, options = get_target("cpu"), CompileOptions()
        _compiled[key] = cpu_compile.compile_program(
            kernel_program(kernel), lambda k: target.lower_options(k, options), target.threads
        )
    return _compiled[key]


def content_key(kernel: Kernel) -> tuple:
    """Equal for kernels with equal code."""
    mappings = [(m.array, m.dims, fingerprint(m.index_map)) for m in (*kernel.inputs, *kernel.outputs)]
    params = tuple(sorted((k, repr(p)) for k, p in kernel.compiler_params.items()))
    return (kernel.name, kernel.grid, kernel.dynamic_grid, len(kernel.inputs), tuple(mappings),
            kernel.scratch, kernel.aliases, kernel.num_scalar_prefetch, params, fingerprint(kernel.body),
            config.num_threads())  # fmt: skip
