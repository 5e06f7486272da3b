"""The NVIDIA GPU's half of lowering: CompilerParams and options -> ThreadOptions; nests -> threads."""

from __future__ import annotations

from pbkern.core.errors import OptionError, ScheduleError
from pbkern.core.passes import Pass
from pbkern.dsl.host_program import HostProgram
from pbkern.dsl.kernel import Kernel
from pbkern.lower.kernel_nests import KernelNests
from pbkern.targets.simt.emit import ThreadFunction, emit
from pbkern.targets.simt.options import ThreadOptions

from .devices import STATIC_SHARED_BYTES, device_kind
from .params import CompilerParams

DEFAULT_PARAMS = CompilerParams()
DEFAULT_WARPS = 4
WARP = 32


class NvgpuBackend:
    """See targets.backend.KernelBackend. `device`: an architecture or a product, see devices.py."""

    passes: tuple[Pass, ...] = ()

    def __init__(self, device: str | None = None):
        self.kind = device_kind(device)

    def build_options(self, kernel: Kernel, options, program: HostProgram | None = None) -> ThreadOptions:
        """Raises ScheduleError where CompilerParams ask for what this target does not do."""
        p = params(kernel)
        _check(kernel, p)
        fast = not options.mlir_disable_fast_math
        return ThreadOptions(
            semantics=p.dimension_semantics,
            contract=fast,
            approx_math=p.approx_math and fast,
            threads=WARP * (p.num_warps or DEFAULT_WARPS),
            shared_bytes=min(self.kind.shared_bytes, STATIC_SHARED_BYTES),
            barriers=not p.unsafe_no_auto_barriers,
        )

    def emit(self, nests: KernelNests, name: str) -> ThreadFunction:
        return emit(nests, name)


def params(kernel: Kernel) -> CompilerParams:
    """The kernel's CompilerParams for this target, or the default ones."""
    found = kernel.compiler_params.get(CompilerParams.target_name, DEFAULT_PARAMS)
    if not isinstance(found, CompilerParams):
        raise OptionError(f"kernel `{kernel.name}` has compiler_params for nvgpu of another class", at=kernel.defined_at
                          or None,
                          why=repr(found), hint="pbkern.nvgpu.CompilerParams(...)")
    return found


def _check(kernel: Kernel, p: CompilerParams) -> None:
    refused = {
        "max_concurrent_steps": (p.max_concurrent_steps > 1, "this target fetches no blocks ahead yet"),
        "profile_space": (p.profile_space > 0, "this target records no events yet"),
        "lowering_semantics": (p.lowering_semantics != "Lane", "this target has no code for tensor cores yet"),
    }
    for field, (asked, why) in refused.items():
        if asked:
            raise ScheduleError(f"kernel `{kernel.name}` asks for {field}={getattr(p, field)!r}", at=kernel.defined_at or None,
                                why=why, hint=f"leave {field} at its default")
