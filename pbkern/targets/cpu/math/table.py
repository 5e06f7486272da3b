"""The CPU's MathTable: which functions have a version for AVX-512 or AVX2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pbkern.lower.math.erf import erfc_by_parts
from pbkern.lower.mlir.math_table import SharedMath
from pbkern.lower.mlir.ops import Builder, Ssa

from . import avx512
from .exponentials import exp2_by_table, exp_by_table
from .lookup_tables import by_pieces, log1p_by_table, log_by_table, odd_by_pieces
from .registers import in_general_register, in_registers

Function = Callable[[Builder, Ssa], Ssa]


def _whole(f: Function, register_bits: int = avx512.REGISTER_BITS) -> Function:
    """f on whole registers, whatever the lanes of what it is given."""
    return lambda b, x: in_registers(b, x, f, register_bits)


OF_F32: dict[str, Function] = {
    "exp": _whole(exp_by_table),
    "exp2": _whole(exp2_by_table),
    "log": _whole(log_by_table),
    "log1p": _whole(log1p_by_table),
    "tanh": _whole(partial(odd_by_pieces, name="tanh")),
    "erf": _whole(partial(odd_by_pieces, name="erf")),
    "erfc": _whole(erfc_by_parts),
    "erfcx": partial(by_pieces, name="erfcx"),  # asked for inside erfc, on whole registers
}
OF_F64 = {name: OF_F32[name] for name in ("exp", "exp2")}

# No function has a table for AVX2: its lookups of one operation find four floats, and take a pipe of multiply-adds.
OF_AVX2: dict[str, Function] = {}

# Whichever vectors there are: it is one element.
OF_F32["loaded_f16"] = OF_AVX2["loaded_f16"] = in_general_register


class Avx512Math:
    """For machines that have AVX-512F and DQ."""

    asymmetric_minima = True
    predicts_branches = True

    def lookup(self, function: str, el: str) -> Function | None:
        return {"f32": OF_F32, "f64": OF_F64}[el].get(function)


class Avx2Math:
    """For other machines that have AVX2."""

    asymmetric_minima = True
    predicts_branches = True

    def lookup(self, function: str, el: str) -> Function | None:
        return OF_AVX2.get(function) if el == "f32" else None


class PlainMath(SharedMath):
    """For other machines."""

    predicts_branches = True

    def __init__(self, *, asymmetric_minima: bool):
        self.asymmetric_minima = asymmetric_minima


AVX512 = Avx512Math()
AVX2 = Avx2Math()
X86 = PlainMath(asymmetric_minima=True)
NEON = PlainMath(asymmetric_minima=False)
