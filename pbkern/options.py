"""Public names: compile options."""

from pbkern.core.options import CompileOptions

__all__ = ["CompileOptions"]
