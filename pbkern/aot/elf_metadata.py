"""A shared library's bytes -> the metadata that it holds, without loading it."""

from __future__ import annotations

MARK = b'{"pbkern": "library", '


def find(content: bytes) -> str | None:
    """The JSON text; None where there is none."""
    at = content.find(MARK)
    return None if at < 0 else content[at : content.index(b"\0", at)].decode()
