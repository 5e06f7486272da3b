"""Lowered kernels and host functions -> object files, on threads: kernels compile while the next ones are being lowered.

Kernels are cut into parts by the length of their MLIR text, in order, so that the objects do not
depend on timing. A part is a module and an object of its own; the last one has the host functions
as well. Objects call each other by name.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from pbkern.targets import mlir
from pbkern.targets.host.kernel_text import FunctionText, LoweredKernel, module_text
from pbkern.targets.host.processor import allowed_cores
from pbkern.targets.llvm.repairs import is_shuffled_without_end

# LLVM's level for explicitly vectorised code, in which its optimiser finds nothing (measured:
# docs/decisions).
VECTOR_OPT_LEVEL = 0
# LLVM's level for scalar loops, in which its optimiser finds something (measured: docs/decisions).
SCALAR_OPT_LEVEL = 2
# LLVM's level for scalar loops that it must not vectorise: at this one it makes no vectors of its
# own.
SCALAR_BYTES_OPT_LEVEL = 1
# Characters of MLIR that fill a part: about 100 ms of passes and code generation, beside which the
# 5 ms that an engine takes are little.
PART_CHARACTERS = 100_000
# Address of functions of other parts, as far as the engine is told: its own image is never run.
ELSEWHERE = 1


class Parts:
    """The parts of one program under way; a context manager, which waits for its threads.

    Args:
      symbols: addresses of the runtime's functions, by name.
      opt_level: of LLVM; None: as each part's loops need.
      timed: timed(stage, f, *args) calls f.
      processor: whose instructions the objects consist of; None: all that the processor at hand has.
    """

    def __init__(
        self,
        symbols: Mapping[str, int],
        opt_level: int | None,
        timed: Callable,
        processor: mlir.Processor | None = None,
    ):
        self.symbols, self.opt_level, self.timed = dict(symbols), opt_level, timed
        self.processor = processor
        self.threads = ThreadPoolExecutor(allowed_cores(), thread_name_prefix="pbkern-compile")
        self.waiting: list[FunctionText] = []
        self.objects: list[Future[bytes]] = []

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *error) -> None:
        self.threads.shutdown(cancel_futures=True)

    def add(self, kernel: LoweredKernel) -> None:
        """Takes the next kernel; starts a part where that fills it.

        Pieces have parts of their own where only they, or only the main function, have scalar loops.

        Keeps callees before callers: a part may call what earlier parts define.
        """
        for piece in sorted(
            kernel.pieces,
            key=lambda function: not function.has_scalar_loops or bool(function.calls),
        ):
            if self.waiting and self.waiting[-1].has_scalar_loops != piece.has_scalar_loops:
                self._start(self.waiting[0].name)
            self._take(piece)
        before = self.waiting[-1] if kernel.pieces and self.waiting else kernel.main
        if before.has_scalar_loops != kernel.main.has_scalar_loops:
            self._start(self.waiting[0].name)
        self._take(kernel.main)

    def _take(self, function: FunctionText) -> None:
        # A full part starts with the next one, so that the host's functions never need an engine for themselves.
        if sum(len(queued.text) for queued in self.waiting) >= PART_CHARACTERS:
            self._start(self.waiting[0].name)
        self.waiting.append(function)

    def finish(self, host: str, function: str) -> tuple[bytes, ...]:
        """Every object, after the last kernel; `function` is one that `host` defines."""
        self._start(function, host)
        return tuple(obj.result() for obj in self.objects)

    def _start(self, function: str, host: str = "") -> None:
        functions, self.waiting = tuple(self.waiting), []
        # Threads run in this context, by which their progress is told.
        run = contextvars.copy_context().run
        self.objects.append(
            self.threads.submit(run, self._object, functions, host, function, dict(self.symbols))
        )
        self.symbols |= {queued.name: ELSEWHERE for queued in functions}

    def _object(
        self,
        functions: tuple[FunctionText, ...],
        host: str,
        function: str,
        symbols: Mapping[str, int],
    ) -> bytes:
        module = llvm_module(module_text(functions), host, self.timed)
        mlir.check_lowered(module)
        if self.processor is not None:
            mlir.set_processor(module, *self.processor)
        level = self.opt_level
        if level is None:
            level = _level(functions)
        return self.timed("llvm", mlir.object_code, module, level, function, symbols)


def _level(functions: Sequence[FunctionText]) -> int:
    if not any(function.has_scalar_loops for function in functions):
        return VECTOR_OPT_LEVEL
    at_risk = any(is_shuffled_without_end(function.text) for function in functions)
    return SCALAR_BYTES_OPT_LEVEL if at_risk else SCALAR_OPT_LEVEL


def llvm_module(kernels: str, host: str, timed: Callable):
    """LLVM dialect of kernels' functions and of host functions."""
    module = timed("parse", mlir.parse, kernels)
    timed("passes", mlir.run_passes, module, mlir.KERNEL_PASSES)
    if mlir.LOOP_MARK in kernels:
        mlir.keep_loops(module)
    if host:
        mlir.join(module, timed("host", host_module, host))
    return module


def host_module(text: str):
    """LLVM dialect of host functions."""
    return mlir.run_passes(mlir.parse(text), mlir.HOST_PASSES)
