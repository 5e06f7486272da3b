"""Content of NAME_metadata: a library described for programs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from pbkern.core.affine import Affine
from pbkern.core.options import CompileOptions
from pbkern.core.version import VERSION
from pbkern.targets.cpu.machines.devices import CpuDevice

from .arguments import Argument
from .c_types import element_type, memref
from .header import Interface


def metadata_of(
    of: Interface, options: CompileOptions, devices: Sequence[CpuDevice], content: Sequence[str]
) -> dict[str, Any]:
    """Makes the content of NAME_metadata."""

    def argument(arg: Argument) -> dict[str, Any]:
        return {
            "name": arg.name,
            "path": arg.path,
            "dtype": arg.type.dtype.name,
            "shape": list(arg.type.shape),
            "bytes": arg.type.nbytes,
            "c_type": element_type(arg.type.dtype, arg.path).c,
            "memref": memref(arg),
            "used": arg.is_used,
            "weight": arg.is_weight,
            **({"dimensions": list(map(dimension, arg.dimensions))} if arg.dimensions else {}),
        }

    def dimension(expression: Affine[str]) -> dict[str, Any]:
        return {"constant": expression.const, "sizes": dict(expression.terms)}

    return {
        "pbkern": "library",
        "name": of.name,
        "inputs": list(map(argument, of.inputs)),
        "outputs": list(map(argument, of.outputs)),
        "weights": list(map(argument, of.weights)),
        "weights_file": of.file and {"bytes": of.file.size, "offsets": list(of.file.offsets)},
        "sizes": [
            {"name": symbol.name, "low": symbol.low, "high": symbol.high}
            for symbol in of.sizes.symbols
        ],
        "shared": [list(pair) for pair in of.shared],
        "user_device_memory": of.user_memory,
        "memory_bytes": of.memory_bytes,
        "devices": list(of.devices),
        "triple": devices[0].triple,
        "needs": [list(device.needs) for device in devices],
        "openmp": options.openmp,
        "threads": of.threads,
        "version": VERSION,
        "content": hashlib.sha256("\n".join(content).encode()).hexdigest(),
    }
