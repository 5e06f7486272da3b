"""LLVM IR -> code, by llvmlite in child processes that stay for the next request (child.py).

On some errors LLVM ends its process, by exit or abort. That is the child's; here it is an
InternalError with what LLVM printed. A child serves one request at a time; as many run as threads
ask.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import spawn
from typing import IO, Any

from pbkern.core.errors import InternalError, TargetError

CHILD = pathlib.Path(__file__).with_name("child.py")
# A large library takes seconds; LLVM that does not come back is stopped.
MOST_LLVM_SECONDS = 600
# Children that wait for requests; each has 65 MB, most of it LLVM's library, which they share.
MOST_IDLE = 2
# Characters of what LLVM printed last that an error shows.
SHOWN_CHARACTERS = 1500


def require_llvmlite(what: str, hint: str) -> str:
    """llvmlite's version. Raises TargetError where it is not installed.

    Args:
      what: it makes.
      hint: command that installs it.
    """
    try:
        version = importlib.metadata.version("llvmlite")
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version is None or importlib.util.find_spec("llvmlite") is None:
        raise TargetError(
            "llvmlite is not installed", why=f"it makes the code of {what}", hint=hint
        )
    return version


def code(request: Mapping[str, Any], texts: Sequence[Sequence[str]], what: str) -> dict[str, bytes]:
    """Each kind of code that a request asks for (child.py). llvmlite is installed.

    Args:
      request: what child.py is to make.
      texts: of all modules.
      what: the code is of, in messages.
    Raises InternalError where LLVM refuses a text, ends its process, or does not come back.
    """
    data = [[text.encode() for text in module] for module in texts]
    head = (
        json.dumps(
            {**request, "sizes": [[len(text) for text in module] for module in data]}
        ).encode()
        + b"\n"
    )
    sent = b"".join([head, *(text for module in data for text in module)])
    child = _waiting()
    if child is not None:
        try:
            sizes, results = child.ask(sent)
        except (
            _Ended
        ) as e:  # perhaps because nobody asked for long, or because of an earlier request
            if e.is_late:
                raise _error(what, e) from None
            child = None
    if child is None:
        child = _Child()
        try:
            sizes, results = child.ask(sent)
        except _Ended as e:
            raise _error(what, e) from None
    _give_back(child)
    if "error" in sizes:
        raise _error(what, f"its text does not parse: {sizes['error'][:SHOWN_CHARACTERS]}")
    return results


def _error(what: str, why: object) -> InternalError:
    return InternalError(f"LLVM made no code of {what}", why=str(why))


def warm() -> None:
    """Starts a child in the background, if none waits: while it loads LLVM, a text can be made for it."""
    if importlib.util.find_spec("llvmlite") is not None:
        _give_back(_waiting() or _Child())


class _Ended(Exception):
    """A child ended in place of an answer; its text says how. `is_late`: it was stopped."""

    def __init__(self, how: str, is_late: bool = False):
        super().__init__(how)
        self.is_late = is_late


class _Child:
    """One process. said: file of what LLVM prints."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("llvmlite")
        assert spec is not None
        assert spec.origin is not None
        environment = dict(os.environ, PYTHONPATH=str(pathlib.Path(spec.origin).parents[1]))
        self.said = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        # a program that embeds Python says there which one to run
        python = os.fsdecode(spawn.get_executable() or "")
        try:
            self.process = subprocess.Popen(
                [python, "-P", "-S", str(CHILD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.said,
                env=environment,
            )
        except OSError as e:
            raise TargetError(
                "the process that runs LLVM cannot be started",
                why=f"{python!r}: {e}",
                hint="multiprocessing.set_executable(path of a Python with llvmlite)",
            ) from None

    def ask(self, sent: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
        """(sizes, results) of one request. Raises _Ended; whatever ends the wait ends the child."""
        self.said.seek(0, os.SEEK_END)
        before, late = self.said.tell(), threading.Event()

        def too_late() -> None:
            late.set()
            self.process.kill()

        stop = threading.Timer(MOST_LLVM_SECONDS, too_late)
        stop.daemon = True
        stop.start()
        try:
            answer = self._answer(sent)
        except BaseException:
            self.end()
            raise
        finally:
            stop.cancel()
        if answer is None:
            status = self._status_at_end()
            with self.said:
                self.said.seek(before)
                printed = self.said.read().decode(errors="replace").strip()
            if late.is_set():
                raise _Ended(f"it was stopped after {MOST_LLVM_SECONDS} s", is_late=True)
            ended = f"signal {-status}" if status < 0 else f"exit status {status}"
            raise _Ended(f"its process ended with {ended}: {printed[-SHOWN_CHARACTERS:]}")
        return answer

    def _answer(self, sent: bytes) -> tuple[dict[str, Any], dict[str, bytes]] | None:
        """None where the child ended."""
        stdin, stdout = self.pipes
        try:
            stdin.write(sent)
            stdin.flush()
        except BrokenPipeError:
            return None
        head = stdout.readline()
        if not head.endswith(b"\n"):
            return None
        sizes = json.loads(head)
        results = {kind: stdout.read(size) for kind, size in sizes.items() if kind != "error"}
        return (
            (sizes, results)
            if all(len(result) == sizes[kind] for kind, result in results.items())
            else None
        )

    @property
    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        return self.process.stdin, self.process.stdout

    def is_there(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        """Ends the process."""
        self._status_at_end()
        self.said.close()

    def _status_at_end(self) -> int:
        """Ends the process; its exit status."""
        self._close_pipes()
        try:
            return self.process.wait(timeout=1)  # it has ended by itself, or does so with its stdin
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def close(self) -> None:
        """Closes the pipes, which tells the process to end, and the file."""
        self._close_pipes()
        self.said.close()

    def _close_pipes(self) -> None:
        """Closes the pipes. The process ends when its input does."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.close()


_idle: list[_Child] = []
_lock = threading.Lock()


def _waiting() -> _Child | None:
    """A child that waits, taken from the list."""
    while True:
        with _lock:
            child = _idle.pop() if _idle else None
        if child is None or child.is_there():
            return child
        child.close()


def _give_back(child: _Child) -> None:
    with _lock:
        if len(_idle) < MOST_IDLE:
            _idle.append(child)
            return
    child.end()


@atexit.register
def end_idle() -> None:
    """Ends the children that wait."""
    with _lock:
        ended, _idle[:] = _idle[:], []
    for child in ended:
        child.close()  # all are told before one is waited for
    for child in ended:
        child.end()


def _forget() -> None:
    """In a forked process: children are the parent's, and so are their pipes."""
    global _lock
    _lock = threading.Lock()
    for child in _idle:
        child.process.returncode = 0  # not this process's to wait for
        child.close()
    _idle.clear()


os.register_at_fork(after_in_child=_forget)
