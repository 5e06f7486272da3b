"""Device: the few things in which vendors' threads differ, as MLIR text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from pbkern.core.errors import OptionError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.options import nearest
from pbkern.lower.mlir.math_table import SHARED, MathTable
from pbkern.lower.mlir.operation import Emit, Operation
from pbkern.lower.mlir.ops import Builder, Ssa

# MLIR's number of the memory that a thread block shares; the same at both vendors.
SHARED_SPACE = 3


class VendorCode(Protocol):
    """Code that only one vendor understands.

    Attributes:
      name: the target's.
      warp: threads that exchange registers.
      declared_bytes: most shared memory that the text may declare for a block; more is asked for at
        the launch.
      private: LLVM's number of the memory in which a function's own variables lie before they are
        registers.
      copies_tiles: whether it copies to shared memory by itself, and loads matrices from there by one instruction.
      relaxed_atomics: whether its code orders nothing but the element that an atomic operation updates.
    """

    @property
    def name(self) -> str: ...
    @property
    def warp(self) -> int: ...
    @property
    def declared_bytes(self) -> int: ...
    @property
    def private(self) -> int: ...
    @property
    def copies_tiles(self) -> bool: ...
    @property
    def relaxed_atomics(self) -> bool: ...
    def math(self, approx: bool) -> MathTable:
        """Instructions in place of functions that all targets have; `approx`: also such as are less exact."""

    def thread(self, put: Emit) -> str:
        """i32: number of the thread in its block."""

    def hidden(self, put: Emit, index: str) -> str:
        """The index, of which LLVM does not know that it is the same in each step of a loop, where that is needed."""

    def other(self, put: Emit, index: str) -> str:
        """The index, of which LLVM does not know that it is the same: what is computed of either is computed twice."""

    def block(self, put: Emit) -> str:
        """i32: number of the block in the grid."""

    def barrier(self) -> tuple[Operation, ...]:
        """Waits for all threads of the block; what they stored before is there for all of them after."""

    def exchange(self, put: Emit, value: str, distance: int) -> str:
        """i32 `value` of the thread of the warp whose number differs in the bit `distance`.

        All threads of the warp take part.
        """


# The natural logarithm of 2 as a float32.
LN2_FLOAT32 = 0.693147182464599609375
# The rest of that logarithm.
LN2_REST = -1.904654323148236e-09
# The least float32 whose exponential is infinite.
EXP_OVERFLOW = 88.72284
# A number whose exponential is 0 in float32.
EXP_UNDERFLOW = -105.0


@dataclass(frozen=True)
class NvidiaMath:
    """Instructions of sm_80 and newer.

    approx: exp within 2**-17 of itself and without subnormals, tanh within 2**-10.9. Source: PTX ISA 8.7, section 9.7.9.21,
    cvt: bf16 with subnormals, one NaN; section 9.7.3: ex2.approx has a relative error of 2**-22, rsqrt.approx one of 2**-22.9,
    and both take and give subnormals; tanh.
    """

    approx: bool

    asymmetric_minima = False
    predicts_branches = False

    def lookup(self, function: str, el: str) -> Callable[[Any, Any], Any] | None:
        if (function, el) == ("bf16", "f32"):
            return _rounded_to_bf16
        if el != "f32":
            return None
        return (self.approx and APPROXIMATE.get(function)) or EXACT.get(function)


def _by_instruction(instruction: str, factor: float = 1.0) -> Callable[[Builder, Ssa], Ssa]:
    """The function of float32 that an instruction computes of so many times its operand."""

    def emit(b: Builder, x: Ssa) -> Ssa:
        scaled = x if factor == 1 else b.mul(x, b.c(factor, x.el))
        syntax = f' "{instruction} $0, $1;", "=f,f" %s'
        return x._replace(name=b.emit("llvm.inline_asm", (scaled.name,), "(f32) -> f32", syntax))

    return emit


_exp2 = _by_instruction("ex2.approx.f32")


def _exp(b: Builder, x: Ssa) -> Ssa:
    """2**h (1 + c) with h = x / ln 2 rounded and c = x - h ln 2, as small as h's rounding; where x overflows, c is above 0."""
    per_octave = b.c(1 / math.log(2), "f32")
    x = b.same("arith.maximumf", x, b.c(EXP_UNDERFLOW, "f32"))
    x = b.same("arith.minimumf", x, b.c(EXP_OVERFLOW, "f32"))
    octaves = b.mul(x, per_octave)
    rest = b.fma(octaves, b.c(-LN2_FLOAT32, "f32"), x)
    rest = b.fma(octaves, b.c(-LN2_REST, "f32"), rest)
    power = _exp2(b, octaves)
    return b.fma(power, rest, power)


# Functions of float32 within 2.5 units in the last place, as an H200 computes them.
EXACT = {"exp": _exp, "exp2": _exp2, "rsqrt": _by_instruction("rsqrt.approx.f32")}
# Functions of float32 where approximations are allowed.
APPROXIMATE = {
    "exp": _by_instruction("ex2.approx.ftz.f32", math.log2(math.e)),
    "exp2": _by_instruction("ex2.approx.ftz.f32"),
    "tanh": _by_instruction("tanh.approx.f32"),
}


def _rounded_to_bf16(b: Builder, x: Ssa) -> Ssa:
    """Rounds by cvt.rn.bf16; elsewhere bfloat16 is an integer of 16 bits."""
    narrow = b.emit("arith.truncf", (x.name,), "f32 to bf16")
    return x._replace(name=b.emit("arith.bitcast", (narrow,), "bf16 to i16"), el="bf16")


