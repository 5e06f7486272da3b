"""A program with the code of its kernels, for devices of every vendor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any, Generic, Protocol, TypeVar

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.options import CompileOptions
from pbkern.dsl.host_program import HostProgram, ProgramSignature
from pbkern.targets.host.objects.elf_loader import Image

from .emit.kernel import ThreadFunction


class KernelCode(Protocol):
    """One kernel's code.

    Attributes:
      function: as MLIR, with the numbers of its launch.
    """

    @property
    def function(self) -> ThreadFunction: ...

    def images(self, refused: list[str]) -> Iterator[tuple[str, bytes]]:
        """(what it is, what a driver may load), the best first; why one cannot be made is added to `refused`."""

    def made_for(self, kind: Any) -> KernelCode | None:
        """Makes the kernel for another kind of device, if that can run it."""


C = TypeVar("C", bound=KernelCode)


@dataclass(frozen=True)
class LinkedHandler:
    """Code of this computer that launches a program's kernels by one driver (launch/handler.py).

    Attributes:
      image: in memory. key: that of its object file on disk.
      temporaries: bytes of memory on the device that a call brings.
    """

    image: Image
    key: str
    temporaries: int


@dataclass(eq=False)
class LoadedDeviceProgram(Generic[C]):
    """One program that can be launched, compiled in this process or in an earlier one.

    Attributes:
      kernels: code of each, in the order in which the program has them.
      handlers: by driver. names: by driver, the one that XLA knows.
    """

    signature: ProgramSignature
    kernels: tuple[C, ...]
    handlers: dict[Any, LinkedHandler] = field(default_factory=dict)
    names: dict[Any, str] = field(default_factory=dict)

    def distinct(self) -> list[C]:
        return list(dict.fromkeys(self.kernels))


@dataclass(eq=False, kw_only=True)
class DeviceProgram(LoadedDeviceProgram[C]):
    """A program whose steps are known.

    Attributes:
      program: without last stages. codes: by id of its kernels. keys: of their code on disk, by id; None where no other
        process can use it.
      times: milliseconds per stage.
    """

    program: HostProgram
    codes: Mapping[int, C]
    keys: Mapping[int, str | None]
    options: CompileOptions
    times: dict[str, float] = field(default_factory=dict)
