"""Target code that all GPU vendors share: HostProgram -> code of its kernels, launched by a driver."""

from __future__ import annotations

import abc
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pbkern.core.errors import OptionError, TargetError
from pbkern.core.machine import Machine
from pbkern.core.options import CompileOptions
from pbkern.core.process import disk_cache, fallback
from pbkern.core.process.disk_cache import DiskStore
from pbkern.dsl.build_programs import in_stages, kernel_program
from pbkern.dsl.host_program import HostProgram, ProgramSignature
from pbkern.dsl.kernel import Kernel
from pbkern.dsl.primitives.in_range import in_range_p
from pbkern.dsl.text import repro
from pbkern.lower.kernel_nests import KernelNests, kernel_nests
from pbkern.lower.nest.ir import Nest, every
from pbkern.lower.nest.tiles.tiling import Tiling
from pbkern.lower.passes.shared import SHARED_PASSES
from pbkern.lower.rules import coverage as support
from pbkern.targets.backend import device_function, device_functions
from pbkern.targets.llvm import process
from pbkern.targets.params import DimensionSemantics

from . import kept_code
from .backend import ThreadBackend
from .emit.kernel import ThreadFunction, alignment_of
from .launch.call import add_stored, direct_entry, handler_of, launched_call
from .launch.driver import Driver
from .launch.handler import argument_sizes
from .options import ThreadOptions
from .params import ThreadParams
from .program import DeviceProgram, KernelCode, LoadedDeviceProgram
from .step_report import step_report

if TYPE_CHECKING:
    from pbkern.fuse.cost.model import CostModel


