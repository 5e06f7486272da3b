"""Parts of printing: equation -> Python expression; body -> function; a failed kernel -> a file that fails the same way.

The rules of spelling register when this package is imported.
"""

from . import spelling

__all__ = ["spelling"]
