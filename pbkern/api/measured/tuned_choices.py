"""Choices that tuning found, by program and machine.

They are in this process, and on disk (core/process/disk_cache.py, kind "tuned").

The key is made of the function's jaxpr, its options, the threads that may be used, the target's
identity and the sources of fusion, whose groups the choices are for. Names do not count: equal
functions share what was found.
"""

from __future__ import annotations

import contextvars
import functools
import json
import pathlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from jax.extend import core as jex

from pbkern import _jax, fuse
from pbkern.core import config
from pbkern.core.options import CompileOptions
from pbkern.core.process import disk_cache
from pbkern.core.process.context_values import during
from pbkern.core.process.jaxpr_digest import described
from pbkern.targets import get_target
from pbkern.targets.host.objects.cache_key import PACKAGE, sources

if TYPE_CHECKING:
    from pbkern.fuse import Choice

KIND = "tuned"
Choices = tuple["Choice", ...]
# Of functions, kept as long as they are.
content = _jax.cached_by_jaxpr_alone(described)
_found: dict[str, Choices] = {}
_trial: contextvars.ContextVar[Choices | None] = contextvars.ContextVar("trial", default=None)


def choices_for(jaxpr: jex.ClosedJaxpr, options: CompileOptions) -> Choices:
    """One choice per fused kernel of this program; () where it was never tuned."""
    tried = _trial.get()
    if tried is not None:
        return tried
    store = disk_cache.current()
    if store is None and not _found:
        return ()
    key = key_of(jaxpr, options)
    if key not in _found and store is not None:
        payload = store.get(KIND, key)
        return _unpacked(payload) if payload is not None else ()
    return _found.get(key, ())


def remember(jaxpr: jex.ClosedJaxpr, options: CompileOptions, choices: Choices) -> None:
    """From now on, these are the program's choices, here and in later processes."""
    key = key_of(jaxpr, options)
    _found[key] = choices
    store = disk_cache.current()
    if store is not None:
        store.put(
            KIND,
            key,
            json.dumps(
                [{"blocks": choice.blocks, "params": dict(choice.params)} for choice in choices]
            ).encode(),
        )


def trial(choices: Choices) -> AbstractContextManager:
    """Programs that this thread compiles in the body have these choices and no others."""
    return during(_trial, choices)


def key_of(jaxpr: jex.ClosedJaxpr, options: CompileOptions) -> str:
    target = get_target(options.target, options.device)
    return disk_cache.digest(
        (
            content(jaxpr).digest,
            repr(options),
            config.num_threads(),
            target.identity(),
            fusion_sources(),
        )
    )


@functools.cache
def fusion_sources(package: pathlib.Path = PACKAGE) -> str:
    """Digest of the part of pbkern that makes groups, and kernels of them."""
    return sources(package, ("fuse",))


def _unpacked(payload: bytes) -> Choices:
    def choice(entry: dict) -> Choice:
        blocks = entry["blocks"]
        return fuse.Choice(
            None if blocks is None else tuple(blocks), tuple(sorted(entry["params"].items()))
        )

    return tuple(map(choice, json.loads(payload)))
