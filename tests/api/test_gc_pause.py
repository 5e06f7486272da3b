"""Compilations pause Python's garbage collector, and only while they run."""

import gc
import sys
import threading
import weakref

import jax.numpy as jnp
import pytest

import pbkern
from pbkern.core.process import gc_pause, progress


@pytest.fixture(autouse=True)
def collecting():
    gc.enable()
    yield
    gc.enable()


def test_a_compilation_pauses_it(monkeypatch):
    seen = []
    monkeypatch.setattr(progress, "step", lambda text: seen.append(gc.isenabled()))
    pbkern.jit(lambda x: jnp.sin(x) * 3)(jnp.ones(7))
    assert seen
    assert not any(seen)
    assert gc.isenabled()


def test_it_goes_on_after_an_error():
    with pytest.raises(ZeroDivisionError), gc_pause.paused():
        _ = 1 // 0
    assert gc.isenabled()


def test_one_that_was_off_stays_off():
    gc.disable()
    with gc_pause.paused():
        pass
    assert not gc.isenabled()


def test_several_threads_pause_it_until_the_last_is_done():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with gc_pause.paused():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with gc_pause.paused():
        thread.start()
        inside.wait(60)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_what_lives_on_is_old_afterwards():
    class Cycle:
        def __init__(self):
            self.itself = self

    with gc_pause.paused():
        lives_on, cycle = [[]], weakref.ref(Cycle())
    assert any(thing is lives_on for thing in gc.get_objects(generation=2))
    assert cycle() is None


@pytest.fixture
def short_generations():
    """Forty objects are a young generation, and two collections of one a middle one."""
    thresholds = gc.get_threshold()
    gc.set_threshold(40, 1, 1)
    yield
    gc.set_threshold(*thresholds)


def collections_after(paused_work, new):
    """Collections of old objects while a few are made behind a pause, and what was made in the pause."""
    generations = []
    note = lambda phase, about: generations.append(about["generation"])
    gc.collect()
    with gc_pause.paused():
        lives_on = paused_work()
    gc.callbacks.append(note)
    new += [[] for _ in range(400)]
    gc.callbacks.remove(note)
    return generations.count(2), lives_on


def test_what_a_compilation_leaves_that_loads_modules_does_not_have_old_objects_walked(
    monkeypatch, short_generations
):
    many = len(gc.get_objects()) // 2

    def load():
        monkeypatch.setitem(sys.modules, "module_of_a_first_compilation", gc)
        return [[] for _ in range(many)]

    count, lives_on = collections_after(load, [])
    assert count == 0
    assert any(thing is lives_on for thing in gc.get_objects(generation=2))


def test_objects_that_a_program_has_frozen_stay_frozen(monkeypatch):
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with gc_pause.paused():
            monkeypatch.setitem(sys.modules, "module_of_a_first_compilation", gc)
        assert 0 < gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()


def test_a_finalizer_may_pause_it():
    class Pauses:
        def __init__(self):
            self.itself = self

        def __del__(self):
            with gc_pause.paused():
                ends.append(gc.isenabled())

    ends: list[bool] = []
    with gc_pause.paused():
        Pauses()
    assert ends == [False]
    assert gc.isenabled()
