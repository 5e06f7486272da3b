"""Both sides of each edit compute the same, on small random nests of odd sizes."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbkern.core.affine import Affine
from pbkern.core.errors import InternalError
from pbkern.lower.build_options import BuildOptions
from pbkern.lower.nest import interpret
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.part import part
from pbkern.lower.nest.edit.rename import renamed
from pbkern.lower.nest.edit.split import split
from pbkern.lower.nest.edit.unroll import unrolled
from pbkern.lower.nest.effects import Effects
from pbkern.lower.nest.ir import Buf, Nest
from pbkern.lower.nest.parse import parse, program_text
from pbkern.lower.nest.verify import verify

# Rows, columns and depth of the programs below.
SIZES = st.tuples(st.integers(1, 7), st.integers(1, 6), st.integers(1, 5))

# An elementwise nest whose stores are masked and shifted.
ELEMENTWISE = """\
%a0: float32[{rows},{columns}]
%a1: float32[{rows},{wide}]
nest [i<{rows}, j<{columns}]
  v0 = mul(%a0[i, j], 2.0)
  %a1[i, j + 1] = select_n((0 <= i + j < 4), v0, sub(v0, convert_element_type:float32((3*i + j))))  if (0 <= j < 5)
"""
# A product whose result is used.
PRODUCT = """\
%a0: float32[{rows},{depth}]
%a1: float32[{depth},{columns}]
%a2: float32[{rows},{columns}]
nest [i<{rows}, j<{columns}, k<{depth}*]
  acc0 dot= %a0[i, k], %a1[k, j]
  %a2[i, j] = max(acc0, 0.5)  (after)
"""
# A running sum: its reduced dimension is walked in order.
RUNNING = """\
%a0: float32[{rows},{columns}]
%a1: float32[{rows},{columns}]
nest [i<{rows}, j<{columns}*] ordered
  acc0 sum= %a0[i, j]
  %a1[i, j] = acc0
"""
PROGRAMS = {"elementwise": ELEMENTWISE, "product": PRODUCT, "running": RUNNING}


class Case:
    """A nest of one of the programs, and what makes nests of it."""

    def __init__(self, name: str, sizes: tuple[int, int, int]):
        rows, columns, depth = sizes
        self.context = NestContext(BuildOptions())
        text = PROGRAMS[name].format(rows=rows, columns=columns, depth=depth, wide=columns + 1)
        program = parse(text, self.context)
        (nest,) = program.statements
        assert isinstance(nest, Nest)
        self.nest, self.buffers, self.pool = nest, program.buffers, self.context.pool
        rng = np.random.default_rng(sum(sizes))
        self.inputs = {
            buf: rng.standard_normal(buf.size).astype(buf.dtype) for buf in self.buffers.values()
        }

    def results(self, *statements: Nest) -> dict[Buf, np.ndarray]:
        verify(statements, frozenset())
        memory = interpret.NestMemory({buf: array.copy() for buf, array in self.inputs.items()})
        interpret.run(statements, memory, {}, lambda site, values: None)
        return {buf: memory.read(buf) for buf in self.inputs}

    def same(self, *statements: Nest) -> None:
        expected = self.results(self.nest)
        for buf, array in self.results(*statements).items():
            np.testing.assert_allclose(
                array, expected[buf], rtol=1e-5, err_msg=program_text(statements)
            )


@given(st.sampled_from(sorted(PROGRAMS)), SIZES, st.data())
@settings(max_examples=60, deadline=None)
def test_parts_of_a_free_dimension_are_the_whole(name, sizes, data):
    case = Case(name, sizes)
    dim = data.draw(st.sampled_from([d for d in case.nest.dims if d not in case.nest.rdims]))
    size = case.nest.dims[dim]
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=3))})
    parts = [
        part(case.nest, dim, Affine((), low), high - low, case.pool)
        for low, high in itertools.pairwise(cuts)
    ]
    assert [p.dims[dim] for p in parts] == [high - low for low, high in itertools.pairwise(cuts)]
    case.same(*parts)


@given(st.sampled_from(sorted(PROGRAMS)), SIZES, st.data())
@settings(max_examples=60, deadline=None)
def test_a_dimension_that_is_split(name, sizes, data):
    case = Case(name, sizes)
    dim = data.draw(st.sampled_from(sorted(case.nest.dims)))
    size = case.nest.dims[dim]
    inner = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    changed = split(case.nest, {dim: {"outer": size // inner, "inner": inner}}, case.pool)
    assert len(changed.rdims) == len(case.nest.rdims) + (dim in case.nest.rdims)
    case.same(changed)


@given(SIZES)
@settings(max_examples=20, deadline=None)
def test_several_dimensions_that_are_split(sizes):
    case = Case("product", sizes)
    parts = {dim: {f"{dim}0": 1, f"{dim}1": size} for dim, size in case.nest.dims.items()}
    case.same(split(case.nest, parts, case.pool))


def test_a_split_into_other_numbers_of_points_is_refused():
    case = Case("product", (6, 4, 2))
    with pytest.raises(InternalError, match="i of 6 points is not split"):
        split(case.nest, {"i": {"a": 2, "b": 2}}, case.pool)


@given(SIZES, st.data())
@settings(max_examples=40, deadline=None)
def test_an_unrolled_dimension(sizes, data):
    case = Case("elementwise", sizes)
    dim = data.draw(st.sampled_from("ij"))
    changed = unrolled(case.nest, dim, case.pool)
    assert len(changed.stores) == case.nest.dims[dim]
    assert dim not in changed.dims
    case.same(changed)


@given(st.sampled_from(sorted(PROGRAMS)), SIZES)
@settings(max_examples=30, deadline=None)
def test_dimensions_in_another_direction(name, sizes):
    """A place may run backwards, and along a dimension of another name."""
    case = Case(name, sizes)
    places = {"i": Affine.symbol("r", -1) + (case.nest.dims["i"] - 1)}
    dims = {("r" if dim == "i" else dim): size for dim, size in case.nest.dims.items()}
    case.same(renamed(case.nest, places, dims, case.pool))


def test_effects_say_what_may_change_places():
    context = NestContext(BuildOptions())
    program = parse(
        """\
%a0: float32[4]
%a1: float32[4]
%t0: float32[4] scratch
%t1: float32[2,2] scratch of %t0
nest [i<4]
  %t0[i] = %a0[i]
nest [i<4]
  %a1[i] = %a0[i]
nest [i<2, j<2]
  %a0[i] = %t1[i, j]
prefetch 4 of %a1[0]
""",
        context,
    )
    copy, other, reads_view, prefetch = map(Effects.of, program.statements)
    assert copy.commute(other)
    assert copy.commute(prefetch)
    assert not copy.commute(reads_view), "a view shares its buffer's bytes"
    assert not other.commute(reads_view)
    assert not other.commute(prefetch)
    assert Effects.of(*program.statements).written == {
        program.buffers[name] for name in ("%a0", "%a1", "%t0")
    }
