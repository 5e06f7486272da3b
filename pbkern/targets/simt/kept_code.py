"""Code of kernels between processes: what lowering and the vendor's compiler made, on disk, by what it depends on.

    key     kernel, its users' lines, options, device; pbkern's sources, versions of MLIR and llvmlite
    entry   the function as MLIR with the numbers of its launch, and the vendor's text or image

A hit costs neither lowering nor MLIR.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import zlib
from typing import Any

from pbkern._jax import user_line
from pbkern.core.jaxprs.walks import equations
from pbkern.core.process import disk_cache
from pbkern.dsl.kernel import Kernel
from pbkern.targets import mlir
from pbkern.targets.host.objects.cache_key import sources

from . import llvm
from .emit.kernel import ThreadFunction
from .emit.recorder import Profile


@functools.cache
def environment() -> str:
    """Digest of what code depends on beside its kernel and its device.

    Raises TargetError without llvmlite.
    """
    return disk_cache.digest((sources(), mlir.installed(), llvm.require_llvmlite()))


def key(kernel: Kernel, name: str, options: Any, device: Any) -> str:
    """Key of one kernel's code. Lines are in it: errors of the simulator name them."""
    lines = tuple(user_line(eqn) for eqn in equations(kernel.body.jaxpr))
    return disk_cache.digest((environment(), name, kernel.content, lines, options, device))


def packed(function: ThreadFunction, image: bytes) -> bytes:
    head = zlib.compress(json.dumps(dataclasses.asdict(function)).encode())
    return len(head).to_bytes(8, "little") + head + image


def unpacked(payload: bytes) -> tuple[ThreadFunction, bytes]:
    """Raises ValueError or TypeError for what `packed` did not make."""
    size = int.from_bytes(payload[:8], "little")
    fields = json.loads(zlib.decompress(payload[8 : 8 + size]))
    profile = fields["profile"] and Profile(
        **fields["profile"] | {"steps": tuple(map(tuple, fields["profile"]["steps"]))}
    )
    return ThreadFunction(
        **fields | {"operands": tuple(fields["operands"]), "profile": profile}
    ), payload[8 + size :]
