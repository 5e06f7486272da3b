"""Public names: the errors that a user can meet."""

from pbkern.core.errors import (
    ArgumentError,
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
    "ArgumentError",
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
