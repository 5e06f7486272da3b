"""What planning a whole network costs, counted: nothing is asked twice without need."""

import gc
import importlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern import _jax
from pbkern._jax import user_line
from pbkern.core.jaxprs.walks import equations
from pbkern.fuse import pipeline
from pbkern.fuse.access import blocks
from pbkern.fuse.access.equation_kinds import EquationKinds
from pbkern.fuse.access.rules import whole
from pbkern.fuse.algebra.reassociate_row_sums import SumResults
from pbkern.fuse.algebra.sums_of_parts import JoinParts
from pbkern.fuse.cost import model as cost_model
from pbkern.fuse.cost import steps as cost_steps
from pbkern.fuse.cost.steps import PricedSteps
from pbkern.fuse.emit import body_memo
from pbkern.fuse.indexing.repeat_to_broadcast import repeats_to_broadcasts
from pbkern.fuse.partition import merge_groups, move_consumers
from pbkern.fuse.simplify.driver import simplify
from pbkern.fuse.tiling import one_program, root_probe, schedule, search_memo
from pbkern.lower.mlir.operation import Operation
from pbkern.targets.costs import kernel as kernel_costs

from .checking import COSTS, check, planned, rand

partition = importlib.import_module("pbkern.fuse.partition.partitioner")


def block(x, wq, wk, wv, wo, w1, w2):
    """Attention and two layers behind it, with norms."""

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)

    def heads(w):
        return (norm(x) @ w).reshape(len(x), 4, -1).transpose(1, 0, 2)

    q, k, v = map(heads, (wq, wk, wv))
    scores = jnp.exp(q @ k.transpose(0, 2, 1))
    mixed = (scores / scores.sum(-1, keepdims=True)) @ v
    x = x + mixed.transpose(1, 0, 2).reshape(x.shape) @ wo
    return x + jnp.maximum(norm(x) @ w1, 0) @ w2


ARGUMENTS = [
    np.ones(s, np.float32) for s in [(512, 256), *[(256, 256)] * 4, (256, 1024), (1024, 256)]
]


def test_groups_that_stay_apart_are_asked_once(monkeypatch):
    asked = []
    merge = merge_groups.merge

    def counted(self, a, b, limits, aliases=()):
        pair = tuple(tuple(map(id, n.eqns)) for n in (a, b))
        done = merge(self, a, b, limits, aliases)
        asked.append((pair, done))
        return done

    monkeypatch.setattr(merge_groups, "merge", counted)
    planned(block, *ARGUMENTS)
    assert any(done for _, done in asked)  # so that all pairs are looked at again
    assert len({pair for pair, _ in asked}) == len(asked)


def test_long_arithmetic_is_priced_in_parts(monkeypatch):
    priced = []
    schedule_more = search_memo.schedule_more

    def counted(eqns, *args):
        priced.append(len(eqns))
        return schedule_more(eqns, *args)

    def long(x):
        for k in range(300):
            x = x * 1.5 + x / (k + 2)
        return x

    monkeypatch.setattr(search_memo, "schedule_more", counted)
    plan = planned(long, np.ones((64, 64), np.float32))
    assert len(plan.kernels()) == 1
    equations = len(plan.jaxpr.eqns)
    assert equations >= 600
    assert sum(priced) < 20 * equations


