"""Any workload in IREE, where it is installed (iree-base-compiler and iree-base-runtime): through the StableHLO of jax.jit.

Code is for this processor, calls use IREE's task system with its default number of workers. Arguments lie in its memory
beforehand, and results stay there.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence

import iree.compiler
import iree.runtime
import jax
import numpy as np

FLAGS = ["--iree-llvmcpu-target-cpu=host", "--iree-opt-level=O3"]


def version() -> str:
    return importlib.metadata.version("iree-base-compiler")


def compiled(function: Callable, arguments: Sequence[jax.Array]) -> Callable[[], object] | None:
    """A call without arguments that returns when its results are there; None where IREE cannot compile the function."""
    module = str(jax.jit(function).lower(*arguments).compiler_ir("stablehlo"))
    try:
        code = iree.compiler.compile_str(
            module, target_backends=["llvm-cpu"], input_type="stablehlo", extra_args=FLAGS
        )
    except iree.compiler.CompilerToolError:
        return None
    config = iree.runtime.Config("local-task")
    loaded = iree.runtime.load_vm_module(
        iree.runtime.VmModule.copy_buffer(config.vm_instance, code), config
    )
    operands = [iree.runtime.asdevicearray(config.device, np.asarray(a)) for a in arguments]
    return lambda: loaded.main(*operands)


def arrays(result) -> list[np.ndarray]:
    """Results as NumPy arrays."""
    results = result if isinstance(result, (tuple, list)) else [result]
    return [np.asarray(r.to_host()) for r in results]
