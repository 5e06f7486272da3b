"""Whether two programs of nests are the same but for the identity of their nodes and the user's lines."""

import dataclasses

import numpy as np

from pbkern.lower.math.elementwise import EqnInfo
from pbkern.lower.nest.ir import UNWRITTEN_PARAMS, Buf, Expr


def difference(left, right, known=None) -> str | None:
    """The first difference of two statements, tuples of them or expressions; None without one."""
    known = {} if known is None else known
    if isinstance(left, Expr | Buf):
        if id(left) in known:
            return None if known[id(left)] is right else f"{left} is shared otherwise"
        known[id(left)] = right
    if type(left) is not type(right):
        return f"{left!s} ({type(left).__name__}) is {right!s} ({type(right).__name__})"
    if isinstance(left, tuple | list):
        if len(left) != len(right):
            return f"{left} is {right}"
        return next((d for pair in zip(left, right) if (d := difference(*pair, known))), None)
    if isinstance(left, frozenset):
        return difference(sorted(left, key=str), sorted(right, key=str), known)
    if isinstance(left, dict):
        return difference(list(left.items()), list(right.items()), known)
    if isinstance(left, EqnInfo):
        return difference(
            (left.primitive, _written(left), left.in_dtypes, left.out_dtype),
            (right.primitive, _written(right), right.in_dtypes, right.out_dtype),
        )
    if isinstance(left, np.generic):
        return None if left.tobytes() == right.tobytes() else f"{left} is {right}"
    if not dataclasses.is_dataclass(left):
        return None if left == right else f"{left!r} is {right!r}"
    for field in dataclasses.fields(left):
        if field.name == "at":
            continue
        found = difference(getattr(left, field.name), getattr(right, field.name), known)
        if found is not None:
            return f"{type(left).__name__}.{field.name}: {found}"
    return None


def _written(info: EqnInfo) -> dict:
    return {
        name: int(value) if isinstance(value, int) else value
        for name, value in sorted(info.params.items())
        if name not in UNWRITTEN_PARAMS and value is not None
    }
