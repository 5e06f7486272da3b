"""Arguments of a call -> its tensors, and a description of the others: structure, Python's values, variables.

As tf.function has it: arrays of NumPy are tensors, numbers and other values of Python are constants
of the function that is traced, and a function is traced anew for other constants, types or shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pbkern.core.errors import ArgumentError, UnsupportedOp
from pbkern.core.lazy_dataclass import dataclass

# Element types that kernels have.
DTYPES = (
    tf.float16,
    tf.bfloat16,
    tf.float32,
    tf.float64,
    tf.int8,
    tf.int16,
    tf.int32,
    tf.int64,
    tf.uint8,
    tf.uint16,
    tf.uint32,
    tf.uint64,
    tf.bool,
    tf.complex64,
    tf.complex128,
)


@dataclass(frozen=True)
class Arguments:
    """Arguments of one call.

    Attributes:
      tensors: in order of tf.nest.flatten.
      key: hashable; equal for calls that one traced function serves.
      structure: (args, kwargs) with a number for each tensor.
    """

    tensors: tuple[tf.Tensor, ...]
    key: tuple
    structure: Any

    def specs(self) -> list[tf.TensorSpec]:
        return [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in self.tensors]

    def rebuilt(self, tensors: Sequence[Any]) -> tuple[tuple, dict]:
        """(args, kwargs) with other tensors in their places."""
        return tf.nest.map_structure(
            lambda x: tensors[x.number] if isinstance(x, TensorPlace) else x, self.structure
        )


@dataclass(frozen=True)
class TensorPlace:
    """Place of a tensor among arguments."""

    number: int


def arguments(args: tuple, kwargs: dict) -> Arguments:
    """Takes arguments apart. Raises UnsupportedOp for tensors that kernels cannot read."""
    tensors: list[tf.Tensor] = []

    def place(value: Any) -> Any:
        if _is_composite(value):
            raise UnsupportedOp(
                f"argument {len(tensors)} is a {type(value).__name__}",
                why="kernels read dense arrays",
                hint="pass its tensors, or tf.sparse.to_dense(x), x.to_tensor()",
            )
        if isinstance(value, np.ndarray | np.generic) or (
            tf.is_tensor(value) and not isinstance(value, tf.Variable)
        ):
            tensors.append(_tensor(value, f"argument {len(tensors)}"))
            return TensorPlace(len(tensors) - 1)
        return value

    structure = tf.nest.map_structure(place, (args, kwargs))
    types = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
    return Arguments(tuple(tensors), (_hashable(structure), types), structure)


def check_numbers(what: str, tensors: Sequence[Any]) -> None:
    """Raises UnsupportedOp for tensors of a function that TensorFlow traces, which have no numbers yet."""
    if any(not hasattr(tensor, "numpy") for tensor in tensors):
        raise UnsupportedOp(
            f"{what} is computed of tensors of a function that TensorFlow traces",
            why="they have no numbers yet",
            hint="decorate the outer function alone; tape.jacobian(..., experimental_use_pfor=False)",
        )


def by_signature(signature: Sequence[Any], args: tuple, kwargs: dict) -> tuple:
    """Arguments converted to the types of an input signature.

    Raises ArgumentError for those that do not match it.
    """
    if kwargs or len(args) != len(signature):
        given = f"{len(args)} arguments" + (f" and {', '.join(kwargs)} by name" if kwargs else "")
        raise ArgumentError(
            "a call does not match the input signature",
            why=f"given {given}, it has {len(signature)}",
            hint="pass every argument by position",
        )
    return tuple(_converted(spec, arg) for spec, arg in zip(signature, args))


def _converted(spec: Any, value: Any) -> Any:
    """An argument of the structure and types of a part of a signature."""
    if isinstance(spec, tf.TensorSpec):
        return _of_type(spec, value)
    if isinstance(spec, dict):
        same = isinstance(value, dict) and value.keys() == spec.keys()
    else:
        same = isinstance(value, list | tuple) and len(value) == len(spec)
    if not same:
        raise ArgumentError(
            "a call does not match the input signature",
            why=f"given {value!r}, it has {spec!r}",
            hint="arguments of the structure that the signature has",
        )
    if isinstance(spec, dict):
        return {k: _converted(inner_spec, value[k]) for k, inner_spec in spec.items()}
    return type(spec)(_converted(inner_spec, entry) for inner_spec, entry in zip(spec, value))


def _of_type(spec: tf.TensorSpec, value: Any) -> tf.Tensor:
    try:
        tensor = tf.convert_to_tensor(value, spec.dtype)
    except (TypeError, ValueError) as e:
        raise _mismatch(spec, value, str(e).splitlines()[0]) from None
    if not spec.shape.is_compatible_with(tensor.shape):
        raise _mismatch(spec, value, f"shape {tuple(tensor.shape)}")
    return tensor


def _mismatch(spec: tf.TensorSpec, value: Any, why: str) -> ArgumentError:
    return ArgumentError(
        f"an argument is no {spec.dtype.name} of shape {spec.shape}",
        why=why,
        hint="the input signature says so",
    )


def _is_composite(value: Any) -> bool:
    """Whether a leaf of the arguments consists of tensors: a SparseTensor, IndexedSlices, an ExtensionType."""
    if isinstance(value, tf.Variable):
        return False
    parts = tf.nest.flatten(value, expand_composites=True)
    return isinstance(value, tf.TensorArray) or len(parts) != 1 or parts[0] is not value


def _tensor(value: Any, what: str) -> tf.Tensor:
    tensor = tf.convert_to_tensor(value)
    check_numbers("a decorated function", [tensor])
    if tensor.dtype not in DTYPES:
        names = ", ".join(dtype.name for dtype in DTYPES)
        raise UnsupportedOp(
            f"{what} has dtype {tensor.dtype.name}",
            why="kernels have no such elements",
            hint=f"one of {names}",
        )
    return tensor


def _hashable(x: Any) -> Any:
    """A structure as tuples, with its constants; variables and other objects by identity."""
    if isinstance(x, dict):
        return dict, tuple((k, _hashable(value)) for k, value in x.items())
    if isinstance(x, tuple | list):
        return type(x), tuple(map(_hashable, x))
    if isinstance(x, TensorPlace):
        return x
    try:
        hash(x)
    except TypeError:
        return type(x), _ById(x)
    return (type(x), x) if not isinstance(x, tf.Variable) else (type(x), _ById(x))


class _ById:
    """An object that equals itself alone. It is kept alive, so that no later one has its identity."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __hash__(self) -> int:
        return id(self.of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.of is self.of