def test_the_neighbours_of_a_filter_are_priced_in_parts(monkeypatch):
    priced = []
    schedule_more = search_memo.schedule_more

    def counted(eqns, *args):
        priced.append(len(eqns))
        return schedule_more(eqns, *args)

    def filtered(x):
        return sum((k + 0.5) * x[k // 12 : k // 12 + 52, k % 12 : k % 12 + 52] for k in range(144))

    monkeypatch.setattr(search_memo, "schedule_more", counted)
    plan = planned(filtered, np.ones((64, 64), np.float32))
    assert len(plan.kernels()) == 1
    equations = len(plan.jaxpr.eqns)
    assert equations >= 400
    assert sum(priced) < 20 * equations


def test_blocks_of_equations_are_worked_out_once(monkeypatch):
    pulled = []

    def counted(eqn, out):
        pulled.append((id(eqn), out, eqn))  # the equation lives as long as its id is compared
        return pull(eqn, out)

    pull = blocks.pull
    monkeypatch.setattr(blocks, "pull", counted)
    planned(block, *ARGUMENTS)
    assert len({(e, out) for e, out, _ in pulled}) == len(pulled)


def perceptron(x, *weights):
    for w in weights:
        x = jnp.tanh(x @ w + 0.5)
    return x


def test_equations_of_one_kind_are_priced_once(monkeypatch):
    priced, step_price = [], type(COSTS).step_price

    def counted(costs, step):
        priced.append(step)
        return step_price(costs, step)

    def prices(number):
        priced.clear()
        planned(
            perceptron, np.ones((32, 64), np.float32), *[np.ones((64, 64), np.float32)] * number
        )
        return len(priced)

    monkeypatch.setattr(type(COSTS), "step_price", counted)
    few = prices(4)
    assert few > 0
    assert prices(16) < 2 * few


def test_prices_of_equations_of_one_kind_are_those_of_each(monkeypatch):
    shared, price_of = [], cost_model.price_of

    def noted(step, costs):
        price = price_of(step, costs)
        if step.model is not None:
            shared.append((step, price))
        return price

    for module in (cost_model, cost_steps):
        monkeypatch.setattr(module, "price_of", noted)
    planned(network, *[np.ones(s, np.float32) for s in [(64, 32), (32, 48), (48, 32)]])
    assert shared
    for step, price in shared:
        assert price == COSTS.step_price(step), step.eqn


def network(x, w, v):
    """Layers that read what earlier ones made, with gradients: groups grow by copies of what several of them want."""

    def loss(w, v):
        y, total = x, 0.0
        for _ in range(3):
            y = (
                y
                + jax.nn.gelu(
                    (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-5) @ w
                )
                @ v
            )
            total += jnp.abs(jnp.roll(y, 1, 0)[1:] * y[:-1]).mean()
        return total

    return jax.value_and_grad(loss, (0, 1))(w, v)


def test_what_a_group_takes_in_is_worked_out_as_if_all_of_it_were(monkeypatch):
    parts, schedule_more = [], schedule.schedule_more

    def compared(eqns, found, machine):
        walked.clear()
        made = schedule_more(eqns, found, machine)
        parts.append(not walked)
        whole = schedule.schedule_at(eqns, [v for v, _ in found.outputs], found.blocks, machine)
        assert (made is None) == (whole is None)
        if made is not None:
            assert made.cost == whole.cost
            assert made.outputs == whole.outputs
            assert made.requests.inputs == whole.requests.inputs
            assert [(s.eqn, s.out) for s in made.requests.steps] == [
                (s.eqn, s.out) for s in whole.requests.steps
            ]
        return made

    walked, request = [], schedule.request
    counted = lambda *args: walked.append(args) or request(*args)
    for module in (schedule, root_probe):
        monkeypatch.setattr(module, "request", counted)
    monkeypatch.setattr(partition, "memoised_extension", compared)
    planned(network, *(np.ones(s, np.float32) for s in [(256, 128), (128, 512), (512, 128)]))
    assert len(parts) > 20
    assert sum(parts) > 0.8 * len(parts)


def layers(count):
    def f(x, w, v):
        def loss(w, v):
            y = x
            for _ in range(count):
                y = (
                    y
                    + jax.nn.gelu(
                        (y - y.mean(-1, keepdims=True))
                        / jnp.sqrt(y.var(-1, keepdims=True) + 1e-5)
                        @ w
                    )
                    @ v
                )
            return (y * y).mean()

        return jax.value_and_grad(loss, (0, 1))(w, v)

    return f


LAYER = [np.ones(s, np.float32) for s in [(256, 128), (128, 512), (512, 128)]]


@pytest.mark.parametrize("name", [pytest.param("search", marks=pytest.mark.slow), "schedule_more"])
def test_layers_that_are_alike_are_searched_once(name, monkeypatch):
    searched, search = [], getattr(search_memo, name)
    monkeypatch.setattr(search_memo, name, lambda *args: searched.append(args) or search(*args))
    counts = []
    for count in (6, 12):
        planned(layers(count), *LAYER)
        counts.append(len(searched))
        searched.clear()
    assert counts[1] < 1.5 * counts[0]


def recurrence(rows, weights):
    """Many small sums, products and joins; the intermediate results that are results too are pulled in as outputs."""
    state, seen = rows[0], []
    for k in range(25):
        mixed = jnp.concatenate([state[3:], rows[k % 5, :3]]) * weights[k % 4].sum()
        state = jnp.tanh(weights @ mixed[:6] + state[:4].max())[jnp.array([0, 1, 2, 3, 0, 1, 2])]
        if k % 8 == 0:
            seen.append(state)
    return state, seen


SMALL = [np.ones((5, 7), np.float32), np.full((4, 6), 0.1, np.float32)]


def test_long_groups_of_one_program_grow_without_searches(monkeypatch):
    walked, request = [], schedule.request

    def counted(eqns, outputs):
        walked.append(len(eqns))
        return request(eqns, outputs)

    for module in (schedule, root_probe):
        monkeypatch.setattr(module, "request", counted)
    plan = planned(recurrence, *SMALL)
    equations = len(plan.jaxpr.eqns)
    assert len(plan.kernels()) == 1
    assert equations > 200
    assert sum(walked) < 20 * equations


def test_what_a_long_group_grows_to_is_what_is_worked_out_anew(monkeypatch):
    parts, grown = [], search_memo.grown

    def compared(eqns, outputs, found, machine):
        walked.clear()
        made = grown(eqns, outputs, found, machine)
        parts.append((not walked, len(outputs) > len(found.outputs)))
        anew = schedule.schedule_at(eqns, outputs, outputs[0].aval.shape, machine)
        assert made.cost == anew.cost
        assert made.outputs == anew.outputs
        assert made.requests.inputs == anew.requests.inputs
        assert [(s.eqn, s.out) for s in made.requests.steps] == [
            (s.eqn, s.out) for s in anew.requests.steps
        ]
        return made

    walked, request = [], one_program.request
    monkeypatch.setattr(one_program, "request", lambda *args: walked.append(args) or request(*args))
    monkeypatch.setattr(search_memo, "grown", compared)
    planned(recurrence, *SMALL)
    assert len(parts) > 5
    assert (True, True) in parts
    assert (True, False) in parts


def lookups(x, places):
    """Gathers, scatters, views, joined indices and reductions, each of which has a rule for what is stored."""
    rows = jnp.sin(x)[places]
    joined = jnp.concatenate([rows * 2, jnp.cos(rows[::-1])])
    summed = jnp.zeros_like(x).at[places].add(jnp.tanh(joined[1 : 1 + len(places)]))
    one = summed.T.reshape(x.shape).sum(0) + joined.max(0)
    pair = jnp.stack([places % 2, places], -1)
    return x.at[pair[:, 0], pair[:, 1] % 3].mul(one[:3].sum()), jnp.where(x > 0, one, summed)


@pytest.mark.parametrize("with_totals", [True, False], ids=["totals", "prices"])
def test_prices_with_equations_in_front_are_those_of_all_equations(with_totals):
    args = rand(5, 4), np.array([3, 0, 4, 3], np.int32)
    jaxpr = planned(lookups, *args).jaxpr
    outputs = [(var, tuple(map(whole, var.aval.shape))) for var in jaxpr.outvars]
    machine, seen = COSTS, set()
    with blocks.steps_memoised():
        for k in range(len(jaxpr.eqns)):
            front, behind = jaxpr.eqns[:k], jaxpr.eqns[k:]
            made = {var for eqn in behind for var in eqn.outvars}
            later = blocks.request(behind, [(var, a) for var, a in outputs if var in made])
            known = [(var, a) for var, a in outputs if var in made]
            price = machine.kernel_cost if with_totals else PricedSteps.of
            price(later, known, () if with_totals else machine)
            more = blocks.request_more(front, later, [o for o in outputs if o not in known])
            extends = more.behind is not None
            anew = blocks.request(jaxpr.eqns, outputs)
            got, want = (PricedSteps.of(r, outputs, machine) for r in (more, anew))
            assert more.inputs == anew.inputs
            for name in ("steps", "results", "stored", "tables"):
                assert getattr(got, name) == getattr(want, name), (k, name)
            assert got.shares == want.shares
            assert machine.kernel_cost(more, outputs, ()) == machine.kernel_cost(anew, outputs, ())
            seen.add((extends, bool(got.stored), got.scatters))
    assert (True, True, True) in seen
    assert got.shares


def test_sums_over_a_long_group_are_over_its_new_equations(monkeypatch):
    """Of chains whose products store what is behind them, of comparisons of indices, and of plain arithmetic."""

    def f(x, w):
        for _ in range(6):
            x = jnp.tanh(x @ w) * 0.5 + jnp.where(jnp.tri(5, dtype=bool), x, 0.0)
            x = jnp.maximum(x - x.mean(-1, keepdims=True), jnp.sin(x)) @ (w * 2.0)
        return x

    jaxpr = planned(f, rand(5, 5), rand(5, 5)).jaxpr
    (output,) = jaxpr.outvars
    placed = [(output, tuple(map(whole, output.aval.shape)))]
    begun: list[bool] = []
    seen: list[bool] = []
    begin = kernel_costs._begun

    def noted(priced):
        totals, front = begin(priced)
        begun.append(len(front) < len(priced.steps))
        return totals, front

    monkeypatch.setattr(kernel_costs, "_begun", noted)
    with blocks.steps_memoised():
        requests = blocks.request(jaxpr.eqns[-1:], placed)
        for k in range(len(jaxpr.eqns) - 2, -1, -1):
            COSTS.kernel_cost(requests, placed, ())
            requests = blocks.request_more(jaxpr.eqns[k : k + 1], requests)
            begun.clear()
            cost = COSTS.kernel_cost(requests, placed, ())
            extends = begun.pop()
            assert cost == COSTS.kernel_cost(blocks.request(jaxpr.eqns[k:], placed), placed, ())
            seen.append(extends)
    assert seen.count(True) > 0.9 * len(seen)


def test_results_that_the_first_computes_anyway_are_not_asked_for_again(monkeypatch):
    walked, request, requested, anew = [], schedule.request, schedule._requested, []

    def compared(eqns, outputs, sizes):
        walked.clear()
        requests, placed, grid = requested(eqns, outputs, sizes)
        if len(outputs) > 1:
            anew.append(len(walked) > 1)
            whole = request(eqns, placed)
            assert requests.inputs == whole.inputs
            assert [(s.eqn, s.out) for s in requests.steps] == [(s.eqn, s.out) for s in whole.steps]
        return requests, placed, grid

    monkeypatch.setattr(schedule, "request", lambda *args: walked.append(args) or request(*args))
    monkeypatch.setattr(schedule, "_requested", compared)
    planned(network, *LAYER)
    assert True in anew  # a result that the first one does not read
    assert False in anew


def test_kernels_that_repeat_products_are_refused_before_all_steps_are_priced(monkeypatch):
    x, w, v = (np.ones(s, np.float32) for s in [(512, 256), (256, 256), (256, 256)])
    jaxpr = jax.make_jaxpr(lambda x, w, v: jnp.tanh(x @ w) @ v)(x, w, v).jaxpr
    (root,) = jaxpr.outvars
    whole_cost, walked, of = COSTS.kernel_cost, [], PricedSteps.of
    monkeypatch.setattr(PricedSteps, "of", lambda *args: walked.append(args) or of(*args))
    # Blocks of all columns compute each row of the first product once, others of 64 columns four times.
    for columns, is_refused in ((256, False), (64, True)):
        walked.clear()
        access, grid, _ = schedule.tile(root.aval.shape, [64, columns])
        requests = blocks.request(jaxpr.eqns, [(root, access)])
        assert (whole_cost(requests, [(root, access)], grid) is None) == is_refused
        assert bool(walked) != is_refused


def test_long_groups_of_one_program_compute_what_they_should():
    check(recurrence, rand(5, 7), 0.1 * rand(4, 6))


@pytest.mark.parametrize("f", [layers(3), network])
def test_what_is_found_for_a_group_holds_for_those_like_it(f, monkeypatch):
    remembered = planned(f, *LAYER)
    monkeypatch.setattr(search_memo, "_once", lambda what, eqns, outputs, look, with_runs: look())
    assert [k.source() for k in planned(f, *LAYER).kernels()] == [
        k.source() for k in remembered.kernels()
    ]


def test_groups_that_differ_in_a_number_are_not_alike():
    kinds = EquationKinds()
    keys = []
    functions = [
        lambda x, y: jnp.exp(x * 2.0) + y,
        lambda x, y: jnp.exp(y * 2.0) + x,  # like the first
        lambda x, y: jnp.exp(x * 2.0) + x,
        lambda x, y: jnp.exp(x * 3.0) + y,
        lambda x, y: jnp.log(x * 2.0) + y,
        lambda x, y: jnp.sum(x * y)[None],
    ]
    for f in functions:
        jaxpr = jax.make_jaxpr(f)(np.ones(5, np.float32), np.ones(5, np.float32)).jaxpr
        keys.append(kinds.group(jaxpr.eqns, jaxpr.outvars))
    assert keys[0] == keys[1]
    assert len(set(keys)) == len(keys) - 1


def test_values_handed_over_are_looked_for_in_one_walk(monkeypatch):
    """Of a group that reads a large value and makes long arithmetic of what it takes from it, beginnings grow step by step."""
    read, counted = [], move_consumers._read

    def counting(eqns):
        read.append(len(eqns))
        return counted(eqns)

    def long(x, labels):
        m = jax.nn.log_softmax(x)[np.arange(len(x)), labels]
        for k in range(100):
            m = m * m + k
        return m.mean()

    monkeypatch.setattr(move_consumers, "_read", counting)
    plan = planned(long, np.ones((3000, 500), np.float32), np.ones(3000, np.int32))
    equations = len(plan.jaxpr.eqns)
    assert equations > 200
    assert equations < sum(read) < 4 * equations**2


def test_mirrored_borders_do_not_multiply_blocks(monkeypatch):
    """Each stage reads the one before at its own place and, turned around, at both ends of it."""
    pulled, pull = [], blocks.pull

    def smoothed(x):
        for _ in range(5):
            p = jnp.pad(x, 1, mode="symmetric")
            x = 0.25 * (p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:])
        return x

    def counted(eqn, out):
        pulled.append(eqn)
        return pull(eqn, out)

    monkeypatch.setattr(blocks, "pull", counted)
    plan = check(smoothed, rand(30, 40))
    assert len(pulled) < 80 * len(plan.jaxpr.eqns)


def test_groups_keep_their_blocks_where_a_search_finds_none(monkeypatch):
    search, searched = partition.memoised_search, []

    def in_vain(eqns, *args):
        searched.append(len(eqns))
        if len(eqns) > 1:
            raise blocks.Unfusable("an output does not have every grid axis")
        return search(eqns, *args)

    monkeypatch.setattr(partition, "memoised_search", in_vain)
    check(lambda x: jnp.tanh(x * 2 + 1), rand(30, 40))
    assert max(searched) > 1


def test_bodies_of_equal_layers_are_traced_once(monkeypatch):
    traced = []
    trace_body = body_memo.trace_body

    def counted(*of):
        traced.append(of)
        return trace_body(*of)

    monkeypatch.setattr(body_memo, "trace_body", counted)

    def layers(x, *ws):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x

    x = np.ones((512, 512), np.float32)
    kernels = planned(layers, x, *[x] * 8).kernels()
    assert len(kernels) == 8
    assert len(traced) == 1
    assert len({id(kernel.body) for kernel in kernels}) == 1


def test_bodies_keep_the_lines_of_their_own_equations():
    def layers(x, v, w):
        x = jnp.tanh(x @ v)
        return jnp.tanh(x @ w)

    x = np.ones((512, 512), np.float32)
    first, second = planned(layers, x, x, x).kernels()
    assert first.content == second.content
    lines = [user_line(kernel.body.jaxpr.eqns[-2]) for kernel in (first, second)]
    assert lines[0] != lines[1]
    assert all("test_planning_work.py" in line for line in lines)


def test_what_one_long_group_alone_reads_joins_it_at_once(monkeypatch):
    attempts, merge = [], merge_groups.merge

    def counted(parts, node, consumer, limits, aliases=()):
        if one_program.grows(consumer.eqns, consumer.own_schedule):
            attempts.append(node)
        return merge(parts, node, consumer, limits, aliases)

    def circuit(angles):
        """Gates of one qubit each, one after the other: a turn, and a phase."""
        state = jnp.zeros(64, jnp.complex64).at[0].set(1).reshape((2,) * 6)
        for layer in angles:
            for qubit, (turn, phase) in enumerate(layer):
                cos, sin = jnp.cos(turn / 2), jnp.sin(turn / 2)
                turned = jnp.array([[cos, -sin], [sin, cos]]).astype(jnp.complex64)
                moved = jnp.array([[1, 0], [0, jnp.exp(1j * phase.astype(jnp.complex64))]])
                for gate in (turned, moved):
                    state = jnp.tensordot(gate, state, ((1,), (qubit,)))
                    state = jnp.moveaxis(state, 0, qubit)
        chances = (jnp.abs(state) ** 2).sum(tuple(range(1, 6)))
        return (chances * jnp.array([1.0, -1.0])).sum()

    monkeypatch.setattr(merge_groups, "merge", counted)
    angles = rand(1, 6, 2)
    plan = planned(jax.value_and_grad(circuit), angles)
    assert len(plan.jaxpr.eqns) > 300
    assert len(attempts) < 4
    check(jax.value_and_grad(circuit), angles)


def test_plans_leave_no_frames_behind():
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        planned(block, *ARGUMENTS)
        gc.collect()
        left = [value for value in gc.garbage if isinstance(value, types.FrameType)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not left


def test_code_leaves_little_text_behind():
    """Operations of MLIR are freed when they are printed: the collector takes longer for what it has to look for."""
    lines = pbkern.jit(block).as_text(*ARGUMENTS, stage="mlir").count("\n")
    jax.clear_caches()
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        pbkern.jit(lambda *args: block(*args) * 2).as_text(*ARGUMENTS, stage="mlir")
        gc.collect()
        left = sum(isinstance(value, Operation) for value in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert left < 0.4 * lines


def test_passes_whose_chains_are_absent_trace_nothing():
    """Pads, choices, repetitions and products of sums are there, but not where these passes look for them."""

    def f(x, w):
        y = jnp.exp(x @ w).sum(1, keepdims=True) * (x @ w)
        padded = jax.lax.pad(x[:3], np.float32(0), [(0, 2, 0), (0, 0, 0)]) * 2
        return jnp.where(x > 0, y, padded).reshape(-1) + 1, jnp.broadcast_to(x[:, None], (5, 2, 5))

    closed = simplify(jax.make_jaxpr(f)(*[jnp.ones((5, 5), jnp.float32)] * 2))
    assert JoinParts()(closed, None) is closed
    assert SumResults()(closed, None) is closed
    assert repeats_to_broadcasts(closed) is closed


def test_reports_are_made_when_they_are_asked_for(monkeypatch):
    made, explain = [], pipeline.explain
    monkeypatch.setattr(pipeline, "explain", lambda *args: made.append(args) or explain(*args))
    plan = planned(perceptron, *[np.ones((8, 8), np.float32)] * 3)
    assert not made
    assert plan.explanation is plan.explanation
    assert len(made) == 1
    assert len(plan.explanation.kernels) == len(plan.kernels())


def test_walks_look_at_the_parameters_of_equations_once(monkeypatch):
    looked, holds = [], _jax._holds_jaxprs
    monkeypatch.setattr(
        _jax, "_holds_jaxprs", lambda params: looked.append(params) or holds(params)
    )
    closed = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), c), x, None, 3))(1.0)
    inside = [eqn.primitive.name for eqn in equations(closed.jaxpr)]
    assert inside == ["scan", "sin"]
    assert inside == [eqn.primitive.name for eqn in equations(closed.jaxpr)]
    assert len(looked) == len(inside)


