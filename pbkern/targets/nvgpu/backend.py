"""The NVIDIA GPU's half of lowering: its CompilerParams, and what of them a device cannot do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pbkern.core.errors import ScheduleError
from pbkern.dsl.host_program import HostProgram
from pbkern.dsl.kernel import Kernel
from pbkern.lower.kernel_nests import KernelNests
from pbkern.lower.nest.ir import Nest, every
from pbkern.lower.nest.tiles.tiling import Tiling
from pbkern.targets.simt.backend import ThreadBackend
from pbkern.targets.simt.emit.kernel import ThreadFunction
from pbkern.targets.simt.options import ThreadOptions
from pbkern.targets.simt.params import ThreadParams, of_kernel
from pbkern.targets.simt.passes.regions import is_contraction

from .params import CompilerParams

# The lowering_semantics by which groups of warps compute products.
GROUPS = "Warpgroup"
# Warps of a group. Source: PTX ISA 8.7, section 9.7.15.1.
WARPS_OF_GROUP = 4
# Architectures with wgmma. Source: PTX ISA 8.7, section 9.7.15.5.2.
WARPGROUP_ARCHITECTURES = ("sm_90a",)


class NvgpuBackend(ThreadBackend):
    """See ThreadBackend."""

    params = CompilerParams()

    def build_options(
        self, kernel: Kernel, options, program: HostProgram | None = None
    ) -> ThreadOptions:
        p = of_kernel(kernel, self.params)
        build = super().build_options(kernel, options, program)
        tensor_cores = not options.polyblocks_gpu_no_tensor_core and not build.plain
        build = dataclasses.replace(build, profile_space=p.profile_space, profile_dir=p.profile_dir)
        has_groups = self.kind.architecture in WARPGROUP_ARCHITECTURES
        return self.with_matrices(
            build, kernel, tensor_cores=tensor_cores, warpgroups=tensor_cores and has_groups
        )

    def refused(self, params: ThreadParams) -> Mapping[str, str]:
        assert isinstance(params, CompilerParams)
        if params.lowering_semantics != GROUPS:
            return {}
        architecture, warps = self.kind.architecture, params.num_warps
        if architecture not in WARPGROUP_ARCHITECTURES:
            return {"lowering_semantics": f"{architecture} has no instructions of four warps"}
        if warps is not None and warps % WARPS_OF_GROUP:
            return {"lowering_semantics": f"a group has {WARPS_OF_GROUP} warps, a block {warps}"}
        return {}

    def emit(self, nests: KernelNests, name: str) -> ThreadFunction:
        kernel = nests.kernel
        if of_kernel(kernel, self.params).lowering_semantics == GROUPS:
            for stmt in (stmt for case in nests.cases for stmt in every(case.statements)):
                if isinstance(stmt, Nest) and _is_product_of_warps(stmt):
                    raise ScheduleError(
                        f"kernel `{kernel.name}` asks for lowering_semantics={GROUPS!r}",
                        at=stmt.at or kernel.defined_at or None,
                        why="a product cannot be computed by groups of four warps: "
                        + ", ".join(f"{dim}<{size}" for dim, size in stmt.dims.items()),
                        hint="operands of 8 or 16 bits whose blocks have 64 rows, 64 columns and rows of 128 bytes, or leave "
                        "lowering_semantics at its default",
                    )
        return super().emit(nests, name)


def _is_product_of_warps(nest: Nest) -> bool:
    """Whether threads, or warps by themselves, compute the sums of a product of matrices."""
    is_of_groups = isinstance(nest.by, Tiling) and nest.by.instruction.row_bytes > 0
    return is_contraction(nest) and not is_of_groups
