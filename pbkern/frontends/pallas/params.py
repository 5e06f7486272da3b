"""CompilerParams of Pallas's back ends -> the CPU target's, by one table with a row per field.

"used" changes what is compiled, "hint" may be dropped because results and memory stay the same,
"refused" raises UnsupportedOp unless it has its default value. docs/pallas-compiler-params.md is
`markdown()`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pbkern.core.errors import UnsupportedOp
from pbkern.core.lazy_dataclass import dataclass
from pbkern.targets.amdgpu.params import CompilerParams as AmdParams
from pbkern.targets.cpu.params import CompilerParams
from pbkern.targets.nvgpu.params import CompilerParams as NvidiaParams
from pbkern.targets.params import DimensionSemantics

# The use of a field: it is passed on.
USED = "used"
# The use of a field: it changes no result, and is ignored.
HINT = "hint"
# The use of a field: it is an error where it is set.
REFUSED = "refused"


@dataclass(frozen=True)
class Field:
    """Treatment of one field of a CompilerParams class."""

    name: str
    use: str
    meaning: str


TPU = (
    Field(
        "dimension_semantics",
        USED,
        "`parallel`, `core_parallel` and `subcore_parallel` dimensions may run on several "
        "threads, `arbitrary` ones run in order. Unset: dimensions whose programs provably write disjoint "
        "blocks or elements run in parallel.",
    ),
    Field(
        "allow_input_fusion",
        USED,
        "Which operands may be computed in the kernel, where a function of pbkern.jit calls it.",
    ),
    Field("vmem_limit_bytes", HINT, "Scratch is ordinary memory; there is no limit to raise."),
    Field(
        "collective_id", REFUSED, "It names a barrier between devices; kernels here use one device."
    ),
    Field(
        "has_side_effects",
        HINT,
        "It keeps XLA from merging or dropping calls; results are the same either way.",
    ),
    Field("flags", HINT, "Flags of the TPU compiler."),
    Field("internal_scratch_in_bytes", HINT, "Scratch for the TPU compiler's own use."),
    Field("serialization_format", HINT, "Format of the TPU module; none is made."),
    Field(
        "disable_bounds_checks",
        HINT,
        "Accesses at block edges are always masked where they may leave the array.",
    ),
    Field("disable_semaphore_checks", HINT, "Kernels with semaphores are refused as such."),
    Field("skip_device_barrier", HINT, "There is one device and no barrier."),
    Field("allow_collective_id_without_custom_barrier", HINT, "See collective_id."),
    Field(
        "shape_invariant_numerics",
        HINT,
        "Reductions are accumulated in several registers whose number depends on the "
        "shape, whatever this says; the "
        "error bounds of the math library do not depend on shapes.",
    ),
    Field(
        "use_tc_tiling_on_sc", HINT, "Tiling of arrays in TPU memory; arrays are row-major here."
    ),
    Field("needs_layout_passes", HINT, "Passes of the TPU compiler."),
    Field(
        "fuse_transposed_lhs_in_matmul",
        HINT,
        "Transposed operands of contractions are always read in place or packed.",
    ),
    Field("kernel_type", HINT, "Which core of a TPU runs the kernel."),
    Field("opt_level", HINT, "How much the TPU compiler optimises."),
)

GPU = (
    Field(
        "approx_math",
        USED,
        "Cheaper implementations of functions such as exp, as with `pbkern.cpu.CompilerParams`.",
    ),
    Field(
        "dimension_semantics",
        USED,
        "`parallel` dimensions may run on several threads, `sequential` ones run in order.",
    ),
    Field(
        "max_concurrent_steps",
        USED,
        "Blocks of the next max_concurrent_steps - 1 sequential steps are prefetched.",
    ),
    Field("delay_release", HINT, "Blocks are read in place: there is no buffer to release."),
    Field("unsafe_no_auto_barriers", HINT, "One thread runs a program: no barriers are needed."),
    Field("reduction_scratch_bytes", HINT, "Reductions across lanes stay in registers."),
    Field("profile_space", REFUSED, "The profiler records events of warps."),
    Field("profile_dir", REFUSED, "The profiler records events of warps."),
    Field("profile_trace_scope", HINT, "See profile_space."),
    Field("profile_bounds_check", HINT, "See profile_space."),
    Field("skip_device_barrier", HINT, "There is one device and no barrier."),
    Field(
        "lowering_semantics",
        HINT,
        "Which threads of a GPU execute an operation; results do not depend on it.",
    ),
)

TRITON = (
    Field(
        "num_warps",
        HINT,
        "Threads of a GPU block; one CPU thread runs a program with vector instructions.",
    ),
    Field(
        "num_stages",
        HINT,
        "Stages of software pipelining on a GPU; the CPU's own prefetchers do this.",
    ),
)

ANY_ORDER = (
    "Programs run on several threads, in any order, as those of a GPU do, where no block of a result belongs to several of\n"
    "them; not if the kernel has atomics or prints."
)

PIPELINES = """\
Steps along dimensions that run in order are pipelined: with `max_concurrent_steps=n` one step computes while blocks of the
inputs of the next n - 1 are on their way to shared memory, and `delay_release=d` keeps the memory of a step for d steps
more, so that d less are on their way. Devices of NVIDIA copy by themselves (cp.async) where neighbours of a row make 4
bytes that lie together; elsewhere, and on all devices of AMD, threads load before a step and store behind it. Elements
outside of an array are zero. Blocks that do not move are copied once if they are small; arrays that the kernel updates,
and those that index maps read, are read in place. Results are stored as before. `f.explain(*args)` names the stages.
Blocks that shared memory does not hold are a `KernelError` with the bytes that are needed, the limit and the most steps
that fit.