def normalised_convolutions(x, filters):
    """Convolutions of groups of channels that are normalised over whole images."""
    for weights in filters:
        groups = x.reshape(*x.shape[:3], 4, -1)
        centred = groups - groups.mean((1, 2, 4), keepdims=True)
        scaled = centred * jax.lax.rsqrt((centred * centred).mean((1, 2, 4), keepdims=True) + 1e-5)
        x = jax.lax.conv_general_dilated(
            jax.nn.silu(scaled.reshape(x.shape)),
            weights,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
    return x


def test_groups_that_grow_are_probed_from_the_blocks_that_they_needed_before(monkeypatch):
    asked, request = [], root_probe.request
    monkeypatch.setattr(root_probe, "request", lambda *args: asked.append(args) or request(*args))
    arguments = (
        np.ones((2, 16, 16, 32), np.float32),
        [np.ones((3, 3, n, m), np.float32) for n, m in [(32, 64), (64, 48), (48, 16)]],
    )
    kernels, counts = [], []
    for is_incremental in (True, False):
        if not is_incremental:
            anew = lambda self, probed: root_probe.LeastBlocks()
            monkeypatch.setattr(root_probe._Probed, "least_so_far", anew)
        asked.clear()
        kernels.append(
            [kernel.source() for kernel in planned(normalised_convolutions, *arguments).kernels()]
        )
        counts.append(len(asked))
    assert kernels[0] == kernels[1]
    assert counts[0] < 0.7 * counts[1]
