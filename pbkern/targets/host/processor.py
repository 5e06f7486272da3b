"""This computer's processor as the system describes it, and how many of its cores this process may use."""

from __future__ import annotations

import os
import pathlib
import re

CPUINFO = pathlib.Path("/proc/cpuinfo")


def cpuinfo() -> str:
    """The system's description of its processors; empty where it has none."""
    try:
        return CPUINFO.read_text()
    except OSError:
        return ""


def cpu_flags(cpuinfo: str) -> set[str]:
    line = re.search(r"^(?:flags|Features)\s*: (.*)$", cpuinfo, re.MULTILINE)
    return set(line[1].split()) if line else set()


def allowed_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