class ThreadTarget(abc.ABC):
    """See targets.target.Target. A vendor's target has beside it:

    backend_of(device): lowering for the device that compile_options name, or for the default one.
    make(function, kind, image): a kernel's code; `image`: its text or binary, if an earlier process
    had it. image(code): the text or binary, as bytes. driver(): the functions that launch. show(code,
    stage): text of a last stage.
    """

    name: str
    params: type[ThreadParams]
    STAGES: tuple[str, ...]
    POOLED_BYTES = 1 << 62  # results lie where XLA puts them
    compiled_class: type[DeviceProgram] = DeviceProgram

    def __init__(self) -> None:
        self._codes: dict[str, KernelCode] = {}

    # ---------------------------------------------------------------- a vendor's own

    @abc.abstractmethod
    def backend_of(self, device: str | None) -> ThreadBackend: ...

    @abc.abstractmethod
    def make(self, function: ThreadFunction, kind: Any, image: bytes | None) -> KernelCode: ...

    @abc.abstractmethod
    def image(self, code: Any) -> bytes: ...

    @abc.abstractmethod
    def driver(self) -> Driver: ...

    @abc.abstractmethod
    def show(self, code: Any, stage: str) -> str: ...

    @abc.abstractmethod
    def machine(self, device: str | None = None) -> Machine: ...

    # ---------------------------------------------------------------- all vendors'

    @property
    def backend(self) -> ThreadBackend:
        return self.backend_of(None)

    def costs(self, device: str | None = None) -> CostModel:
        from .costs import ThreadCosts  # imports the fuser, which `import pbkern` does not need

        return ThreadCosts.of(self.machine(device))

    def supports(self, eqn) -> str | None:
        if eqn.primitive is in_range_p:
            return "kernels on GPUs do not count numbers that are out of their range"
        return support.supports(eqn)

    def fused_params(
        self, semantics: tuple[DimensionSemantics, ...], options, **chosen: Any
    ) -> Mapping[str, Any]:
        return {self.name: self.params(dimension_semantics=semantics, **chosen)}

    def variations(self) -> list[tuple[str, list]]:
        return [("num_warps", [2, 8])]

    def product_instructions(self, kernel: Kernel, options) -> tuple[str, ...]:
        names = set()
        for nests in self._nests(kernel, options):
            stmts = [stmt for case in nests.cases for stmt in every(case.statements)]
            by = [stmt.by for stmt in stmts if isinstance(stmt, Nest)]
            names |= {tiling.instruction.name for tiling in by if isinstance(tiling, Tiling)}
        return tuple(sorted(names))

    def block_copies(self, kernel: Kernel, options) -> tuple[str, ...]:
        return tuple(line for nests in self._nests(kernel, options) for line in step_report(nests))

    def _nests(self, kernel: Kernel, options) -> Iterator[KernelNests]:
        """Nests of stages behind all passes, of those in which these decide about instructions or copies."""
        backend = self.backend_of(options.device)
        for stage in in_stages(kernel_program(kernel)).kernels():
            build = backend.build_options(stage, options)
            if build.one_case or build.stages > 1:
                yield kernel_nests(stage, build).after((*SHARED_PASSES, *backend.passes))

    def identity(self) -> str:
        return f"{self.name} {self.backend.kind.architecture} {kept_code.environment()}"

    def coverage(self) -> dict[str, list[str]]:
        return support.coverage()

    def compile(self, program: HostProgram, options, recorded: bool = False) -> DeviceProgram:
        """Raises UnsupportedOp, ScheduleError, OptionError, TargetError or InternalError."""
        if recorded:
            raise TargetError(
                f"launches on target `{self.name}` are not recorded",
                why=f"program `{program.name}`; the recorder takes the times of threads of this processor",
                hint="profile_space and profile_dir of pbkern.nvgpu.CompilerParams take those of blocks",
            )
        if not options.device_one_time_load:
            raise OptionError(
                f"target `{self.name}` loads a kernel once, however often it is launched",
                why="device_one_time_load=False",
                hint="leave it out",
            )
        program, start = in_stages(program), time.perf_counter()
        backend, codes, keys = self.backend_of(options.device), {}, {}
        shared: dict[tuple[tuple, ThreadOptions], tuple[KernelCode, str | None]] = {}
        for n, kernel in enumerate(program.kernels()):
            build = backend.build_options(kernel, options, program)
            like = kernel.content, build
            code, key = shared.get(like) or self._code(
                kernel, build, f"k{n}_{kernel.name}", backend
            )
            if code.function.is_shared:
                shared[like] = code, key
            codes[id(kernel)], keys[id(kernel)] = code, key
        compiled = self.compiled_class(
            program.signature,
            tuple(codes.values()),
            program=program,
            codes=codes,
            keys=keys,
            options=options,
        )
        compiled.times |= {"code": (time.perf_counter() - start) * 1e3}
        return compiled

    def _code(
        self, kernel: Kernel, options: ThreadOptions, name: str, backend: ThreadBackend
    ) -> tuple[KernelCode, str | None]:
        """Finds what this process or the disk has, else makes the code now.

        Returns the code and its key, None where no other process can use it.
        """
        key = kept_code.key(kernel, name, options, backend.kind)
        if fallback.is_failing():
            return self._lowered(kernel, options, name, backend), None
        store = disk_cache.current()
        code = self._stored(store, key, backend)
        if code is None:
            code = self._lowered(kernel, options, name, backend)
            if not code.function.is_shared:
                return code, None
            self._codes[key] = code
            if store:
                store.put(self.name, key, kept_code.packed(code.function, self.image(code)))
        return code, key

    def _stored(
        self, store: DiskStore | None, key: str, backend: ThreadBackend
    ) -> KernelCode | None:
        """The code under a key that this process or the disk has."""
        payload = store.get(self.name, key) if store and key not in self._codes else None
        if store and payload is not None:
            try:
                function, image = kept_code.unpacked(payload)
                self._codes[key] = self.make(function, backend.kind, image)
            except (ValueError, TypeError, zlib.error):  # no entry of ours: make it anew
                store.remove(self.name, key)
        return self._codes.get(key)

    def _lowered(
        self, kernel: Kernel, options: ThreadOptions, name: str, backend: ThreadBackend
    ) -> KernelCode:
        process.warm()
        try:
            function = device_function(kernel, options, backend.passes, backend.emit, name)
            code = self.make(function, backend.kind, None)
            self.image(code)
        except Exception as e:
            repro.attach(e, kernel)
            raise
        return code

    def lower_again(self, compiled: DeviceProgram) -> Any:
        options: CompileOptions = compiled.options
        backend = self.backend_of(options.device)
        return device_functions(
            compiled.program,
            lambda kernel: backend.build_options(kernel, options, compiled.program),
            backend.passes,
            backend.emit,
        )

    def reference(self, store: DiskStore, compiled: DeviceProgram) -> dict[str, Any] | None:
        """Keys of the kernels' code and of the handler's, and what a driver has to know of them."""
        for kernel, key in compiled.keys.items():
            if key is None:
                return None
            if store.get(self.name, key) is None:  # compiled for another store, or removed since
                code = compiled.codes[kernel]
                store.put(self.name, key, kept_code.packed(code.function, self.image(code)))
        return {
            "architecture": self.backend_of(compiled.options.device).kind.architecture,
            "kernels": list(compiled.keys.values()),
            "argument_sizes": argument_sizes(compiled),
            "handler": handler_of(compiled, self.driver()).key,
        }

    def load(
        self, store: DiskStore, signature: ProgramSignature, reference: Mapping[str, Any]
    ) -> LoadedDeviceProgram | None:
        backend = self.backend_of(reference["architecture"])
        codes = [self._stored(store, key, backend) for key in reference["kernels"]]
        kernels = tuple(code for code in codes if code is not None)
        if len(kernels) < len(codes):
            return None
        loaded = LoadedDeviceProgram(signature, kernels)
        sizes = [tuple(row) for row in reference["argument_sizes"]]
        is_complete = add_stored(loaded, self.driver(), store, reference["handler"], sizes)
        return loaded if is_complete else None

    def call(self, compiled: LoadedDeviceProgram, label: str, operands: Sequence) -> list:
        return launched_call(compiled, label, operands, self.driver())

    def direct_entry(
        self, compiled: LoadedDeviceProgram
    ) -> tuple[Callable[[bytes, int, int], None], int]:
        """See launch/call.py: for callers whose arrays XLA does not have.

        Arrays begin at multiples of `alignment`.
        """
        return direct_entry(compiled, self.driver())

    def alignment(self, nbytes: int) -> int:
        """Bytes, of which the address of an array of `nbytes` has to be a multiple."""
        return alignment_of(nbytes)

    def call_into(
        self, compiled: LoadedDeviceProgram, label: str, operands: Sequence, places: Sequence
    ) -> tuple[list, Any]:
        return self.call(compiled, label, operands), None

    def text(self, compiled: DeviceProgram, stage: str) -> str:
        codes = compiled.distinct()
        match stage:
            case "nests":
                return "\n\n".join(
                    f"{code.function.name}:\n{code.function.nests}" for code in codes
                )
            case "mlir":
                return "\n".join(code.function.text for code in codes)
        return "\n".join(self.show(code, stage) for code in codes)

    def memory(self, compiled: LoadedDeviceProgram) -> tuple[int, int]:
        codes = compiled.distinct()
        scratch = max(
            (code.function.global_bytes * code.function.blocks for code in codes), default=0
        )
        return scratch, sum(len(self.image(code)) for code in codes)
