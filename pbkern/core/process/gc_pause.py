"""Python's cyclic garbage collector, paused while a compilation runs.

A compilation makes a few hundred thousand small objects that live until it ends, so that the
collector, which runs after every 700 new ones, finds nothing and walks all that JAX has loaded
again and again: a tenth to a fifth of the time of a transformer block. What four blocks leave
behind in cycles is 25 MB. The collector looks for it once, when it goes on, and calls what is left old. The younger
generations would be walked one after the other otherwise, 20 ms each after a first compilation, which loads modules.
"""

from __future__ import annotations

import gc

from .while_any import WhileAny

# The generation whose survivors are old.
MIDDLE = 1


def _disable() -> bool:
    was_enabled = gc.isenabled()
    gc.disable()
    return was_enabled


def _enable(was_enabled: bool) -> None:
    if was_enabled:
        # Otherwise the collector begins as soon as it is on, with the youngest generation alone.
        gc.collect(MIDDLE)
        gc.enable()


# No collections while the body runs, also where several threads pause; one that was off stays off.
paused = WhileAny(_disable, _enable)
