"""Plans: control flow, segments left to XLA, forwarding, constants, aliases, options, explanations."""

import dataclasses

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax

import pbkern
from pbkern.core.errors import UnsupportedOp
from pbkern.core.machine import DEFAULT_MACHINE, STREAMED_RUN_BYTES
from pbkern.dsl.host_program import Cond, Copy, HostWhile, Loop
from pbkern.fuse.access.blocks import Unfusable
from pbkern.fuse.partition.leave_layouts_to_xla import REASON as LAYOUT
from pbkern.fuse.tiling.block_search import alternatives, search, tall_blocks
from pbkern.targets.cpu.costs import CpuCosts

from .checking import check, loops_stay_outside, planned, rand
from .oracle import run_program

X = rand(6, 9)


def steps(plan):
    return [s for p in plan.programs() for s in p.steps]


LOOPS = {
    "scan": (lambda x: lax.scan(lambda c, a: (c + a, c * a), x[0], x), (X,), Loop),
    "scan_reverse": (
        lambda x: lax.scan(lambda c, a: (jnp.tanh(c - a), c.sum()), x[0], x, reverse=True),
        (X,),
        Loop,
    ),
    "scan_constant": (
        lambda x, w: lax.scan(lambda c, a: (c @ w + a, ()), x[0], x)[0],
        (X, rand(9, 9)),
        Loop,
    ),
    "scan_swaps": (
        lambda x: lax.scan(lambda c, a: ((c[1], c[0] + a), c[0]), (x[0], x[1]), x),
        (X,),
        Loop,
    ),
    "scan_nested": (
        lambda x: lax.scan(
            lambda c, a: lax.scan(lambda d, b: (d * 0.5 + b, d), c, a), x[0, 0], x.reshape(3, 2, 9)
        ),
        (X.reshape(3, 2, 9),),
        Loop,
    ),
    "fori": (
        lambda x: lax.fori_loop(0, 5, lambda i, c: jnp.roll(jnp.sin(c), 1) + i, x),
        (X,),
        Loop,
    ),
    "while": (
        lambda x: lax.while_loop(
            lambda c: c[0].sum() < 100.0, lambda c: (c[0] * 1.5 + 1, c[1] + 1), (x, 0)
        ),
        (X,),
        HostWhile,
    ),
    "cond": (
        lambda x: lax.cond(x.sum() > 0, lambda x: x * 2, lambda x: x.max() - x, x),
        (X,),
        Cond,
    ),
    "switch": (
        lambda x: lax.switch(
            jnp.int32(x[0, 0] * 0 + 1), [jnp.sin, lambda x: x, lambda x: 0 * x + 2], x
        ),
        (X,),
        Cond,
    ),
    "cond_literal": (lambda x: lax.cond(x.sum() > 0, lambda: 1.0, lambda: 2.0) + x, (X,), Cond),
}


@pytest.mark.parametrize("name", LOOPS)
def test_control_flow_is_native(name):
    f, args, kind = LOOPS[name]
    with loops_stay_outside():
        plan = check(f, *args)
    assert any(isinstance(s, kind) for s in steps(plan))


def test_a_loop_with_an_op_of_xlas_is_left_as_a_whole():
    def f(x):
        return lax.fori_loop(0, 3, lambda i, c: jnp.fft.fft(c).real + x, x) * 2

    plan = check(f, X, left=True)
    assert [x.op for x in plan.left_to_xla()] == ["scan"]
    assert len(plan.kernels()) >= 1


def test_segments_keep_order_around_xla():
    plan = check(lambda x: jnp.fft.fft(x @ x.T).real.sum(0) * 2 + x[:, 0], X, left=True)
    assert [s.is_ours for s in plan.segments] == [True, False, True]


def test_target_says_what_it_cannot_do():
    refused = "no tanh here"
    plan = planned(
        lambda x: jnp.tanh(x) + 1,
        X,
        supports=lambda e: refused if e.primitive.name == "tanh" else None,
    )
    (left,) = plan.left_to_xla()
    assert (left.op, left.why) == ("tanh", refused)
    assert "test_plan.py" in left.at


def test_strict_target_names_op_and_line():
    with pytest.raises(UnsupportedOp, match=r"(?s)svd.*test_plan.py"):
        planned(lambda x: jnp.linalg.svd(x @ x.T)[0], X, strict_target=True)


