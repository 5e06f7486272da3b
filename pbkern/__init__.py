"""pbkern: a Pallas-style kernel DSL with an auto-fusing front end."""

import gc
import importlib
from typing import TYPE_CHECKING, Any

import pbkern.simulate as _folder
from pbkern.core.version import VERSION

if TYPE_CHECKING:
    from pbkern import (
        amdgpu,
        config,
        cpu,
        device_helpers,
        errors,
        nvgpu,
        options,
        pallas,
        testing,
        tpu,
    )
    from pbkern.aot.decorator import polyblocks_aot_jax
    from pbkern.aot.frameworks import polyblocks_aot_tf, polyblocks_aot_torch
    from pbkern.api.decorators import jit, polyblocks_jit_jax, polymage_jit_jax
    from pbkern.api.editing.adopt import adopt
    from pbkern.api.editing.eject import eject
    from pbkern.api.observed.profile import LaunchTrace, profile
    from pbkern.api.observed.simulation import Simulation, simulate
    from pbkern.api.stablehlo_functions import from_stablehlo
    from pbkern.api.tf_functions import polyblocks_jit_tf, polymage_jit_tf
    from pbkern.api.torch_functions import polyblocks_jit_torch, polymage_jit_torch
    from pbkern.api.tune import tune
    from pbkern.core.options import CompileOptions
    from pbkern.dsl import (
        Blocked,
        BlockSpec,
        BoundedSlice,
        Element,
        GridSpec,
        Kernel,
        Scratch,
        Squeezed,
        atomic_add,
        atomic_and,
        atomic_cas,
        atomic_max,
        atomic_min,
        atomic_or,
        atomic_xchg,
        atomic_xor,
        bind,
        breakpoint,
        call_kernel,
        cdiv,
        check,
        ds,
        fail,
        in_bounds,
        load,
        loop,
        multiple_of,
        num_programs,
        program_id,
        rebuild,
        source,
        store,
        when,
    )
    from pbkern.dsl.interpret import interpret
    from pbkern.dsl.trace import kernel
    from pbkern.simulate.launches import simulate_ptx

# The folder `simulate` has the name of a function below: imported once, it does not take its place.
globals().pop(_folder.__name__.partition(".")[2], None)

# Module -> the public names that it has; each is imported when it is first used.
_HOMES = {
    "pbkern.aot.decorator": "polyblocks_aot_jax",
    "pbkern.aot.frameworks": "polyblocks_aot_tf polyblocks_aot_torch",
    "pbkern.api.decorators": "jit polyblocks_jit_jax polymage_jit_jax",
    "pbkern.api.editing.adopt": "adopt",
    "pbkern.api.editing.eject": "eject",
    "pbkern.api.observed.profile": "LaunchTrace profile",
    "pbkern.api.observed.simulation": "Simulation simulate",
    "pbkern.api.stablehlo_functions": "from_stablehlo",
    "pbkern.api.tf_functions": "polyblocks_jit_tf polymage_jit_tf",
    "pbkern.api.torch_functions": "polyblocks_jit_torch polymage_jit_torch",
    "pbkern.api.tune": "tune",
    "pbkern.core.options": "CompileOptions",
    "pbkern.dsl": """
        Blocked BlockSpec BoundedSlice Element GridSpec Kernel Scratch Squeezed
        atomic_add atomic_and atomic_cas atomic_max atomic_min atomic_or atomic_xchg
        atomic_xor bind breakpoint call_kernel cdiv check ds fail in_bounds
        load loop multiple_of num_programs program_id rebuild source store when
    """,
    "pbkern.dsl.interpret": "interpret",
    "pbkern.dsl.trace": "kernel",
    "pbkern.simulate.launches": "simulate_ptx",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__version__ = VERSION

__all__ = [
    "BlockSpec",
    "Blocked",
    "BoundedSlice",
    "CompileOptions",
    "Element",
    "GridSpec",
    "Kernel",
    "LaunchTrace",
    "Scratch",
    "Simulation",
    "Squeezed",
    "adopt",
    "amdgpu",
    "atomic_add",
    "atomic_and",
    "atomic_cas",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_xchg",
    "atomic_xor",
    "bind",
    "breakpoint",
    "call_kernel",
    "cdiv",
    "check",
    "config",
    "cpu",
    "device_helpers",
    "ds",
    "eject",
    "errors",
    "fail",
    "from_stablehlo",
    "in_bounds",
    "interpret",
    "jit",
    "kernel",
    "load",
    "loop",
    "multiple_of",
    "num_programs",
    "nvgpu",
    "options",
    "pallas",
    "polyblocks_aot_jax",
    "polyblocks_aot_tf",
    "polyblocks_aot_torch",
    "polyblocks_jit_jax",
    "polyblocks_jit_tf",
    "polyblocks_jit_torch",
    "polymage_jit_jax",
    "polymage_jit_tf",
    "polymage_jit_torch",
    "profile",
    "program_id",
    "rebuild",
    "simulate",
    "simulate_ptx",
    "source",
    "store",
    "testing",
    "tpu",
    "tune",
    "when",
]


def __dir__() -> list[str]:
    """The public names alone: folders of the compiler are attributes too, once they are imported."""
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    """A public name, from its module."""
    if name not in __all__:
        raise AttributeError(f"module 'pbkern' has no attribute {name!r}")
    was_collecting = gc.isenabled()
    gc.disable()  # a collection while modules load would look at all of JAX's objects, for 0.1 s
    try:
        home = _HOME_OF.get(name)
        if home or name == "pallas":
            importlib.import_module("pbkern.api.decorators")  # registers what compiles kernels
        value = (
            getattr(importlib.import_module(home), name)
            if home
            else importlib.import_module(f"pbkern.{name}")
        )
    finally:
        if was_collecting:
            gc.enable()
    globals()[name] = value
    return value
