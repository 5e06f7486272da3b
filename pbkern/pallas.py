"""pl.pallas_call on CPUs and GPUs, without a change to the kernels: `pbkern.pallas.install()`.

install() registers a lowering of JAX's pallas_call primitive for the target's platform, and of that
of pl.kernel and pl.core_map. Under jit, vmap, grad, scan and friends a kernel is imported
(frontends/pallas/call.py), compiled, differentiated and called like one written in pbkern. `interpret=True` and
InterpretParams still reach JAX's own interpreters. Kernels that ask for the machine's sizes
(pltpu.get_tpu_info, emit_pipeline) are told those of one core of a TPU v6e, so that they run as
they were written; meshes that ask the device for its cores (pltpu.create_tensorcore_mesh) have one.
jax.export cannot carry machine code of this process: exported programs contain JAX's interpretation
of the kernel. `installed(like="tpu v6e")` answers libraries that ask which device there is
(frontends/pallas/likeness.py). The other way, a kernel of pbkern as a pallas_call, is `to_pallas`
(frontends/pallas/export/call.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import jax
from jax.interpreters import ad, mlir

from pbkern import _jax, config
from pbkern.api.pipeline import build_kernel, compile_programs, warn_of_export
from pbkern.core.jaxprs.walks import inner_jaxprs
from pbkern.core.options import CompileOptions
from pbkern.dsl import checks
from pbkern.dsl.body_rewrites.derivative_refusals import derivative_error
from pbkern.dsl.body_rewrites.narrow_floats import is_narrow_float
from pbkern.dsl.call import kernel_p
from pbkern.dsl.transformations.last_maxima import with_final_states
from pbkern.dsl.transformations.rules import finals_of, kernel_tangents
from pbkern.frontends.pallas.call import held_like, import_call
from pbkern.frontends.pallas.likeness import answers
from pbkern.frontends.pallas.mesh import call_params
from pbkern.frontends.pallas.transposed_operands import in_place
from pbkern.targets import get_target

_installed: list[str] = []  # the target, where there is one
_undo: list[Callable[[], None]] = []


def install(target: str | None = None) -> None:
    """From now on, pallas_call compiles to native code. Installing twice does nothing.

    Args:
      target: as in compile_options: "cpu", or "nvgpu", in place of JAX's own back ends for these
        devices. None: the target of decorators that name none.
    Raises TargetError for a target that there is not.

    Examples:
      >>> from jax.experimental import pallas as pl
      >>> def double(x, o):
      ...     o[...] = 2 * x[...]
      >>> pbkern.pallas.install()
      >>> pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct((4,), "float32"))(jnp.arange(4.0)).tolist()
      [0.0, 2.0, 4.0, 6.0]
      >>> pbkern.pallas.uninstall()
    """
    target = target or config.current().target
    if _installed:
        return
    platform = get_target(target).platform
    for primitive, lower, stock in (
        (_jax.pallas().call_p, _lower, _jax.pallas().stock_lowering),
        (_jax.pallas().mesh_call_p, _lower_mesh, _jax.pallas().stock_mesh_lowering),
    ):
        mlir.register_lowering(primitive, lower, platform=platform, cacheable=False)
        if platform == "cpu":
            _undo.append(functools.partial(_jax.remove_cpu_lowering, primitive))
        else:
            _undo.append(
                functools.partial(mlir.register_lowering, primitive, stock, platform=platform)
            )
    infos, info = _jax.tpu_infos()
    infos[platform] = info
    _undo.append(lambda: infos.pop(platform, None))
    _undo.append(_jax.give_meshes_one_core())
    _undo.append(_jax.replace_jvp(_jax.pallas().call_p, _jvp))
    _installed.append(target)
    jax.clear_caches()  # programs lowered before would keep their old meaning


def uninstall() -> None:
    """pallas_call is JAX's again: on CPU, an error without interpret=True.

    Examples:
      >>> pbkern.pallas.install()
      >>> pbkern.pallas.uninstall()
    """
    if _installed:
        while _undo:
            _undo.pop()()
        _installed.clear()
        jax.clear_caches()


@contextlib.contextmanager
def installed(target: str | None = None, *, like: str | None = None) -> Iterator[None]:
    """install() for the duration of a `with` block.

    Args:
      target: as of `install`.
      like: a device, "tpu v6e" or "gpu sm_90": libraries that ask JAX which device there is are
        answered as that one would, and choose their kernels for it. They ask jax.default_backend(),
        a device's platform, device_kind, core_count, num_cores or compute_capability, or
        pltpu.get_tpu_info(). Arrays and programs stay where they are. None: the truth.

    Raises OptionError for a device of which there are no answers.

    Examples:
      >>> from jax.experimental import pallas as pl
      >>> def double(x, o):
      ...     o[...] = 2 * x[...]
      >>> with pbkern.pallas.installed():
      ...     pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct((4,), "float32"))(jnp.ones(4)).tolist()
      [2.0, 2.0, 2.0, 2.0]
      >>> with pbkern.pallas.installed(like="gpu sm_90"):
      ...     jax.default_backend(), jax.devices()[0].compute_capability
      ('gpu', '9.0')
    """
    with contextlib.ExitStack() as undo:
        if like:
            undo.callback(jax.clear_caches)  # what is traced meanwhile has asked another device
            undo.callback(answers(like))
            jax.clear_caches()
        if not _installed:
            install(target)
            undo.callback(uninstall)
        yield


def _lower(ctx, *nodes, interpret, **params):
    if not interpret and _jax.is_for_export(ctx):
        warn_of_export(params["name"] or params["jaxpr"].debug_info.func_name)
    if interpret or _jax.is_for_export(ctx):
        return _jax.pallas().stock_lowering(ctx, *nodes, interpret=interpret or True, **params)
    return _native(ctx, nodes, params)


def _lower_mesh(ctx, *nodes, interpret, **params):
    """pl.kernel and pl.core_map."""
    if interpret or _jax.is_for_export(ctx):
        return _jax.pallas().stock_mesh_lowering(ctx, *nodes, interpret=interpret or True, **params)
    return _native(ctx, nodes, call_params(ctx.avals_in, **params))


def _jvp(stock: Callable, primals, tangents, *, interpret, **params):
    """The rule of kernels (dsl/transformations/rules.py), in place of JAX's, which knows forward mode alone.

    Raises UnsupportedKernel for kernels, and for operands and results, that have no derivative.
    """
    if interpret:
        return stock(primals, tangents, interpret=interpret, **params)
    imported = import_call(**params, target=_installed[0])
    kernel, types = imported.kernel, imported.kernel.in_types
    moved = [tangents[operand] for operand in imported.operands]
    held = [held_like(primals[n], type_.dtype) for n, type_ in zip(imported.operands, types)]
    finals, known = finals_of(kernel, moved), []
    if finals:
        known = kernel_p.bind(*held, kernel=with_final_states(kernel, finals))
        results = [held_like(x, aval.dtype) for x, aval in zip(known, params["out_avals"])]
    else:
        results = _jax.pallas().call_p.bind(*primals, interpret=interpret, **params)
    for array, type_, tangent in (
        *zip((primals[n] for n in imported.operands), types, moved),
        *((x, type_, None) for x, type_ in zip(results, kernel.out_types)),
    ):
        if is_narrow_float(array.dtype) and not isinstance(tangent, ad.Zero):
            raise derivative_error(
                kernel,
                f"{array.dtype} has too few digits: the kernel holds it as {type_.dtype}",
                "operands and results of 16 or more bits",
            )
    stored = [held_like(x, type_.dtype) for x, type_ in zip(results, kernel.out_types)]
    known = [*stored, *known[len(stored) :]]
    return results, kernel_tangents(kernel_p, kernel, held, known, moved, finals)


def _native(ctx, nodes, params: dict):
    imported = import_call(**params, target=_installed[0])
    kernel, views = in_place(imported.kernel, imported.operands, nodes)
    target = get_target(_installed[0])
    (compiled,) = compile_programs(
        build_kernel(kernel), CompileOptions.from_dict({"target": target.name})
    ).compiled.values()
    _jax.keep_with_executable(ctx, compiled)
    results = [jax.ShapeDtypeStruct(type_.shape, type_.dtype) for type_ in kernel.out_types]

    def call(*operands):
        places = {
            operand: operands[operand].reshape(type_.shape)
            for operand, type_ in zip(imported.operands, kernel.in_types)
            if operand in views
        }
        held = [
            held_like(places.get(operand, operands[operand]), type_.dtype)
            for operand, type_ in zip(imported.operands, kernel.in_types)
        ]
        if _prints(kernel.body.jaxpr):  # the CPU's alone
            returned = _jax.ffi_call(
                compiled.ffi_name,
                kernel.name,
                results,
                held,
                kernel.aliases,
                has_side_effect=True,
            )
        else:
            returned = target.call(compiled, kernel.name, held)
        checked = checks.after([kernel], returned)
        return [held_like(x, aval.dtype) for x, aval in zip(checked, ctx.avals_out)]

    sources = {
        i: jax.core.ShapedArray(tuple(view.source.type.shape), ctx.avals_in[i].dtype)
        for i, view in views.items()
    }
    ctx = ctx.replace(avals_in=[sources.get(i, aval) for i, aval in enumerate(ctx.avals_in)])
    held = (views[i].source if i in views else node for i, node in enumerate(nodes))
    return mlir.lower_fun(call, multiple_results=True)(ctx, *held)


def _prints(jaxpr) -> bool:
    return any(
        eqn.primitive.name == "debug_print" or any(_prints(j.jaxpr) for j in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )
