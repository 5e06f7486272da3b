"""Results that are worth keeping between processes, on disk: compiled programs and tuned schedules.

Bytes by content.

An entry is one file, `<kind>-<key>.pbk`, whose name is a digest of everything that its content
depends on. It is written beside its place and renamed into it, so that no process ever sees half of
one, and begins with a checksum of the rest: what does not agree with it is dropped and made again.
Entries that were not used for longest go first once all of them together exceed the limit. A folder
that cannot be written to costs one warning; everything works without.

The folder is PBKERN_CACHE_DIR, else $XDG_CACHE_HOME/pbkern, else ~/.cache/pbkern; PBKERN_CACHE=0
does without. PBKERN_CACHE_SHARED names more folders, which are only read: filled by root in a
container image, for example.

Entries hold machine code. A folder and an entry are used only if they belong to this user or to
root, and neither a group nor others may write to them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
import secrets
import stat
import warnings
from collections.abc import Iterator
from dataclasses import field

from pbkern.core import config
from pbkern.core.errors import OptionError
from pbkern.core.lazy_dataclass import dataclass

MAGIC = b"pbkern entry 1\n"
SUFFIX = ".pbk"
# Others may read entries, as far as the umask lets them: code is no secret, and a shared folder is
# of use to them.
ENTRY_MODE = 0o644
# A process looks at the whole folder when it has written this part of the limit. Source: not
# recorded.
CHECK_SHARE = 1 / 16
# The part of the limit that a process leaves in the folder when it makes room. Source: not
# recorded.
KEEP_SHARE = 0.9


def digest(value: object) -> str:
    """Name of a nested tuple of texts, bytes, numbers and dataclasses of them: equal for equal `repr`."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


@dataclass
class DiskStore:
    """Entries below one folder.

    Attributes:
      limit: bytes of all entries together.
      shared: stores that are read where this one lacks an entry.
      read_only: nothing is written, removed or marked as used.
    """

    folder: pathlib.Path
    limit: int
    shared: tuple[DiskStore, ...] = ()
    read_only: bool = False
    _usable: bool | None = field(
        default=None, init=False
    )  # whether entries can be written; None: not tried
    _trust: bool | None = field(default=None, init=False)  # whether nobody else can write them
    _warned: bool = field(default=False, init=False)
    _unchecked: int | None = field(
        default=None, init=False
    )  # bytes written since the folder was last looked at

    def get(self, kind: str, key: str) -> bytes | None:
        """The entry's bytes; None where there is none, or none that is whole and safe to run."""
        path = self._path(kind, key)
        payload = self._read(path, kind, key)
        if payload is None:
            contents = (store.get(kind, key) for store in self.shared)
            return next((content for content in contents if content is not None), None)
        if not self.read_only:
            with contextlib.suppress(OSError):  # a folder that may only be read has no order of use
                os.utime(path)
        return payload

    def _read(self, path: pathlib.Path, kind: str, key: str) -> bytes | None:
        try:
            with path.open("rb") as file:
                # Of the open file: between a look at a path and its opening, others could put
                # another file there.
                entry, content = os.fstat(file.fileno()), file.read()
        except OSError:
            return None
        if not self._trusted():
            return None
        if not _is_safe(entry):
            self._distrust(
                f"other users may have written its entry {path.name} ({_owner_and_mode(entry)})"
            )
            return None
        payload = _payload(content, kind, key)
        if payload is None:
            self._drop(path)
        return payload

    def put(self, kind: str, key: str, payload: bytes) -> bool:
        """Writes an entry; whether it could.

        Of two processes that write the same one, either's file stays.
        """
        if not self._writable():
            return False
        content = MAGIC + _checksum(kind, key, payload) + payload
        if len(content) > self.limit:
            return False
        new = self.folder / f".new-{secrets.token_hex(8)}"
        try:
            handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, ENTRY_MODE)
        except OSError as e:
            return self._give_up(str(e))
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(new, self._path(kind, key))
        except OSError as e:
            self._drop(new)
            return self._give_up(str(e))
        self._keep_within_limit(len(content))
        return True

    def remove(self, kind: str, key: str) -> None:
        """Drops an entry whose content turned out to be of no use."""
        self._drop(self._path(kind, key))

    def entries(self) -> list[tuple[pathlib.Path, os.stat_result]]:
        """Files of the store, least recently used first."""
        return sorted(self._files(), key=lambda file: file[1].st_mtime_ns)

    def size(self) -> int:
        """Bytes of all entries together."""
        return sum(status.st_size for _, status in self._files())

    def clear(self) -> tuple[int, int]:
        """Removes every entry: (how many, bytes)."""
        entries = [*self._files(), *self._files(".new-*")]
        for path, _ in entries:
            self._drop(path)
        return len(entries), sum(status.st_size for _, status in entries)

    # ------------------------------------------------------------------------------------------------
    # within

    def _path(self, kind: str, key: str) -> pathlib.Path:
        return self.folder / f"{kind}-{key}{SUFFIX}"

    def _files(self, pattern: str = f"*{SUFFIX}") -> Iterator[tuple[pathlib.Path, os.stat_result]]:
        for path in self.folder.glob(pattern):
            with contextlib.suppress(OSError):  # another process may have removed it
                yield path, path.stat()

    def _drop(self, path: pathlib.Path) -> None:
        if self.read_only:
            return
        with contextlib.suppress(OSError):
            path.unlink()

    def _writable(self) -> bool:
        if self.read_only:
            return False
        if self._usable is None:
            try:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._usable = os.access(self.folder, os.W_OK | os.X_OK) or self._give_up(
                    "it may not be written to"
                )
            except OSError as e:
                self._give_up(str(e))
        return bool(self._usable) and self._trusted()

    def _trusted(self) -> bool:
        """Whether nobody else may put code here that this process would then run."""
        if self._trust is None:
            try:
                status = self.folder.stat()
            except OSError as e:
                return self._give_up(str(e))
            self._trust = _is_safe(status)
            if not self._trust:
                self._distrust(f"other users may write to it ({_owner_and_mode(status)})")
        return self._trust

    def _distrust(self, why: str) -> None:
        """Reads and writes nothing from now on, and warns."""
        self._trust = False
        self._give_up(f"{why}; `chmod go-w` makes it safe where the owner is right")

    def _give_up(self, why: str) -> bool:
        """False: nothing more is written.

        Warns, once; what is there is read all the same, if it can be trusted.
        """
        self._usable = False
        if not self._warned:
            self._warned = True
            lost = (
                "reads nothing from a shared cache" if self.read_only else "keeps nothing on disk"
            )
            other = "PBKERN_CACHE_SHARED" if self.read_only else "PBKERN_CACHE_DIR"
            warnings.warn(
                f"pbkern {lost}: {self.folder} cannot be used: {why}. "
                f"{other} names another folder, PBKERN_CACHE=0 does without",
                stacklevel=2,
            )
        return False

    def _keep_within_limit(self, written: int) -> None:
        """Removes the least recently used files.

        The folder is listed at the first entry and then once in a while.
        """
        if self._unchecked is not None and self._unchecked + written < self.limit * CHECK_SHARE:
            self._unchecked += written
            return
        self._unchecked = 0
        entries = self.entries()
        total = sum(status.st_size for _, status in entries)
        if total <= self.limit:
            return
        for path, status in entries:
            if total <= self.limit * KEEP_SHARE:
                return
            self._drop(path)
            total -= status.st_size


