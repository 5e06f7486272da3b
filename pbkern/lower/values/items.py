"""Items that a region's equations leave to be stated, in program order: values, scalars, stores and control flow.

`lower/build.py` collects them, decides which values go to memory, and then makes statements of them
one after the other. Refs are views of the buffers that items store to.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.ir import Buf

from .values import Index, Value


@dataclass(eq=False)
class RefView:
    """A Ref: per axis of `buf` an offset and the Ref axis that runs along it (or None).

    copied: of a block in scratch, the view of the array that it is a copy of.
    """

    buf: Buf
    shape: tuple[int, ...]
    dtype: np.dtype
    offsets: tuple[Affine, ...]
    axes: tuple[int | None, ...]
    guard: bool = False
    copied: RefView | None = None

    def place(self, ix: Index) -> Index:
        return tuple(
            offset if axis is None else offset + ix[axis]
            for offset, axis in zip(self.offsets, self.axes)
        )


@dataclass(eq=False)
class LetItem:
    """Evaluate a scalar here. `clamp` = n keeps it in [0, n]."""

    name: str
    value: Value
    clamp: int | None = None


@dataclass(eq=False)
class StoreItem:
    """buf[place(ix)] = value[ix] over `shape`."""

    buf: Buf
    shape: tuple[int, ...]
    place: Callable[[Index], Index]
    value: Value
    mask: Value | None = None
    guard: bool = False
    at: str | None = None


@dataclass(eq=False)
class ControlItem:
    """Control flow: `run()` appends its statements.

    `uses` are captured values, `writes` the buffers changed inside.
    """

    uses: tuple[Value, ...]
    stores: frozenset[Buf]
    run: Callable[[], None]


Item = Value | LetItem | StoreItem | ControlItem
