"""Lines of points in turn: the order, what it must not break, and where nothing changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.lower.mlir.operation import Operation
from pbkern.targets.cpu.emit import interleave_chains
from pbkern.targets.cpu.emit.interleave_chains import (
    MOST_INTERLEAVED,
    MOST_LIVE,
    SHORTEST_INTERLEAVED,
)


def interleaved(points: list[list[str]]) -> list[str]:
    """The same of lines."""
    return [
        op.text
        for op in interleave_chains.interleaved([list(map(Operation, lines)) for lines in points])
    ]


def chain(name: str, length: int, first: str = "") -> list[str]:
    """A point of `length` operations, each on the one before."""
    lines = [f"%{name}0 = vector.load %a[%i] : memref<64xf32>, vector<16xf32>"]
    lines += [
        f"%{name}{k} = arith.addf %{name}{k - 1}, %{first or name + '0'} : vector<16xf32>"
        for k in range(1, length - 1)
    ]
    return [*lines, f"vector.store %{name}{length - 2}, %b[%i] : memref<64xf32>, vector<16xf32>"]


def test_long_points_take_turns():
    a, b = chain("a", SHORTEST_INTERLEAVED), chain("b", SHORTEST_INTERLEAVED)
    assert interleaved([a, b]) == [line for pair in zip(a, b) for line in pair]


def test_short_points_stay_one_after_the_other():
    a, b = chain("a", SHORTEST_INTERLEAVED - 1), chain("b", SHORTEST_INTERLEAVED - 1)
    assert interleaved([a, b]) == a + b


@pytest.mark.parametrize(
    "line",
    ["%c = scf.if %t -> (vector<16xf32>) {\nscf.yield\n}", "scf.if %t {", "func.call @print()"],
)
def test_branches_and_calls_keep_all_in_order(line):
    points = [[*chain(name, SHORTEST_INTERLEAVED), line] for name in "ab"]
    assert interleaved(points) == points[0] + points[1]


def test_what_a_point_takes_from_another_comes_before():
    a, b = (
        chain("a", 2 * SHORTEST_INTERLEAVED),
        chain("b", SHORTEST_INTERLEAVED, first=f"a{SHORTEST_INTERLEAVED}"),
    )
    lines = interleaved([b, a])  # b reads a value of a that is made late
    made: set[str] = {"%a", "%b", "%i"}
    for line in lines:
        own, *needed = [w.strip(",[]") for w in line.replace("[", " ").split() if w.startswith("%")]
        assert made.issuperset(needed) or line.startswith("vector.store")
        made.add(own)
    assert sorted(lines) == sorted(a + b)


def test_groups_shrink_where_registers_are_few():
    """Values that all live to the end of a point: fewer points share the registers."""

    def wide(name: str) -> list[str]:
        loads = [
            f"%{name}{k} = vector.load %x[%i] : memref<64xf32>, vector<16xf32>"
            for k in range(MOST_LIVE // 3)
        ]
        return loads + [
            f"%{name}s{k} = arith.negf %{name}{k} : vector<16xf32>" for k in range(len(loads))
        ]

    points = [wide(name) for name in "abcd"]
    lines = interleaved(points)
    assert len(points) == MOST_INTERLEAVED
    assert (
        lines.index("%c0 = vector.load %x[%i] : memref<64xf32>, vector<16xf32>") == len(lines) // 2
    )


def test_points_that_fill_the_registers_alone_stay_one_after_the_other():
    def wide(name: str) -> list[str]:
        loads = [
            f"%{name}{k} = vector.load %x[%i] : memref<64xf32>, vector<16xf32>"
            for k in range(MOST_LIVE)
        ]
        return loads + [
            f"%{name}s{k} = arith.negf %{name}{k} : vector<16xf32>" for k in range(len(loads))
        ]

    points = [wide(name) for name in "ab"]
    assert interleaved(points) == points[0] + points[1]


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
