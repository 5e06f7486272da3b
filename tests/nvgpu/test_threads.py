"""Who computes what: points of nests on threads, barriers between statements that meet."""

import dataclasses
import math

import numpy as np
import pytest

from pbkern.core.affine import Affine
from pbkern.lower.nest.ir import Buf, For, Nest, Pool, Reduction, Store
from pbkern.targets.simt.passes.strips import in_step
from pbkern.targets.simt.schedule.barriers import Barriers, Pending
from pbkern.targets.simt.schedule.policy import ThreadPolicy
from pbkern.targets.simt.schedule.threads import is_one_to_one, is_parallel, map_to_threads
from pbkern.targets.simt.schedule.tiles import Tile, accepts, tiles, whole_terms

F32 = np.dtype(np.float32)
i, j = Affine.symbol("i"), Affine.symbol("j")


def copy(source: Buf, index, target: Buf, place, dims) -> Nest:
    load = Pool().load(F32, source, index, False)
    return Nest(dims, stores=(Store(target, place, load),))


@pytest.mark.parametrize(("index", "is_one"), [
    ((i, j), True), ((i * 4 + j,), True), ((i * 3 + j,), False), ((i,), False), ((i + j, i), True), ((i * 0 + 2, i + j), False),
])  # fmt: skip
def test_indices_that_tell_points_apart(index, is_one):
    places = {
        tuple(a.evaluate({"i": x, "j": y}) for a in index) for x in range(5) for y in range(4)
    }
    assert (len(places) == 20) or not is_one
    assert is_one_to_one(index, {"i": 5, "j": 4}) is is_one


def test_points_that_read_what_others_store_run_in_order():
    a, b = Buf("%a", (10,), F32), Buf("%b", (10,), F32)
    shifted = copy(a, (i,), a, (i + 1,), {"i": 9})
    assert not is_parallel(shifted, {"i": 9})
    assert map_to_threads(shifted, 128, 32).alone
    assert not map_to_threads(copy(a, (i,), a, (i,), {"i": 9}), 128, 32).alone
    assert not map_to_threads(copy(a, (i,), b, (i + 1,), {"i": 9}), 128, 32).alone


def test_lanes_run_along_neighbours():
    a, b = Buf("%a", (30, 50), F32), Buf("%b", (50, 30), F32)
    assert (
        map_to_threads(copy(a, (i, j), a, (i, j), {"j": 50, "i": 30}), 128, 32).free[-1][0] == "j"
    )
    assert (
        map_to_threads(copy(a, (i, Affine()), b, (Affine(), i), {"j": 1, "i": 30}), 128, 32).free[
            -1
        ][0]
        == "i"
    )


def test_places_of_a_tile():
    far, near = Tile("i", 10, 4), Tile("i", 8, 4, beside=True)
    assert far.steps == 3
    assert [far.may_lie_outside(u) for u in range(4)] == [
        False,
        False,
        False,
        True,
    ]
    assert sorted(far.place(u).evaluate({"i": k}) for u in range(4) for k in range(3)) == list(
        range(12)
    )
    assert sorted(near.place(u).evaluate({"i": k}) for u in range(4) for k in range(2)) == list(
        range(8)
    )


def planned(stmts) -> list[bool]:
    """Before which statements, inner ones too, threads wait; %t and %u share bytes."""
    places = {"%t": ("shared", 0, 64), "%u": ("shared", 32, 96), "%v": ("shared", 96, 128)}
    plan = Barriers(lambda b: places.get(b.name, (b.name, 0, 1)), lambda s: False)
    plan.run(stmts, Pending())
    return [id(s) in plan.before for s in stmts]


def test_barriers_stand_where_bytes_meet():
    a, t, u, v = (Buf(n, (8,), F32, arena=n != "%a") for n in ("%a", "%t", "%u", "%v"))
    at = ((i,), {"i": 8})
    store = lambda source, target: copy(source, at[0], target, at[0], at[1])
    assert planned([store(a, t), store(a, v), store(t, a)]) == [False, False, True]
    assert planned([store(a, t), store(a, u)]) == [False, True]
    assert planned([store(a, t), store(a, v), store(v, u)]) == [False, False, True]


def test_steps_of_a_loop_meet():
    a, t = Buf("%a", (8,), F32), Buf("%t", (8,), F32, arena=True)
    body = [copy(a, (i,), t, (i,), {"i": 8})]
    plan = Barriers(lambda b: (b.name, 0, 1), lambda s: False)
    plan.run([For("%k", 3, tuple(body))], Pending())
    assert id(body[0]) in plan.before


A, B, C = (Buf(n, (10, 12), F32) for n in ("%a", "%b", "%c"))
ROWS = {"i": 10, "j": 12}
k, l = Affine.symbol("k"), Affine.symbol("l")


def test_which_tiles_a_nest_accepts():
    """A neighbour's choice: points in order take none, and those outside may not be read where the nest stores."""
    plain, kept = copy(A, (i, j), B, (i, j), ROWS), Buf("%t", (10, 12), F32, arena=True)
    far, near = Tile("i", 10, 4), Tile("j", 12, 4, beside=True)
    assert accepts(plain, [far], kept)
    assert accepts(plain, [near], kept)
    assert not accepts(dataclasses.replace(plain, ordered=True), [far], kept)
    over = copy(A, (i, j), A, (i, j), ROWS)
    assert not accepts(over, [far], kept)
    assert accepts(over, [Tile("i", 10, 5)], kept)
    assert accepts(over, [far], A)
    assert not accepts(plain, [Tile("j", 12, 6, beside=True)], kept)  # more than 16 bytes
    assert not accepts(copy(A, (i, j), B, (j, i), ROWS), [near], kept)  # no vector


