"""Python's cyclic garbage collector, paused while a compilation runs.

A compilation makes a few hundred thousand small objects that live until it ends, so that the
collector, which runs after every 700 new ones, finds nothing and walks all that JAX has loaded
again and again: a tenth to a fifth of the time of a transformer block. What four blocks leave
behind in cycles is 25 MB. The collector looks for it once, when it goes on, and calls what is left old. The younger
generations would be walked one after the other otherwise, 20 ms each after a first compilation, which loads modules.
Old objects are walked when a quarter of them are new to their age. Modules alone are that many: what a compilation leaves that
has loaded some is old without being counted, so that the next compilation does not begin with 100 ms of the collector.
"""

from __future__ import annotations

import gc
import sys

from .while_any import WhileAny

# The generation of new objects.
YOUNG = 0
# The one whose survivors are old.
MIDDLE = 1


def _disable() -> tuple[bool, int]:
    was_enabled = gc.isenabled()
    gc.disable()
    return was_enabled, len(sys.modules)


def _enable(before: tuple[bool, int]) -> None:
    was_enabled, modules = before
    if not was_enabled:
        return
    # Otherwise the collector begins as soon as it is on, with the youngest generation alone.
    if len(sys.modules) == modules or gc.get_freeze_count():
        gc.collect(MIDDLE)
    else:
        gc.collect(YOUNG)
        # What thaws is old. A program that has frozen objects of its own would lose that.
        gc.freeze()
        gc.unfreeze()
    gc.enable()


# No collections while the body runs, also where several threads pause; one that was off stays off.
paused = WhileAny(_disable, _enable)