def test_inputs_literals_and_repeats_are_forwarded():
    plan = check(lambda x: (x, jnp.sin(x), jnp.float32(3), x, jnp.sin(x)), X, kernels=1)
    assert len(plan.programs()[0].outputs) == 1


def test_array_constants_become_inputs():
    table = np.arange(9, dtype=np.float32)
    plan = check(lambda x: x * table + jnp.asarray(table), X)
    assert len(plan.programs()[0].inputs) == 2


def test_reshapes_between_kernels_are_views():
    def f(x, w):
        return (jnp.sort(x @ w, 0).reshape(27, 2) * 2).sum(0), (x + 1).reshape(-1)

    check(f, X, rand(9, 9))


def test_reshape_of_an_input_is_an_output():
    check(lambda x: (x.reshape(9, 6), x.reshape(54) + 1), X)


def test_empty_arrays_go_to_xla():
    check(lambda x: (x[:0] + 1, x * 2), X, left=True)


def test_affine_fusion_can_be_disabled():
    plan = check(lambda x: jnp.sin(x) * 2 + 1, X, disable_affine_fusion=True)
    assert len(plan.kernels()) == 3


def test_reduce_reduce_fusion_can_be_disabled():
    assert len(check(jax.nn.softmax, X, disable_reduce_reduce_fusion=True).kernels()) > 1


def test_division_by_a_constant_keeps_its_rounding_on_request():
    def ops(**options):
        plan = planned(lambda x: x / 3, X, **options)
        return {e.primitive.name for e in plan.jaxpr.eqns}

    assert ops() == {"mul"}
    assert ops(disable_unsafe_math_canonicalizations=True) == {"div"}


def test_explanation_names_kernels_lines_and_prices():
    explanation = planned(lambda x: jnp.fft.fft(jax.nn.softmax(x)).real, X).explanation
    for part in (
        "kernel(s)",
        "test_plan.py",
        "us predicted",
        "operation(s), which saves",
        "XLA: fft",
    ):
        assert part in str(explanation)
    assert "fused: exp" not in str(explanation)
    assert "fused: exp at" in str(dataclasses.replace(explanation, verbose=True))


def test_temporaries_share_slots():
    def f(x, w):
        for _ in range(5):
            x = jnp.sort(x @ w, 1)
        return x

    big = rand(200, 200)
    plan = planned(f, big, big)
    temps = [b for p in plan.programs() for b in p.buffers if b.slot >= 0]
    assert len(temps) > len({b.slot for b in temps})


@pytest.mark.parametrize(
    ("mode", "multiplied"),
    [("fp16", "float16"), ("mixed_fp16_fp32", "float16"), ("fp32", "float32")],
)
def test_precision_mode_sets_the_dtype_of_contractions(mode, multiplied):
    plan = check(lambda x: x @ x.T, X, mm_conv_precision_mode=mode, tolerance=3e-2)
    (dot,) = [e for e in plan.jaxpr.eqns if e.primitive.name == "dot_general"]
    assert dot.invars[0].aval.dtype == multiplied


