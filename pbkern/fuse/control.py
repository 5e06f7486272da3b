"""scan, while and cond -> native Loop, While and Cond steps."""
from __future__ import annotations


def control_steps(builder, node):
    raise NotImplementedError
