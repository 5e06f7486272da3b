"""The AMD GPU's half of lowering: its CompilerParams."""

from __future__ import annotations

from pbkern.targets.simt.backend import ThreadBackend

from .params import CompilerParams


class AmdgpuBackend(ThreadBackend):
    """See ThreadBackend."""

    params = CompilerParams()
