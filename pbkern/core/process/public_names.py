"""PublicNames: an object whose `dir`, and so completion, shows its public names alone."""

from __future__ import annotations

from typing import ClassVar


class PublicNames:
    """Hides names with an underscore, and those of `INTERNAL`, which other rooms of this package call."""

    INTERNAL: ClassVar[frozenset[str]] = frozenset()

    def __dir__(self) -> list[str]:
        hidden = self.INTERNAL | {"INTERNAL"}
        return [
            name
            for name in super().__dir__()
            if name.startswith("__") or not (name.startswith("_") or name in hidden)
        ]
