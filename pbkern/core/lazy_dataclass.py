"""Dataclasses whose methods are made when they are first used, in place of those of the standard library.

`dataclasses.dataclass` compiles five to seven small functions for each class when its module is imported: about 1 ms per
class, and a first call imports more than 300 of them, most of which it never instantiates. Here a class gets its fields from
the standard library, shares all methods but `__init__` with the other classes, and compiles `__init__` when its first
instance is made. `dataclasses.fields`, `replace`, `asdict` and `is_dataclass` know these classes.

Differences: the arguments that modules of pbkern use are known and no others; fields that are `InitVar` are refused;
`inspect.signature` of a class shows its parameters from its first instance on. Classes that users call directly have the
standard library's methods, for that reason.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import reprlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(
        cls: type | None = None,
        /,
        *,
        frozen: bool = False,
        eq: bool = True,
        repr: bool = True,
        slots: bool = False,
        kw_only: bool = False,
    ):
        """The standard library's decorator, with these arguments of its own.

        Raises:
          TypeError: a field is an `InitVar`.
        """

        def decorate(cls: type) -> type:
            # Without a docstring the standard library would write one from the signature of `__init__`.
            cls.__doc__ = cls.__doc__ or cls.__name__
            explicit_hash = cls.__dict__.get("__hash__")
            types = inspect.get_annotations(cls)
            if any("InitVar" in str(written) for written in types.values()):
                raise TypeError(f"{cls.__qualname__}: fields that are InitVar are not known here")
            # The standard library matches each type that is text with regular expressions, thrice.
            cls.__annotations__ = {
                name: written if _is_no_field(written) else object
                for name, written in types.items()
            }
            cls = dataclasses.dataclass(
                init=False, repr=False, eq=False, slots=slots, kw_only=kw_only
            )(cls)
            cls.__annotations__ = types
            for name in cls.__dataclass_fields__.keys() & types.keys():
                cls.__dataclass_fields__[name].type = types[name]
            methods: dict[str, Any] = {"__init__": _first_init(cls, frozen)}
            if repr:
                methods["__repr__"] = _repr
            if eq:
                compared = [field for field in dataclasses.fields(cls) if field.compare]
                methods["__eq__"] = _eq(_values(compared))
                # A class with `__eq__` and no hash of its own has `__hash__` None.
                if explicit_hash is None:
                    hashed = [
                        field
                        for field in dataclasses.fields(cls)
                        if (field.compare if field.hash is None else field.hash)
                    ]
                    cls.__hash__ = _hash(_values(hashed)) if frozen else None
            if frozen:
                methods |= {"__setattr__": _refuse_assignment, "__delattr__": _refuse_deletion}
                if slots:
                    methods |= {"__getstate__": _state, "__setstate__": _restore}
            for name, method in methods.items():
                if name not in cls.__dict__:
                    setattr(cls, name, method)
            return cls

        return decorate if cls is None else decorate(cls)


def _is_no_field(written: object) -> bool:
    """Whether an annotation may be one that dataclasses look at: of a class variable, or the mark before keyword fields."""
    return "ClassVar" in str(written) or "KW_ONLY" in str(written)


def _values(fields: list[dataclasses.Field]) -> Callable[[Any], tuple]:
    """A function from an instance to the values of these fields."""
    names = [field.name for field in fields]
    if len(names) > 1:
        return operator.attrgetter(*names)
    if names:
        value = operator.attrgetter(names[0])
        return lambda instance: (value(instance),)
    return lambda instance: ()


def _eq(values: Callable[[Any], tuple]) -> Callable:
    def __eq__(self, other):
        if other.__class__ is not self.__class__:
            return NotImplemented
        return values(self) == values(other)

    return __eq__


def _hash(values: Callable[[Any], tuple]) -> Callable:
    def __hash__(self):
        return hash(values(self))

    return __hash__


@reprlib.recursive_repr()
def _repr(self) -> str:
    shown = ", ".join(
        f"{field.name}={getattr(self, field.name)!r}"
        for field in dataclasses.fields(self)
        if field.repr
    )
    return f"{type(self).__qualname__}({shown})"


def _refuse_assignment(self, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_deletion(self, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self) -> list:
    """The state of a frozen instance with slots, for pickle and copy, whose own way is to assign to fields."""
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _restore(self, state: list) -> None:
    for field, value in zip(dataclasses.fields(self), state):
        object.__setattr__(self, field.name, value)


def _first_init(cls: type, frozen: bool) -> Callable:
    """An `__init__` that replaces itself by the class's own."""

    def __init__(self, *args, **kwargs):
        init = _init(cls, frozen)
        cls.__init__ = init
        init(self, *args, **kwargs)

    return __init__


def _init(cls: type, frozen: bool) -> Callable:
    """The class's `__init__`, compiled: parameters in the order of fields, then those by keyword."""
    positional: list[str] = []
    by_keyword: list[str] = []
    body: list[str] = []
    scope: dict[str, Any] = {"_set": object.__setattr__, "_missing": dataclasses.MISSING}
    for field in dataclasses.fields(cls):
        name = field.name
        parameter = value = name
        if field.default_factory is not dataclasses.MISSING:
            scope[f"_make_{name}"] = field.default_factory
            parameter = f"{name}=_missing"
            value = f"_make_{name}() if {name} is _missing else {name}"
            value = value if field.init else f"_make_{name}()"
        elif field.default is not dataclasses.MISSING:
            scope[f"_default_{name}"] = field.default
            parameter = f"{name}=_default_{name}"
            value = name if field.init else f"_default_{name}"
        elif not field.init:
            continue
        if field.init:
            (by_keyword if field.kw_only else positional).append(parameter)
        body.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    parameters = ", ".join(["self", *positional, *(["*", *by_keyword] if by_keyword else [])])
    exec(f"def __init__({parameters}):\n " + "\n ".join(body or ["pass"]), scope)
    init = scope["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    return init