def _hidden(put: Emit, index: str, register: str) -> str:
    """An index behind an empty instruction, in LLVM's eyes another one. register: the vendor's letter for its registers."""
    number = put("arith.index_cast", (index,), "index to i32")
    empty = f' has_side_effects "", "={register},0" %s'
    hidden = put("llvm.inline_asm", (number,), "(i32) -> i32", empty)
    return put("arith.index_castui", (hidden,), "i32 to index")


@dataclass(frozen=True)
class Nvidia:
    """PTX, by the NVVM dialect.

    Source of declared_bytes: CUDA C++ Programming Guide, shared memory.
    """

    name: str = "nvgpu"
    warp: int = 32
    declared_bytes: int = 48 << 10
    private: int = 0
    copies_tiles: bool = True
    relaxed_atomics: bool = True

    def math(self, approx: bool) -> MathTable:
        return NvidiaMath(approx)

    def thread(self, put: Emit) -> str:
        return put("nvvm.read.ptx.sreg.tid.x", (), "i32")

    def hidden(self, put: Emit, index: str) -> str:
        """The index itself: ptxas computes places again rather than store them."""
        return index

    def other(self, put: Emit, index: str) -> str:
        return _hidden(put, index, "r")

    def block(self, put: Emit) -> str:
        return put("nvvm.read.ptx.sreg.ctaid.x", (), "i32")

    def barrier(self) -> tuple[Operation, ...]:
        return (Operation("nvvm.barrier"),)

    def exchange(self, put: Emit, value: str, distance: int) -> str:
        mask, by, last = (
            put("arith.constant", (), "i32", f" {constant}") for constant in (-1, distance, 31)
        )
        return put("nvvm.shfl.sync", (mask, value, by, last), "i32 -> i32", " bfly %s, %s, %s, %s")

    def processor(self, put: Emit) -> str:
        """i32: number of the SM that runs the block."""
        return put("nvvm.read.ptx.sreg.smid", (), "i32")

    def cycles(self, put: Emit) -> str:
        """i64: the SM's clock."""
        return put("nvvm.read.ptx.sreg.clock64", (), "i64")

    def nanoseconds(self, put: Emit) -> str:
        """i64: the time of all SMs."""
        return put("nvvm.read.ptx.sreg.globaltimer", (), "i64")


@dataclass(frozen=True)
class Amd:
    """AMD's instructions, by the ROCDL dialect.

    A warp is what AMD calls a wavefront: 64 threads of CDNA, 32 of RDNA.
    """

    name: str = "amdgpu"
    warp: int = 64
    declared_bytes: int = 64 << 10
    private: int = 5
    copies_tiles: bool = False
    relaxed_atomics: bool = False

    def math(self, approx: bool) -> MathTable:
        return SHARED

    def thread(self, put: Emit) -> str:
        return put("rocdl.workitem.id.x", (), "i32")

    def hidden(self, put: Emit, index: str) -> str:
        """The result of an empty instruction: LLVM would move hundreds of places before a loop, and spill them."""
        return self.other(put, index)

    def other(self, put: Emit, index: str) -> str:
        return _hidden(put, index, "v")

    def block(self, put: Emit) -> str:
        return put("rocdl.workgroup.id.x", (), "i32")

    def barrier(self) -> tuple[Operation, ...]:
        """The instruction alone orders no memory.

        Source: LLVM, User Guide for AMDGPU Backend, memory model.
        """
        return (
            Operation("llvm.fence", syntax=' syncscope("workgroup") release'),
            Operation("rocdl.s.barrier"),
            Operation("llvm.fence", syntax=' syncscope("workgroup") acquire'),
        )

    def exchange(self, put: Emit, value: str, distance: int) -> str:
        """Exchanges by ds_bpermute, which takes places in bytes, of 4 for each thread of the warp."""
        number = lambda value: put("arith.constant", (), "i32", f" {value}")
        lane = put("arith.andi", (self.thread(put), number(self.warp - 1)), "i32")
        other = put("arith.xori", (lane, number(distance)), "i32")
        place = put("arith.shli", (other, number(2)), "i32")
        return put("rocdl.ds_bpermute", (place, value), "(i32, i32) -> i32")


NVIDIA = Nvidia()


class DeviceKind(Protocol):
    """Kind of device that code is made for.

    Attributes:
      architecture: as compilers call it. device: the vendor's code. shared_bytes: most shared
        memory of a block.
    """

    @property
    def architecture(self) -> str: ...
    @property
    def device(self) -> VendorCode: ...
    @property
    def shared_bytes(self) -> int: ...


K = TypeVar("K", bound=DeviceKind)


def kind_of_name(name: str, kinds: Mapping[str, K], products: Mapping[str, str], what: str) -> K:
    """The one of an architecture, or of a product, whose architecture `products` has.

    Raises OptionError.

    Args:
      name: of an architecture or a product.
      kinds: name of an architecture -> kind.
      products: name of a product -> name of its architecture.
      what: the kinds are, in messages.
    """
    architecture = products.get(name.lower(), name.lower())
    if architecture not in kinds:
        known = [*kinds, *products]
        raise OptionError(
            f"there is no {what} `{name}`",
            why=f"devices are {', '.join(known)}",
            hint=nearest(name.lower(), known),
        )
    return kinds[architecture]
