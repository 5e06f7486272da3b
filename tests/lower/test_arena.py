"""Places of scratch buffers."""

import numpy as np

from pbkern.core.affine import Affine
from pbkern.lower.nest import scratch
from pbkern.lower.nest.ir import Buf, Nest, Pool, Store


def test_equal_buffers_take_places_in_order_of_their_names():
    """Whatever the order in which a set of them comes: another process makes the same code."""
    names = [f"%t{n}" for n in range(10, 42)]
    buffers = [Buf(name, (16,), np.dtype(np.float32), arena=True) for name in reversed(names)]
    zero = Pool().const(np.float32, np.float32(0))
    nest = Nest({}, stores=tuple(Store(b, (Affine(),), zero) for b in buffers))
    placed, end = scratch.place([nest], 128)
    assert [b.name for b in sorted(placed, key=placed.__getitem__)] == names
    assert sorted(placed.values()) == list(range(128, end, 64))
    assert end == 128 + 64 * len(names)
