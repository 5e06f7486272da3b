"""Path, bytes, text or jax.export.Exported -> Source: an MLIR module and how its main function is called."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.export
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from pbkern import _jax
from pbkern._user_lines import UserLine
from pbkern.core.errors import ArgumentError, TargetError, UnsupportedOp
from pbkern.core.lazy_dataclass import dataclass

from .places import SourcePlaces

BYTECODE = b"ML\xefR"
PORTABLE = b"StableHLO_v"  # producer in the header of a portable artefact's bytecode
# Characters of a text that may be a path: fewer than this (PATH_MAX, Linux, limits.h).
LONGEST_PATH = 4096
WITHOUT_RULE_HINT = "compute these outside of the program, or export it with fixed shapes"


@dataclass(frozen=True)
class ProgramSource:
    """A program that can be imported.

    Attributes:
      module: its MLIR module.
      what: words for messages, such as "`model.mlir`".
      exported: what jax.export made it of, which knows the structure of arguments and results; None
        for other programs.
      places: of its operations.
    """

    module: ir.Module
    what: str
    exported: jax.export.Exported | None = None
    places: SourcePlaces = SourcePlaces()


def parse(
    given: Any, what: str = "the text", named: Mapping[str, UserLine] | None = None
) -> ProgramSource:
    """Reads a program; `what` stands for a text in messages, `named` knows places by the names of operations.

    Raises ArgumentError for what is no StableHLO, TargetError where a package is missing,
    UnsupportedOp for several devices.
    """
    if isinstance(given, ProgramSource):
        return given
    if isinstance(given, jax.export.Exported):
        return _of_exported(given, f"the export of `{given.fun_name}`")
    if isinstance(given, os.PathLike) or (isinstance(given, str) and _is_path(given)):
        program = _of_bytes(_contents(pathlib.Path(given)), f"`{given}`")
        return dataclasses.replace(program, places=SourcePlaces(os.fspath(given)))
    if isinstance(given, bytes | bytearray | memoryview):
        return _of_bytes(bytes(given), f"program of {len(given)} bytes")
    if isinstance(given, str):
        places = SourcePlaces(named=named or {})
        return ProgramSource(_module(given, what, places), what, places=places)
    forms = "a StableHLO program is a path, bytes, text or a jax.export.Exported"
    raise ArgumentError(
        forms, why=f"given {type(given).__name__}", hint="jax.export.export(jax.jit(f))(*args)"
    )


def _is_path(text: str) -> bool:
    """Whether a string names a file: no program has only one line without a brace."""
    return "\n" not in text and "{" not in text and len(text) < LONGEST_PATH


def _contents(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise ArgumentError(
            f"`{path}` cannot be read",
            why=f"{type(e).__name__}: {e.strerror}",
            hint="the path of a StableHLO file",
        ) from None


def _of_bytes(given: bytes, what: str) -> ProgramSource:
    if given.startswith(BYTECODE):
        return ProgramSource(_module(given, what), what)
    try:
        text = given.decode()
    except UnicodeDecodeError:
        text = ""
    if "{" in text:
        return ProgramSource(_module(text, what), what)
    return _of_blob(given, what)


def _of_blob(given: bytes, what: str) -> ProgramSource:
    """Reads bytes that jax.export.Exported.serialize wrote."""
    try:
        exported = jax.export.deserialize(bytearray(given))
    except ImportError as e:
        raise TargetError(
            f"{what} cannot be read", why=str(e), hint="pip install flatbuffers"
        ) from None
    except Exception as e:
        raise _no_program(
            what, f"neither MLIR's bytecode or text, nor a jax.export artefact: {type(e).__name__}"
        ) from None
    return _of_exported(exported, what)


def _of_exported(exported: jax.export.Exported, what: str) -> ProgramSource:
    if exported.nr_devices != 1:
        raise UnsupportedOp(
            f"{what} is for {exported.nr_devices} devices",
            why="kernels run on one",
            hint="export it without shardings",
        )
    if len(exported.platforms) != 1:
        raise UnsupportedOp(
            f"{what} is for several platforms",
            why=f"{', '.join(exported.platforms)}",
            hint="export it for one: platforms=['cpu']",
        )
    if exported.ordered_effects or exported.unordered_effects:
        effects = ", ".join(map(str, (*exported.ordered_effects, *exported.unordered_effects)))
        raise UnsupportedOp(
            f"{what} has side effects", why=effects, hint="export it without callbacks and prints"
        )
    return ProgramSource(_module(exported.mlir_module_serialized, what), what, exported)


def _module(given: bytes | str, what: str, places: SourcePlaces = SourcePlaces()) -> ir.Module:
    context = _jax.mlir_context()
    try:
        if isinstance(given, bytes) and PORTABLE in given[:32]:
            return stablehlo.deserialize_portable_artifact(context, given)
        with context:
            return ir.Module.parse(given)
    except ir.MLIRError as e:
        raise _refused(e.error_diagnostics, what, places) from None
    except Exception as e:
        lines = str(e).strip().splitlines()
        raise _no_program(what, lines[0] if lines else type(e).__name__) from None


def _refused(
    diagnostics: Sequence[Any], what: str, places: SourcePlaces
) -> ArgumentError | UnsupportedOp:
    """The error for what MLIR's parser says of a program, which stops at the first mistake."""
    if not diagnostics:
        return _no_program(what, "MLIR cannot parse it")
    (first, *_) = diagnostics
    place = places.of(first)
    why = f"{first.message} at {place.file}:{place.line}" if place else first.message
    if not first.message.startswith("unregistered operation"):
        return _no_program(what, why)
    return UnsupportedOp(
        f"{what} has an operation that cannot be imported", why=why, hint=WITHOUT_RULE_HINT
    )


def _no_program(what: str, why: str) -> ArgumentError:
    hint = "a file that jax.export, TensorFlow or another compiler wrote"
    return ArgumentError(f"{what} is no StableHLO program", why=why, hint=hint)
