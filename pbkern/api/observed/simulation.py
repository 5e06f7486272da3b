"""pbkern.simulate: functions and kernels as PTX for an NVIDIA GPU, run on this machine and checked while they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.api.decorators import JitFunction
from pbkern.api.pipeline import build_kernel, compile_programs
from pbkern.core.errors import InternalError, KernelError, OptionError
from pbkern.core.jaxprs.walks import literal_value
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.options import CompileOptions
from pbkern.core.process import fallback
from pbkern.dsl import checks
from pbkern.dsl.host_program import HostProgram
from pbkern.dsl.kernel import Kernel
from pbkern.dsl.trace import KernelFunction
from pbkern.frontends.jax.call import call_p
from pbkern.simulate.counts import Counts
from pbkern.targets.amdgpu import devices as amd_devices

if TYPE_CHECKING:  # lowering is imported when something is compiled
    from pbkern.targets.nvgpu.program import NvProgram


# The same device on every computer, also on one with another GPU, so that results are the same.
DEFAULT_DEVICE = "sm_90a"


@dataclass(frozen=True)
class Simulation:
    """Results and counts of a simulated call.

    Attributes:
      results: as the function returns them, of NumPy arrays; of a kernel, a list.
      kernels: those that ran, in launch order.
      ptx: their texts, in the same order.
      counts: instructions, traffic and conflicts of all launches together (simulate/counts.py).

    Examples:
      >>> simulation = pbkern.simulate(lambda x: x * 2, np.ones(300, np.float32))
      >>> float(simulation.results.sum()), len(simulation.ptx)
      (600.0, 1)
      >>> simulation.counts.instructions > 0
      True
    """

    results: Any
    kernels: list[Kernel]
    ptx: list[str]
    counts: Counts = field(default_factory=Counts)


@_jax.hides_own_frames
def simulate(
    f: Callable | Kernel, *args, device: str | None = None, check: bool = True, **kwargs
) -> Simulation:
    """Runs a function or a kernel as the code of an NVIDIA GPU, on NumPy, without a GPU.

    Args:
      f: a decorated or a plain function of JAX arrays, a `pbkern.kernel`, or a traced Kernel.
      *args: its arguments.
      device: "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120", or a product such as "h100".
        Default: that of a decorated function's compile_options, else "sm_90a".
      check: races, and reads of shared memory and registers before a store, are found. Default True.
      **kwargs: its named arguments.
    Raises SimulationError where threads race, wait for ever, are not together, or leave their
    arrays; UnsupportedOp; OptionError, for devices of AMD as well: their code is not simulated.

    Examples:
      >>> simulation = pbkern.simulate(jnp.cumsum, np.ones(8, np.float32), device="h100")
      >>> simulation.results.tolist()
      [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    """
    if device is not None and device.lower() in (*amd_devices.KINDS, *amd_devices.NAMES):
        raise OptionError(
            "code for AMD GPUs cannot be simulated",
            why=f"the simulator runs PTX, and `{device}` does not",
            hint=f"device={DEFAULT_DEVICE!r}, or any other device of NVIDIA",
        )
    options = CompileOptions(target="nvgpu", device=device or DEFAULT_DEVICE)
    if not callable(f) and not isinstance(f, Kernel):
        raise KernelError(
            "what is simulated is neither a function nor a kernel",
            why=f"{type(f).__name__}: {f!r:.80}",
            hint="pbkern.simulate(f, *args); pbkern.simulate_ptx(text, grid, block, arrays) runs PTX",
        )
    if isinstance(f, KernelFunction):
        f = f.trace(*args, **kwargs)
    if isinstance(f, Kernel):
        return _kernel(f, args, options, check)
    if isinstance(f, JitFunction):
        of_function = f._options.device if f._options.target == "nvgpu" else None
        given = f._options.differing() | {
            "target": "nvgpu",
            "device": device or of_function or DEFAULT_DEVICE,
        }
        f, options = f.__wrapped__, CompileOptions(**given)
    return _function(f, args, kwargs, options, check)


def _function(
    f: Callable, args: tuple, kwargs: dict, options: CompileOptions, check: bool
) -> Simulation:
    """Simulates the kernels of a plain function; the rest of its plan runs as JAX does."""
    traced: JitFunction = JitFunction(f, options, {})
    with fallback.strictly(True):  # a kernel that XLA would run instead is an error
        build, _ = traced.build(args, kwargs)
        compile_programs(build, options)
    counts: list[Counts] = []

    def run(program: HostProgram, operands) -> list:
        compiled: NvProgram = build.compiled[program.name]
        results, cost = compiled.simulated([np.asarray(operand) for operand in operands], check)
        checks.raise_failed(program.kernels())
        counts.append(cost)
        return results

    flat = traced.trace(*args, **kwargs)
    leaves = [
        np.asarray(leaf)
        if not jax.dtypes.issubdtype(jax.typeof(leaf).dtype, jax.dtypes.extended)
        else leaf
        for leaf in jax.tree.leaves(_dynamic(options, args, kwargs))
    ]
    results = _evaluated(flat.jaxpr, leaves, lambda operands: build.fused.evaluate(operands, run))
    return Simulation(
        jax.tree.unflatten(jax.tree.structure(flat.out_info), results),
        build.fused.kernels(),
        _texts(list(build.compiled.values())),
        sum(counts, Counts()),
    )


def _evaluated(traced: jex.ClosedJaxpr, leaves: list, call: Callable[[list], list]) -> list:
    """Results of a traced function, whose equations all bind `call_p`.

    Args:
      traced: the function; arrays that it closes over are its constants.
      leaves: its arguments.
      call: operands of the primitive -> its results.
    """
    env = dict(zip(traced.jaxpr.invars, leaves)) | dict(
        zip(traced.jaxpr.constvars, map(np.asarray, traced.consts))
    )

    def value(atom: Any) -> Any:
        return literal_value(atom) if isinstance(atom, jex.Literal) else env[atom]

    for eqn in traced.jaxpr.eqns:
        if eqn.primitive is not call_p:
            raise InternalError("a traced function binds another primitive", why=eqn.primitive.name)
        env.update(zip(eqn.outvars, call([value(var) for var in eqn.invars])))
    return [value(var) for var in traced.jaxpr.outvars]


def _dynamic(options: CompileOptions, args: tuple, kwargs: dict) -> tuple:
    """Arguments without those that are compile-time constants."""
    positions = {argnum % len(args) for argnum in options.static_argnums} if args else set()
    return [arg for k, arg in enumerate(args) if k not in positions], {
        n: value for n, value in kwargs.items() if n not in options.static_argnames
    }


def _kernel(kernel: Kernel, args: tuple, options: CompileOptions, check: bool) -> Simulation:
    """Simulates one kernel."""
    build = compile_programs(build_kernel(kernel), options)
    (compiled,) = build.compiled.values()
    results, counts = compiled.simulated([np.asarray(arg) for arg in args], check)
    checks.raise_failed([kernel])
    return Simulation(results, [kernel], _texts([compiled]), counts)


def _texts(compiled: list[NvProgram]) -> list[str]:
    """PTX of all kernels, in launch order."""
    return [
        executable.codes[id(kernel)].ptx
        for executable in compiled
        for kernel in executable.program.kernels()
    ]
