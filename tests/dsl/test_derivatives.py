"""Derivatives of kernels by hand, against those of the plain functions in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl

import pbkern
from pbkern.core.errors import UnsupportedKernel
from pbkern.dsl import same_kernel
from pbkern.dsl.transformations.backward import backward_plan
from pbkern.dsl.transformations.tangent import tangent_kernel

from .differentiable_kernels import (
    BS,
    CASES,
    Case,
    attention,
    histogram,
    layer_norm,
    matmul,
    matmul_in_results,
    numbers,
    order,
    prefix_sum,
    recurrence,
    rounds_of_programs,
    s,
    stencil,
)

# Relative to the largest element of the exact derivative, some tens of float32's spacing.
ROUNDING = 3e-6
# Derivatives that are zero leave some of float64's spacing where their terms are rounded.
NOISE = 1e-12
SMALL = (
    "layer_norm",
    "whole_softmax",
    "matmul",
    "recurrence",
    "segment_sum",
    "rounds_of_programs",
    "histogram",
)


def close(got, want):
    for found, exact in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert found.shape == exact.shape
        error = abs(np.asarray(found, np.float64) - exact).max(initial=0)
        assert error <= max(ROUNDING * abs(np.asarray(exact)).max(initial=0), NOISE)


def directions(xs):
    return [numbers(*np.shape(x), seed=7 + n) for n, x in enumerate(xs)]


def of_floats(function, case: Case):
    """The function of the operands that have derivatives."""

    def call(*floats):
        operands = list(case.operands)
        for n, x in zip(case.floats, floats):
            operands[n] = x
        return function(*operands)

    return call


def floats_of(case: Case):
    return [case.operands[n] for n in case.floats]


def pulled(function, xs):
    """Cotangents of `xs` for directions of the results."""
    results, pull = jax.vjp(function, *xs)
    given = [
        x.astype(y.dtype)
        for x, y in zip(directions(jax.tree.leaves(results)), jax.tree.leaves(results))
    ]
    return pull(jax.tree.unflatten(jax.tree.structure(results), given))


def pushed(function, xs):
    tangents = (jnp.asarray(d, x.dtype) for d, x in zip(directions(xs), xs))
    return jax.jvp(function, tuple(xs), tuple(tangents))


def exactly(derivative, case: Case):
    """A derivative of the plain function, in float64."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, np.float64) for x in floats_of(case)]
        return jax.tree.map(np.asarray, derivative(of_floats(case.plain, case), wide))


@pytest.mark.parametrize("name", CASES)
def test_cotangents_are_those_of_the_plain_function(name):
    case = CASES[name]()
    close(pulled(of_floats(case.kernel, case), floats_of(case)), exactly(pulled, case))


@pytest.mark.parametrize("name", CASES)
def test_tangents_are_those_of_the_plain_function(name):
    case = CASES[name]()
    close(pushed(of_floats(case.kernel, case), floats_of(case)), exactly(pushed, case))


def loss(function):
    return lambda *xs: sum((x * x).sum() for x in jax.tree.leaves(function(*xs)))


def gradients(function, xs):
    return jax.grad(loss(function), range(len(xs)))(*xs)


