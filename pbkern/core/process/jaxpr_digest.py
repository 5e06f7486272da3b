"""Digests of jaxprs: equal for jaxprs that compute the same, in any process.

A digest covers equations, parameters, types, literals and constants. Names of variables and lines
of source do not count. Python's own functions have no content that can be named: `Described.unnamed`
lists those that a jaxpr calls, so that whoever stores something under the digest can decline.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from pbkern._jax import cached_by_jaxpr_alone, is_generator, key_implementation
from pbkern.core.jaxprs.walks import as_dtype, literal_value
from pbkern.core.lazy_dataclass import dataclass

# Parameters that only derivatives read: functions that the equation itself does not call.
DERIVATIVE_RULES = frozenset({"jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees", "policy"})
# Packages whose values print their content.
PRINTED = frozenset({"jax", "jaxlib", "numpy", "ml_dtypes", "builtins"})


@dataclass(frozen=True)
class Described:
    """A jaxpr's digest, and what it does not cover: functions and other values without content, as text."""

    digest: str
    unnamed: tuple[str, ...]


def described(closed: jex.ClosedJaxpr) -> Described:
    """The digest of a jaxpr with its constants."""
    digester = _Digester()
    digest = digester.closed(closed)
    return Described(digest, tuple(dict.fromkeys(digester.unnamed)))


def fingerprint(jaxpr: jex.ClosedJaxpr | jex.Jaxpr) -> str:
    """The digest of a jaxpr without its constants' values."""
    return _fingerprint(jaxpr.jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jaxpr)


@cached_by_jaxpr_alone
def _fingerprint(jaxpr: jex.Jaxpr) -> str:
    return _Digester().jaxpr(jaxpr)


def same(left: jex.ClosedJaxpr, right: jex.ClosedJaxpr) -> bool:
    """Whether two jaxprs have the same equations, parameters and types, up to names of variables."""
    return fingerprint(left) == fingerprint(right)


class _Digester:
    """One walk over a jaxpr. Inner jaxprs and types that occur again are described once."""

    def __init__(self) -> None:
        self.unnamed: list[str] = []
        self._types: dict[int, str] = {}
        self._inner: dict[int, str] = {}

    def closed(self, closed: jex.ClosedJaxpr) -> str:
        if not closed.consts:
            return self.jaxpr(closed.jaxpr)
        return _hashed([self.jaxpr(closed.jaxpr), *map(self._value, closed.consts)])

    def jaxpr(self, jaxpr: jex.Jaxpr) -> str:
        known = self._inner.get(id(jaxpr))
        if known is None:
            known = self._inner[id(jaxpr)] = _hashed(self._words(jaxpr))
        return known

    def _words(self, jaxpr: jex.Jaxpr) -> list[str]:
        numbers: dict[jex.Var, int] = {}

        def new(var: jex.Var) -> str:
            numbers[var] = len(numbers)
            return self._type(var.aval)

        def atom(read: jex.Var | jex.Literal) -> str:
            if isinstance(read, jex.Literal):
                value = literal_value(read)
                return f"{value.dtype} {value.tobytes().hex()}"
            return str(numbers[read]) if read in numbers else f"free {new(read)}"

        words = [*map(new, jaxpr.constvars), ";", *map(new, jaxpr.invars)]
        for eqn in jaxpr.eqns:
            words += (";", eqn.primitive.name, *map(atom, eqn.invars), "=", *map(new, eqn.outvars))
            for name, value in sorted(eqn.params.items()):
                if value is not None and name not in DERIVATIVE_RULES:
                    words += (name, self._value(value))
        return [*words, ";", *map(atom, jaxpr.outvars)]

    def _type(self, aval: Any) -> str:
        known = self._types.get(id(aval))
        if known is None:
            weak = "~" if getattr(aval, "weak_type", False) else ""
            dtype = getattr(aval, "dtype", None)
            generator = f" {self._generator(key_implementation(dtype))}" if _is_key(dtype) else ""
            known = self._types[id(aval)] = f"{weak}{aval}{generator}"
        return known

    def _generator(self, generator: Any) -> str:
        """A generator of PRNG keys: its functions, for other generators may have its name and tag."""
        return f"generator({','.join(map(self._value, generator))})"

    def _value(self, value: Any) -> str:
        match value:
            case None | bool() | int() | float() | complex() | str() | bytes():
                return repr(value)
            case jex.ClosedJaxpr():
                return self.closed(value)
            case jex.Jaxpr():
                return self.jaxpr(value)
            case jax.core.Tracer():
                return self._without_content(value)
            case np.integer():
                return repr(int(value))
            case enum.Enum():
                return str(value)
            case np.ndarray() | np.generic() | jax.Array():
                return self._array(value)
            case _ if is_generator(value):
                return self._generator(value)
            case tuple() | list():
                return f"({','.join(map(self._value, value))})"
            case Mapping():
                return f"{{{','.join(sorted(f'{self._value(k)}:{self._value(v)}' for k, v in value.items()))}}}"
            case set() | frozenset():
                return f"{{{','.join(sorted(map(self._value, value)))}}}"
        dtype = as_dtype(value)
        if dtype is not None:
            return str(dtype)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = (getattr(value, field.name) for field in dataclasses.fields(value))
            return f"{type(value).__qualname__}({','.join(map(self._value, fields))})"
        if _is_function_of_library(value):
            return f"{value.__module__}.{value.__qualname__}"
        of_class, text = value if isinstance(value, type) else type(value), str(value)
        named = of_class.__module__.partition(".")[0] in PRINTED and " at 0x" not in text
        return f"{of_class.__qualname__} {text}" if named else self._without_content(value)

    def _array(self, value: Any) -> str:
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
            generator = self._generator(key_implementation(value.dtype))
            return f"{value.dtype} {generator} {self._array(jax.random.key_data(value))}"
        array = np.asarray(value)
        return f"{array.dtype}{array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"

    def _without_content(self, value: Any) -> str:
        self.unnamed.append(getattr(value, "__qualname__", type(value).__qualname__))
        return "unnamed"


def _is_key(dtype: Any) -> bool:
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def _is_function_of_library(value: Any) -> bool:
    """Whether a value is what its module and name say, in a package whose version tells its content."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not callable(value) or not isinstance(module, str) or not isinstance(name, str):
        return False
    held_there = getattr(sys.modules.get(module), name, None)
    return module.partition(".")[0] in PRINTED and held_there is value


def _hashed(words: list[str]) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()
