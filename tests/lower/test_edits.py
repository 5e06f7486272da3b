"""Both sides of each edit compute the same, on small random nests of odd sizes."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbkern.core.affine import Affine
from pbkern.core.errors import InternalError
from pbkern.lower.build_options import BuildOptions
from pbkern.lower.nest import effects, interpret
from pbkern.lower.nest.async_copies import copied
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.accumulate import accumulated_in
from pbkern.lower.nest.edit.fuse import are_independent, fused
from pbkern.lower.nest.edit.grow import grown, in_steps, zero_filled
from pbkern.lower.nest.edit.inline import inlined, recomputed, stored_at
from pbkern.lower.nest.edit.join_loops import joined_loops
from pbkern.lower.nest.edit.part import part
from pbkern.lower.nest.edit.pipeline import pipelined
from pbkern.lower.nest.edit.relocate import relocated
from pbkern.lower.nest.edit.rename import renamed
from pbkern.lower.nest.edit.split import split
from pbkern.lower.nest.edit.stage import Box, staged
from pbkern.lower.nest.edit.unroll import may_unroll_reductions, unrolled, unrolled_reductions
from pbkern.lower.nest.edit.version import settled, versioned
from pbkern.lower.nest.effects import Effects
from pbkern.lower.nest.ir import AsyncCopy, Buf, Expr, For, Nest, Op, Stmt, Store, Wait, every
from pbkern.lower.nest.parse import parse, program_text
from pbkern.lower.nest.tiles.axes import row_major
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
# Scratch that is stored by one nest and read by another, at two neighbouring points.
THROUGH_SCRATCH = """\
%a0: float32[{rows},{wide}]
%a1: float32[{rows},{columns}]
%t0: float32[{rows},{wide}] scratch
nest [i<{rows}, j<{wide}]
  %t0[i, j] = mul(%a0[i, j], 2.0)
nest [i<{rows}, j<{columns}]
  %a1[i, j] = sub(%t0[i, j], %t0[i, j + 1])
"""
# Scratch of wide integers that holds narrow ones.
WIDENED = """\
%a0: int8[{rows},{columns}]
%a1: int32[{rows},{columns}]
%t0: int32[{rows},{columns}] scratch
nest [i<{rows}, j<{columns}]
  %t0[i, j] = convert_element_type:int32(%a0[i, j])
nest [i<{rows}, j<{columns}]
  %a1[i, j] = mul(%t0[i, j], 3:int32)
"""
# Nests over the same points: the second reads what the first stores, and both reduce columns.
TWO_OVER_ROWS = """\
%a0: float32[{rows},{columns}]
%a1: float32[{rows},{columns}]
%a2: float32[{rows}]
%a3: float32[{rows}]
nest [i<{rows}, j<{columns}*]
  acc0 sum= %a0[i, j]
  %a1[i, j] = mul(%a0[i, j], 3.0)
  %a2[i] = acc0  (after)
nest [i<{rows}, j<{columns}*]
  acc0 max= %a1[i, j]
  %a3[i] = acc0  (after)
"""
# A choice between arrays by a scalar.
CHOICE = """\
%a0: float32[{rows},{columns}]
%a1: float32[{rows},{columns}]
%a2: int32[1]
%a3: float32[{rows},{columns}]
nest [i<{rows}, j<{columns}]
  v0 = lt(%a2[0], 1:int32)
  %a3[i, j] = add(select_n(v0, %a0[i, j], %a1[i, j]), select_n(v0, 1.0, %a0[i, j]))
"""
# Windows of an array.
WINDOWS = """\
%a0: float32[{rows},{deep}]
%a1: float32[{rows},{columns}]
nest [i<{rows}, j<{columns}, k<{depth}*]
  acc0 sum= %a0[i, 2*j + k]
  %a1[i, j] = acc0  (after)
