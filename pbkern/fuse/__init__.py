"""ClosedJaxpr -> Plan: which equations run as one kernel, and how. `plan` is the entry point (pipeline.py).

The fuser is imported by the first use of one of these names, not by `import pbkern`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import choices
    from .choices import Choice, groups_of
    from .explain import Explanation
    from .pipeline import plan
    from .segment import Left, Plan, Segment

__all__ = ["Choice", "Explanation", "Left", "Plan", "Segment", "choices", "groups_of", "plan"]


def __getattr__(name: str):
    if name == "choices":
        return importlib.import_module(".choices", __name__)
    if name in __all__:
        return getattr(importlib.import_module(".pipeline", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
