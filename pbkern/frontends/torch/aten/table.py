"""The table of operators.

    @op("aten::gelu")
    def gelu(call, x, approximate="none"): ...

A rule gets the Call and the operator's arguments, tensors as JAX arrays, and returns arrays. What it returns is cast to the
types that Torch gives the results: promotion differs between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from pbkern.core.errors import UnsupportedOp
from pbkern.core.rules import RuleTable


@dataclass
class Call:
    """What a rule may know of one call of an operator.

    Attributes:
      name: of the operator.
      dtypes: of its results, as NumPy's; None for what is no tensor.
      shapes: of its results.
      used: numbers of the results that somebody reads.
      arguments: types of tensors among its arguments, as Torch promotes them together.
      key: a new PRNG key, whenever it is called.
      dense: whether all tensors among its arguments lie one element after the other.
    """

    name: str
    dtypes: tuple[np.dtype | None, ...]
    shapes: tuple[tuple[int, ...] | None, ...] = ()
    used: frozenset[int] = frozenset({0})
    arguments: np.dtype | None = None
    key: Callable[[], Any] = field(default=lambda: None)
    dense: bool = True

    @property
    def dtype(self) -> np.dtype:
        """Of the first result."""
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
    """An operator's name without its overload; None for what is no operator."""
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else None


def rule_of(target: Any) -> Callable[..., Any] | None:
    name = name_of(target)
    return TABLE.lookup(name) if name is not None and name in TABLE else None


def names() -> list[str]:
    """Operators that are compiled, in order."""
    return sorted(TABLE)


def as_type(x: Any, dtype: np.dtype) -> Any:
    """An array, or a number, as an array of this type; integers beyond it wrap."""
    if hasattr(x, "astype"):
        return x.astype(dtype)
    return jnp.asarray(np.asarray(x).astype(dtype))


def operands(call: Call, *args: Any) -> list[Any]:
    """Arguments in the type in which Torch computes: that of the result, or float32 for shorter ones beside a number, which
    Torch does not round to them."""
    short = call.dtype.itemsize == 2 and jnp.issubdtype(call.dtype, jnp.floating)
    dtype = np.dtype(np.float32) if short and any(isinstance(a, float) for a in args) else call.dtype
    return [as_type(a, dtype) for a in args]


def check_real(x: Any) -> None:
    """Raises UnsupportedOp for complex numbers, whose branches Torch chooses in its own way."""
    if jnp.iscomplexobj(x):
        raise UnsupportedOp("the table's rule is for real numbers", why=f"an argument is {x.dtype}")


def as_list(v: Any, n: int) -> list[int]:
    """A number per dimension: one number stands for all."""
    v = list(v) if isinstance(v, list | tuple) else [v]
    return v * n if len(v) == 1 else v


def axes_of(x: Any, dims: Any) -> tuple[int, ...]:
    """Dimensions that an argument names: all for None and for an empty list."""
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return tuple(range(x.ndim))
    dims = dims if isinstance(dims, list | tuple) else [dims]
    return tuple(d % max(x.ndim, 1) for d in dims) if x.ndim else ()
