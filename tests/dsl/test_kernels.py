"""Hand-written kernels: interpretation against NumPy, and print -> rebuild -> the same kernel."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern import _jax
from pbkern.core.errors import OutOfBoundsError, RaceError
from pbkern.dsl import Point, Range, ref_access, same_kernel

F32, I32 = jnp.float32, jnp.int32
rng = np.random.default_rng(0)


def s(shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def f32(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def run(kf, *arrays):
    """Results of a kernel function, after its text has rebuilt it."""
    k = kf.trace(*arrays)
    text = str(k)
    again = pbkern.rebuild(text)
    assert same_kernel(k, again), f"{text}\n{k.body}\n{again.body}"
    assert str(again) == text
    results = pbkern.interpret(k, *arrays)
    for a, b in zip(results, pbkern.interpret(again, *arrays)):
        np.testing.assert_array_equal(a, b)
    return results[0] if len(results) == 1 else results


@dataclasses.dataclass(frozen=True)
class Params:
    dimension_semantics: tuple[str, ...] | None = None
    stages: int = 2
    target_name = "nvgpu"


rows = pbkern.BlockSpec((8, 16), lambda i: (i, 0))


def test_vector_add_with_ragged_last_block():
    @pbkern.kernel(grid=(4,), in_specs=[rows, rows], out_specs=rows, out_shape=s((30, 16)))
    def add(x, y, o):
        o[...] = x[...] + 2 * y[...]

    x, y = f32(30, 16), f32(30, 16)
    np.testing.assert_array_equal(run(add, x, y), x + 2 * y)


def test_tiled_matmul_accumulates_in_scratch():
    @pbkern.kernel(
        grid=(2, 2, 3),
        in_specs=[
            pbkern.BlockSpec((16, 8), lambda i, j, k: (i, k)),
            pbkern.BlockSpec((8, 16), lambda i, j, k: (k, j)),
        ],
        out_specs=pbkern.BlockSpec((16, 16), lambda i, j, k: (i, j)),
        out_shape=s((32, 32)),
        scratch_shapes=[pbkern.Scratch((16, 16), F32)],
        compiler_params=Params(("parallel", "parallel", "arbitrary")),
    )
    def matmul(a, b, o, acc):
        @pbkern.when(pbkern.program_id(2) == 0)
        def _():
            acc[...] = jnp.zeros_like(acc)

        acc[...] += a[...] @ b[...]

        @pbkern.when(pbkern.program_id(2) == pbkern.num_programs(2) - 1)
        def _():
            o[...] = acc[...]

    a, b = f32(32, 24), f32(24, 32)
    np.testing.assert_allclose(run(matmul, a, b), a @ b, rtol=1e-5, atol=1e-5)


def test_softmax_of_rows_ragged_in_both_dimensions():
    spec = pbkern.BlockSpec((4, 16), lambda i: (i, 0))

    @pbkern.kernel(grid=(3,), in_specs=[spec], out_specs=spec, out_shape=s((10, 16)))
    def softmax(x, o):
        e = jnp.exp(x[...] - jnp.max(x[...], axis=1, keepdims=True))
        o[...] = e / jnp.sum(e, axis=1, keepdims=True)

    x = f32(10, 16)
    e = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(run(softmax, x), e / e.sum(1, keepdims=True), rtol=1e-6)


def test_halo_stencil_reads_padding_as_out_of_bounds():
    @pbkern.kernel(
        grid=(3,),
        in_specs=[
            pbkern.BlockSpec((pbkern.Element(10, padding=(1, 1)), 16), lambda i: (i * 8 - 1, 0))
        ],
        out_specs=rows,
        out_shape=s((24, 16)),
    )
    def blur(x, o):
        v = jnp.where(pbkern.in_bounds(x, 0)[:, None], x[...], 0.0)
        o[...] = v[:-2] + v[1:-1] + v[2:]

    x = f32(24, 16)
    p = np.pad(x, ((1, 1), (0, 0)))
    np.testing.assert_allclose(run(blur, x), p[:-2] + p[1:-1] + p[2:], rtol=1e-6)
    assert "lambda i: (i * 8 - 1, 0)" in str(blur.trace(x))


def test_strided_static_and_dynamic_indices():
    @pbkern.kernel(out_shape=[s((4, 4)), s((8,))])
    def index(x, start, o, column):
        n = start[...]
        o[...] = x[::2, 1:8:2]
        o[1] = x[n, pbkern.ds(n, 4)]
        o.at[2:4].at[1][pbkern.ds(n - 2, 2)] = x[-1, :2]
        column[...] = x[:, n]
        jax.ref.addupdate(column, pbkern.ds(n, 2), jnp.ones(2))
        column[0] += 1.0

    x = f32(8, 8)
    o, column = run(index, x, np.int32(3))
    expected = x[::2, 1::2].copy()
    expected[1] = x[3, 3:7]
    expected[3, 1:3] = x[7, :2]
    np.testing.assert_array_equal(o, expected)
    expected = x[:, 3].copy()
    expected[3:5] += 1
    expected[0] += 1
    np.testing.assert_array_equal(column, expected)


def test_additions_at_integer_array_indices():
    """Rows that an index names several times take every addition."""

    @pbkern.kernel(out_shape=[s((5, 3)), s((4, 6))])
    def add(x, i, rows, columns):
        rows[...] = jnp.ones((5, 3))
        jax.ref.addupdate(rows, i[...], x[...])
        columns[...] = jnp.zeros((4, 6))
        jax.ref.addupdate(columns, (pbkern.ds(1, 3), i[...]), x[...].T)

    x, i = f32(8, 3), np.array([0, 1, 1, 4, 4, 4, 2, 0], np.int32)
    rows, columns = np.ones((5, 3), np.float32), np.zeros((4, 6), np.float32)
    np.add.at(rows, i, x)
    np.add.at(columns[1:], (slice(None), i), x.T)
    for got, expected in zip(run(add, x, i), (rows, columns)):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_integer_array_indices():
    @pbkern.kernel(out_shape=[s((3, 4)), s((8, 4)), s((3, 2))])
    def gather(x, i, o, scattered, mixed):
        o[...] = x[i[...]]
        scattered[...] = jnp.zeros((8, 4))
        scattered[i[...], 2] = jnp.ones(3)
        mixed[...] = x[i[...], 1:3]

    x, i = f32(8, 4), np.array([5, 0, 7], np.int32)
    o, scattered, mixed = run(gather, x, i)
    np.testing.assert_array_equal(o, x[i])
    np.testing.assert_array_equal(np.argwhere(scattered), sorted([[n, 2] for n in i]))
    np.testing.assert_array_equal(mixed, x[i, 1:3])


def test_masked_accesses_leave_masked_off_positions_alone():
    @pbkern.kernel(out_shape=[s((4, 8)), s((8,))])
    def masked(x, o, w):
        columns = lax.broadcasted_iota(I32, (4, 8), 1)
        o[...] = jnp.full((4, 8), 7.0)
        v = pbkern.load(x, (slice(None), pbkern.ds(4, 8)), mask=columns < 4, other=-1.0)
        pbkern.store(o, ..., v, mask=columns != 1)
        w[...] = pbkern.load(x, (0, lax.iota(I32, 8) * 2), mask=lax.iota(I32, 8) < 4)

    x = f32(4, 8)
    expected = np.full((4, 8), -1, np.float32)
    expected[:, :4] = x[:, 4:]
    expected[:, 1] = 7
    o, w = run(masked, x)
    np.testing.assert_array_equal(o, expected)
    np.testing.assert_array_equal(w, [*x[0, ::2], 0, 0, 0, 0])


def test_loops_over_refs():
    @pbkern.kernel(out_shape=[s((8, 4)), s(())])
    def loops(x, n, o, total):
        @pbkern.loop(0, 8)
        def _(i):
            o[i] = x[i] * 2

        @pbkern.loop(1, 8, step=3)
        def _(i):
            o[i, 0] = 0.0

        @pbkern.loop(0, n[...], init=0.0)
        def result(i, carry):
            return carry + x[i, 0]

        total[...] = lax.while_loop(
            lambda c: c < 100.0, lambda c: c * 2 + x[0, 0] ** 2, result**2 + 1
        )

    x = f32(8, 4)
    o, total = run(loops, x, np.int32(5))
    expected = x * 2
    expected[1::3, 0] = 0
    np.testing.assert_array_equal(o, expected)
    c = np.float32(x[:5, 0].sum()) ** 2 + 1
    while c < 100:
        c = c * 2 + x[0, 0] ** 2
    np.testing.assert_allclose(total, c, rtol=1e-5)


def test_conditions():
    @pbkern.kernel(
        grid=(4,),
        in_specs=None,
        out_specs=pbkern.BlockSpec((None, 4), lambda i: (i, 0)),
        out_shape=s((4, 4)),
    )
    def choose(x, o):
        i = pbkern.program_id(0)
        a = lax.cond(i % 2 == 0, lambda: x[0] + 1, lambda: x[1])
        b = lax.switch(i, [lambda: a, lambda: a * x[0], lambda: -a])
        o[...] = lax.cond((i > 1).astype(I32) + 0 > 0, lambda v: v + i.astype(F32), lambda v: v, b)

    x = f32(2, 4)
    a = [x[0] + 1, x[1], x[0] + 1, x[1]]
    expected = [a[0], a[1] * x[0], -a[2] + 2, -a[3] + 3]
    np.testing.assert_allclose(run(choose, x), expected, rtol=1e-6)


def test_scans():
    @pbkern.kernel(out_shape=[s((4, 8)), s((8,))])
    def scans(x, o, last):
        def step(carry, row):
            a, n = carry
            return (a * 0.5 + row, n + 1), (a, row * n)

        (a, n), (before, scaled) = lax.scan(step, (jnp.zeros(8), 0.0), x[...], reverse=True)
        o[...] = before + scaled
        last[...] = a + n

        def count(i, c):
            o[i] += c
            return c + 1

        lax.scan(lambda c, i: (count(i, c), None), 0.0, jnp.arange(4))

    x = f32(4, 8)
    a, n, expected = np.zeros(8, np.float32), 0, np.zeros((4, 8), np.float32)
    for i in reversed(range(4)):
        expected[i] = a + x[i] * n
        a, n = a * np.float32(0.5) + x[i], n + 1
    o, last = run(scans, x)
    np.testing.assert_allclose(o, expected + np.arange(4)[:, None], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(last, a + 4, rtol=1e-5)


def test_names_in_the_body_do_not_capture_refs():
    @pbkern.kernel(out_shape=s((4,)))
    def shadow(xs, carry, a, b):
        def step(c, v):
            return c + carry[0], xs[0] * v

        b[...] = lax.scan(step, 0.0, a[...])[1] + lax.fori_loop(
            0, 3, lambda i, c: c + carry[i], 0.0
        )

    x, c, a = f32(4), f32(4), f32(4)
    np.testing.assert_allclose(run(shadow, x, c, a), x[0] * a + c[:3].sum(), rtol=1e-5)


def test_prefetched_operands_choose_blocks():
    @pbkern.kernel(
        grid_spec=pbkern.GridSpec(
            (3,),
            [pbkern.BlockSpec((None, 4), lambda i, table: (table[i], 0))],
            pbkern.BlockSpec((None, 4), lambda i, table: (i, 0)),
            num_scalar_prefetch=1,
        ),
        out_shape=s((3, 4)),
    )
    def pick(table, x, o):
        o[...] = x[...] + table[0].astype(F32)

    table, x = np.array([2, 0, 1], np.int32), f32(3, 4)
    np.testing.assert_array_equal(run(pick, table, x), x[table] + 2)
    assert "lambda i, j: (j[i], 0)" in str(pick.trace(table, x))


def test_index_maps_with_shared_values_print_as_functions():
    spec = pbkern.BlockSpec((8, 16), lambda i: (i // 2 * 2 + i % 2, 0))

    @pbkern.kernel(grid=(4,), in_specs=[spec], out_specs=rows, out_shape=s((32, 16)))
    def copy(x, o):
        o[...] = x[...]

    x = f32(32, 16)
    np.testing.assert_array_equal(run(copy, x), x)
    assert "def copy_block_0(i):" in str(copy.trace(x))


def test_aliased_operand_and_result_are_one_array():
    first = pbkern.BlockSpec((8,), lambda i: (i,))

    @pbkern.kernel(
        grid=(2,),
        in_specs=[first],
        out_specs=first,
        out_shape=s((24,)),
        input_output_aliases={0: 0},
    )
    def double(x, o):
        o[...] = x[...] * 2

    x = f32(24)
    np.testing.assert_array_equal(run(double, x), np.concatenate([x[:16] * 2, x[16:]]))


def test_results_that_a_program_leaves_out_are_poison():
    @pbkern.kernel(grid=(1,), out_shape=[s((2,)), s((2,), I32)])
    def lazy(o, n):
        @pbkern.when(pbkern.num_programs(0) == 1)
        def _():
            o[0] = 1.0
            n[1] = 1

    o, n = run(lazy)
    assert o[0] == n[1] == 1
    assert np.isnan(o[1])
    assert n[0] == np.iinfo(np.int32).min


def test_index_outside_the_block_names_line_and_values():
    @pbkern.kernel(out_shape=s((4,)))
    def far(x, n, o):
        o[...] = x[pbkern.ds(n[...], 4)]

    with pytest.raises(OutOfBoundsError) as e:
        pbkern.interpret(far.trace(f32(4), np.int32(1)), f32(4), np.int32(1))
    line = far.body.__code__.co_firstlineno + 2
    assert f"test_kernels.py:{line}:" in str(e.value)
    assert "dimension 0 of shape (4,), indices 1 to 4, program ()" in str(e.value)


def test_computed_indices_below_zero_do_not_count_from_the_end():
    @pbkern.kernel(out_shape=s((4,)), grid=(4,))
    def program_before(x, o):
        o[pbkern.program_id(0)] = x[pbkern.program_id(0) - 1]

    @pbkern.kernel(out_shape=s((4,)))
    def turn_before(x, o):
        @pbkern.loop(0, 4)
        def _(i):
            o[i] = x[i - 1]

    for kernel in (program_before, turn_before):
        with pytest.raises(OutOfBoundsError, match=r"dimension 0 of shape .4,., index -1"):
            pbkern.interpret(kernel.trace(f32(4)), f32(4))


def test_constant_indices_below_zero_count_from_the_end():
    @pbkern.kernel(out_shape=s(()))
    def last(x, o):
        o[...] = x[-1]

    x = f32(4)
    assert pbkern.interpret(last.trace(x), x)[0] == x[-1]


def test_parallel_programs_that_write_one_element_race():
    def racing(semantics):
        @pbkern.kernel(
            grid=(2, 2), out_specs=pbkern.BlockSpec((4,), lambda i, j: (i,)), out_shape=s((8,)),
            compiler_params=Params(semantics),
        )  # fmt: skip
        def write(o):
            o[...] = jnp.full((4,), 1.0)

        return write.trace()

    pbkern.interpret(racing(("parallel", "arbitrary")))
    with pytest.raises(RaceError, match=r"programs \(0, 0\) and \(0, 1\), element \(0,\)"):
        pbkern.interpret(racing(("parallel", "parallel")))
    pbkern.interpret(racing(("parallel", "parallel")), check_races=False)


# --- calls -------------------------------------------------------------------------------------------------------


@pbkern.kernel(
    grid=(2,),
    in_specs=[rows, pbkern.BlockSpec()],
    out_specs={"y": rows},
    out_shape={"y": s((16, 16))},
    interpret=True,
)
def scaled(x, w, y):
    y[...] = x[...] * w[...] + pbkern.program_id(0).astype(F32)


def scaled_reference(x, w):
    return x * w + np.repeat([0.0, 1.0], 8)[:, None].astype(np.float32)


def test_calls_keep_the_result_pytree_and_work_under_jit():
    x, w = f32(16, 16), f32(16)
    w = w.reshape(1, 16)
    np.testing.assert_allclose(scaled(x, w)["y"], scaled_reference(x, w), rtol=1e-6)
    jitted = jax.jit(lambda x, w: scaled(x + 1, w)["y"] * 2)
    np.testing.assert_allclose(jitted(x, w), scaled_reference(x + 1, w) * 2, rtol=1e-5)
    assert scaled.trace(x, w) is scaled.trace(x, w)


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 1), (2, 0)])
def test_vmap_adds_a_grid_dimension(axes):
    x, w = f32(16, 16), f32(1, 16)
    xs = x if axes[0] is None else np.moveaxis(f32(3, 16, 16), 0, axes[0])
    ws = w if axes[1] is None else np.moveaxis(f32(3, 1, 16), 0, axes[1])
    got = jax.vmap(lambda x, w: scaled(x, w)["y"], axes)(xs, ws)
    np.testing.assert_allclose(
        got, jax.vmap(scaled_reference, axes)(jnp.asarray(xs), jnp.asarray(ws)), rtol=1e-6
    )
    nested = jax.vmap(jax.vmap(lambda x: scaled(x, w)["y"]))(f32(2, 2, 16, 16))
    assert nested.shape == (2, 2, 16, 16)


def test_vmap_of_prefetched_operands():
    @pbkern.kernel(
        grid_spec=pbkern.GridSpec(
            (3,), [pbkern.BlockSpec((None, 4), lambda i, t: (t[i], 0))], pbkern.BlockSpec((None, 4), lambda i, t: (i, 0)),
            num_scalar_prefetch=1,
        ),
        out_shape=s((3, 4)), interpret=True,
    )  # fmt: skip
    def pick(table, x, o):
        o[...] = x[...]

    tables, x = np.array([[2, 0, 1], [1, 1, 1]], np.int32), f32(3, 4)
    np.testing.assert_array_equal(jax.vmap(pick, (0, None))(tables, x), x[tables])
    xs = f32(2, 3, 4)
    np.testing.assert_array_equal(jax.vmap(pick, (None, 0))(tables[0], xs), xs[:, tables[0]])


def test_a_kernel_object_runs_on_arrays():
    x, w = f32(16, 16), f32(1, 16)
    k = pbkern.rebuild(str(scaled.trace(x, w)))
    (y,) = pbkern.call_kernel(k, x, w, interpret=True)
    np.testing.assert_allclose(y, scaled_reference(x, w), rtol=1e-6)


def test_bodies_have_the_same_types_whatever_jax_enable_x64_says():
    def body(x, n, o):
        i = jnp.arange(4) + n[...] + jnp.array(3)
        o[...] = x[...] * 1.5 + i + lax.fori_loop(0, 3, lambda i, c: c + i, 0.0)

    types = [s((4,)), s((), I32)]
    traced = []
    for x64 in (False, True):
        with jax.enable_x64(x64):
            traced.append(pbkern.kernel(body, out_shape=s((4,))).trace(*types))
    assert same_kernel(*traced)
    wide = pbkern.kernel(body, out_shape=s((4,)), x64=True)
    assert "int64" in str(wide.trace(*types)) or "float64" in str(wide.trace(*types))
    assert same_kernel(wide.trace(*types), pbkern.rebuild(str(wide.trace(*types))))


def test_constant_conditions_and_calls_leave_no_trace():
    @jax.jit
    def helper(ref, x):
        ref[0] = x.sum()
        return x * 2

    @pbkern.kernel(out_shape=s((4,)))
    def plain(x, o):
        o[...] = lax.cond(jnp.bool_(True), lambda: helper(o, x[...]), lambda: x[...])
        jnp.sin(x[...])  # unused

    x = f32(4)
    np.testing.assert_array_equal(run(plain, x), x * 2)
    names = [e.primitive.name for e in plain.trace(x).body.jaxpr.eqns]
    assert names == ["get", "reduce_sum", "swap", "mul", "swap"]


def test_equations_keep_the_users_line():
    @pbkern.kernel(out_shape=s((4,)))
    def lined(x, o):
        y = jnp.exp(x[...])
        pbkern.store(o, ..., y, mask=y > 0)

    line = lined.body.__code__.co_firstlineno
    eqns = lined.trace(s((4,))).body.jaxpr.eqns
    lines = {e.primitive.name: _jax.user_line(e) for e in eqns}
    assert f"test_kernels.py:{line + 2}:" in lines["exp"]
    assert f"test_kernels.py:{line + 2}:" in lines["get"]
    assert f"test_kernels.py:{line + 3}:" in lines["masked_store"]


def test_bodies_that_are_lambdas_or_partial_print_under_a_name():
    def scale(factor, x, o):
        o[...] = x[...] * factor

    for body in (lambda x, o: scale(2.0, x, o), functools.partial(scale, 2.0)):
        x = f32(4)
        np.testing.assert_array_equal(run(pbkern.kernel(body, out_shape=s((4,))), x), x * 2)


def test_compiler_params_print_with_their_import():
    @pbkern.kernel(
        grid=(2,),
        in_specs=[rows],
        out_specs=rows,
        out_shape=s((16, 16)),
        compiler_params=Params(("parallel",)),
    )
    def copy(x, o):
        o[...] = x[...]

    text = str(copy.trace(s((16, 16))))
    assert f"import {__name__}\n" in text
    assert f"compiler_params={__name__}.Params(dimension_semantics=('parallel',))" in text
    run(copy, f32(16, 16))


def test_accesses_have_one_canonical_view():
    @pbkern.kernel(out_shape=s((4, 4)))
    def accesses(x, n, o):
        o[...] = x[:4, n[...]][:, None] * jnp.ones((4, 4))
        jax.ref.addupdate(o, (pbkern.ds(n[...], 2), 1), jnp.ones(2))
        o.at[1:3].at[pbkern.ds(n[...], 1)][...] = jnp.ones((1, 4))

    k = accesses.trace(s((8, 8)), s((), I32))
    found = [
        ref_access(e) for e in k.body.jaxpr.eqns if e.primitive.name in ("get", "swap", "addupdate")
    ]
    kinds = [a.kind for a in found]
    assert kinds == ["load", "load", "store", "load", "add", "load", "store"]
    assert found[1].indices[0] == Range(0, 4)
    assert isinstance(found[1].indices[1], Point)
    assert found[4].indices[0].size == 2
    assert found[4].indices[1] == Point(1)
    assert [i.size for i in found[6].indices] == [1, 4]
    assert found[6].value is not None


def test_kernels_without_operands_run_while_jax_evaluates_ahead_of_time():
    """JAX evaluates them there under jit as well."""

    @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((8,), jnp.float32))
    def counted(out):
        out[...] = jnp.arange(8, dtype=jnp.float32)

    with jax.ensure_compile_time_eval():
        results = [counted(), jax.jit(lambda: counted())()]
    for result in results:
        np.testing.assert_array_equal(result, np.arange(8))


def test_updates_of_whole_dimensions_of_values():
    """JAX gives such updates an empty array of indices, which is no operand."""

    def body(x, o, p):
        o[...] = x[...].at[:].add(x[...] * 2)
        p[...] = x[...].reshape(4, 1).at[..., 0:1].set(7)

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((4,), (4, 1))]
    kernel = pbkern.kernel(body, out_shape=shapes)
    updated, replaced = kernel(jnp.ones(4))
    np.testing.assert_array_equal(updated, np.full(4, 3))
    np.testing.assert_array_equal(replaced, np.full((4, 1), 7))