`lowering_semantics=Warpgroup` asks for products by groups of four warps (wgmma), and is an error where these cannot
compute one. With `unsafe_no_auto_barriers` no barrier stands between statements of the body; copies keep theirs.
"""

# The class's module tells the back end, and so survives that all three are called CompilerParams.
TABLES = {
    "mosaic": ("pltpu.CompilerParams", TPU),
    "mosaic_gpu": ("plgpu.CompilerParams", GPU),
    "triton": ("plt.CompilerParams", TRITON),
}


def cpu_params(
    params: Any,
    grid: tuple[int, ...],
    vmapped: tuple[int, ...],
    ordered: bool,
    at: str,
    target: str = "cpu",
) -> dict[str, CompilerParams]:
    """{"cpu": CompilerParams} with the same meaning.

    `vmapped` grid dimensions, which the author's semantics do not count, are parallel. `ordered`:
    programs take turns at shared elements (atomics), so that only a proof of disjointness may make
    dimensions parallel. `target`: that the kernel is for: fields that only NVIDIA's has are left to
    it.
    """
    if params is None:
        return {}
    if isinstance(params, CompilerParams):
        return {"cpu": params}
    if isinstance(params, NvidiaParams | AmdParams):
        return {}
    if isinstance(params, dict):
        return cpu_params(params.get("cpu"), grid, vmapped, ordered, at, target)
    given = _given(
        params, at, NVIDIA.get(backend_of(params) or "", ()) if target == "nvgpu" else ()
    )
    semantics = given.get("dimension_semantics")
    return {
        "cpu": CompilerParams(
            approx_math=bool(given.get("approx_math", False)),
            dimension_semantics=None
            if semantics is None or ordered
            else _semantics(semantics, grid, vmapped, at),
            max_concurrent_steps=max(int(given.get("max_concurrent_steps", 1)), 1),
            allow_input_fusion=given.get("allow_input_fusion"),
        )
    }


# Fields that pbkern.nvgpu.CompilerParams has under the same name, per back end; the others concern
# other devices.
NVIDIA = {
    "mosaic_gpu": (
        "approx_math",
        "dimension_semantics",
        "max_concurrent_steps",
        "delay_release",
        "unsafe_no_auto_barriers",
        "profile_space",
        "profile_dir",
        "lowering_semantics",
    ),
    "triton": ("num_warps",),
}


# As NVIDIA, for pbkern.amdgpu.CompilerParams.
AMD = {"mosaic_gpu": NVIDIA["mosaic_gpu"][:5]}


def thread_params(params: Any, semantics: Any) -> dict[str, NvidiaParams | AmdParams]:
    """CompilerParams by target with the same fields, for targets of GPUs for which one differs from its default.

    These targets refuse what they do not do. `semantics`: of all grid dimensions, vmapped ones too,
    in the CPU's words; None or empty: not known.
    """
    if isinstance(params, NvidiaParams | AmdParams):
        return {params.target_name: params}
    by_target: dict[str, NvidiaParams | AmdParams] = {}
    for kind, fields in ((NvidiaParams, NVIDIA), (AmdParams, AMD)):
        names = fields.get(backend_of(params) or "", ())
        defaults = {x.name: x.default for x in dataclasses.fields(params)} if names else {}
        given = {
            name: value
            for name in names
            if (value := getattr(params, name, None)) is not None and value != defaults[name]
        }
        if "dimension_semantics" in given:
            given["dimension_semantics"] = semantics or None
        translated = kind(**given)
        if translated != kind():
            by_target[kind.target_name] = translated
    return by_target


def backend_of(params: Any) -> str | None:
    """Which of Pallas's back ends a CompilerParams is for, None if it is for another."""
    return next(
        (package for package in reversed(type(params).__module__.split(".")) if package in TABLES),
        None,
    )


