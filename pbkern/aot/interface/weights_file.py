"""The file of weights that goes with a library.

    NAME.weights    64 bytes: a mark, the digest of the layout, zeros; then the arrays, each from a cache line's start on

A file belongs to every library whose weights have the same names, types and shapes: a model that
was trained further needs no new library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.scratch import BUFFER_ALIGNMENT

from .arguments import Argument

# The first bytes of a file of weights; the number is the format's.
FILE_MARK = b"pbkern weights 1"
# Bytes in front of the arrays of a file: the mark, 32 of the digest, zeros.
HEAD_BYTES = 64


@dataclass(frozen=True)
class FileLayout:
    """Places of the arrays in a file of weights.

    Attributes:
      offsets: of the arrays, in bytes from the file's start.
      size: of the file, in bytes.
      head: its first HEAD_BYTES bytes.
    """

    offsets: tuple[int, ...]
    size: int
    head: bytes

    @classmethod
    def of(cls, weights: Sequence[Argument]) -> FileLayout:
        offsets, end = [], HEAD_BYTES
        for argument in weights:
            offsets.append(end)
            end += -(-argument.type.nbytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
        described = "\n".join(
            f"{argument.path} {argument.type.dtype.name} {argument.type.shape}"
            for argument in weights
        )
        head = FILE_MARK + hashlib.sha256(described.encode()).digest()
        return cls(tuple(offsets), end, head.ljust(HEAD_BYTES, b"\0"))

    def content(self, values: Sequence[np.ndarray]) -> bytes:
        """The bytes of a file with these arrays."""
        content = bytearray(self.size)
        content[:HEAD_BYTES] = self.head
        for offset, value in zip(self.offsets, values, strict=True):
            content[offset : offset + value.nbytes] = np.ascontiguousarray(value).tobytes()
        return bytes(content)