AROUND = {
    "jit": lambda f, xs: jax.jit(lambda *xs: gradients(f, xs))(*xs),
    "gradient in pbkern.jit": lambda f, xs: pbkern.jit(lambda *xs: gradients(f, xs))(*xs),
    "gradient of pbkern.jit": lambda f, xs: gradients(pbkern.jit(f), xs),
    "tangents in pbkern.jit": lambda f, xs: pbkern.jit(lambda *xs: pushed(f, xs))(*xs),
    "remat": lambda f, xs: gradients(jax.checkpoint(f), xs),
    "scan": lambda f, xs: gradients(
        lambda *xs: jax.lax.scan(lambda c, x: (c, f(*x)), 0.0, [jnp.stack([x, x]) for x in xs])[1], xs
    ),
    "gradient of vmap": lambda f, xs: gradients(
        jax.vmap(f), [jnp.stack([x, x / 2, -x]) for x in xs]
    ),
    "vmap of gradient": lambda f, xs: jax.vmap(lambda *xs: gradients(f, xs))(
        *[jnp.stack([x, x / 2, -x]) for x in xs]
    ),
    "vmap of one operand's gradient": lambda f, xs: jax.vmap(
        lambda x: gradients(f, [x, *xs[1:]])
    )(jnp.stack([xs[0], xs[0] / 2])),
    "linearize": lambda f, xs: jax.linearize(f, *xs)[1](*map(jnp.cos, xs)),
    "gradient of gradient": lambda f, xs: gradients(lambda *xs: gradients(f, xs), xs),
    "tangents of gradient": lambda f, xs: pushed(lambda *xs: gradients(f, xs), xs),
    "gradient of tangents": lambda f, xs: gradients(lambda *xs: pushed(f, xs)[1], xs),
}  # fmt: skip


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", SMALL)
def test_derivatives_go_with_other_transformations(name, around):
    case = CASES[name]()
    derivative = AROUND[around]
    close(derivative(of_floats(case.kernel, case), floats_of(case)), exactly(derivative, case))


@pytest.mark.parametrize(
    "jacobian", [jax.jacfwd, jax.jacrev, jax.hessian], ids=lambda f: f.__name__
)
def test_jacobians(jacobian):
    case = stencil(size=6, block=4)

    def derivative(f, xs):
        return jacobian(f, range(len(xs)))(*xs)

    close(derivative(case.kernel, case.operands), exactly(derivative, case))


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 12), st.booleans())
def test_blocks_that_do_not_divide_their_arrays(rows, columns, block, is_parallel):
    block = min(block, rows)

    def body(x, scale, o):
        o[...] = jnp.sin(x[...] * scale[...]) / (1 + x[...] ** 2)

    def plain(x, scale):
        return jnp.sin(x * scale) / (1 + x**2)

    tile = pbkern.BlockSpec((block, columns), lambda i: (i, 0))
    kernel = pbkern.kernel(
        body, grid=(pbkern.cdiv(rows, block),), out_specs=tile, out_shape=s(rows, columns),
        in_specs=[tile, pbkern.BlockSpec((1, columns), lambda i: (0, 0))],
        compiler_params=order("parallel" if is_parallel else "arbitrary"),
    )  # fmt: skip
    case = Case(kernel, plain, (numbers(rows, columns), numbers(1, columns)))
    close(pulled(kernel, case.operands), exactly(pulled, case))


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 7), st.integers(1, 9))
def test_loops_that_programs_end(rows, columns):
    case = rounds_of_programs(rows, columns)
    close(pulled(of_floats(case.kernel, case), floats_of(case)), exactly(pulled, case))


@settings(max_examples=4, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 9), st.booleans())
def test_sums_that_are_handed_on(blocks, block, columns, is_reversed):
    """The last row of a running sum is the first one of its derivative's."""
    rows = blocks * block

    def body(x, o, carried):
        @pbkern.when(pbkern.program_id(0) == 0)
        def _():
            carried[...] = jnp.zeros_like(carried)

        sums = jax.lax.cumsum(jnp.sin(x[...]), 0, reverse=is_reversed) + carried[...]
        o[...] = sums * sums
        carried[...] = sums[:1] if is_reversed else sums[block - 1 :]

    tile = pbkern.BlockSpec((block, columns), lambda i: (blocks - 1 - i if is_reversed else i, 0))
    kernel = pbkern.kernel(
        body, grid=(blocks,), in_specs=[tile], out_specs=tile, out_shape=s(rows, columns),
        scratch_shapes=[pbkern.Scratch((1, columns), jnp.float32)],
    )  # fmt: skip
    plain = lambda x: jax.lax.cumsum(jnp.sin(x), 0, reverse=is_reversed) ** 2
    case = Case(kernel, plain, (numbers(rows, columns),))
    close(pulled(kernel, case.operands), exactly(pulled, case))


def test_running_sums_are_made_once():
    """What goes on to the next program is a row of them, and what came from the one before is added to all rows."""
    case = prefix_sum()
    source = backward_plan(case.traced(), case.active).backward.source()
    assert source.count("cumsum") == 2  # the kernel's own, and its derivative
    assert "reduce_sum" not in source
    assert "pad(" not in source


