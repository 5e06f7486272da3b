"""(equation, block of its result) -> blocks of its operands; blocks of a whole group, and its body at them.

The rules register when this package is imported.
"""

from . import reshape_gather, rules, scatter, windows_contractions

__all__ = ["reshape_gather", "rules", "scatter", "windows_contractions"]
