"""Lines of points in turn: the order, what it must not break, and where nothing changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.lower.mlir.operation import Operation, Region
from pbkern.targets.cpu.emit.interleave_chains import (
    AHEAD,
    FEW_LIVE,
    MOST_INTERLEAVED,
    MOST_LIVE,
    SHORTEST_INTERLEAVED,
    SHORTEST_SORTED,
    interleaved,
)

VECTOR = "vector<16xf32>"
REGISTERS = 32


def load(result: str) -> Operation:
    return Operation("vector.load", ("%a", "%i"), f"memref<64xf32>, {VECTOR}", result=result)


def chain(name: str, length: int, first: str = "") -> list[Operation]:
    """A point of `length` operations, each on the one before."""
    first = f"%{first or name + '0'}"
    steps = [
        Operation("arith.addf", (f"%{name}{k - 1}", first), VECTOR, result=f"%{name}{k}")
        for k in range(1, length - 1)
    ]
    last = (f"%{name}{length - 2}", "%b", "%i")
    store = Operation("vector.store", last, f"memref<64xf32>, {VECTOR}")
    return [load(f"%{name}0"), *steps, store]


def loads_and_steps(name: str, count: int) -> list[Operation]:
    """A point whose values all live until its end."""
    loads = [load(f"%{name}{k}") for k in range(count)]
    steps = [
        Operation("arith.negf", (f"%{name}{k}",), VECTOR, result=f"%{name}s{k}")
        for k in range(count)
    ]
    return loads + steps


def test_long_points_take_turns():
    a, b = chain("a", SHORTEST_INTERLEAVED), chain("b", SHORTEST_INTERLEAVED)
    assert interleaved([a, b], REGISTERS) == [op for pair in zip(a, b) for op in pair]


def test_points_that_ask_for_lines_take_turns():
    ahead = Operation("memref.prefetch", ("%a", "%i"), "memref<64xf32>")
    a, b = ([ahead, *chain(name, SHORTEST_INTERLEAVED)] for name in "ab")
    assert interleaved([a, b], REGISTERS) == [op for pair in zip(a, b) for op in pair]


def test_short_points_stay_one_after_the_other():
    a, b = chain("a", SHORTEST_INTERLEAVED - 1), chain("b", SHORTEST_INTERLEAVED - 1)
    assert interleaved([a, b], REGISTERS) == a + b


@pytest.mark.parametrize(
    "last",
    [
        Operation("scf.if", ("%t",), "", f" %s -> ({VECTOR})", (Region([]),), "%c"),
        Operation("scf.if", ("%t",), regions=(Region([]),)),
        Operation("func.call", syntax=" @print()"),
    ],
    ids=lambda op: op.head,
)
def test_branches_and_calls_keep_all_in_order(last):
    points = [[*chain(name, SHORTEST_INTERLEAVED), last] for name in "ab"]
    assert interleaved(points, REGISTERS) == points[0] + points[1]


def test_what_a_point_takes_from_another_comes_before():
    a, b = (
        chain("a", 2 * SHORTEST_INTERLEAVED),
        chain("b", SHORTEST_INTERLEAVED, first=f"a{SHORTEST_INTERLEAVED}"),
    )
    order = interleaved([b, a], REGISTERS)  # b reads a value of a that is computed late
    defined = {"%a", "%b", "%i"}
    for op in order:
        assert defined.issuperset(op.operands)
        defined.update(op.defined)
    assert set(order) == {*a, *b}
    assert len(order) == len(a) + len(b)


def test_groups_shrink_where_registers_are_few():
    """Values that all live to the end of a point: fewer points share the registers."""
    points = [loads_and_steps(name, MOST_LIVE // 3) for name in "abcd"]
    order = interleaved(points, REGISTERS)
    assert len(points) == MOST_INTERLEAVED
    assert order.index(points[2][0]) == len(order) // 2


def test_points_that_fill_the_registers_alone_stay_one_after_the_other():
    points = [loads_and_steps(name, MOST_LIVE) for name in "ab"]
    assert interleaved(points, REGISTERS) == points[0] + points[1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("n", [1, 15, 16, 17, 63, 64, 65, 1000, 4097])
def test_long_chains_of_all_lengths(n):
    """Whole steps, a rest of several vectors, and a last partial one."""

    def f(x):
        for _ in range(6):
            x = x - (x**3 - 2 * x - 5) / (3 * x * x - 2)
        return x

    x = np.linspace(2, 4, n, dtype=np.float32)
    want = f(x.astype(np.float64))
    np.testing.assert_allclose(pbkern.jit(f)(jnp.asarray(x)), want, rtol=1e-6)


def test_chains_before_a_sum():
    x = np.random.default_rng(0).standard_normal((37, 1003)).astype(np.float32)
    want = (x.astype(np.float64) * np.tanh(np.log1p(np.exp(x.astype(np.float64))))).sum(1)
    got = pbkern.jit(lambda x: (x * jnp.tanh(jax.nn.softplus(x))).sum(1))(jnp.asarray(x))
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_groups_of_short_lived_values_have_twice_the_points():
    points = [chain(name, SHORTEST_INTERLEAVED) for name in "abcdefgh"]
    order = interleaved(points, REGISTERS)
    assert len(points) == 2 * MOST_INTERLEAVED
    assert order[: len(points)] == [point[0] for point in points]


def steps_of_squares(name: str, count: int) -> list[Operation]:
    """A point whose steps need three vectors each, and leave one."""
    operations, last = [load(f"%{name}0")], f"%{name}0"
    for k in range(count):
        one, other, total = (f"%{name}{part}{k}" for part in "pqr")
        operations += [
            Operation("arith.addf", (last, last), VECTOR, result=one),
            Operation("arith.mulf", (last, last), VECTOR, result=other),
            Operation("arith.addf", (one, other), VECTOR, result=total),
        ]
        last = total
    store = Operation("vector.store", (last, "%b", "%i"), f"memref<64xf32>, {VECTOR}")
    return [*operations, store]


def most_live(order: list[Operation]) -> int:
    """Vectors that are made and still to be read, at most."""
    ends = {name: k for k, op in enumerate(order) for name in op.operands}
    starts = {op.result: k for k, op in enumerate(order) if op.result}
    return max(sum(starts[x] <= k <= ends[x] for x in starts) for k in range(len(order)))


@pytest.mark.parametrize(("registers", "together"), [(32, 1), (16, 3)])
def test_runs_that_leave_one_vector_take_turns_where_registers_are_few(registers, together):
    """Eight points of 16 registers have a register each between their steps, so that steps take turns."""
    points = [steps_of_squares(name, SHORTEST_INTERLEAVED) for name in "abcdefgh"]
    order = interleaved(points, registers)
    assert sorted(map(id, order)) == sorted(id(op) for point in points for op in point)
    loads = [point[0] for point in points]
    assert order[:8] == loads
    assert order[8 : 8 + together] == points[0][1 : 1 + together]
    assert order[8 + together] is points[1][1]
    assert most_live(order) <= registers * FEW_LIVE


def test_points_without_operations_beside_long_ones():
    """A point that another one computes has nothing to do, also the first one."""
    points = [[], *(steps_of_squares(name, SHORTEST_INTERLEAVED) for name in "abcdefg")]
    order = interleaved(points, 16)
    assert sorted(map(id, order)) == sorted(id(op) for point in points for op in point)


def added_chains(names: str, length: int) -> list[Operation]:
    """A point of chains that it adds up: each chain behind the one before, and the sum so far after each."""
    operations, total = [load("%t0")], "%t0"
    for name in names:
        operations += chain(name, length)[:-1]
        added = (total, f"%{name}{length - 2}")
        total = f"%t{name}"
        operations.append(Operation("arith.addf", added, VECTOR, result=total))
    return [
        *operations,
        Operation("vector.store", (total, "%b", "%i"), f"memref<64xf32>, {VECTOR}"),
    ]


def is_in_order(order: list[Operation]) -> bool:
    """Whether every operation comes behind those whose values it reads."""
    places = {op.result: k for k, op in enumerate(order) if op.result}
    return all(places.get(name, -1) < k for k, op in enumerate(order) for name in op.operands)


def test_chains_of_a_long_point_take_turns():
    point = added_chains("abcdef", 30)
    order = interleaved([point], REGISTERS)
    assert sorted(map(id, order)) == sorted(map(id, point))
    assert is_in_order(order)
    # Steps of the first chain, of which each waits for three cycles, and between them those of later ones.
    first = [order.index(op) for op in point if op.result and op.result.startswith("%a")]
    assert first[10] > 2 * 10
    assert order[-1] is point[-1]


def test_no_operation_of_a_long_point_begins_far_ahead():
    point = added_chains("abcdefghijkl", 30)
    order = interleaved([point], REGISTERS)
    places = {id(op): k for k, op in enumerate(point)}
    waiting = set(range(len(point)))
    for op in order:
        assert places[id(op)] - min(waiting) <= AHEAD
        waiting.remove(places[id(op)])


def test_operations_of_a_long_point_stay_between_its_stores():
    parts = [added_chains(names, 30) for names in ("abcd", "efgh")]
    parts[1][0] = load("%t1")  # the name of the first part's load is taken
    parts[1] = [
        Operation(op.name, tuple("%t1" if x == "%t0" else x for x in op.operands), op.types, result=op.result)
        for op in parts[1]
    ]  # fmt: skip
    point = parts[0] + parts[1]
    order = interleaved([point], REGISTERS)
    assert order[len(parts[0]) - 1] is parts[0][-1]
    assert {*order[: len(parts[0])]} == {*parts[0]}
    assert is_in_order(order)


def test_a_point_alone_that_is_short_keeps_its_order():
    point = added_chains("ab", SHORTEST_SORTED // 2 - 5)
    assert len(point) < SHORTEST_SORTED
    assert interleaved([point], REGISTERS) == point


def test_weights_of_many_neighbours():
    """A point of 25 exponentials, against float64."""
    x = np.random.default_rng(0).standard_normal((40, 61)).astype(np.float32)

    def bilateral(x, exp):
        rows, columns = x.shape[0] - 4, x.shape[1] - 4
        centre = x[2 : 2 + rows, 2 : 2 + columns]
        total, weight = centre * 0, centre * 0
        for i in range(5):
            for j in range(5):
                y = x[i : i + rows, j : j + columns]
                w = exp(-((y - centre) ** 2) - 0.1 * ((i - 2) ** 2 + (j - 2) ** 2))
                total, weight = total + w * y, weight + w
        return total / weight

    got = pbkern.jit(lambda x: bilateral(x, jnp.exp))(jnp.asarray(x))
    np.testing.assert_allclose(got, bilateral(x.astype(np.float64), np.exp), rtol=1e-5, atol=1e-6)
