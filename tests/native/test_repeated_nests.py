"""Nests that are equal but for buffers and places are one function; what else differs keeps them apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.lower.build_options import BuildOptions
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.ir import Nest, every
from pbkern.lower.nest.parse import parse
from pbkern.targets.cpu.codegen import repeated_nests
from pbkern.targets.cpu.codegen.kernel import lower_kernel
from pbkern.targets.cpu.lower_options import LowerOptions
from pbkern.targets.cpu.schedule.nest_schedule import CPU_DIALECT

from .running import native

RNG = np.random.default_rng(0)
LAYERS = 5


def perceptron(rows, width, block):
    """A kernel of LAYERS layers over blocks of rows: the first reads an argument, the last writes the result."""

    def kernel(x, *refs):
        *weights, out = refs
        y = x[...]
        for w, b in zip(weights[::2], weights[1::2]):
            y = jnp.tanh(y @ w[...] + b[...])
        out[...] = y

    x = RNG.standard_normal((rows, width)).astype("f")
    weights = [
        0.2 * RNG.standard_normal(shape).astype("f")
        for _ in range(LAYERS)
        for shape in ((width, width), (width,))
    ]
    rows_of = pbkern.BlockSpec((block, width), lambda i: (i, 0))
    traced = pbkern.kernel(
        kernel,
        grid=(pbkern.cdiv(rows, block),),
        in_specs=[rows_of, *[pbkern.BlockSpec()] * len(weights)],
        out_specs=[rows_of],
        out_shape=jax.ShapeDtypeStruct(x.shape, "f"),
    ).trace(x, *weights)
    return traced, [x, *weights]


def wanted(x, *weights):
    y = x.astype("f8")
    for w, b in zip(weights[::2], weights[1::2]):
        y = np.tanh(y @ w.astype("f8") + b)
    return y


@pytest.mark.parametrize("rows", [64, 77])
@pytest.mark.parametrize("least", [1, 2, 10**9])
def test_layers_are_one_function(monkeypatch, rows, least):
    monkeypatch.setattr(repeated_nests, "LEAST_NESTS", least)
    k, arguments = perceptron(rows, 48, 32)
    pieces = lower_kernel(k, "k", LowerOptions(avx2=True)).pieces
    if least > LAYERS:
        assert not pieces
    elif rows == 64:
        assert len(pieces) == 1
    result = native(k, *arguments)[0]
    np.testing.assert_allclose(result, wanted(*arguments), rtol=1e-5, atol=1e-5)


BUFFERS = "\n".join((*(f"%a{n}: float32[96,96]" for n in range(4)), "%t4: float32[192,96] scratch"))
SCHEDULE = "schedule(lanes=8, vector='{1}', unroll={2}, order=('{0}', '{1}'), registers=16)"


def forms(*bodies, unroll=4):
    """Forms of two nests over 96 x 96 points, of which the second calls its dimensions row and column."""
    rows = [BUFFERS]
    for body, (i, j), vectors in zip(bodies, (("i", "j"), ("row", "column")), (4, unroll)):
        rows += [f"nest [{i}<96, {j}<96] {SCHEDULE.format(i, j, vectors)}", f"  {body}"]
    program = parse("\n".join(rows), NestContext(BuildOptions()), CPU_DIALECT)
    nests = [stmt for stmt in every(program.statements) if isinstance(stmt, Nest)]
    touched = [access.buf.root for nest in nests for access in (*nest.loads(), *nest.stores)]
    return [repeated_nests.form(nest, touched) for nest in nests]


PLAIN = "%a1[i, j] = mul(%a0[i, j], 2.0)"


@pytest.mark.parametrize(
    ("body", "other"),
    [
        (PLAIN, "%a3[row, column] = mul(%a2[row, column], 2.0)"),
        (PLAIN, "%a3[row, column] = mul(%t4[row + %h0, column], 2.0)"),
        (PLAIN, "%t4[row + %h0, column + %h1] = mul(%a0[row, column], 2.0)"),
        ("%a1[i, j] = mul(%a1[i, j], 2.0)", "%a2[row, column] = mul(%a2[row, column], 2.0)"),
        ("%a1[i, j] = add(%a0[i, j], %a2[j, i])", "%a3[row, column] = add(%a0[row, column], %a1[column, row])"),
    ],
)  # fmt: skip
def test_buffers_and_starts_are_passed(body, other):
    first, second = forms(body, other)
    assert first.key == second.key


@pytest.mark.parametrize(
    ("body", "other"),
    [
        (PLAIN, "%a3[row, column] = mul(%a2[row, column], 3.0)"),
        (PLAIN, "%a3[row, column] = add(%a2[row, column], 2.0)"),
        (PLAIN, "%a3[row, column] = mul(%a2[column, row], 2.0)"),
        (PLAIN, "%a3[column, row] = mul(%a2[row, column], 2.0)"),
        (PLAIN, "%a3[row, column] = mul(%t4[row + 1, column], 2.0)"),
        (PLAIN, "%a3[row, column] = mul(%a3[row, column], 2.0)"),
        (PLAIN, "%a3[row, column] = mul(%a2[row + %h0, column]?, 2.0)"),
        (
            "%a1[i, j] = add(%a0[i, j], %a0[i, j + 1])",
            "%a3[row, column] = add(%a2[row + %h0, column], %a2[row + %h0, column + 1])",
        ),
        ("%a1[i, j] = add(%a0[i, j], %a0[j, i])", "%a3[row, column] = add(%a0[row, column], %a1[column, row])"),
        ("%a1[i, j] = %a0[i + %h0, j]?", "%a1[row, column] = %t4[row + %h0, column]?"),
        ("%t4[i, j] = add(%t4[i + %h0, j], 1.0)", "%t4[row + %h0, column] = add(%t4[row + %h0, column], 1.0)"),
    ],
)  # fmt: skip
def test_other_nests_stay_apart(body, other):
    first, second = forms(body, other)
    assert first.key != second.key


def test_schedules_are_part_of_a_form():
    other = PLAIN.replace("i, j", "row, column")
    first, second = forms(PLAIN, other, unroll=2)
    assert first.key != second.key
    first, second = forms(PLAIN, other)
    assert first.key == second.key


def test_buffers_that_may_share_memory_are_not_passed():
    first, _ = forms(PLAIN, PLAIN.replace("i, j", "row, column"))
    assert repeated_nests.form(first.nest, first.roots[:1]) is None