def test_kernels_verify_and_print():
    from pbkern.dsl.body_checks.verify import verify
    from pbkern.dsl.printer import rebuild, same_kernel, source

    from .workloads import WORKLOADS

    for f, args, types, _ in WORKLOADS.values():
        for kernel in planned(f, *args).kernels() + planned(f, *types).kernels():
            verify(kernel)
            assert same_kernel(kernel, rebuild(source(kernel)))


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_large_carries_alternate_between_buffers(count):
    def sums(x):
        return lax.fori_loop(0, count, lambda _, a: jnp.cumsum(jnp.tanh(a), 1), x)

    with loops_stay_outside():
        plan = check(sums, rand(70, 80), kernels=1)  # the counter is gone as well
    program = plan.programs()[0]
    loops = [s for s in program.steps if isinstance(s, Loop)]
    # The first step reads the operand, the last writes the result; in between, two steps per turn.
    assert [(len(s.steps), s.trip_count) for s in loops] == [(2, (count - 1) // 2)] * (count > 2)
    assert not any(isinstance(s, Copy) for s in program.steps)


def test_carries_of_other_shapes_alternate():
    """A new carry renames what a kernel makes."""

    def sums(x):
        return lax.fori_loop(0, 5, lambda _, a: jnp.cumsum(a[None] * 0.5, 2)[0], x)

    with loops_stay_outside():
        program = check(sums, rand(70, 80), kernels=1).programs()[0]
    assert not any(
        isinstance(s, Copy) for step in program.steps for s in getattr(step, "steps", (step,))
    )


@pytest.mark.parametrize("twice", [False, True])
def test_two_carries_that_are_one_array_are_copied(twice):
    def sums(x):
        def step(_, state):
            new = jnp.cumsum(state[0] * 0.5 + state[-1].reshape(state[0].shape), 1)
            return (new, new) if twice else (new, new.reshape(80, 70))

        return lax.fori_loop(0, 5, step, (x, x if twice else x.reshape(80, 70)))

    check(sums, rand(70, 80))


STENCILS = {
    "zero boundary": lambda a: (
        0.25 * sum(jnp.roll(jnp.pad(a, 1), s, d)[1:-1, 1:-1] for d in (0, 1) for s in (1, -1))
    ),
    "fixed boundary": lambda a: a.at[1:-1, 1:-1].set(
        0.25 * (a[:-2, 1:-1] + a[2:, 1:-1] + a[1:-1, :-2] + a[1:-1, 2:])
    ),
    "periodic": lambda a: a + 0.1 * (jnp.roll(a, 1, 0) + jnp.roll(a, -1, 1) - 2 * a),
    "lines": lambda a: a.at[:, 1:-1].set(0.5 * a[:, 1:-1] + 0.25 * (a[:, 2:] + a[:, :-2])),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", STENCILS)
@pytest.mark.parametrize("count", [4, pytest.param(13, marks=pytest.mark.slow)])
def test_stencils_do_several_steps_per_kernel(name, count):
    step = STENCILS[name]
    plan = check(lambda x: lax.fori_loop(0, count, lambda _, a: step(a), x), rand(70, 90))
    assert len(steps(plan)) < count


def test_waves_do_several_steps_per_kernel():
    def wavefronts(u, v, c):
        def step(carry, _):
            u, v = carry
            p = jnp.pad(v, 1)
            return (
                v,
                2 * v - u + c * (p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:] - 4 * v),
            ), None

        return lax.scan(step, (u, v), None, length=11)[0]

    plan = check(
        wavefronts, rand(70, 90), rand(70, 90, seed=1), 0.1 * rand(70, 90) ** 2, tolerance=1e-3
    )
    assert len(steps(plan)) < 11


def test_scan_slices_of_alternating_steps():
    def f(x):
        return lax.scan(lambda c, a: (jnp.tanh(c) + a, c * 2), x[0] * 0, x, reverse=True)

    check(f, rand(5, 70, 80))


@pytest.mark.parametrize(("apart", "kernels"), [(True, 3), (False, 1)])
def test_hand_written_kernels_are_launched(apart, kernels):
    """As they are, where nothing may be fused with them."""
    import pbkern
    from pbkern.dsl.call import call_kernel

    spec = pbkern.BlockSpec((2, 9), lambda i: (i, 0))
    kind = jax.ShapeDtypeStruct((6, 9), jnp.float32)

    @pbkern.kernel(grid=(3,), in_specs=[spec], out_specs=[spec], in_types=[kind], out_shape=[kind])
    def twice(x, y):
        y[...] = x[...] * 2

    kernel = twice.trace(kind)
    closed = jax.make_jaxpr(lambda x: jnp.tanh(call_kernel(kernel, x + 1)[0]))(X)
    function = jax.extend.core.jaxpr_as_fun(closed)
    plan = planned(function, X, disable_affine_fusion=apart)
    assert (kernel in plan.kernels()) == apart
    assert len(plan.kernels()) == kernels
    (got,) = plan.evaluate([X], run_program)
    np.testing.assert_allclose(got, np.tanh(2 * (np.asarray(X) + 1)), rtol=1e-5)


LONG = [
    lambda x: x.sum(),
    lambda x: x + x,
    lambda x: x[::3].max(),
    lambda x: lax.fori_loop(0, 3, lambda i, y: y + x[i], 0.0),
]


@pytest.mark.parametrize("f", LONG)
def test_arrays_longer_than_kernels_count_are_left_to_xla(f):
    made = planned(f, jax.ShapeDtypeStruct((2**31 + 77,), jnp.float32))
    left = [x.why for x in made.explanation.left if x.why != LAYOUT]
    assert left
    assert all("more than 2147483647 elements" in why or "its body" in why for why in left)
    assert planned(lambda x: x.sum(), jax.ShapeDtypeStruct((50000, 50001), jnp.float32)).kernels()


def test_blocks_of_products_are_searched_from_two_places():
    """With programs of few columns no rows are copied: cheaper, but not downhill from wide blocks."""
    types = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 2
    closed = jax.make_jaxpr(lambda a, b: jnp.tanh(a @ b))(*types)
    machine = dataclasses.replace(CpuCosts.of(DEFAULT_MACHINE), cores=2)
    wide = search(closed.jaxpr.eqns, closed.jaxpr.outvars, machine)
    tall = tall_blocks(closed.jaxpr.eqns, wide, machine)
    assert tall.blocks[1] < wide.blocks[1]
    assert tall.cost.seconds < wide.cost.seconds
    (kernel,) = planned(lambda a, b: jnp.tanh(a @ b), *types, machine=machine).kernels()
    assert kernel.grid == tall.grid
    sums = jax.make_jaxpr(lambda a: a.sum(1))(types[0])
    assert (
        tall_blocks(sums.jaxpr.eqns, search(sums.jaxpr.eqns, sums.jaxpr.outvars, machine), machine)
        is None
    )


@pytest.mark.parametrize(("columns", "dtype"), [(4000, jnp.int8), (4001, jnp.float16)])
def test_large_results_are_not_written_in_short_runs(columns, dtype):
    """Runs that begin inside a cache line share it with others, and do not pass the caches."""
    machine = dataclasses.replace(CpuCosts.of(DEFAULT_MACHINE), cores=2)
    rows = machine.l3_bytes // columns // 2
    row = jax.ShapeDtypeStruct((1, columns), dtype)
    (kernel,) = planned(
        lambda v: jnp.broadcast_to(v * 2, (rows, columns)), row, machine=machine
    ).kernels()
    assert kernel.outputs[0].ref_shape[-1] * np.dtype(dtype).itemsize >= STREAMED_RUN_BYTES


def test_groups_that_are_one_program_keep_it_where_other_blocks_have_no_schedule():
    """A halving product of a row asks for more and more places of the row, which no block of it has apart."""

    def f(x):
        return ((x @ jnp.ones((x.shape[1], 1))) * jnp.prod(x, 1, keepdims=True)).sum()

    x = 1 + 0.1 * rand(2, 129)
    plan = planned(jax.grad(f), x)
    exact = np.asarray(x, np.float64)
    product, total = exact.prod(1, keepdims=True), exact.sum(1, keepdims=True)
    (gradient,) = plan.evaluate([x], run_program)
    np.testing.assert_allclose(gradient, product + total * product / exact, rtol=1e-5)
    machine = CpuCosts.of(DEFAULT_MACHINE)
    without_others = []
    for group in (node for node in plan.nodes if node.kind == "group"):
        schedule = group.own_schedule
        outputs = [var for var, _ in schedule.outputs]
        try:
            search(group.eqns, outputs, machine)
        except Unfusable:
            assert tall_blocks(group.eqns, schedule, machine) is None
            assert alternatives(group.eqns, outputs, schedule.blocks, machine, 4) == []
            without_others.append(group)
    assert without_others


CHANNELS = st.sampled_from(
    [1, 3, 8, 17, 24, 33, 40, 65, 72, 96, 120, 144, 200, 288, 300, 576, 1000]
)


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 7, 14]),
    CHANNELS,
    CHANNELS,
    st.sampled_from([1, 3, 5]),
    st.sampled_from([1, 2]),
    st.booleans(),
)
def test_every_convolution_and_its_gradients_have_blocks(
    size, channels, features, taps, stride, depthwise
):
    """Whatever the number of channels: where the usual blocks end far outside of an array, blocks of equal sizes are taken."""
    groups, features = (channels, channels) if depthwise else (1, features)

    def f(x, w):
        y = lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
                                     feature_group_count=groups)  # fmt: skip
        return (y * y).sum(), y

    shapes = (1, size, size, channels), (taps, taps, channels // groups, features)
    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    assert not pbkern.jit(jax.grad(f, (0, 1), has_aux=True)).explain(*types).left
