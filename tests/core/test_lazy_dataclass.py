"""The package's dataclasses behave as the standard library's."""

import copy
import dataclasses
import pickle
import re
import subprocess
import sys

import pytest

from pbkern.core import lazy_dataclass

OPTIONS = [
    {},
    {"eq": False},
    {"repr": False},
    {"frozen": True},
    {"frozen": True, "eq": False},
    {"slots": True},
    {"frozen": True, "slots": True},
    {"kw_only": True},
]


def classes(decorator, **options):
    @decorator(**options)
    class Base:
        """A base."""

        a: int
        b: list = dataclasses.field(default_factory=list)
        c: str = dataclasses.field(default="c", compare=False, repr=False)
        d: int = dataclasses.field(default=4, init=False)
        e: tuple = dataclasses.field(default=(), hash=False)

    @decorator(**options)
    class Derived(Base):
        f: float = 1.5

        def __post_init__(self):
            assert self.a is not None, "a is given"

    return Base, Derived


def outcome(call, cls):
    """The text of a call's result, or its error's type and text, without places in memory and in this file."""
    try:
        text = str(call(cls))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return re.sub(r"0x[0-9a-f]+|classes\.<locals>\.", "", text)


CALLS = [
    lambda cls: cls(1),
    lambda cls: cls(a=1, b=[2], c="x"),
    lambda cls: cls(),
    lambda cls: cls(None),
    lambda cls: cls(1, wrong=2),
    lambda cls: cls(1, [2], "x", (3,), 4.0),
    lambda cls: cls(a=1) == cls(a=1),
    lambda cls: cls(a=1, c="x") == cls(a=1, c="y"),
    lambda cls: cls(a=1) == cls(a=2),
    lambda cls: cls(a=1) != 1,
    lambda cls: hash(cls(a=1, b=(), e=(1,))) == hash(cls(a=1, b=(), e=(2,))),
    lambda cls: isinstance(hash(cls(a=1)), int),
    lambda cls: hash(cls(a=1, b=())) == hash(cls(a=1, b=())),
    lambda cls: setattr(cls(a=1), "a", 2),
    lambda cls: delattr(cls(a=1), "a"),
    lambda cls: dataclasses.replace(cls(a=1), b=[5]),
    lambda cls: dataclasses.asdict(cls(a=1)),
    lambda cls: copy.deepcopy(cls(a=1, b=[[1]])),
    lambda cls: copy.copy(cls(a=1, b=[[1]])) == cls(a=1, b=[[1]]),
    lambda cls: [field.name for field in dataclasses.fields(cls)],
    lambda cls: cls.__match_args__,
    lambda cls: cls.__doc__ == "A base." or cls.__name__,
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_classes_are_those_of_the_standard_library(options):
    pairs = zip(
        classes(lazy_dataclass.dataclass, **options), classes(dataclasses.dataclass, **options)
    )
    for ours, plain in pairs:
        assert [outcome(call, ours) for call in CALLS] == [outcome(call, plain) for call in CALLS]


def test_methods_that_a_class_defines_stay():
    @lazy_dataclass.dataclass(frozen=True)
    class Named:
        name: str

        def __repr__(self):
            return self.name

        def __eq__(self, other):
            return True

        def __hash__(self):
            return 7

    assert repr(Named("x")) == "x"
    assert Named("x") == Named("y")
    assert hash(Named("x")) == 7


@lazy_dataclass.dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 2


def test_frozen_slots_are_pickled():
    assert pickle.loads(pickle.dumps(Point(1))) == Point(1)
    assert copy.deepcopy(Point(1, 3)) == Point(1, 3)
    with pytest.raises(dataclasses.FrozenInstanceError, match="'z'"):
        Point(1).z = 2
    assert not hasattr(Point(1), "__dict__")


def test_a_cycle_is_shown_once():
    @lazy_dataclass.dataclass
    class Node:
        next: object = None

    node = Node()
    node.next = node
    assert repr(node).endswith("Node(next=...)")


def test_init_vars_are_refused():
    with pytest.raises(TypeError, match="InitVar"):

        @lazy_dataclass.dataclass
        class Odd:
            x: dataclasses.InitVar[int]


def test_the_package_compiles_no_methods_of_the_standard_library_when_it_is_imported():
    """Classes that users call have the standard library's methods; there are few of them."""
    program = """
import dataclasses
compiled = []
process = dataclasses._process_class
def spy(cls, init, *rest, **options):
    if init and cls.__module__.startswith("pbkern."):
        compiled.append(f"{cls.__module__}.{cls.__name__}")
    return process(cls, init, *rest, **options)
dataclasses._process_class = spy
import jax.numpy as jnp, pbkern
pbkern.jit(lambda x: x + 1)(jnp.ones(3))
print(*compiled, sep="\\n")
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    names = run.stdout.split()
    assert "pbkern.targets.cpu.params.CompilerParams" in names
    assert len(names) <= 12, names
