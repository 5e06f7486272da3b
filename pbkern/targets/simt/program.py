"""A HostProgram with the code of its kernels, for devices of every vendor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any, Generic, Protocol, TypeVar

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.options import CompileOptions
from pbkern.dsl.host_program import HostProgram

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


@dataclass(eq=False)
class DeviceProgram(Generic[C]):
    """One program.

    Attributes:
      program: without last stages. codes: by id of its kernels. options: CompileOptions. times:
        milliseconds per stage.
      handlers: by driver, the handler's code and the bytes of temporaries of a call. names: by
        driver, the one that XLA knows.
    """

    program: HostProgram
    codes: Mapping[int, C]
    options: CompileOptions
    times: dict[str, float] = field(default_factory=dict)
    handlers: dict[Any, tuple[Any, int]] = field(default_factory=dict)
    names: dict[Any, str] = field(default_factory=dict)

    def distinct(self) -> list[C]:
        return list(dict.fromkeys(self.codes.values()))
