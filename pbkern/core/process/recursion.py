"""Room on Python's stack for a compilation, however deep its caller is.

Expressions have bounded height (lower/nest/ir/), so walks over them need at most this many
frames; walks over whole functions, whose depth has no bound, are loops. JAX itself traces and
lowers within a few dozen frames of its caller.
"""

from __future__ import annotations

import sys

from .while_any import WhileAny

# Python frames that a walk over an expression of any permitted height needs, at most. Source: not
# recorded.
WALK_FRAMES = 6000


def _raise_limit() -> int:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + WALK_FRAMES)
    return before


# While the body runs, in any thread, the interpreter's limit is higher; afterwards it is what it
# was.
headroom = WhileAny(_raise_limit, sys.setrecursionlimit)
