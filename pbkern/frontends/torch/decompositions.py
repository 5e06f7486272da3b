"""Which operators Torch takes apart before the table sees them.

They are its core decompositions, and all of operators that the table lacks. Softmax and
normalisations are among them, so that what a backward graph needs of them can be computed again in
parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import aten, pool_gradient
from .aten.table import name_of

# What has no own rule and must not be taken apart: these decompositions write to their arguments.
KEPT = ("aten::lift", "aten::alias", "aten::detach")


@functools.cache
def decompositions() -> dict[Any, Callable]:
    """Operator -> decomposition."""
    from torch._decomp import core_aten_decompositions, decomposition_table

    core = core_aten_decompositions()
    rules = {k: rule for k, rule in core.items() if aten.rule_of(k) is None}
    for k, function in decomposition_table.items():
        name = name_of(k)
        if (
            name is None
            or aten.rule_of(k) is not None
            or name.startswith(KEPT)
            or "scatter" in name
        ):
            continue
        if isinstance(k, torch._ops.OpOverload) and k.namespace in ("aten", "prims"):
            rules[k] = function
    return rules | pool_gradient.decompositions()
