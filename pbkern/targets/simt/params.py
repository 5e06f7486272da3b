"""ThreadParams: what a kernel's author may tell the targets that run threads; each vendor's CompilerParams add their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from pbkern.core.errors import OptionError
from pbkern.dsl.kernel import Kernel
from pbkern.targets.params import CheckedParams, DimensionSemantics, is_count

# Most warps of a block: 1024 threads, of which a warp has 32 or more.
MOST_WARPS = 32


@dataclass(frozen=True)
class ThreadParams(CheckedParams):
    """Fields and checks that all vendors share."""

    approx_math: bool = False
    dimension_semantics: tuple[DimensionSemantics, ...] | None = None
    unsafe_no_auto_barriers: bool = False
    num_warps: int | None = None
    max_concurrent_steps: int = 1
    delay_release: int = 0

    def __post_init__(self) -> None:
        self._check_flags("approx_math", "unsafe_no_auto_barriers")
        warps = self.num_warps
        good = warps is None or (
            is_count(warps) and warps <= MOST_WARPS and warps & (warps - 1) == 0
        )
        self._check("num_warps", good, "1, 2, 4, 8, 16, 32 or None")
        most, delay = self.max_concurrent_steps, self.delay_release
        self._check("max_concurrent_steps", is_count(most), "an integer of at least 1")
        self._check(
            "delay_release",
            is_count(delay, 0) and delay < most,
            f"an integer of at least 0 and less than max_concurrent_steps, here {most}",
        )
        self._check_semantics()


P = TypeVar("P", bound=ThreadParams)


def of_kernel(kernel: Kernel, default: P) -> P:
    """The kernel's CompilerParams for the target of `default`.

    Kernels without any have the default ones, with the dimension_semantics that they have for
    another target: these say what programs do, not what a device does.

    Raises OptionError.
    """
    params = kernel.compiler_params.get(default.target_name)
    if params is None:
        every = (
            getattr(param, "dimension_semantics", None) for param in kernel.compiler_params.values()
        )
        return default.replace(dimension_semantics=next(filter(None, every), None))
    if not isinstance(params, type(default)):
        raise OptionError(
            f"kernel `{kernel.name}` has compiler_params for {default.target_name} of another class",
            at=kernel.defined_at or None,
            why=repr(params),
            hint=f"pbkern.{default.target_name}.CompilerParams(...)",
        )
    return params