def _given(params: Any, at: str, elsewhere: Sequence[str]) -> dict[str, Any]:
    """Fields that are used, after refusing what must be, but for those that another target uses or refuses."""
    backend = backend_of(params)
    if backend is None:
        raise UnsupportedOp(
            f"compiler_params of type {type(params).__name__} on CPU",
            at=at,
            why=f"{params!r}",
            hint="pltpu, plgpu or Triton CompilerParams, or pbkern.cpu.CompilerParams",
        )
    label, table = TABLES[backend]
    uses = {param.name: param for param in table}
    given = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        entry = uses.get(field.name)
        if entry is None or entry.use == REFUSED:
            if value != field.default and field.name not in elsewhere:
                why = entry.meaning if entry else "this version of pbkern does not know the field"
                what = f"{label} field `{field.name}` on CPU"
                raise UnsupportedOp(
                    what, at=at, why=f"{field.name}={value!r}. {why}", hint="leave it out"
                )
        elif entry.use == USED:
            given[field.name] = value
    return given


# What dimension_semantics may say, in the words of all of Pallas's back ends.
WORDS = ("parallel", "core_parallel", "subcore_parallel", "arbitrary", "sequential")


def _semantics(
    given, grid: tuple[int, ...], vmapped: tuple[int, ...], at: str
) -> tuple[DimensionSemantics, ...]:
    """One of the CPU's words per grid dimension."""
    written = [str(getattr(word, "value", word)).lower() for word in given]
    if not set(written) <= set(WORDS):
        raise UnsupportedOp(
            "dimension_semantics has a word that means nothing",
            at=at,
            why=f"dimension_semantics={tuple(given)!r}",
            hint=f"one of {', '.join(map(repr, WORDS))} per grid dimension",
        )
    words: list[DimensionSemantics] = [
        "parallel"
        if word.endswith("parallel")
        else "arbitrary"
        if word == "arbitrary"
        else "sequential"
        for word in written
    ]
    if len(words) == len(grid):
        return tuple(words)
    if len(words) != len(grid) - len(vmapped):
        raise UnsupportedOp(
            "dimension_semantics does not fit the grid",
            at=at,
            why=f"dimension_semantics={tuple(given)!r}, grid={grid}",
            hint="one entry per grid dimension",
        )
    rest = iter(words)
    return tuple("parallel" if axis in vmapped else next(rest) for axis in range(len(grid)))


def markdown() -> str:
    """The table, for docs/pallas-compiler-params.md."""
    rows = [
        "# CompilerParams of Pallas's back ends on CPU",
        "",
        "Kernels keep the CompilerParams they were written with. A field is *used*, a *hint* that cannot change results",
        "here, or *refused* with an error when it is not at its default.",
        "",
    ]
    for label, table in TABLES.values():
        rows += [f"## {label}", ""] + ([ANY_ORDER, ""] if table is TRITON else [])
        rows += ["| field | | what it does here |", "|---|---|---|"]
        rows += [f"| `{param.name}` | {param.use} | {param.meaning} |" for param in table] + [""]
    rows += [
        "## On GPUs",
        "",
        "For the targets `nvgpu` and `amdgpu` these fields become those of the same name of `pbkern.nvgpu.CompilerParams` and",
        "`pbkern.amdgpu.CompilerParams`, whose docstrings say what they mean; others are hints to other devices.",
        "",
        "| class | target | fields |",
        "|---|---|---|",
    ]
    rows += [
        f"| `{TABLES[backend][0]}` | `{target}` | {', '.join(f'`{name}`' for name in names)} |"
        for target, fields in (("nvgpu", NVIDIA), ("amdgpu", AMD))
        for backend, names in fields.items()
    ]
    rows += ["", PIPELINES]
    return "\n".join(rows)