def test_additions_at_arrays_are_gathers_backwards():
    case = histogram()
    source = backward_plan(case.traced(), case.active).backward.source()
    assert "gather" in source
    assert "scan" not in source


def derived(case: Case):
    """The kernels of a case's derivatives."""
    plan = backward_plan(case.traced(), case.active)
    return [
        k for k in (plan.backward, plan.saving, tangent_kernel(case.traced(), case.active)) if k
    ]


@pytest.mark.parametrize("name", [name for name in CASES if name != "mean_of_squares"])
def test_derived_kernels_print_as_source_that_rebuilds_them(name):
    for kernel in derived(CASES[name]()):
        assert same_kernel(pbkern.rebuild(kernel.source()), kernel)


@pytest.mark.parametrize("name", ["layer_norm", "attention", "stencil", "segment_sum", "histogram"])
def test_derived_kernels_have_no_races_and_stay_in_bounds(name):
    """The interpreter checks that, and its results are the compiled ones."""
    case = CASES[name]()
    interpreted = pbkern.kernel(
        case.kernel.body, grid_spec=case.kernel.grid_spec, out_shape=out_shape(case), interpret=True,
        compiler_params=case.traced().compiler_params,
    )  # fmt: skip
    close(pulled(of_floats(interpreted, case), floats_of(case)), exactly(pulled, case))


def out_shape(case: Case):
    (type_,) = case.traced().out_types
    return jax.ShapeDtypeStruct(type_.shape, type_.dtype)


def test_explain_names_the_backward_kernel():
    case = attention()
    text = str(pbkern.jit(lambda *xs: gradients(case.kernel, xs)).explain(*case.operands))
    assert "attention_backward" in text
    assert "attention_saving" not in text


@pytest.mark.parametrize("name", ["layer_norm", "prefix_sum", "rounds_of_programs", "histogram"])
def test_backward_kernels_run_on_simulated_gpus(name):
    case = CASES[name]()

    def gradient(*xs):
        return gradients(of_floats(case.kernel, case), xs)

    xs = floats_of(case)
    close(pbkern.simulate(pbkern.jit(gradient), *xs).results, gradient(*xs))


def test_only_states_that_the_derivative_reads_are_saved():
    def saved(case):
        return backward_plan(case.traced(), case.active).saved

    assert (
        saved(layer_norm()) == saved(prefix_sum(square=False)) == saved(matmul_in_results()) == ()
    )
    assert saved(recurrence()) == (1,)
    assert saved(attention()) == (1, 2, 3)


def test_what_a_result_holds_is_read_there():
    """tanh's derivative follows from the result, which the last step of a sum stores: no sums are saved."""
    case = matmul()
    plan = backward_plan(case.traced(), case.active)
    assert (plan.read, plan.saved) == ((0,), ())
    assert "tanh" not in plan.backward.source()
    unread = backward_plan(case.traced(), case.active, known=())
    assert (unread.read, unread.saved) == ((), (1,))


@pytest.mark.parametrize(
    ("activation", "is_read"), [(jnp.tanh, True), (jnp.sqrt, False), (lambda x: x, False)]
)
def test_results_whose_blocks_reach_over_an_edge(activation, is_read):
    """They are read where other numbers in place of what is outside do no harm; a square root would divide by them."""

    def body(x, w, o, partial):
        o[...] = activation(jnp.exp(x[...]) * w[...])
        partial[...] = x[...] * 2

    rows, columns, block = 21, 7, 8
    tile, whole = BS((block, columns), lambda i: (i, 0)), BS((1, columns), lambda i: (0, 0))
    kernel = pbkern.kernel(
        body, grid=(pbkern.cdiv(rows, block),), in_specs=[tile, whole], out_specs=[tile, tile],
        out_shape=[s(rows, columns)] * 2,
    )  # fmt: skip
    plain = lambda x, w: (activation(jnp.exp(x) * w), x * 2)
    case = Case(kernel, plain, (numbers(rows, columns), abs(numbers(1, columns, seed=1))))
    plan = backward_plan(case.traced(), case.active)
    assert (0 in plan.read) == is_read
    want = exactly(pulled, case)
    close(pulled(kernel, case.operands), want)
    # The interpreter has NaN in place of what is outside.
    zeros = [np.zeros(type_.shape, type_.dtype) for type_ in plan.sums]
    given = directions([np.empty((rows, columns))] * 2)
    results = [np.asarray(x) for x in kernel(*case.operands)]
    interpreted = pbkern.interpret(
        plan.backward, *case.operands, *(results[n] for n in plan.read), *given, *zeros
    )
    close([x.sum(0) if x.ndim > y.ndim else x for x, y in zip(interpreted, want)], want)


