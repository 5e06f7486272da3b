"""CompilerParams of Pallas's back ends -> what they mean here, field by field."""

from __future__ import annotations


def cpu_params(params, grid, vmapped, at):
    return {}