def _is_safe(status: os.stat_result) -> bool:
    """Whether a folder or a file belongs to this user or to root, and nobody else may write to it."""
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _owner_and_mode(status: os.stat_result) -> str:
    return f"owner {status.st_uid}, mode {stat.filemode(status.st_mode)}"


def _checksum(kind: str, key: str, payload: bytes) -> bytes:
    return hashlib.sha256(f"{kind}-{key}\n".encode() + payload).digest()


def _payload(content: bytes, kind: str, key: str) -> bytes | None:
    """Returns the bytes behind the checksum, if that agrees."""
    head = len(MAGIC) + hashlib.sha256().digest_size
    payload = content[head:]
    good = content[:head] == MAGIC + _checksum(kind, key, payload)
    return payload if good else None


# --- the process's own
# ----------------------------------------------------------------------------------------------


def folder() -> pathlib.Path:
    """Folder of the entries. Raises OptionError where nothing says, and the user has no home."""
    chosen = config.current().cache_dir
    if chosen is not None:
        return chosen.expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (
            pathlib.Path(base)
            if base and os.path.isabs(base)
            else pathlib.Path("~/.cache").expanduser()
        ) / "pbkern"
    except RuntimeError as e:
        raise OptionError(
            "there is no folder for the cache", why=str(e), hint="PBKERN_CACHE_DIR names one"
        ) from None


def current() -> DiskStore | None:
    """The store that configuration names; None where it says to do without, or there is no place for one."""
    settings = config.current()
    if not settings.cache:
        return None
    try:
        return _store(folder(), settings.cache_megabytes << 20, settings.cache_shared)
    except OptionError as e:
        _warn(str(e))
        return None


@functools.cache
def _warn(text: str) -> None:
    """Once per text and process."""
    warnings.warn(f"pbkern keeps nothing on disk: {text}", stacklevel=3)


@functools.cache
def _store(at: pathlib.Path, limit: int, shared: tuple[pathlib.Path, ...]) -> DiskStore:
    return DiskStore(
        at, limit, tuple(DiskStore(other.expanduser(), 0, read_only=True) for other in shared)
    )
