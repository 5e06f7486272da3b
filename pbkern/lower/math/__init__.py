"""Elementwise equations and functions such as exp on SSA values.

The rules register when this package is imported.
"""

from . import elementwise

__all__ = ["elementwise"]
