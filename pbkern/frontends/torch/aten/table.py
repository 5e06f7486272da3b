"""The table of operators.

    @op("aten::gelu")
    def gelu(call, x, approximate="none"): ...

A rule gets the Call and the operator's arguments, tensors as JAX arrays, and returns arrays.
Arguments come as the operator's schema has them, whatever a graph left out: in order, those that
are keywords alone by name, none missing. A parameter has a default only where another overload
lacks the argument. What a rule returns is cast to the types that Torch gives the results: promotion
differs between the two.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from pbkern.core.errors import UnsupportedOp
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.rules import RuleTable


@dataclass
class Call:
    """Facts that a rule may know of one call of an operator.

    Attributes:
      name: of the operator.
      dtypes: of its results, as NumPy's; None for what is no tensor.
      shapes: of its results.
      used: numbers of the results that somebody reads.
      arguments: types of tensors among its arguments, as Torch promotes them together.
      key: a new PRNG key, whenever it is called.
      dense: whether all tensors among its arguments lie one element after the other.
      in_range: integers x, low, high -> x, of which those that are not in [low, high), or for low > high in [high, low), make
        the call of the program raise. A fourth argument says in the message what the integers are, unless they are indices.
    """

    name: str
    dtypes: tuple[np.dtype | None, ...]
    shapes: tuple[tuple[int, ...] | None, ...] = ()
    used: frozenset[int] = frozenset({0})
    arguments: np.dtype | None = None
    key: Callable[[], Any] = field(default=lambda: None)
    dense: bool = True
    in_range: Callable[..., Any] = field(default=lambda x, low, high, number="index": x)

    @property
    def dtype(self) -> np.dtype:
        """Type of the first result."""
        assert self.dtypes[0] is not None
        return self.dtypes[0]

    @property
    def shape(self) -> tuple[int, ...]:
        assert self.shapes[0] is not None
        return self.shapes[0]


TABLE: RuleTable[Callable[..., Any]] = RuleTable("ATen")


def op(*names: str):
    """Registers a rule for operators by their names without overloads, such as "aten::add"."""
    return TABLE.register(*names)


def name_of(target: Any) -> str | None:
    """An operator's name without its overload; None for other objects."""
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else None


def rule_of(target: Any) -> Callable[..., Any] | None:
    """The rule for an operator; None where the table has none, or one that does not take this overload's arguments."""
    name = name_of(target)
    if name is None or name not in TABLE:
        return None
    rule = TABLE.lookup(name)
    return rule if _takes(rule, target) else None


# Arguments that say where a result lies and what draws it, not what it is.
WHERE = ("device", "layout", "pin_memory", "memory_format", "generator")


@functools.cache
def _takes(rule: Callable[..., Any], target: Any) -> bool:
    """Whether a rule has a parameter for each argument of an operator's schema."""
    arguments = [argument for argument in target._schema.arguments if argument.name not in WHERE]
    try:
        inspect.signature(rule).bind(
            None,
            *[argument for argument in arguments if not argument.kwarg_only],
            **{argument.name: argument for argument in arguments if argument.kwarg_only},
        )
    except TypeError:
        return False
    return True