@pytest.mark.parametrize(("function", "is_read"), [(jnp.exp, True), (jnp.sin, False)])
def test_only_results_that_are_read_stay_in_memory(function, is_read):
    case = of_whole_arrays(function, numbers(3, 5))
    result, pull = jax.vjp(case.kernel, *case.operands)
    held = [np.array_equal(x, result) for x in jax.tree.leaves(pull) if x.shape == result.shape]
    assert any(held) == is_read


def test_a_result_is_not_read_where_computing_again_costs_less():
    """One multiplication, of an operand that is read anyway."""

    def body(x, doubled, o):
        doubled[...] = x[...] * 2
        o[...] = jnp.sin(x[...] * 2) * x[...]

    kernel = pbkern.kernel(body, out_shape=[s(4096), s(4096)])
    case = Case(kernel, lambda x: (x * 2, jnp.sin(x * 2) * x), (numbers(4096),))
    assert backward_plan(case.traced(), case.active).read == ()
    close(pulled(kernel, case.operands), exactly(pulled, case))


QUOTIENTS = {
    "softmax of a kernel": lambda x, axis: weights_of(x, axis, x.max(axis, keepdims=True)),
    "without a maximum": lambda x, axis: weights_of(x, axis, 0.0),
    "less something else": lambda x, axis: weights_of(x, axis, x[:1, :1] * 2),
    "jax.nn": lambda x, axis: jax.nn.softmax(x, axis),
}
OTHERS = {
    "less what varies": lambda x, axis: weights_of(x, axis, x * x),
    "of another sum": lambda x, axis: jnp.exp(x) / jnp.exp(2 * x).sum(axis, keepdims=True),
    "of a sum along the other axis": lambda x, axis: jnp.exp(x) / jnp.exp(x).sum(1 - axis, keepdims=True),
    "of a sum that lies across": lambda x, axis: jnp.exp(x) / jnp.exp(x).sum(axis).reshape(-1, 1)[: len(x)].mean(),
    "times a number": lambda x, axis: jnp.exp(x) / (2 * jnp.exp(x).sum(axis, keepdims=True)),
}  # fmt: skip


def weights_of(x, axis, shift):
    exponentials = jnp.exp(x - shift)
    return exponentials / exponentials.sum(axis, keepdims=True)


def of_whole_arrays(function, x):
    def body(x, o):
        o[...] = function(x[...])

    return Case(pbkern.kernel(body, out_shape=s(*x.shape)), function, (x,))


@settings(max_examples=4, deadline=None)
@given(
    st.sampled_from(sorted(QUOTIENTS)),
    st.integers(1, 7),
    st.integers(1, 9),
    st.sampled_from([0, 1]),
)
def test_quotients_of_exponentials_are_read_from_the_result(name, rows, columns, axis):
    case = of_whole_arrays(lambda x: QUOTIENTS[name](x, axis), numbers(rows, columns))
    plan = backward_plan(case.traced(), case.active)
    assert plan.read == (0,)
    assert "exp(" not in plan.backward.source()
    close(pulled(case.kernel, case.operands), exactly(pulled, case))


@pytest.mark.parametrize("name", OTHERS)
def test_other_quotients_keep_their_derivatives(name):
    for axis in (0, 1):
        case = of_whole_arrays(lambda x: OTHERS[name](x, axis), numbers(4, 4))  # noqa: B023
        close(pulled(case.kernel, case.operands), exactly(pulled, case))


