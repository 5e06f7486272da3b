"""Public names: the errors that a user can meet."""

from pbkern.core.errors import (
    CheckError,
    FallbackWarning,
    FunctionError,
    InternalError,
    KernelError,
    OptionError,
    OutOfBoundsError,
    PbkernError,
    RaceError,
    ScheduleError,
    SimulationError,
    TargetError,
    UnsupportedKernel,
    UnsupportedOp,
)

__all__ = [
    "CheckError",
    "FallbackWarning",
    "FunctionError",
    "InternalError",
    "KernelError",
    "OptionError",
    "OutOfBoundsError",
    "PbkernError",
    "RaceError",
    "ScheduleError",
    "SimulationError",
    "TargetError",
    "UnsupportedKernel",
    "UnsupportedOp",
]
