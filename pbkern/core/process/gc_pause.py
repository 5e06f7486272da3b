"""Python's cyclic garbage collector, paused while a compilation runs.

A compilation makes a few hundred thousand small objects that live until it ends, so that the
collector, which runs after every 700 new ones, finds nothing and walks all that JAX has loaded
again and again: a tenth to a fifth of the time of a transformer block. What four blocks leave
behind in cycles is 25 MB; the collector finds it once it goes on.
"""

from __future__ import annotations

import gc

from .while_any import WhileAny


def _disable() -> bool:
    was_enabled = gc.isenabled()
    gc.disable()
    return was_enabled


def _enable(was_enabled: bool) -> None:
    if was_enabled:
        gc.enable()


# No collections while the body runs, also where several threads pause; one that was off stays off.
paused = WhileAny(_disable, _enable)