def test_a_sum_across_a_square_is_no_softmax():
    """The divisor repeats along the axis that was not summed."""

    def across(x):
        return jnp.exp(x) / jnp.broadcast_to(jnp.exp(x).sum(1), x.shape)

    case = of_whole_arrays(across, numbers(4, 4))
    close(pulled(case.kernel, case.operands), exactly(pulled, case))


def with_epilogue(epilogue, size=32, block=8, exact=True):
    """A product in steps. `exact`: the result is stored in the last of them, once."""

    def body(a, b, o, acc):
        step = pbkern.program_id(2)

        @pbkern.when(step == 0)
        def _():
            acc[...] = jnp.zeros_like(acc)

        acc[...] += a[...] @ b[...]

        @pbkern.when(step == pbkern.num_programs(2) - 1 if exact else step >= 1)
        def _():
            o[...] = epilogue(acc[...] / size)

    shape = (block, block)
    kernel = pbkern.kernel(
        body, grid=(size // block,) * 3, out_shape=s(size, size),
        in_specs=[BS(shape, lambda i, j, k: (i, k)), BS(shape, lambda i, j, k: (k, j))],
        out_specs=BS(shape, lambda i, j, k: (i, j)), scratch_shapes=[pbkern.Scratch(shape, jnp.float32)],
    )  # fmt: skip
    operands = numbers(size, size), numbers(size, size, seed=1)
    return Case(kernel, lambda a, b: epilogue(a @ b / size), operands)


EPILOGUES = {
    "exp": (jnp.exp, True),
    "sigmoid": (jax.nn.sigmoid, True),
    "relu": (jax.nn.relu, True),  # the result is positive where its argument is
    "sqrt of exp": (lambda x: jnp.sqrt(jnp.exp(x)), False),
    "gelu": (jax.nn.gelu, False),
    "silu": (jax.nn.silu, False),
}


@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues_whose_derivatives_follow_from_the_result(name):
    epilogue, follows = EPILOGUES[name]
    case = with_epilogue(epilogue)
    plan = backward_plan(case.traced(), case.active)
    assert plan.saved == (() if follows else (1,))
    close(pulled(case.kernel, case.operands), exactly(pulled, case))


@pytest.mark.parametrize("exact", [True, False])
def test_results_that_are_stored_again_are_read_in_the_last_program(exact):
    case = with_epilogue(jnp.tanh, exact=exact)
    plan = backward_plan(case.traced(), case.active)
    assert plan.read == ((0,) if exact else ())
    close(pulled(case.kernel, case.operands), exactly(pulled, case))


def test_custom_rules_around_a_kernel_win():
    case = layer_norm()
    wrapped = jax.custom_vjp(case.kernel)
    wrapped.defvjp(lambda *xs: (case.kernel(*xs), xs), lambda xs, _: tuple(map(jnp.ones_like, xs)))
    for got in gradients(wrapped, case.operands):
        np.testing.assert_array_equal(got, 1)
    other = jax.custom_jvp(case.kernel)
    other.defjvp(lambda xs, _: (case.kernel(*xs), jnp.full((50, 32), 3.0)))
    np.testing.assert_array_equal(pushed(other, case.operands)[1], 3)


def test_sums_of_narrow_cotangents_are_added_up_in_float32():
    rows = 512

    @pbkern.kernel(
        grid=(rows,), in_specs=[pbkern.BlockSpec((1, 8), lambda i: (i, 0)), pbkern.BlockSpec()],
        out_specs=pbkern.BlockSpec((1, 8), lambda i: (i, 0)), out_shape=jax.ShapeDtypeStruct((rows, 8), "bfloat16"),
    )  # fmt: skip
    def scaled(x, scale, o):
        o[...] = x[...] * scale[...]

    ones = jnp.ones((1, 8), "bfloat16")
    given = jnp.ones((rows, 8), "bfloat16")
    (got,) = jax.vjp(lambda scale: scaled(given, scale), ones)[1](given)
    assert got.dtype == "bfloat16"
    np.testing.assert_array_equal(got.astype("float32"), rows)  # a sum in bfloat16 stays at 256


def test_doubles_and_results_without_derivatives():
    with jax.enable_x64(True):

        @pbkern.kernel(
            out_shape=[jax.ShapeDtypeStruct((4,), "float64"), jax.ShapeDtypeStruct((4,), "int32")]
        )
        def both(x, o, places):
            o[...] = jnp.exp(x[...])
            places[...] = jnp.argsort(x[...]).astype(jnp.int32)

        x = jnp.asarray([0.3, 0.1, 0.2, 0.4], "float64")
        np.testing.assert_allclose(jax.grad(lambda x: both(x)[0].sum())(x), jnp.exp(x), rtol=1e-15)
        _, (_, moved) = jax.jvp(both, (x,), (x,))
        assert moved.dtype == jax.dtypes.float0


def test_operands_without_elements_and_grids_without_programs():
    @pbkern.kernel(grid=(0,), out_shape=s(0))
    def nothing(x, o):
        o[...] = x[:0]

    np.testing.assert_array_equal(jax.grad(lambda x: nothing(x).sum())(jnp.ones(3)), np.zeros(3))


def refused(kernel, *operands):
    """The error of a derivative in reverse."""
    with pytest.raises(UnsupportedKernel, match="derivative of kernel") as raised:
        jax.vjp(kernel, *operands)[1](jax.tree.map(jnp.ones_like, kernel(*operands)))
    assert __file__ in raised.value.at
    assert "jax.custom_vjp" in raised.value.hint
    return str(raised.value)


def test_loops_of_unknown_length_are_refused_at_their_line():
    @pbkern.kernel(out_shape=s(4))
    def powers(count, x, o):
        @pbkern.loop(0, count[0], init=x[...])
        def value(_, carry):
            return carry * x[...]

        o[...] = value

    count, x = jnp.array([3]), jnp.ones(4)
    text = refused(functools.partial(powers, count), x)
    assert "how often this loop runs" in text
    assert ".powers)" in text
    np.testing.assert_array_equal(jax.jvp(functools.partial(powers, count), (x,), (x,))[1], 4)


def test_stores_through_arrays_of_indices_are_refused_at_their_line():
    @pbkern.kernel(out_shape=s(4))
    def scattered(place, x, o):
        o[...] = jnp.zeros(4)
        o[place[...]] = x[...]

    text = refused(functools.partial(scattered, jnp.array([2, 0])), jnp.ones(2))
    assert "not known to name each element once" in text
    assert "pbkern.atomic_add" in text


def test_memory_shared_under_different_blocks_is_refused():
    @pbkern.kernel(
        grid=(2,), in_specs=[pbkern.BlockSpec()], out_specs=pbkern.BlockSpec((2,), lambda i: (i,)),
        out_shape=s(4), input_output_aliases={0: 0},
    )  # fmt: skip
    def halves(x, o):
        o[...] = x[:2]

    assert "one array in blocks of their own" in refused(halves, jnp.ones(4))


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_programs_that_an_operand_counts_depend_on_each_other(rows):
    """A product that is handed on, and a sum: the backward kernel begins at the last program that ran."""

    @pbkern.kernel(
        grid=(2, 8), dynamic_grid={1: 1}, in_specs=[BS((1, 1), lambda i, j: (i, j)), BS()],
        out_specs=[BS((1, 1), lambda i, j: (i, 0))] * 2, out_shape=[s(2, 1)] * 2,
        scratch_shapes=[pbkern.Scratch((1, 1), jnp.float32)],
    )  # fmt: skip
    def product(x, count, o, total, handed_on):
        @pbkern.when(pbkern.program_id(1) == 0)
        def _():
            handed_on[...] = jnp.ones((1, 1))
            total[...] = jnp.zeros((1, 1))

        handed_on[...] *= x[...]
        total[...] += jnp.sin(x[...])
        o[...] = handed_on[...] * (1 + pbkern.program_id(1))

    def call(x):
        return product(x, jnp.int32(rows))

    def plain(x):
        x = x[:, :rows]
        return [rows * x.prod(1, keepdims=True), jnp.sin(x).sum(1, keepdims=True)]

    case = Case(call, plain, (1 + numbers(2, 8) / 4,))
    for around in (pulled, pushed, AROUND["gradient of gradient"], AROUND["vmap of gradient"]):
        close(around(call, case.operands), exactly(around, case))


def test_grids_of_unknown_size_have_derivatives():
    @pbkern.kernel(
        grid=(8,), dynamic_grid={0: 1}, in_specs=[pbkern.BlockSpec((1,), lambda i: (i,)), pbkern.BlockSpec()],
        out_specs=pbkern.BlockSpec((1,), lambda i: (i,)), out_shape=s(8),
    )  # fmt: skip
    def squares(x, count, o):
        o[...] = x[...] ** 2

    x = jnp.arange(1.0, 9.0)
    got = jax.grad(lambda x: squares(x, jnp.int32(3)).sum())(x)
    np.testing.assert_array_equal(got, [2, 4, 6, 0, 0, 0, 0, 0])


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (straight_through(x), None), lambda _, given: (2 * given,))


