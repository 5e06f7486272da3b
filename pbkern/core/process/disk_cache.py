"""What is worth keeping between processes, on disk: compiled programs and tuned schedules. Bytes by content.

An entry is one file, `<kind>-<key>.pbk`, whose name is a digest of everything that its content depends on. It is written
beside its place and renamed into it, so that no process ever sees half of one, and begins with a checksum of the rest:
what does not agree with it is dropped and made again. Entries that were not used for longest go first once all of them
together exceed the limit. A folder that cannot be written to costs one warning; everything works without.

The folder is PBKERN_CACHE_DIR, else $XDG_CACHE_HOME/pbkern, else ~/.cache/pbkern; PBKERN_CACHE=0 does without.
Entries hold machine code: a folder that other users may write to is not used.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
import stat
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

from pbkern.core import config
from pbkern.core.errors import OptionError

MAGIC = b"pbkern entry 1\n"
SUFFIX = ".pbk"
# A process looks at the whole folder when it has written this share of the limit, and then makes this much room.
CHECK_SHARE, KEEP_SHARE = 1 / 16, 0.9


def digest(value: object) -> str:
    """Name of a nested tuple of texts, bytes, numbers and dataclasses of them: equal for equal `repr`."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


@dataclass
class Store:
    """Entries below one folder.

    Attributes:
      limit: bytes of all entries together.
    """

    folder: pathlib.Path
    limit: int
    _usable: bool | None = field(default=None, init=False)  # whether entries can be written; None: not tried
    _trust: bool | None = field(default=None, init=False)  # whether nobody else can write them
    _warned: bool = field(default=False, init=False)
    _unchecked: int | None = field(default=None, init=False)  # bytes written since the folder was last looked at

    def get(self, kind: str, key: str) -> bytes | None:
        """The entry's bytes; None where there is none, or none that is whole."""
        path = self._path(kind, key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        payload = _payload(content, kind, key)
        if payload is None:
            self._drop(path)
        if payload is None or not self._trusted():
            return None
        with contextlib.suppress(OSError):  # a folder that may only be read has no order of use
            os.utime(path)
        return payload

    def put(self, kind: str, key: str, payload: bytes) -> bool:
        """Writes an entry; whether it could. Of two processes that write the same one, either's file stays."""
        if not self._writable():
            return False
        content = MAGIC + _checksum(kind, key, payload) + payload
        if len(content) > self.limit:
            return False
        try:
            handle, name = tempfile.mkstemp(prefix=".new-", dir=self.folder)
        except OSError as e:
            return self._give_up(str(e))
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(name, self._path(kind, key))
        except OSError as e:
            self._drop(pathlib.Path(name))
            return self._give_up(str(e))
        self._keep_within_limit(len(content))
        return True

    def remove(self, kind: str, key: str) -> None:
        """Drops an entry whose content turned out to be of no use."""
        self._drop(self._path(kind, key))

    def entries(self) -> list[tuple[pathlib.Path, os.stat_result]]:
        """Files of the store, least recently used first."""
        return sorted(self._files(), key=lambda f: f[1].st_mtime_ns)

    def size(self) -> int:
        """Bytes of all entries together."""
        return sum(s.st_size for _, s in self._files())

    def clear(self) -> tuple[int, int]:
        """Removes every entry: (how many, bytes)."""
        found = [*self._files(), *self._files(".new-*")]
        for path, _ in found:
            self._drop(path)
        return len(found), sum(s.st_size for _, s in found)

    # ------------------------------------------------------------------------------------------------ within

    def _path(self, kind: str, key: str) -> pathlib.Path:
        return self.folder / f"{kind}-{key}{SUFFIX}"

    def _files(self, pattern: str = f"*{SUFFIX}") -> Iterator[tuple[pathlib.Path, os.stat_result]]:
        for path in self.folder.glob(pattern):
            with contextlib.suppress(OSError):  # another process may have removed it
                yield path, path.stat()

    def _drop(self, path: pathlib.Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()

    def _writable(self) -> bool:
        if self._usable is None:
            try:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._usable = os.access(self.folder, os.W_OK | os.X_OK) or self._give_up("it may not be written to")
            except OSError as e:
                self._give_up(str(e))
        return bool(self._usable) and self._trusted()

    def _trusted(self) -> bool:
        """Whether nobody else may put code here that this process would then run."""
        if self._trust is None:
            try:
                found = self.folder.stat()
            except OSError as e:
                return self._give_up(str(e))
            self._trust = found.st_uid in (os.getuid(), 0) and not found.st_mode & stat.S_IWOTH
            if not self._trust:
                owner = f"owner {found.st_uid}, mode {stat.filemode(found.st_mode)}"
                self._give_up(f"other users may write to it ({owner})")
        return self._trust

    def _give_up(self, why: str) -> bool:
        """False: nothing more is written. Warns, once; what is there is read all the same, if it can be trusted."""
        self._usable = False
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"pbkern keeps nothing on disk: {self.folder} cannot be used: {why}. "
                "PBKERN_CACHE_DIR names another folder, PBKERN_CACHE=0 does without", stacklevel=2,
            )  # fmt: skip
        return False

    def _keep_within_limit(self, written: int) -> None:
        """Removes what was not used for longest. The folder is listed at the first entry and then once in a while."""
        if self._unchecked is not None and self._unchecked + written < self.limit * CHECK_SHARE:
            self._unchecked += written
            return
        self._unchecked = 0
        entries = self.entries()
        total = sum(s.st_size for _, s in entries)
        if total <= self.limit:
            return
        for path, found in entries:
            if total <= self.limit * KEEP_SHARE:
                return
            self._drop(path)
            total -= found.st_size


def _checksum(kind: str, key: str, payload: bytes) -> bytes:
    return hashlib.sha256(f"{kind}-{key}\n".encode() + payload).digest()


def _payload(content: bytes, kind: str, key: str) -> bytes | None:
    """What is behind the checksum, if that agrees."""
    head = len(MAGIC) + hashlib.sha256().digest_size
    payload = content[head:]
    good = content[:head] == MAGIC + _checksum(kind, key, payload)
    return payload if good else None


# --- the process's own ----------------------------------------------------------------------------------------------


def folder() -> pathlib.Path:
    """Where entries are kept. Raises OptionError where nothing says, and the user has no home."""
    chosen = config.current().cache_dir
    if chosen is not None:
        return chosen.expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (pathlib.Path(base) if base and os.path.isabs(base) else pathlib.Path("~/.cache").expanduser()) / "pbkern"
    except RuntimeError as e:
        raise OptionError("there is no folder for the cache", why=str(e), hint="PBKERN_CACHE_DIR names one") from None


def current() -> Store | None:
    """The store that configuration names; None where it says to do without, or there is no place for one."""
    c = config.current()
    if not c.cache:
        return None
    try:
        return _store(folder(), c.cache_megabytes << 20)
    except OptionError as e:
        _warn(str(e))
        return None


@functools.cache
def _warn(text: str) -> None:
    """Once per text and process."""
    warnings.warn(f"pbkern keeps nothing on disk: {text}", stacklevel=3)


@functools.cache
def _store(at: pathlib.Path, limit: int) -> Store:
    return Store(at, limit)
