"""An instruction for products is added by one row and its emission: passes, code and the interpreter take it from the table.

The row is of vpmaddwd, which multiplies pairs of int16 and adds the two products, as x86-64 has it since SSE2. Source: Intel 64
and IA-32 Architectures Software Developer's Manual, volume 2, PMADDWD.
"""

import platform
from collections.abc import Sequence
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.lower.mlir.ops import Builder, Ssa
from pbkern.lower.nest.tiles.instructions import ProductInstruction
from pbkern.targets.cpu.schedule.instructions import INSTRUCTIONS, INT16, INT32

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="the instruction is one of x86-64"
)
# Lanes of the accumulator -> LLVM's name.
INTRINSICS = {4: "sse2.pmadd.wd", 8: "avx2.pmadd.wd", 16: "avx512.pmaddw.d.512"}


def emit(b: Builder, acc: Ssa, args: Sequence[Ssa]) -> Ssa:
    """accumulator + vpmaddwd(words of two int16)."""
    parts = f"vector<{2 * acc.lanes}xi16>"
    x, y = (b.emit("vector.bitcast", (arg.name,), f"{arg.type} to {parts}") for arg in args)
    call = f' "llvm.x86.{INTRINSICS[acc.lanes]}"(%s, %s)'
    products = b.emit("llvm.call_intrinsic", (x, y), f"({parts}, {parts}) -> {acc.type}", call)
    return b.add(acc, acc._replace(name=products))


@pytest.fixture
def alone():
    """The row, without others; every option set has `contract`. The table's order, which counts, is restored afterwards."""
    row = ProductInstruction("pmaddwd", "contract", (1, 1, 2), (INT16, INT16), INT32, emit)
    with mock.patch.dict(INSTRUCTIONS, {row.name: row}, clear=True):
        yield row


@pytest.mark.parametrize(("m", "k", "n"), [(48, 64, 96), (33, 130, 40), (7, 31, 64), (64, 2, 64)])
@pytest.mark.parametrize("dtype", ["int16", "int8"])
def test_products_are_right_and_use_it_where_they_are_deep(alone, dtype, m, k, n):
    rng, info = np.random.default_rng(k), np.iinfo(dtype)
    x, y = (rng.integers(info.min, info.max, shape, dtype) for shape in ((m, k), (k, n)))
    product = pbkern.jit(lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.int32))
    want = x.astype(np.int64) @ y.astype(np.int64)
    np.testing.assert_array_equal(product(x, y), want.astype(np.int32))
    if k >= 64 and k % 2 == 0:
        assert " by pmaddwd= " in product.as_text(x, y, stage="nests")
        assert "pmadd" in product.as_text(x, y, stage="llvm")


def test_the_interpreter_takes_its_meaning_from_the_row(alone):
    """All values of int16, of which the products of the smallest with itself wrap as the instruction's do."""
    words = np.array([[-32768, 32767], [-32768, -32768], [5, -7]], np.int16).view(np.int32)[:, 0]
    first, second = (alone.elements(k, words).astype(np.int64) for k in (0, 1))
    np.testing.assert_array_equal((first * second).sum(-1), [2147418113, 2147483648, 74])