"""


class Case:
    """The nests of a program, and what makes nests of them."""

    def __init__(self, text: str, sizes: tuple[int, int, int]):
        rows, columns, depth = sizes
        self.context = NestContext(BuildOptions())
        names = {"rows": rows, "columns": columns, "depth": depth}
        text = text.format(**names, wide=columns + 1, deep=2 * columns + depth)
        program = parse(text, self.context)
        self.statements = [stmt for stmt in program.statements if isinstance(stmt, Nest)]
        assert len(self.statements) == len(program.statements)
        self.nest, self.buffers, self.pool = self.statements[0], program.buffers, self.context.pool
        rng = np.random.default_rng(sum(sizes))
        self.inputs = {buf: numbers(buf, rng) for buf in self.buffers.values() if not buf.arena}

    def results(self, *statements: Stmt) -> dict[Buf, np.ndarray]:
        verify(statements, frozenset())
        memory = interpret.NestMemory({buf: array.copy() for buf, array in self.inputs.items()})
        interpret.run(statements, memory, {}, lambda site, values: None)
        return {buf: memory.read(buf) for buf in self.inputs}

    def same(self, *statements: Stmt) -> None:
        expected = self.results(*self.statements)
        for buf, array in self.results(*statements).items():
            np.testing.assert_allclose(
                array, expected[buf], rtol=1e-5, err_msg=program_text(statements)
            )


def numbers(buf: Buf, rng: np.random.Generator) -> np.ndarray:
    if buf.dtype.kind == "i":
        return rng.integers(0, 3, buf.size).astype(buf.dtype)
    return rng.standard_normal(buf.size).astype(buf.dtype)


@given(st.sampled_from(sorted(PROGRAMS)), SIZES, st.data())
@settings(max_examples=60, deadline=None)
def test_parts_of_a_free_dimension_are_the_whole(name, sizes, data):
    case = Case(PROGRAMS[name], sizes)
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
    case = Case(PROGRAMS[name], sizes)
    dim = data.draw(st.sampled_from(sorted(case.nest.dims)))
    size = case.nest.dims[dim]
    inner = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    changed = split(case.nest, {dim: {"outer": size // inner, "inner": inner}}, case.pool)
    assert len(changed.rdims) == len(case.nest.rdims) + (dim in case.nest.rdims)
    case.same(changed)


@given(SIZES)
@settings(max_examples=20, deadline=None)
def test_several_dimensions_that_are_split(sizes):
    case = Case(PRODUCT, sizes)
    parts = {dim: {f"{dim}0": 1, f"{dim}1": size} for dim, size in case.nest.dims.items()}
    case.same(split(case.nest, parts, case.pool))


def test_a_split_into_other_numbers_of_points_is_refused():
    case = Case(PRODUCT, (6, 4, 2))
    with pytest.raises(InternalError, match="i of 6 points is not split"):
        split(case.nest, {"i": {"a": 2, "b": 2}}, case.pool)


@given(SIZES, st.data())
@settings(max_examples=40, deadline=None)
def test_an_unrolled_dimension(sizes, data):
    case = Case(ELEMENTWISE, sizes)
    dim = data.draw(st.sampled_from("ij"))
    changed = unrolled(case.nest, dim, case.pool)
    assert len(changed.stores) == case.nest.dims[dim]
    assert dim not in changed.dims
    case.same(changed)


@given(st.sampled_from(sorted(PROGRAMS)), SIZES)
@settings(max_examples=30, deadline=None)
def test_dimensions_in_another_direction(name, sizes):
    """A place may run backwards, and along a dimension of another name."""
    case = Case(PROGRAMS[name], sizes)
    places = {"i": Affine.symbol("r", -1) + (case.nest.dims["i"] - 1)}
    dims = {("r" if dim == "i" else dim): size for dim, size in case.nest.dims.items()}
    case.same(renamed(case.nest, places, dims, case.pool))


@given(SIZES, st.permutations([0, 1]), st.tuples(*[st.integers(0, 3)] * 4))
@settings(max_examples=40, deadline=None)
def test_scratch_in_another_layout(sizes, axes, margins):
    """Places may be turned and moved, in a buffer with room to spare."""
    case = Case(THROUGH_SCRATCH, sizes)
    scratch = case.buffers["%t0"]
    before, behind = margins[:2], margins[2:]
    shape = tuple(before[k] + scratch.shape[k] + behind[k] for k in axes)
    other = case.context.new_buffer(shape, scratch.dtype)
    changed = relocated(
        case.statements,
        {scratch: other}.get,
        case.pool,
        lambda buf, index: tuple(index[k] + before[k] for k in axes),
    )
    assert scratch not in effects.touched(changed)
    case.same(*changed)


@given(SIZES)
@settings(max_examples=20, deadline=None)
def test_scratch_of_another_type(sizes):
    case = Case(WIDENED, sizes)
    wide = case.buffers["%t0"]
    narrow = case.context.new_buffer(wide.shape, np.int8)

    def widened(value: Expr) -> Expr:
        return case.context.op(
            "convert_element_type", np.int32, value, params={"new_dtype": np.dtype(np.int32)}
        )

    changed = relocated(
        case.statements,
        {wide: narrow}.get,
        case.pool,
        loaded=widened,
        stored=lambda value: value.args[0],
    )
    assert wide not in effects.touched(changed)
    case.same(*changed)


@given(SIZES)
@settings(max_examples=30, deadline=None)
def test_two_nests_as_one(sizes):
    case = Case(TWO_OVER_ROWS, sizes)
    first, second = case.statements
    assert are_independent(first, second)
    both = fused(first, second, case.pool)
    assert [reduction.op for reduction in both.reductions] == ["sum", "max"]
    assert case.buffers["%a1"] not in {load.buf for load in both.loads()}, "values are handed on"
    case.same(both)


def test_nests_that_wait_for_each_other_are_not_independent():
    case = Case(THROUGH_SCRATCH, (3, 4, 1))
    first, second = case.statements
    assert not are_independent(first, second), "the second reads the next point too"
    assert not are_independent(second, first), "the first overwrites what the second reads"


@given(SIZES)
@settings(max_examples=30, deadline=None)
def test_a_nest_inside_its_reader(sizes):
    case = Case(THROUGH_SCRATCH, (sizes[0], sizes[1] + 1, sizes[2]))
    maker, reader = case.statements
    inside = inlined(maker, reader, case.pool)
    assert inside is not None
    assert inside.moves()
    case.same(inside)


# The first operand of a product is computed by a nest of its own.
PROLOGUE = """\
%a0: float32[{rows},{depth}]
%a1: float32[{depth},{columns}]
%a2: float32[{rows},{columns}]
%t0: float32[{rows},{depth}] scratch
nest [i<{rows}, k<{depth}]
  %t0[i, k] = max(%a0[i, k], 0.0)
