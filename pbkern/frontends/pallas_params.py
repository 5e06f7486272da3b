"""CompilerParams of Pallas's back ends -> what they mean here, field by field."""

from __future__ import annotations

from ..lower.program import LowerOptions


def cpu_params(params, grid, vmapped, at):
    return {}


__all__ = ["LowerOptions", "cpu_params"]
