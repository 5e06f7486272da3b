"""Public names: settings from the environment, and `override` for the length of a `with` block."""

from pbkern.core.config import Config, current, override

__all__ = ["Config", "current", "override"]
