"""CompilerParams: what a kernel's author tells Pallas's compiler for TPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pbkern.core.errors import OptionError
from pbkern.targets.params import CheckedParams, is_count

CoreWord = Literal["parallel", "arbitrary", "core_parallel", "subcore_parallel"]
FLAGS = (
    "disable_bounds_checks",
    "disable_semaphore_checks",
    "skip_device_barrier",
    "allow_collective_id_without_custom_barrier",
    "shape_invariant_numerics",
    "fuse_transposed_lhs_in_matmul",
)
SIDE_EFFECTS = ("pure", "dataflow_side_effecting", "side_effecting")
CORES = ("tc", "sc_scalar_subcore", "sc_vector_subcore")


@dataclass(frozen=True)
class CompilerParams(CheckedParams):
    """Choices for one kernel on a TPU; the fields of jax.experimental.pallas.tpu.CompilerParams.

    `to_pallas(target="tpu")` hands them to JAX's compiler. Words may be given as strings or as JAX's own
    enums.

    Attributes:
      dimension_semantics: one entry per grid dimension. "parallel": programs run in any order, on
        several cores where there are any. "arbitrary": in order. "core_parallel" and
        "subcore_parallel": spread over cores, or subcores. None, the default: what the kernel's
        CompilerParams for other targets say, else all in order.
      allow_input_fusion: per operand, whether XLA may fuse into the kernel what computes it.
        Default None: no.
      vmem_limit_bytes: most bytes of vector memory (VMEM) that the kernel uses. Default None: that
        of the compiler.
      collective_id: which barrier semaphore kernels on several devices share. Default None.
      has_side_effects: True, or "dataflow_side_effecting" or "side_effecting": XLA keeps a call
        whose results nobody uses, and calls that are alike. Default False.
      flags: command-line flags of the compiler for this kernel, by name. Default None.
      internal_scratch_in_bytes: bytes of the compiler's own scratch. Default None.
      serialization_format: format in which the body is stored. Default 1.
      kernel_type: "tc", the default: a TensorCore. "sc_scalar_subcore", "sc_vector_subcore": a
        SparseCore's; refused by versions of JAX whose CompilerParams lack the field.
      disable_bounds_checks: leave out the checks of bounds. Default False.
      disable_semaphore_checks: leave out the checks of semaphores. Default False.
      skip_device_barrier: leave out the barrier of devices before the kernel. Default False.
      allow_collective_id_without_custom_barrier: accept a collective_id in a kernel that has no
        barrier of its own. Default False.
      shape_invariant_numerics: results of products do not depend on shapes. Default True.
      use_tc_tiling_on_sc: SparseCores use the tiles of TensorCores. Default None.
      needs_layout_passes: whether the compiler infers layouts of vectors. Default None: as the
        installed JAX does.
      fuse_transposed_lhs_in_matmul: let products take a transposed left operand as it is. Default
        False.
      opt_level: how hard the compiler works, a member of JAX's OptLevel; refused by versions of JAX
        that lack it. Default None: as they choose.

    Examples:
      >>> params = pbkern.tpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=2**20)
      >>> params.vmem_limit_bytes
      1048576
    """

    dimension_semantics: tuple[CoreWord, ...] | None = None
    allow_input_fusion: tuple[bool, ...] | None = None
    vmem_limit_bytes: int | None = None
    collective_id: int | None = None
    has_side_effects: bool | Any = False
    flags: Mapping[str, Any] | None = None
    internal_scratch_in_bytes: int | None = None
    serialization_format: int = 1
    kernel_type: Any = "tc"
    disable_bounds_checks: bool = False
    disable_semaphore_checks: bool = False
    skip_device_barrier: bool = False
    allow_collective_id_without_custom_barrier: bool = False
    shape_invariant_numerics: bool = True
    use_tc_tiling_on_sc: bool | None = None
    needs_layout_passes: bool | None = None
    fuse_transposed_lhs_in_matmul: bool = False
    opt_level: Any = None

    target_name: ClassVar[str] = "tpu"

    def __post_init__(self) -> None:
        words = CoreWord.__args__  # type: ignore[attr-defined]
        if self.dimension_semantics is not None:
            self._check_sequence(
                "dimension_semantics",
                lambda word: _word(word) in words,
                f"a sequence of {', '.join(map(repr, words))}",
            )
            semantics = tuple(map(_word, self.dimension_semantics))
            object.__setattr__(self, "dimension_semantics", semantics)
        self._check_sequence(
            "allow_input_fusion", lambda flag: isinstance(flag, bool), "a sequence of bools"
        )
        for name in ("vmem_limit_bytes", "internal_scratch_in_bytes"):
            value = getattr(self, name)
            self._check(name, value is None or is_count(value), "a number of bytes, or None")
        self._check(
            "collective_id",
            self.collective_id is None or is_count(self.collective_id, 0),
            "an integer from 0, or None",
        )
        self._check("serialization_format", is_count(self.serialization_format), "an integer")
        self._check(
            "flags",
            self.flags is None or isinstance(self.flags, Mapping),
            "{name of a flag: value}, or None",
        )
        self._check_flags(*FLAGS)
        for name in ("use_tc_tiling_on_sc", "needs_layout_passes"):
            self._check(name, getattr(self, name) in (None, True, False), "True, False or None")
        effects = self.has_side_effects
        self._check(
            "has_side_effects",
            isinstance(effects, bool) or _word(effects) in SIDE_EFFECTS,
            f"True, False, {', '.join(map(repr, SIDE_EFFECTS))}",
        )
        if not isinstance(effects, bool):
            object.__setattr__(self, "has_side_effects", _word(effects))
        self._check("kernel_type", _word(self.kernel_type) in CORES, ", ".join(map(repr, CORES)))
        object.__setattr__(self, "kernel_type", _word(self.kernel_type))

    def for_pallas(self, at: str | None) -> Any:
        """The installed JAX's CompilerParams.

        Raises OptionError at `at`, the kernel's line, for a field that it lacks.
        """
        from jax.experimental.pallas import tpu

        known = {field.name for field in dataclasses.fields(tpu.CompilerParams)}
        given = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        for name in given.keys() - known:
            raise OptionError(
                f"tpu.CompilerParams field `{name}` means nothing to the installed JAX",
                at=at,
                why=f"{name}={given[name]!r}",
                hint="leave it out, or install a newer JAX",
            )
        if isinstance(given.get("has_side_effects"), str):
            given["has_side_effects"] = tpu.SideEffectType[given["has_side_effects"].upper()]
        if "kernel_type" in given:
            given["kernel_type"] = tpu.CoreType[given["kernel_type"].upper()]
        return tpu.CompilerParams(**given)


def _word(word: Any) -> str:
    """The name of a word that is a string or a member of one of JAX's enums."""
    return str(getattr(word, "name", word)).lower()
