"""Who computes what: points of nests on threads, barriers between statements that meet."""

import numpy as np
import pytest

from pbkern.core.affine import Affine
from pbkern.lower.nest.ir import Buf, For, Nest, Pool, Write
from pbkern.targets.simt.schedule.barriers import Barriers, Pending
from pbkern.targets.simt.schedule.threads import deal, is_one_to_one, is_parallel
from pbkern.targets.simt.schedule.tiles import Tile

F32 = np.dtype(np.float32)
i, j = Affine.symbol("i"), Affine.symbol("j")


def copy(source: Buf, index, target: Buf, place, dims) -> Nest:
    load = Pool().make("load", F32, (source, index, False))
    return Nest(dims, writes=[Write(target, place, load)])


@pytest.mark.parametrize("index, is_one", [
    ((i, j), True), ((i * 4 + j,), True), ((i * 3 + j,), False), ((i,), False), ((i + j, i), True), ((i * 0 + 2, i + j), False),
])  # fmt: skip
def test_indices_that_tell_points_apart(index, is_one):
    places = {tuple(a.evaluate({"i": x, "j": y}) for a in index) for x in range(5) for y in range(4)}
    assert (len(places) == 20) or not is_one
    assert is_one_to_one(index, {"i": 5, "j": 4}) is is_one


def test_points_that_read_what_others_store_run_in_order():
    a, b = Buf("%a", (10,), F32), Buf("%b", (10,), F32)
    shifted = copy(a, (i,), a, (i + 1,), {"i": 9})
    assert not is_parallel(shifted, {"i": 9}) and deal(shifted, 128, 32).alone
    assert not deal(copy(a, (i,), a, (i,), {"i": 9}), 128, 32).alone
    assert not deal(copy(a, (i,), b, (i + 1,), {"i": 9}), 128, 32).alone


def test_lanes_run_along_neighbours():
    a, b = Buf("%a", (30, 50), F32), Buf("%b", (50, 30), F32)
    assert deal(copy(a, (i, j), a, (i, j), {"j": 50, "i": 30}), 128, 32).free[-1][0] == "j"
    assert deal(copy(a, (i, Affine()), b, (Affine(), i), {"j": 1, "i": 30}), 128, 32).free[-1][0] == "i"


def test_places_of_a_tile():
    far, near = Tile("i", 10, 4), Tile("i", 8, 4, beside=True)
    assert far.steps == 3 and [far.may_lie_outside(u) for u in range(4)] == [False, False, False, True]
    assert sorted(far.place(u).evaluate({"i": k}) for u in range(4) for k in range(3)) == list(range(12))
    assert sorted(near.place(u).evaluate({"i": k}) for u in range(4) for k in range(2)) == list(range(8))


def planned(stmts) -> list[bool]:
    """Before which statements, inner ones too, threads wait; %t and %u share bytes."""
    places = {"%t": ("shared", 0, 64), "%u": ("shared", 32, 96), "%v": ("shared", 96, 128)}
    plan = Barriers(lambda b: places.get(b.name, (b.name, 0, 1)), lambda s: False)
    plan.run(stmts, Pending())
    return [id(s) in plan.before for s in stmts]


def test_barriers_stand_where_bytes_meet():
    a, t, u, v = (Buf(n, (8,), F32, arena=n != "%a") for n in ("%a", "%t", "%u", "%v"))
    at = ((i,), {"i": 8})
    store = lambda source, target: copy(source, at[0], target, at[0], at[1])  # noqa: E731
    assert planned([store(a, t), store(a, v), store(t, a)]) == [False, False, True]
    assert planned([store(a, t), store(a, u)]) == [False, True]
    assert planned([store(a, t), store(a, v), store(v, u)]) == [False, False, True]


def test_steps_of_a_loop_meet():
    a, t = Buf("%a", (8,), F32), Buf("%t", (8,), F32, arena=True)
    body = [copy(a, (i,), t, (i,), {"i": 8})]
    plan = Barriers(lambda b: (b.name, 0, 1), lambda s: False)
    plan.run([For("%k", 3, body)], Pending())
    assert id(body[0]) in plan.before
