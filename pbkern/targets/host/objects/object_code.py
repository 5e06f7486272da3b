"""Machine code of one program: object files, found in the store on disk or made and stored, and their image in memory.

Code is kept under the program's content (cache_key.py). With a hit nothing is lowered and MLIR is
not imported.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

from pbkern.core.errors import InternalError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.process import disk_cache, fallback
from pbkern.core.process.disk_cache import DiskStore
from pbkern.lower.rules.debug_callbacks import TRACE
from pbkern.targets.host.runtime import xla

from . import cache_key, elf_loader, known_failures

KIND = "code"


def _untimed(stage: str, function: Callable, *args: Any) -> Any:
    return function(*args)


@dataclass(frozen=True)
class ObjectCode:
    """Machine code of one program, as it is kept on disk.

    Attributes:
      objects: ELF object files. Each may call functions of those before it; the last has
        @pbk_handler and @pbk_call.
      arena_bytes: memory of one call for temporaries and scratch.
    """

    objects: tuple[bytes, ...]
    arena_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.objects))

    def packed(self) -> bytes:
        head = {"arena_bytes": self.arena_bytes, "sizes": [len(obj) for obj in self.objects]}
        return b"".join([json.dumps(head).encode(), b"\n", *self.objects])

    @classmethod
    def unpacked(cls, payload: bytes) -> ObjectCode:
        first, _, rest = payload.partition(b"\n")
        head = json.loads(first)
        ends = list(itertools.accumulate(head["sizes"]))
        return cls(
            tuple(rest[end - size : end] for end, size in zip(ends, head["sizes"])),
            head["arena_bytes"],
        )


def stored_key(key: str) -> str:
    """The key on disk of code that depends on `key`."""
    return disk_cache.digest((key, cache_key.environment()))


def find_code(
    store: DiskStore, key: str, symbols: Mapping[str, int], timed: Callable = _untimed
) -> tuple[ObjectCode, elf_loader.Image] | None:
    """The code that the store has under a key of `stored_key`, loaded."""
    payload = timed("read", store.get, KIND, key)
    if payload is None:
        return None
    try:
        code = ObjectCode.unpacked(payload)
        return code, timed("load", image_of, code, symbols)
    except (InternalError, ValueError, KeyError):  # no object of ours: make it again
        store.remove(KIND, key)
        return None


def stored_code(
    key: str,
    symbols: dict[str, int],
    make: Callable[[], ObjectCode],
    timed: Callable = _untimed,
    remembers_failures: bool = False,
):
    """(code, its image, whether it was on disk): what the store has under `key`, else what `make` makes, stored.

    remembers_failures: a failure of `make` is stored, too, and raised again in later processes
    without another try.
    """
    store = None if fallback.is_failing() else disk_cache.current()
    if store is not None:
        key = timed("environment", stored_key, key)
        loaded = find_code(store, key, symbols, timed)
        if loaded is not None:
            return *loaded, True
    with known_failures.remembered(store if remembers_failures else None, key):
        code = make()
        image = timed("load", image_of, code, symbols)
    if store is not None and not prints(code):
        timed("write", store.put, KIND, key, code.packed())
    return code, image, False


def image_of(code: ObjectCode, symbols: Mapping[str, int]) -> elf_loader.Image:
    """The last object's image, which keeps those of the others alive. Raises InternalError."""
    image = None
    for content in code.objects:
        image = elf_loader.Image(content, symbols, image)
    if image is None:
        raise InternalError("a program has no object file")
    return image


def prints(code: ObjectCode) -> bool:
    """Whether the code holds numbers of print sites, which mean nothing in another process."""
    return any(
        elf_loader.undefined_symbols(obj) & {TRACE, xla.PREFIX + TRACE} for obj in code.objects
    )
