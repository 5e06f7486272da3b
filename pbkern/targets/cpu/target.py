"""The CPU target: HostProgram -> code registered with XLA, and what this code says of itself."""

from __future__ import annotations

import functools
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pbkern.core import config
from pbkern.core.errors import TargetError
from pbkern.core.machine import Machine
from pbkern.core.process import disk_cache, fallback
from pbkern.core.process.disk_cache import DiskStore
from pbkern.core.process.made_once import MadeOnce
from pbkern.dsl.build_programs import in_stages, kernel_program
from pbkern.dsl.host_program import HostProgram, ProgramSignature
from pbkern.dsl.kernel import Kernel
from pbkern.dsl.text import repro
from pbkern.lower.rules import coverage as support
from pbkern.targets.host import compile as host_compile
from pbkern.targets.host import loaded_program
from pbkern.targets.host.loaded_program import CompiledProgram, LoadedProgram
from pbkern.targets.host.memory_message import memory_message
from pbkern.targets.host.objects import cache_key as content
from pbkern.targets.host.objects.object_code import KIND as CODE
from pbkern.targets.host.runtime import xla
from pbkern.targets.params import DimensionSemantics

from .machines.devices import CpuDevice, jit_device, jit_machine, jit_processor
from .params import CompilerParams

if TYPE_CHECKING:
    from pbkern.fuse.cost.model import CostModel

    from .backend import CpuBackend


class CpuTarget:
    """See targets.target.Target.

    `device`: what libraries are made for; None: this computer's processor, or that of PBKERN_MACHINE.
    """

    name = "cpu"
    platform = "cpu"
    POOLED_BYTES = xla.POOLED_BYTES
    STAGES: tuple[str, ...] = ("nests", "schedule", "mlir", "llvm", "asm")

    def __init__(self, device: CpuDevice | None = None) -> None:
        self.device = device
        self._compiled: weakref.WeakValueDictionary[Hashable, CompiledProgram] = (
            weakref.WeakValueDictionary()
        )
        self._made_once = MadeOnce(self._compiled)

    @functools.cached_property
    def backend(self) -> CpuBackend:
        from .backend import CpuBackend  # imports emission, which programs on disk do not need

        return CpuBackend(None if self.device is None else self.device.machine)

    def machine(self) -> Machine:
        return self.device.machine if self.device else jit_machine()

    def costs(self, device: str | None = None) -> CostModel:
        from pbkern.targets.cpu.costs import (
            CpuCosts,
        )  # imports the fuser, which `import pbkern` does not need

        return CpuCosts.of(self.machine())

    def supports(self, eqn) -> str | None:
        return support.supports(eqn)

    def fused_params(
        self, semantics: tuple[DimensionSemantics, ...], options, **chosen: Any
    ) -> Mapping[str, Any]:
        return {self.name: CompilerParams(dimension_semantics=semantics, **chosen)}

    def variations(self) -> list[tuple[str, list]]:
        cores = config.num_threads() or self.machine().cores
        threads = sorted({count for count in (1, cores // 2) if 1 <= count < cores})
        return [("max_concurrent_steps", [2, 3]), ("num_threads", threads)]

    def product_instructions(self, kernel: Kernel, options) -> tuple[str, ...]:
        return ()  # those of this target multiply words of vectors

    def block_copies(self, kernel: Kernel, options) -> tuple[str, ...]:
        steps = self.backend.build_options(kernel, options).prefetch_steps
        return (f"blocks of the next {steps} steps are prefetched",) if steps else ()

    def identity(self) -> str:
        return (
            disk_cache.digest((content.sources(), self.device))
            if self.device
            else disk_cache.digest((content.environment(), jit_device()))
        )

    def compile(self, program: HostProgram, options, recorded: bool = False) -> CompiledProgram:
        from .codegen import compile as cpu_compile  # the same

        program = in_stages(program)
        options_of = functools.partial(self.backend.build_options, options=options, program=program)
        threads_of = self.backend.threads
        processor = jit_processor()
        key = content.program_key(program, options_of, threads_of, None, processor)
        compiled = functools.partial(
            cpu_compile.compile_program,
            options_of=options_of,
            threads_of=threads_of,
            processor=processor,
            recorded=recorded,
        )
        if recorded:  # records have the names of a program and its kernels
            names = [kernel.name for kernel in program.kernels()]
            key = disk_cache.digest((key, "recorded", program.name, names))

        def make() -> CompiledProgram:
            try:
                return compiled(program, key=key)
            except TargetError:
                raise
            except Exception as e:
                attach_repro(e, program, compiled)
                raise

        if fallback.is_failing():
            loaded = self._compiled[key] = make()
            return loaded
        return self._made_once.get(key, make)

    def reference(self, store: DiskStore, compiled: CompiledProgram) -> dict[str, Any] | None:
        if compiled.key is None:
            return None
        if store.get(CODE, compiled.key) is None:  # compiled for another store, or removed since
            store.put(CODE, compiled.key, compiled.code.packed())
        message = memory_message(compiled.program, compiled.code.arena_bytes, lines=False)
        return {"code": compiled.key, "message": message}

    def load(
        self, store: DiskStore, signature: ProgramSignature, reference: Mapping[str, Any]
    ) -> LoadedProgram | None:
        return host_compile.load_program(store, signature, reference["code"], reference["message"])

    def call(self, compiled: LoadedProgram, label: str, operands: Sequence) -> list:
        return loaded_program.call(compiled, label, operands)

    def call_into(
        self, compiled: LoadedProgram, label: str, operands: Sequence, places: Sequence
    ) -> tuple[list, Any]:
        return loaded_program.call_into(compiled, label, operands, places)

    def lower_again(self, compiled: CompiledProgram) -> Any:
        return compiled.lower()

    def text(self, compiled: CompiledProgram, stage: str) -> str:
        match stage:
            case "nests" | "schedule":
                return "\n\n".join(
                    f"{kernel.name}:\n{getattr(kernel, stage)}"
                    for kernel in compiled.lowered.lowered
                )
            case "mlir":
                return f"{compiled.lowered.kernels}\n{compiled.lowered.host}"
            case "llvm":
                return compiled.llvm
        return assembly(compiled)

    def memory(self, compiled: LoadedProgram) -> tuple[int, int]:
        return compiled.code.arena_bytes, compiled.code.nbytes

    def coverage(self) -> dict[str, list[str]]:
        return support.coverage()


def attach_repro(
    error: Exception, program: HostProgram, compiled: Callable[[HostProgram], Any]
) -> None:
    """Adds a file that fails the same way: of the kernel at fault, the first that fails by itself.

    No file if none does.
    """
    if getattr(error, "repro", None) is not None:
        return
    kernels = program.kernels()
    for kernel in kernels:
        if len(kernels) == 1 or _fails(compiled, kernel):
            repro.attach(error, kernel)
            return


def _fails(compiled: Callable[[HostProgram], Any], kernel: Kernel) -> bool:
    try:
        compiled(kernel_program(kernel))
    except Exception:
        return True
    return False


def assembly(compiled: LoadedProgram) -> str:
    """Machine code as objdump prints it. Raises TargetError where objdump is not installed."""
    return "\n".join(map(_disassembled, compiled.code.objects))


def _disassembled(content: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".o") as file:
        file.write(content)
        file.flush()
        try:
            command = ["objdump", "--disassemble", "--no-show-raw-insn", file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as e:
            hint = "install objdump (binutils)"
            raise TargetError(
                "machine code cannot be disassembled", why=str(e), hint=hint
            ) from None
