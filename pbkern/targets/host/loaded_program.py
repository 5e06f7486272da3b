"""One program in memory: called with addresses, with NumPy arrays, or as an operation of JAX.

Programs stay in memory while something may call them, see lifetime.py. Their texts and nests do
not: whoever asks for those of one has it lowered again.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import jax
import numpy as np

from pbkern import _jax
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.host_program import HostProgram, ProgramSignature
from pbkern.dsl.kernel import ArrayType
from pbkern.lower.nest.scratch import BUFFER_ALIGNMENT

from . import lifetime
from .memory_message import give_message
from .objects import object_files
from .objects.elf_loader import Image
from .objects.object_code import ObjectCode
from .program_text import LoweredProgram
from .runtime import xla

# Type of @pbk_call: its status, of the addresses of inputs and results.
PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
_looked_at: list = []  # weak reference to a program, its lowered form


@dataclass(eq=False)
class LoadedProgram:
    """One program in memory.

    Attributes:
      name: name under which XLA knows the handler, once it is asked for as `ffi_name`.
      code: its machine code.
      no_memory: text for a call that gets no memory for the arena, to which the code points.
      from_disk: whether an earlier process had compiled it.
      key: that of its code on disk; None where no other process can use it.
      times: milliseconds per stage; those of different kernels overlap.
    """

    signature: ProgramSignature
    name: str
    code: ObjectCode
    image: Image
    no_memory: ctypes.Array
    from_disk: bool = False
    key: str | None = None
    times: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lifetime.free_with(self, self.image)
        give_message(self.image, self.no_memory)

    @functools.cached_property
    def ffi_name(self) -> str:
        """Registers the handler.

        Not before somebody asks: until XLA has a client it only keeps the address, and the program
        may have gone when it calls there.
        """
        lifetime.register(self.name, self.image)
        return self.name

    def __call__(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Runs on this thread on NumPy arrays; inputs must be contiguous."""
        ins = [np.ascontiguousarray(array) for array in arrays]
        outs = [_aligned(output) for output in self.signature.outputs]
        pointers = (ctypes.c_void_p * max(len(ins) + len(outs), 1))(
            *(buffer.ctypes.data for buffer in (*ins, *outs))
        )
        self.entry(self.image)(pointers)
        return outs

    def linked(self, symbols: Mapping[str, int]) -> Mapping[str, int]:
        """Addresses of what the code calls, of those of the runtime and of a parallel loop."""
        return symbols

    def entry(self, image: Image) -> Any:
        """The program in an image of its code, as a function of addresses, which raises MemoryError."""

        def check(status: int, *_) -> None:
            if status:
                raise MemoryError(self.no_memory.value.decode())

        call: Any = PROTOTYPE(image.address("pbk_call"))
        call.errcheck = check
        return call


@dataclass(eq=False, kw_only=True)
class CompiledProgram(LoadedProgram):
    """A program in memory whose kernels are known: its texts and nests can be made again."""

    program: HostProgram
    lower: Callable[[], LoweredProgram]

    @property
    def lowered(self) -> LoweredProgram:
        """MLIR text and nests, made again; those of the program that was last asked for are kept."""
        if not _looked_at or _looked_at[0]() is not self:
            _looked_at[:] = [weakref.ref(self), self.lower()]
        return _looked_at[1]

    @property
    def llvm(self) -> str:
        """Text of the LLVM dialect module."""
        host = host_text(self.program, self.lowered)
        return str(
            object_files.llvm_module(self.lowered.kernels, host, lambda stage, f, *args: f(*args))
        )


def _aligned(spec: ArrayType) -> np.ndarray:
    """A new array that starts at a cache line, as XLA's do."""
    memory = np.empty(spec.nbytes + BUFFER_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % BUFFER_ALIGNMENT
    return memory[start : start + spec.nbytes].view(spec.dtype).reshape(spec.shape)


def host_text(program: HostProgram, lowered: LoweredProgram) -> str:
    """All host functions of a program on this processor: its steps, and those by which XLA and others call it."""
    sizes = tuple(output.type.nbytes for output in program.outputs)
    return lowered.host + xla.program_text(lowered.arena_bytes, len(program.inputs), sizes)


def call(compiled: LoadedProgram, label: str, operands: Sequence) -> list:
    """See targets.target.Target.call."""
    signature = compiled.signature
    results = [jax.ShapeDtypeStruct(output.shape, output.dtype) for output in signature.outputs]
    return _jax.ffi_call(compiled.ffi_name, label, results, operands, signature.shared)


def call_into(
    compiled: LoadedProgram, label: str, operands: Sequence, places: Sequence
) -> tuple[list, jax.Array]:
    """See targets.target.Target.call_into. The places are operands that the handler writes to."""
    small = [output for output in compiled.signature.outputs if output.nbytes < xla.POOLED_BYTES]
    types = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in small]
    flag = jax.ShapeDtypeStruct((0,), np.uint8)
    *results, done = _jax.ffi_call(
        compiled.ffi_name, label, [*types, flag], [*operands, *places], has_side_effect=True
    )
    return results, done