nest [i<{rows}, j<{columns}, k<{depth}*]
  acc0 dot= %t0[i, k], %a1[k, j]
  %a2[i, j] = acc0  (after)
"""


@given(SIZES)
@settings(max_examples=20, deadline=None)
def test_an_operand_that_is_computed_where_it_is_read(sizes):
    case = Case(PROLOGUE, sizes)
    inside = recomputed(*case.statements, case.pool)
    assert inside is not None
    assert case.buffers["%t0"] not in effects.touched([inside])
    case.same(inside)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("max(%a0[i, k], 0.0)", "max(%t0[i, k], 0.0)"),  # reads what it stores
        ("dot= %t0[i, k]", "dot= %t0[i, k]?"),  # reads what is not stored
        ("%t0[i, k] = max", "%t0[0, k] = max"),  # the place does not tell the point
    ],
)
def test_operands_that_are_not_computed_again(old, new):
    assert PROLOGUE.count(old) == 1
    assert (
        recomputed(
            *Case(PROLOGUE.replace(old, new), (3, 4, 2)).statements, Case(PROLOGUE, (3, 4, 2)).pool
        )
        is None
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%t0[i, j + 1])", "%t0[i, 2*j])"),  # not in step
        ("%t0[i, j] = mul", "%t0[i, 0] = mul"),  # not once at each point
        ("mul(%a0[i, j], 2.0)", "mul(%a0[i, j], %t0[i, j])"),  # reads what it stores
    ],
)
def test_nests_that_stay_outside_their_reader(old, new):
    assert THROUGH_SCRATCH.count(old) == 1
    case = Case(THROUGH_SCRATCH.replace(old, new), (3, 4, 1))
    assert inlined(*case.statements, case.pool) is None


@given(SIZES, st.integers(0, 2), st.integers(0, 2))
@settings(max_examples=30, deadline=None)
def test_the_value_that_a_store_puts_at_an_index(sizes, row, column):
    case = Case(THROUGH_SCRATCH, (sizes[0] + 2, sizes[1] + 2, 1))
    (store,) = case.nest.stores
    place = Affine((), row), Affine((), column)
    value = stored_at(store, place, case.pool)
    assert value is not None
    assert {load.buf for load in Nest({}, stores=(replace(store, value=value),)).loads()} == {
        case.buffers["%a0"]
    }

    def first_result(expr: Expr) -> np.ndarray:
        store = Store(case.buffers["%a1"], (Affine(), Affine()), expr)
        return case.results(case.nest, Nest({}, stores=(store,)))[store.buf][0, 0]

    assert first_result(value) == first_result(case.pool.load(np.float32, store.buf, place))


@given(SIZES)
@settings(max_examples=30, deadline=None)
def test_a_copy_of_what_a_nest_reads(sizes):
    case = Case(WINDOWS, sizes)
    (load,) = case.nest.loads()
    box = Box.around(load.index, case.nest.dims)
    rows, columns, depth = sizes
    assert box.shape == (rows, 2 * (columns - 1) + depth)
    copy = case.context.new_buffer(box.shape, load.dtype)
    statement = box.copied(
        lambda index: case.pool.load(load.dtype, load.buf, index), copy, ["d0", "d1"], None
    )
    there = {load: case.pool.load(load.dtype, copy, box.within(load.index))}
    case.same(statement, case.nest.mapped(case.pool.rewriter(there.get)))


@given(SIZES, st.sampled_from(["sum", "prod", "max", "min"]))
@settings(max_examples=30, deadline=None)
def test_reductions_as_expressions(sizes, operation):
    case = Case(WINDOWS.replace("sum=", f"{operation}="), sizes)
    assert may_unroll_reductions(case.nest)
    changed = unrolled_reductions(case.nest, case.context)
    assert not changed.reductions
    assert changed.dims.keys() == {"i", "j"}
    case.same(changed)


@given(SIZES)
@settings(max_examples=20, deadline=None)
def test_products_as_expressions(sizes):
    case = Case(PRODUCT, sizes)
    case.same(unrolled_reductions(case.nest, case.context))


def test_running_sums_stay_reductions():
    assert not may_unroll_reductions(Case(RUNNING, (2, 3, 1)).nest)


@given(SIZES)
@settings(max_examples=20, deadline=None)
def test_versions_by_a_test(sizes):
    case = Case(CHOICE, sizes)
    (test,) = {
        node.args[0]
        for node in case.nest.nodes()
        if isinstance(node, Op) and node.info.primitive == "select_n"
    }
    versions = [[settled(case.nest, test, value, case.pool)] for value in range(2)]
    arrays = [effects.read(version) - {case.buffers["%a2"]} for version in versions]
    assert arrays == [{case.buffers["%a0"]}, {case.buffers["%a0"], case.buffers["%a1"]}]
    case.same(*versioned("%s0", test, versions, case.context))


@given(SIZES)
@settings(max_examples=20, deadline=None)
def test_a_sum_in_a_buffer(sizes):
    case = Case(PRODUCT, sizes)
    buf = case.context.new_buffer(sizes[:2], np.float32)
    zeros, total, last = accumulated_in(case.nest, buf, case.context)
    assert [bool(nest.reductions) for nest in (zeros, total, last)] == [False, True, False]
    assert effects.written([zeros, total]) == {buf}
    case.same(zeros, total, last)


@given(st.sampled_from(["elementwise", "product"]), SIZES, st.integers(0, 5), st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_more_points_store_nothing(name, sizes, rows, columns):
    case = Case(PROGRAMS[name], sizes)
    larger = {"i": case.nest.dims["i"] + rows, "j": case.nest.dims["j"] + columns}
    case.same(grown(case.nest, larger, case.context))


@given(SIZES, st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_a_sum_in_steps(sizes, size):
    case = Case(PRODUCT, sizes)
    zeros, total, last = accumulated_in(
        case.nest, case.context.new_buffer(sizes[:2], np.float32), case.context
    )
    loop = in_steps(total, "k", size, case.context)
    assert loop.trips == -(-sizes[2] // size)
    case.same(zeros, loop, last)


@given(SIZES, st.booleans())
@settings(max_examples=20, deadline=None)
def test_zeros_for_what_lies_outside(sizes, masked):
    """What a larger nest reads outside is 0 and not poison; tests that an expression makes itself are not made again."""
    case = Case(THROUGH_SCRATCH, sizes)
    larger = {dim: size + 2 for dim, size in case.nest.dims.items()}
    rows, columns = grown(case.nest, larger, case.context), case.buffers["%t0"].shape[1]
    value = rows.stores[0].value
    if masked:
        inside = case.pool.in_range(Affine.symbol("j"), 0, columns)
        value = case.context.select(inside, value, case.context.const(0, np.float32))
    ranges = {dim: (0, size - 1) for dim, size in larger.items()}
    value = zero_filled(value, ranges, case.context)
    assert str(value).count("<= j <") == 1
    other = case.context.new_buffer(tuple(larger.values()), np.float32)
    memory = interpret.NestMemory({buf: array.copy() for buf, array in case.inputs.items()})
    store = Store(other, tuple(map(Affine.symbol, larger)), value)
    interpret.run([Nest(larger, stores=(store,))], memory, {}, lambda *_: None)
    want = np.zeros(other.shape)
    want[:-2, :-2] = 2 * memory.read(case.buffers["%a0"])
    np.testing.assert_array_equal(memory.read(other), want)


def in_stages(case: Case, size: int, stages: int, is_async) -> list[Stmt]:
    """The product of a case in steps, whose operands are staged and copied ahead."""
    rows, columns, _ = case.nest.dims.values()
    sums = case.context.new_buffer((rows, columns), np.float32)
    zeros, total, last = accumulated_in(case.nest, sums, case.context)
    loop = in_steps(total, "k", size, case.context)
    (product,) = loop.body
    copies = []
    for arg, dims in zip(product.reductions[0].args, ("ik", "kj")):
        buf = case.context.new_buffer([product.dims[dim] for dim in dims], np.float32)
        copy, product = staged(product, arg, buf, [(dim,) for dim in dims], case.pool)
        copies.append(copy)
    loop = For(loop.counter, loop.trips, (*copies, product))
    if not stages:
        return [zeros, loop, last]
    return [zeros, *pipelined(loop, stages, copies, is_async, case.context), last]


@given(SIZES, st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_operands_that_are_staged(sizes, size):
    case = Case(PRODUCT, sizes)
    case.same(*in_stages(case, size, 0, None))


@given(SIZES, st.integers(1, 4), st.integers(2, 4), st.lists(st.booleans(), min_size=2, max_size=2))
@settings(max_examples=60, deadline=None)
def test_copies_that_run_ahead(sizes, size, stages, by_device):
    """Some copies are the device's, some the threads': each ends as late as the program allows."""
    case = Case(PRODUCT, sizes)
    operands = [case.buffers["%a0"], case.buffers["%a1"]]

    def is_async(copy: Nest) -> bool:
        assert copied(copy) is not None
        return by_device[operands.index(copy.loads()[0].buf)]

    statements = in_stages(case, size, stages, is_async)
    kinds = [type(stmt) for stmt in every(statements)]
    assert (AsyncCopy in kinds) == any(by_device)
    is_short = -(-sizes[2] // size) <= stages
    assert kinds.count(Wait) == (1 if is_short else 2) * any(by_device)
    case.same(*statements)


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


@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(2, 5))
@settings(max_examples=30, deadline=None)
def test_loops_that_are_joined(around, trips):
    """Each turn of the one loop is that of the others, in their order."""
    case = Case(THROUGH_SCRATCH, (3, 4, 5))
    sizes = (*around, trips)
    array = case.context.new_buffer(sizes, np.int32)
    counters = {f"%i{at}": size for at, size in enumerate(around)}
    index = tuple(map(Affine.symbol, (*counters, "%o")))
    number = row_major({**counters, "%o": trips})
    store = Store(array, index, case.pool.index(np.int32, number))
    nest = Nest({"i": 1}, stores=(store,))
    loop = joined_loops(counters, For("%o", trips, (nest,)), case.context)
    memory = interpret.NestMemory({})
    interpret.run([loop], memory, {}, lambda *_: None)
    np.testing.assert_array_equal(memory.read(array).ravel(), np.arange(math.prod(sizes)))
