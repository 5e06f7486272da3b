"""ClosedJaxpr -> Plan: which equations run as one kernel, and how. `plan` is the entry point (pipeline.py).

The fuser is imported by the first use of one of these names, not by `import pbkern`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pbkern.fuse.emit import choices
    from pbkern.fuse.emit.choices import Choice, groups_of
    from pbkern.fuse.emit.explain import Explanation
    from pbkern.fuse.emit.plan import LeftToXla, Plan, Segment

    from .pipeline import left_whole, plan

__all__ = [
    "Choice",
    "Explanation",
    "LeftToXla",
    "Plan",
    "Segment",
    "choices",
    "groups_of",
    "left_whole",
    "plan",
]


def __getattr__(name: str):
    if name == "choices":
        return importlib.import_module("pbkern.fuse.emit.choices")
    if name in __all__:
        return getattr(importlib.import_module(".pipeline", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