@jax.custom_jvp
def steeper(x):
    return x**3


steeper.defjvp(lambda xs, tangents: (steeper(xs[0]), 7 * tangents[0]))

RULES = {
    "stop_gradient": lambda x: jax.lax.stop_gradient(x) * x,
    "relu": jax.nn.relu,  # 0 at 0, where a maximum has 1/2
    "custom_jvp": lambda x: steeper(x) * x,
    "custom_vjp": lambda x: straight_through(x) * x,
}


def stored(x, o, function):
    o[...] = function(x[...])


def stored_in_a_branch(x, o, function):
    @pbkern.when(x[0] == 0)
    def _():
        o[...] = function(x[...])


def stored_in_a_loop(x, o, function):
    @pbkern.loop(0, 4)
    def _(row):
        o[row] = function(x[row])


@pytest.mark.parametrize("store", [stored, stored_in_a_branch, stored_in_a_loop])
@pytest.mark.parametrize("rule", RULES)
def test_rules_inside_bodies_win(rule, store):
    @pbkern.kernel(out_shape=s(4))
    def kernel(x, o):
        store(x, o, RULES[rule])

    x = jnp.array([0.0, 1, -2, 3.25])
    stacked = [jnp.stack([x, 2 * x])]
    close(gradients(jax.vmap(kernel), stacked), gradients(jax.vmap(RULES[rule]), stacked))
    twice = AROUND["gradient of gradient"]
    if (rule, store) != ("custom_jvp", stored_in_a_loop):  # JAX's own loops have the rule once
        close(twice(kernel, [x]), twice(RULES[rule], [x]))
    if rule != "custom_vjp":  # which has no tangents
        close(pushed(kernel, [x]), pushed(RULES[rule], [x]))


