"""A library that was made, its files, and calls of it from Python."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from pbkern.core.lazy_dataclass import dataclass
from pbkern.targets.cpu.machines.devices import CpuDevice

from . import link
from .loaded import LoadedLibrary


@dataclass(frozen=True)
class Library:
    """A C library.

    Attributes:
      name: of its C function.
      paths: what was written: "obj", "header", "shared", ... -> file.
      header: text of the C header.
      metadata: arguments, types, sizes, device, version: a dictionary.
    """

    name: str
    paths: Mapping[str, pathlib.Path]
    header: str
    metadata: Mapping[str, Any]
    code: bytes = field(repr=False)
    device: CpuDevice = field(repr=False)
    use_openmp: bool = field(repr=False)

    def load(self) -> LoadedLibrary:
        """The library in this process. Raises TargetError for one that is made for another system."""
        if "shared" in self.paths:
            return LoadedLibrary(self.paths["shared"], self.metadata, self.paths.get("weights"))
        with tempfile.TemporaryDirectory() as folder:
            shared_object, code = (
                pathlib.Path(folder) / f"{self.name}.so",
                pathlib.Path(folder) / f"{self.name}.o",
            )
            code.write_bytes(self.code)
            link.link(shared_object, [code], self.device, self.use_openmp)
            return LoadedLibrary(shared_object, self.metadata, self.paths.get("weights"))
