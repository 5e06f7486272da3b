"""Joint graph of forward and backward -> the two, by Torch's minimal cut: as few bytes as possible are kept between them.

What is computed again costs little where kernels fuse it, so the cut may go through more than
Torch's own: batched products too, such as the scores of attention, which are many more than what
they are made of. Views are always made again: to keep one would be to copy it. Measured in
docs/decisions/045-saved-tensors.md.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import torch
from torch._functorch import config, partitioners
from torch.utils._ordered_set import OrderedSet

# Beside those of Torch's list. Products with weights stay: they cost more than their bytes.
AGAIN = (
    "bmm",
    "cat",
    "constant_pad_nd",
    "tril",
    "logsumexp",
    "amin",
    "all",
    "repeat",
    "stack",
    "flip",
    "roll",
    "detach",
    "alias",
    "gather",
    "scatter",
    "contiguous",
    "clone",
    "copy",
    "real",
    "imag",
    "view_as_real",
    "view_as_complex",
)
CHOICES = {"ban_recompute_materialized_backward": False, "recompute_views": True}
_lock = threading.RLock()


def partition(
    joint: torch.fx.GraphModule, inputs: Any, **options: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """(forward graph, backward graph)."""
    listed = partitioners.get_default_op_list()
    more = [getattr(torch.ops.aten, name) for name in AGAIN]
    again, fused = (
        OrderedSet([*ops, *more]) for ops in (listed.recomputable_ops, listed.fusible_ops)
    )
    ours = dataclasses.replace(listed, recomputable_ops=again, fusible_ops=fused)
    with _lock, config.patch(CHOICES):
        before = partitioners.get_default_op_list
        partitioners.get_default_op_list = lambda: ours
        try:
            return partitioners.min_cut_rematerialization_partition(joint, inputs, **options)
        finally:
            partitioners.get_default_op_list = before