def test_programs_of_parallel_dimensions_have_a_part_of_a_sum_each():
    case = layer_norm()
    backward = backward_plan(case.traced(), case.active).backward
    assert backward.compiler_params["cpu"].dimension_semantics == ("parallel",)
    assert [str(type_) for type_ in backward.out_types[1:]] == ["float32[4,1,32]"] * 2
    assert not backward.aliases  # nothing needs to begin as zeros


def test_large_parts_are_not_worth_their_memory():
    def body(x, table, o):
        o[...] = x[...] * table[...].sum()

    rows = pbkern.BlockSpec((1,), lambda i: (i,))
    kernel = pbkern.kernel(
        body, grid=(64,), in_specs=[rows, pbkern.BlockSpec()], out_specs=rows, out_shape=s(64),
        compiler_params=order("parallel"),
    )  # fmt: skip
    case = Case(kernel, lambda x, table: x * table.sum(), (numbers(64), numbers(100)))
    backward = backward_plan(case.traced(), case.active).backward
    assert backward.compiler_params["cpu"].dimension_semantics == ("arbitrary",)
    close(pulled(kernel, case.operands), exactly(pulled, case))


def test_what_one_branch_reads_is_computed_there():
    """The product of the last step is no part of the other steps."""
    case = with_epilogue(jax.nn.gelu)
    backward = backward_plan(case.traced(), case.active).backward
    products = [eqn.primitive.name for eqn in backward.body.jaxpr.eqns].count("dot_general")
    assert products == 2
    assert backward.source().count("dot") > 2