def arguments_of(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call in the order of the operator's schema, and by name those that are keywords alone.

    A graph leaves out what equals the schema's default: it is filled in. What says where a result
    lies is left out.
    """
    placed: list[Any] = []
    named: dict[str, Any] = {}
    for k, argument in enumerate(target._schema.arguments):
        given = args[k] if k < len(args) else kwargs.get(argument.name, argument.default_value)
        if argument.name in WHERE:
            continue
        if argument.kwarg_only:
            named[argument.name] = given
        else:
            placed.append(given)
    return placed, named


def check_numbers(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: np.dtype | None
) -> None:
    """Raises UnsupportedOp for a number that the type of the result does not hold.

    Torch, which then runs the operator, has an error for it. Operands of arithmetic and comparisons
    wrap instead.
    """
    given = [*args, *kwargs.values()]
    names = [
        argument
        for argument in target._schema.arguments
        if argument.name not in WHERE and not argument.kwarg_only
    ]
    names += [argument for argument in target._schema.arguments if argument.name in kwargs]
    for parameter, value in zip(names, given):
        is_number = "number" in str(parameter.type) and parameter.name not in (
            "other",
            "self",
            "test_element",
        )
        if (
            is_number
            and dtype is not None
            and isinstance(value, int | float)
            and _overflows(value, dtype)
        ):
            raise UnsupportedOp(f"`{parameter.name}` is no {dtype}", why=f"it is {value}")


def _overflows(value: int | float, dtype: np.dtype) -> bool:
    """Whether Torch refuses to convert a number.

    An integer may be the two's complement of one without a sign.
    """
    if dtype.kind in "bc":
        return False
    if jnp.issubdtype(dtype, jnp.floating):
        return np.isfinite(value) and abs(value) > float(jnp.finfo(dtype).max)
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    if dtype.kind == "u" and isinstance(value, int) and value < 0:
        low = -high
    return not low <= value <= high


def names() -> list[str]:
    """Operators that are compiled, in order."""
    return sorted(TABLE)


def as_type(x: Any, dtype: np.dtype) -> Any:
    """An array, or a number, as an array of this type; integers beyond it wrap, floats as `_wrapped` says."""
    if not hasattr(x, "astype"):
        return jnp.asarray(np.asarray(x).astype(dtype))
    if x.dtype == dtype:
        return x
    dtype = np.dtype(dtype)
    return (
        _wrapped(x, dtype)
        if dtype.kind in "iu" and jnp.issubdtype(x.dtype, jnp.floating)
        else x.astype(dtype)
    )


def _wrapped(x: Any, dtype: np.dtype) -> Any:
    """Floats as integers like Torch on x86: cvttss2si to 32 or 64 bits.

    Its result is the least integer for what is out of range and for NaN; the lower bits are kept.
    """
    x = x.astype(np.float32) if x.dtype.itemsize == 2 else x
    if dtype == np.uint64:
        large = x >= 2.0**63
        low = _cut(jnp.where(large, x - np.asarray(2.0**63, x.dtype), x), np.int64).astype(dtype)
        return jnp.where(large, low + np.uint64(1 << 63), low)
    exact = (
        dtype == np.uint8 and x.dtype != np.float64
    )  # floats of 2^31 and more are multiples of 256
    through = np.int32 if dtype.name in ("int8", "int16", "int32", "uint16") or exact else np.int64
    return _cut(x, through).astype(dtype)


def _cut(x: Any, dtype: Any) -> Any:
    """Floats rounded towards zero; the least integer for numbers that the type cannot represent, and for NaN."""
    low = float(np.iinfo(dtype).min)
    # NaN fails both tests; the upper limit is a float, the largest integer may not be one.
    return jnp.where((x >= low) & (x < -low), x, np.asarray(low, x.dtype)).astype(dtype)


def operands(call: Call, *args: Any, exact_numbers: bool = False) -> list[Any]:
    """Arguments in the type in which Torch computes: that of the result; float32 for shorter types beside a number.

    Torch rounds a number to the type of the result first, but for operators with `exact_numbers`: products, quotients
    and interpolation.
    """
    is_short = call.dtype.itemsize == 2 and jnp.issubdtype(call.dtype, jnp.floating)
    if not is_short or not any(isinstance(arg, float) for arg in args):
        return [as_type(arg, call.dtype) for arg in args]
    if not exact_numbers:
        args = tuple(as_type(arg, call.dtype) for arg in args)
    return [as_type(arg, np.dtype(np.float32)) for arg in args]


def check_real(x: Any) -> None:
    """Raises UnsupportedOp for complex numbers, whose branches Torch chooses in its own way."""
    if jnp.iscomplexobj(x):
        raise UnsupportedOp("the table's rule is for real numbers", why=f"an argument is {x.dtype}")


def as_list(value: Any, rank: int) -> list[int]:
    """A number per dimension: one number stands for all."""
    value = list(value) if isinstance(value, list | tuple) else [value]
    return value * rank if len(value) == 1 else value


def axes_of(x: Any, dims: Any) -> tuple[int, ...]:
    """Dimensions that an argument names: all for None and for an empty list."""
    if isinstance(dims, bool):
        raise UnsupportedOp(
            "the table's rule takes dimensions here",
            why=f"the argument is {dims}: another overload",
        )
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return tuple(range(x.ndim))
    dims = dims if isinstance(dims, list | tuple) else [dims]
    return tuple(dim % max(x.ndim, 1) for dim in dims) if x.ndim else ()
