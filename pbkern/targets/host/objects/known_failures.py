"""Failures to compile that are kept on disk, so that no later process spends the seconds again before it falls back to XLA."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

from pbkern.core import config
from pbkern.core.errors import InternalError, PbkernError
from pbkern.core.process import fallback
from pbkern.core.process.disk_cache import DiskStore

KIND = "failure"


@contextlib.contextmanager
def remembered(store: DiskStore | None, key: str) -> Iterator[None]:
    """Raises InternalError at once where the store says that the body failed under `key`; stores a failure of the body.

    Neither is done without a store, and where failures are errors (PBKERN_FALLBACK=0,
    strict_target): whoever looks for the cause wants the whole of it. Errors that explain a mistake
    are not stored, nor those of memory, files, threads and the depth of the stack, which may not
    happen again.
    """
    if store is None or not config.current().fallback or fallback.is_strict():
        yield
        return
    payload = store.get(KIND, key)
    if payload is not None:
        failure = json.loads(payload)
        raise InternalError(
            f"{failure['what']} (kept from an earlier process)",
            why=failure["why"],
            hint="PBKERN_FALLBACK=0 compiles it again and shows the whole error; `pbkern cache clear` forgets it",
        )
    try:
        yield
    except (
        MemoryError,
        OSError,
        RuntimeError,
    ):  # RecursionError is a RuntimeError, and so is what starting threads raises
        raise
    except Exception as error:
        if isinstance(error, PbkernError) and not isinstance(error, InternalError):
            raise
        what, _, rest = str(error).partition("\n")
        why = error.why if isinstance(error, InternalError) else " ".join(rest.split())[:500]
        store.put(
            KIND, key, json.dumps({"what": what or type(error).__name__, "why": why or ""}).encode()
        )
        raise