@pytest.mark.parametrize("update", ["max", "xchg"])
def test_other_atomic_updates_have_the_derivative_of_their_order(update):
    """A maximum's cotangent goes to the largest value, that of an exchange to the last one."""
    tile = pbkern.BlockSpec((3,), lambda i: (i,))

    @pbkern.kernel(grid=(4,), in_specs=[tile, tile], out_shape=s(4))
    def updated(bin_of, weight, o):
        @pbkern.when(pbkern.program_id(0) == 0)
        def _():
            o[...] = jnp.full(4, -5.0, jnp.float32)

        getattr(pbkern, f"atomic_{update}")(o, bin_of[...], weight[...] * 2)

    bin_of = np.array([3, 2, 2, 1, 1, 0, 0, 0, 0, 3, 2, 3], np.int32)
    weight, given = numbers(12), np.arange(1.0, 5.0, dtype=np.float32)
    (got,) = jax.vjp(lambda weight: updated(bin_of, weight), weight)[1](given)
    want = np.zeros(12)
    for number in range(4):
        (members,) = np.nonzero(bin_of == number)
        chosen = members[weight[members].argmax()] if update == "max" else members[-1]
        want[chosen] = 2 * given[number]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_kernels_that_convert_are_differentiated_in_compiled_functions(dtype):
    """JAX's rule of a conversion gives it a sharding over no devices."""

    @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((5,), jnp.float32))
    def kernel(x, o):
        o[...] = jnp.sin(x[...].astype(jnp.float32)) * x[...].mean(dtype=jnp.float32)

    x = jnp.asarray(np.linspace(-1, 1, 5), dtype)

    def loss(x):
        return kernel(x).sum()

    got = pbkern.jit(jax.grad(loss))(x)
    assert got.dtype == x.dtype
    wide = np.asarray(x, np.float64)
    want = np.cos(wide) * wide.mean() + np.sin(wide).sum() / 5
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=2.0**-7)
    for made in pbkern.jit(jax.grad(loss)).kernels(x):
        pbkern.rebuild(str(made))


def narrow(dtype):
    return lambda a: a.astype(dtype).astype(a.dtype) * a


# What a body computes by equations that have another derivative, or none: functions of a float32[5, 5].
REWRITTEN = {
    "few of top_k": lambda a: jax.lax.top_k(a, 2)[0],
    "most of top_k": lambda a: jax.lax.top_k(a, 5)[0],
    "top_k of columns": lambda a: jax.lax.top_k(a.T, 3)[0] * a[:, :3],
    "inverse": jnp.linalg.inv,
    "float8_e4m3fn": narrow(jnp.float8_e4m3fn),
    "sum of float8": lambda a: (a.astype(jnp.float8_e5m2) + a.astype(jnp.float8_e5m2)).astype(
        a.dtype
    ),
}
# Tangents are not rounded to a narrow float's type, as those of JAX are: half the step of 2 bits of mantissa.
NARROW_ROUNDING = 0.15


@pytest.mark.parametrize(
    ("name", "imported"), [*((name, False) for name in REWRITTEN), ("few of top_k", True)]
)
def test_derivatives_of_what_bodies_compute_by_other_equations(name, imported):
    function = REWRITTEN[name]
    x = jnp.asarray(numbers(5, 5, seed=3) + 2 * np.eye(5), jnp.float32)
    out = jax.eval_shape(function, x)

    def body(x_ref, o_ref):
        o_ref[...] = function(x_ref[...])

    kernel = pl.pallas_call if imported else pbkern.kernel
    call = jax.jit(kernel(body, out_shape=out))
    tolerance = NARROW_ROUNDING if "float8" in name else 2e-5
    with pbkern.pallas.installed():
        found = pushed(call, [x])[1], pulled(call, [x])[0]
    wanted = pushed(jax.jit(function), [x])[1], pulled(jax.jit(function), [x])[0]
    for got, want in zip(found, wanted):
        assert abs(want).max() > 0.1
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * abs(want).max())
