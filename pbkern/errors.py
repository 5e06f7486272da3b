"""Public names: the errors that a user can meet."""

from pbkern.core.errors import (
    CheckError,
    InternalError,
    KernelError,
    OptionError,
    OutOfBoundsError,
    PbkernError,
    RaceError,
    ScheduleError,
    SimulationError,
    TargetError,
    UnsupportedOp,
)

__all__ = [
    "CheckError",
    "InternalError",
    "KernelError",
    "OptionError",
    "OutOfBoundsError",
    "PbkernError",
    "RaceError",
    "ScheduleError",
    "SimulationError",
    "TargetError",
    "UnsupportedOp",
]