@pytest.mark.parametrize(("source", "place", "vectors"), [
    ((i, j), (i, j), True), ((i, j + 4), (i, j), True), ((i, j + 1), (i, j), False), ((i, j * 2), (i, j), False),
    ((i, Affine()), (i, j), True),
])  # fmt: skip
def test_whole_vectors_are_those_at_multiples_of_their_size(source, place, vectors):
    a, b = Buf("%a", (40, 64), F32), Buf("%b", (40, 64), F32)
    nest = copy(a, source, b, place, {"i": 40, "j": 24})
    assert tiles(nest, {"i": 40, "j": 24}, 128) == (
        (Tile("j", 24, 4, beside=True),) if vectors else ()
    )
    assert tiles(dataclasses.replace(nest, ordered=True), {"i": 40, "j": 24}, 128) == ()


def test_terms_that_a_thread_loads_as_vectors():
    total = lambda index, guard=False: Nest(
        ROWS, ("j",), (Reduction("sum", (Pool().load(F32, A, index, guard),), F32),),
        (Store(B, (i, Affine()), Pool().accumulator(F32, 0), inner=False),))  # fmt: skip
    assert [whole_terms(total(index), "j") for index in ((i, j), (i, j + 1), (i, Affine()))] == [
        4,
        1,
        1,
    ]
    assert whole_terms(total((i, j), True), "j") == 1
    assert whole_terms(total((j, i)), "j") == 1


def test_rows_are_stored_over_as_vectors_too():
    stores = (Store(B, (i, j), Pool().load(F32, B, (i, j), False)),)
    nest = Nest(
        ROWS, ("j",), (Reduction("sum", (Pool().load(F32, A, (i, j), False),), F32),), stores
    )
    assert whole_terms(nest, "j") == 4
    moved = dataclasses.replace(nest, stores=(dataclasses.replace(stores[0], index=(i, j + 1)),))
    assert whole_terms(moved, "j") == 1


def test_what_is_stored_beside_terms_is_loaded_as_vectors_too():
    """Rows of another length, and the places beside."""
    pool, rows_of_13 = Pool(), Buf("%c", (10, 13), F32)
    total = Reduction("sum", (pool.load(F32, A, (i, j), False),), F32)
    for load, count in (
        (pool.load(F32, A, (i, j), False), 4),
        (pool.load(F32, A, (i, j), True), 1),
        (pool.load(F32, A, (i, j + 1), False), 1),
        (pool.load(F32, rows_of_13, (i, j), False), 1),
    ):
        nest = Nest(ROWS, ("j",), (total,), (Store(B, (i, j), load),))
        assert whole_terms(nest, "j") == count


def test_what_the_policy_answers():
    policy = ThreadPolicy(near_bytes=1 << 12)
    rows = Nest({"i": 64, "j": 256}, ("j",), (Reduction("sum", (Pool().load(F32, A, (i, j), False),), F32),),
                (Store(B, (i, Affine()), Pool().accumulator(F32, 0), inner=False),))  # fmt: skip
    assert policy.vector_dimension(rows) == "j"
    assert policy.lanes(rows, "j") == 32
    assert policy.vector_dimension(copy(A, (i, j), A, (i + 1, j), ROWS)) is None, "one thread"
    plain = copy(A, (i, j), B, (i, j), ROWS)
    assert policy.cycles(plain, 6.0) > policy.cycles(plain, 0.0) > 0
    (store,) = plain.stores
    taken = Pool().shifted(F32, (("j", 1),), (store.value,))
    moves = dataclasses.replace(plain, stores=(dataclasses.replace(store, value=taken),))
    assert policy.cycles(moves, 0.0) == math.inf, "threads hand no values to their neighbours"


WALKS = {
    "what was written": (
        [copy(A, (i, j), B, (i, j), ROWS), copy(B, (k, l), C, (k, l), {"k": 10, "l": 12})],
        "i",
        {0: "i", 1: "k"},
    ),
    "what was written, turned": (
        [copy(A, (i, j), B, (i, j), ROWS), copy(B, (k, l), C, (k, l), {"k": 10, "l": 12})],
        "j",
        {0: "j", 1: "l"},
    ),
    "what both read": (
        [copy(A, (i, j), B, (i, j), ROWS), copy(A, (k, l), C, (k, l), {"k": 10, "l": 12})],
        "i",
        {0: "i", 1: "k"},
    ),
    "nothing": (
        [
            copy(A, (i, j), B, (i, j), ROWS),
            copy(C, (k, l), Buf("%d", (10, 12), F32), (k, l), {"k": 10, "l": 12}),
        ],
        "i",
        None,
    ),
    "another size": (
        [copy(A, (i, j), B, (i, j), ROWS), copy(B, (k, l), C, (k, l), {"k": 9, "l": 12})],
        "i",
        None,
    ),
    "the next row": (
        [copy(A, (i, j), B, (i, j), ROWS), copy(B, (k + 1, l), C, (k, l), {"k": 10, "l": 12})],
        "i",
        None,
    ),
    "every second row": (
        [copy(A, (i, j), B, (i * 2, j), ROWS), copy(B, (k * 2, l), C, (k, l), {"k": 10, "l": 12})],
        "i",
        None,
    ),
    "one row for all": (
        [copy(A, (i, j), B, (i, j), ROWS), copy(B, (Affine(), l), C, (k, l), {"k": 10, "l": 12})],
        "i",
        None,
    ),
}


@pytest.mark.parametrize("name", WALKS)
def test_nests_that_walk_in_step(name):
    run, first, want = WALKS[name]
    assert in_step(run, first) == want
