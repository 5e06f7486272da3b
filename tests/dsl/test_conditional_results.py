"""Results that values decide on: grids of dynamic size, conditions, computed blocks. Zeros are where nothing is stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pbkern
import pbkern.cpu
from pbkern.dsl.build_programs import BLOCK_BYTES, zeros
from pbkern.dsl.conditional_results import unsure_results
from pbkern.dsl.kernel import ArrayType
from pbkern.errors import KernelError
from tests.native.running import compiled

ROWS, COLUMNS, BOUND = 3, 5, 4
SHAPE = (ROWS * BOUND, COLUMNS)


def out(shape=SHAPE, dtype="f4"):
    return jax.ShapeDtypeStruct(shape, dtype)


def numbers(seed, *shape):
    """Integers as floats: exact however products and sums are rounded."""
    return np.random.default_rng(seed).integers(-9, 9, shape).astype("f")


def scaled(size, x, o):
    o[...] = x[...] * 3 + pbkern.num_programs(0).astype(x.dtype)


block = pbkern.BlockSpec((ROWS, COLUMNS), lambda i: (i, 0))
dynamic = pbkern.kernel(scaled, grid=(BOUND,), dynamic_grid={0: 0}, in_specs=[pbkern.BlockSpec(), block], out_specs=block,
                        out_shape=out())  # fmt: skip


def expected(size, x):
    programs = min(max(size, 0), BOUND)
    return np.where(np.arange(len(x))[:, None] < ROWS * programs, x * 3 + programs, 0)


@pytest.mark.parametrize("size", [-2, 0, 1, 3, BOUND, BOUND + 1, 10**6, 2**31 - 1])
def test_sizes_end_at_the_grids_bound(size):
    x = numbers(0, *SHAPE)
    before = np.full(1 << 20, 7.0, "f")  # memory that a result may be given again
    del before
    operands = jnp.int32(size), x
    for got in (
        dynamic(*operands),
        jax.jit(dynamic)(*operands),
        *pbkern.interpret(dynamic.trace(*operands), *operands),
    ):
        np.testing.assert_array_equal(got, expected(size, x))


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(-1, 9), min_size=1, max_size=4), st.booleans())
def test_each_example_of_a_batch_has_its_own_size(sizes, shared):
    x = numbers(1, len(sizes), *SHAPE)
    axes = (0, None) if shared else (0, 0)
    got = jax.vmap(dynamic, in_axes=axes)(jnp.array(sizes, jnp.int32), x[0] if shared else x)
    for n, size in enumerate(sizes):
        np.testing.assert_array_equal(got[n], expected(size, x[0 if shared else n]))


def test_a_batch_of_operands_shares_one_size():
    x = numbers(2, 3, *SHAPE)
    got = jax.vmap(dynamic, in_axes=(None, 0))(jnp.int32(2), x)
    np.testing.assert_array_equal(got, np.stack([expected(2, one) for one in x]))


def kernel_of(body, operands=1, **options):
    return pbkern.kernel(body, out_shape=out(), **options).trace(*[out()] * operands)


def by_value(x, o):
    @pbkern.when(x[0, 0] > 0)
    def _():
        o[...] = x[...]


def by_value_of_a_loop(x, o):
    @pbkern.loop(0, x[0, 0].astype(jnp.int32))
    def _(i):
        o[i] = x[i]


def in_one_branch(x, o):
    def store():
        o[...] = x[...]

    jax.lax.cond(x[0, 0] > 0, store, lambda: None)


def in_both_branches(x, o):
    def store(sign):
        def run():
            o[...] = x[...] * sign

        return run

    jax.lax.cond(x[0, 0] > 0, store(1), store(-1))


def behind_the_last_program(x, o):
    @pbkern.when(pbkern.program_id(0) == pbkern.num_programs(0) - 1)
    def _():
        o[...] = x[...]


def in_a_loop(x, o):
    @pbkern.loop(0, SHAPE[0])
    def _(i):
        o[i] = x[i]


def nested(x, o):
    @pbkern.when(pbkern.program_id(0) == 0)
    def _():
        by_value(x, o)


def under_a_mask_of_values(x, o):
    pbkern.store(o, ..., x[...], mask=x[...] > 0)


def under_a_mask_of_its_place(x, o):
    rows = jax.lax.broadcasted_iota(jnp.int32, SHAPE, 0) + pbkern.program_id(0)
    pbkern.store(o, ..., x[...], mask=rows < SHAPE[0] + 3)


def under_a_mask_and_under_none(x, o):
    under_a_mask_of_values(x, o)
    o[...] = x[...] + 1


def under_a_mask_in_a_branch(x, o):
    @pbkern.when(pbkern.program_id(0) == 0)
    def _():
        under_a_mask_of_values(x, o)


def at_a_loaded_row(x, o):
    o[place(x)] = x[0]


def at_loaded_rows(x, o):
    o[x[:4, 1].astype(jnp.int32) % SHAPE[0]] = x[:4]


def from_a_loaded_start(x, o):
    o[:, pbkern.ds(place(x) % 3, 2)] = x[:, :2]


def added_at_a_loaded_row(x, o):
    pbkern.atomic_add(o, (place(x), 2), x[0, 0])


def added_to_what_was_there(x, o):
    o[...] += x[...]


def at_a_row_that_a_loop_loads(x, o):
    def step(i, row):
        o[row] = x[i]
        return x[i, 0].astype(jnp.int32) % SHAPE[0]

    jax.lax.fori_loop(0, 5, step, 0)


def at_a_loaded_row_behind_all(x, o):
    o[...] = x[...] * 2
    at_a_loaded_row(x, o)


def at_a_loaded_row_behind_a_part(x, o):
    o[: SHAPE[0] // 2] = x[: SHAPE[0] // 2]
    at_a_loaded_row(x, o)


def a_part_by_value(x, o):
    o[0] = x[0]

    @pbkern.when(x[0, 0] > 0)
    def _():
        o[1:] = x[1:]


def rows_of_counters(x, o):
    """Each row of the one before: what a loop has stored, it may read."""
    o[0] = x[0]
    jax.lax.fori_loop(1, SHAPE[0], lambda i, row: store_row(o, x, i, row), 0)


def store_row(o, x, i, row):
    o[i] = o[row] + x[i]
    return row + 1


def parts_of_places(x, o):
    @pbkern.when(pbkern.program_id(0) == 0)
    def _():
        o[:3] = x[:3]

    @pbkern.when(pbkern.program_id(0) > 0)
    def _():
        o[3:] = x[3:]


def added_behind_the_first(x, o):
    @pbkern.when(pbkern.program_id(0) == 0)
    def _():
        o[...] = x[...]

    added_to_what_was_there(x, o)


def place(x):
    return jnp.abs(x[0, 0]).astype(jnp.int32) + 1


whole = pbkern.BlockSpec(SHAPE, lambda i: (0, 0))
in_order = {"grid": (3,), "in_specs": [whole], "out_specs": whole}


BY_SIGN = (
    by_value,
    by_value_of_a_loop,
    in_one_branch,
    nested,
    under_a_mask_of_values,
    under_a_mask_in_a_branch,
)


@pytest.mark.parametrize(
    ("body", "options", "unsure"),
    [(by_value, {}, True), (by_value_of_a_loop, {}, True), (in_one_branch, {}, True), (nested, in_order, True),
     (under_a_mask_of_values, {}, True), (under_a_mask_of_its_place, in_order, False),
     (under_a_mask_and_under_none, {}, False), (under_a_mask_in_a_branch, in_order, True),
     (at_a_loaded_row, {}, True), (at_loaded_rows, {}, True), (from_a_loaded_start, {}, True),
     (added_at_a_loaded_row, in_order, True), 
     (at_a_row_that_a_loop_loads, {}, True), (at_a_loaded_row_behind_a_part, {}, True),
     (a_part_by_value, {}, True), (at_a_loaded_row_behind_all, {}, False), (rows_of_counters, {}, False),
     (parts_of_places, in_order, False), (added_behind_the_first, in_order, False),
     (in_both_branches, {}, False), (behind_the_last_program, in_order, False), (in_a_loop, {}, False)],
)  # fmt: skip
def test_which_results_start_as_zeros(body, options, unsure):
    kernel = kernel_of(body, **options)
    assert unsure_results(kernel) == ((0,) if unsure else ())
    for sign in (1, -1):
        x = np.full(SHAPE, sign, "f")
        (want,) = pbkern.interpret(kernel, x)
        run = compiled(kernel)
        dirty = [np.full(SHAPE, 7, "f") for _ in range(64)]  # memory that the result may get
        del dirty
        (got,) = run(x)
        np.testing.assert_array_equal(got, want)
        if unsure:  # what is stored are numbers of the operand, or their sums
            assert set(np.unique(got)) <= {0, *(sign * times for times in (1, 3))}
            assert body not in BY_SIGN or sign > 0 or (np.asarray(got) == 0).all()


def test_a_result_that_shares_an_operands_memory_keeps_its_values():
    kernel = pbkern.kernel(by_value, out_shape=out(), input_output_aliases={0: 0})
    x = np.full(SHAPE, -2, "f")
    assert unsure_results(kernel.trace(x)) == ()
    np.testing.assert_array_equal(kernel(x), x)


def test_blocks_that_operands_choose_leave_zeros_elsewhere():
    spec = pbkern.GridSpec((6,), [pbkern.BlockSpec((1, COLUMNS), lambda i, rows: (i, 0))],
                           pbkern.BlockSpec((1, COLUMNS), lambda i, rows: (rows[i], 0)), num_scalar_prefetch=1)  # fmt: skip

    @pbkern.kernel(out_shape=out((6, COLUMNS)), grid_spec=spec)
    def put(rows, x, o):
        o[...] = x[...]

    x = np.random.default_rng(3).normal(size=(6, COLUMNS)).astype("f")
    rows = np.array([4, 1, 4, 4, 0, 1], np.int32)
    want = np.zeros((6, COLUMNS), "f")
    for row, values in zip(rows, x):
        want[row] = values
    np.testing.assert_array_equal(put(rows, x), want)
    np.testing.assert_array_equal(pbkern.interpret(put.trace(rows, x), rows, x)[0], want)


@pytest.mark.parametrize("dtype", ["f4", "f2", "bfloat16", "i1", "u8", "?", "f8"])
@pytest.mark.parametrize(
    "shape", [(), (1,), (0, 3), (7, 5), (3, BLOCK_BYTES // 4 + 1), (2, 3, 5, 7)]
)
def test_zeros(shape, dtype):
    (got,) = compiled(zeros(ArrayType(shape, jnp.dtype(dtype))))()
    assert got.shape == shape
    assert got.dtype == jnp.dtype(dtype)
    assert not np.asarray(got, "f8").any()


# ---- programs in parallel -------------------------------------------------------------------------------------------


def copied(x, o):
    o[...] = x[...]


def declared(word, out_map, grid=(BOUND,)):
    rank = len(grid)
    in_map = (lambda i: (i, 0)) if rank == 1 else (lambda i, j: (i, 0))
    return pbkern.kernel(
        copied, grid=grid, in_specs=[pbkern.BlockSpec((ROWS, COLUMNS), in_map)],
        out_specs=pbkern.BlockSpec((ROWS, COLUMNS), out_map),
        out_shape=out((ROWS, COLUMNS)), compiler_params=pbkern.cpu.CompilerParams(dimension_semantics=(word,) * rank),
    )  # fmt: skip


@pytest.mark.parametrize("way", ["called", "jitted", "decorated", "traced"])
def test_parallel_programs_that_write_one_block_are_refused(way):
    kernel, x = declared("parallel", lambda i: (0, 0)), np.ones(SHAPE, "f")
    if way == "traced":
        kernel.trace(x)  # the interpreter shows the race
        return
    call = {
        "called": kernel,
        "jitted": jax.jit(kernel),
        "decorated": pbkern.jit(lambda x: kernel(x) + 1),
    }[way]
    with pytest.raises(
        KernelError, match="run in parallel write the same elements of output 0"
    ) as e:
        call(x)
    assert "dimension 0" in e.value.why
    assert __file__ in e.value.at
    assert '"arbitrary"' in e.value.hint


def test_programs_in_order_may_write_one_block():
    x = np.random.default_rng(4).normal(size=SHAPE).astype("f")
    np.testing.assert_array_equal(declared("arbitrary", lambda i: (0, 0))(x), x[-ROWS:])


def test_one_program_of_a_parallel_dimension_may_store():
    def last(x, o):
        @pbkern.when(pbkern.program_id(0) == BOUND - 1)
        def _():
            o[...] = x[...]

    kernel = declared("parallel", lambda i: (0, 0))
    kernel.body = last
    x = np.random.default_rng(5).normal(size=SHAPE).astype("f")
    np.testing.assert_array_equal(kernel(x), x[-ROWS:])


def test_one_program_of_a_parallel_dimension_may_store_under_a_mask():
    def last(x, o):
        mine = jnp.full((ROWS, COLUMNS), pbkern.program_id(0) == BOUND - 1)
        pbkern.store(o, (slice(None), slice(None)), x[...], mask=mine)

    kernel = declared("parallel", lambda i: (0, 0))
    kernel.body = last
    x = np.random.default_rng(6).normal(size=SHAPE).astype("f")
    np.testing.assert_array_equal(kernel(x), x[-ROWS:])
