"""A kernel as MLIR functions that the host's program calls: what a target that runs kernels on this processor emits."""

from __future__ import annotations

from collections.abc import Iterable

from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.rules import debug_callbacks


@dataclass(frozen=True)
class FunctionText:
    """Text of a function.

    calls: declarations of functions that it calls; declaration: its own, where others call it by
    one; has_scalar_loops: whether LLVM's optimiser is worth its time.
    """

    name: str
    text: str
    calls: frozenset[str] = frozenset()
    declaration: str = ""
    has_scalar_loops: bool = False


@dataclass(frozen=True)
class LoweredKernel:
    """`main` is func.func @name(operands..., copies..., arena, low, high), which calls `pieces`.

    programs: number of parallel programs; scratch_bytes: arena of one task; nests, schedule:
    readable, as they were emitted; copies: numbers of the operands that it reads as they were before the
    launch, from copies.
    """

    main: FunctionText
    pieces: tuple[FunctionText, ...]
    programs: int
    scratch_bytes: int
    nests: str
    schedule: str
    operand_count: int
    copies: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.main.name

    @property
    def functions(self) -> tuple[FunctionText, ...]:
        return (*self.pieces, self.main)

    @property
    def text(self) -> str:
        return "\n".join(function.text for function in self.functions)

    @property
    def is_shared(self) -> bool:
        """Whether launches of equal kernels may use it: the text holds no numbers of print sites."""
        return not any(debug_callbacks.DECLARATION in function.calls for function in self.functions)

    @property
    def argument_types(self) -> list[str]:
        """Types of operands and copies, the scratch memory, and the first program and the one after the last."""
        return ["!llvm.ptr"] * (self.operand_count + len(self.copies) + 1) + ["i64", "i64"]


def module_text(functions: Iterable[FunctionText]) -> str:
    """One module of several functions."""
    functions = tuple(functions)
    declared = frozenset().union(*(function.calls for function in functions)) - {
        function.declaration for function in functions
    }
    return "\n".join([*sorted(declared), *(function.text for function in functions)])
