"""What is made: a library in memory, its files, written whole or not at all, and how they are called from Python."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pbkern.core.errors import OptionError
from pbkern.targets.cpu.devices import Device

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
    device: Device = field(repr=False)
    use_openmp: bool = field(repr=False)

    def load(self) -> LoadedLibrary:
        """The library in this process. Raises TargetError for one that is made for another system."""
        if "shared" in self.paths:
            return LoadedLibrary(self.paths["shared"], self.metadata)
        with tempfile.TemporaryDirectory() as folder:
            made, code = pathlib.Path(folder) / f"{self.name}.so", pathlib.Path(folder) / f"{self.name}.o"
            code.write_bytes(self.code)
            link.link(made, [code], self.device, self.use_openmp)
            return LoadedLibrary(made, self.metadata)


@contextlib.contextmanager
def all_or_none(targets: Mapping[str, pathlib.Path]) -> Iterator[dict[str, pathlib.Path]]:
    """Paths beside the targets, which are moved there once the body is done; after an error, nothing is left of them."""
    for folder in {p.parent for p in targets.values()}:
        if not folder.is_dir():
            raise OptionError(
                f"there is no folder {folder}", why="files of the library would go there", hint=f"mkdir -p {folder}"
            )
        if not os.access(folder, os.W_OK):
            raise OptionError(f"nothing can be written to {folder}", why="files of the library would go there")
    for path in targets.values():
        if path.is_dir():
            raise OptionError(
                f"{path} is a folder", why="a file of the library has this name", hint="another name, or remove it"
            )
    with contextlib.ExitStack() as stack:
        places = {}
        for kind, path in targets.items():
            beside = stack.enter_context(tempfile.TemporaryDirectory(prefix=".pbkern-", dir=path.parent))
            places[kind] = pathlib.Path(beside) / path.name
        yield places
        for kind, path in targets.items():
            os.replace(places[kind], path)
