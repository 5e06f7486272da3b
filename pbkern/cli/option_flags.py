"""Every field of CompileOptions as an option: `-aot-name x`, `--mm-conv-precision-mode=fp16`, `--no-openmp`.

Switches are given as `--openmp`, `--no-openmp`, `--openmp=true` or `--openmp=false`.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable
from typing import Any

from pbkern.core.options import CompileOptions

PREFIX = "option_"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags. Flags that are not given are not in the result of `given`."""
    group = parser.add_argument_group(
        "compile options", "as in compile_options={...}; one hyphen in front will do"
    )
    for field in dataclasses.fields(CompileOptions):
        name, dest, kind = field.name.replace("_", "-"), PREFIX + field.name, str(field.type)
        help = _help(field.name)
        if kind == "bool":
            group.add_argument(f"--{name}", dest=dest, action="store_true", default=None, help=help)
            group.add_argument(
                f"--no-{name}", dest=dest, action="store_false", help=f"as --{name}=false"
            )
        else:
            group.add_argument(
                f"--{name}", dest=dest, type=_parser(kind), metavar=_metavar(kind), help=help
            )


def as_switch(argument: str) -> str:
    """`--openmp=false` -> `--no-openmp`, `--openmp=true` -> `--openmp`; other arguments stay as they are."""
    option, equals, value = argument.partition("=")
    name = option.removeprefix("--").replace("-", "_")
    if not equals or not any(
        field.name == name and str(field.type) == "bool"
        for field in dataclasses.fields(CompileOptions)
    ):
        return argument
    if value.lower() in ("true", "1", "on", "yes"):
        return option
    return f"--no-{option[2:]}" if value.lower() in ("false", "0", "off", "no") else argument


def given(parsed: argparse.Namespace) -> dict[str, Any]:
    """Options that were given, as compile_options."""
    values = {
        name.removeprefix(PREFIX): var
        for name, var in vars(parsed).items()
        if name.startswith(PREFIX)
    }
    return {name: value for name, value in values.items() if value is not None}


def _parser(kind: str) -> Callable[[str], Any]:
    """Parser of a value; a text that is no number stays one, which CompileOptions refuses with its reason."""
    if kind.startswith("tuple"):
        return lambda text: tuple(
            _number(part) if "int" in kind else part for part in text.split(",") if part
        )
    return _number if kind.startswith("int") else str


def _number(text: str) -> int | str:
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _metavar(kind: str) -> str:
    return (
        "N"
        if kind.startswith("int")
        else "N,N"
        if kind == "tuple[int, ...]"
        else "A,B"
        if kind.startswith("tuple")
        else "X"
    )


def _help(name: str) -> str:
    """The first sentence of an option's entry in CompileOptions' documentation."""
    text = " ".join((CompileOptions.__doc__ or "").split())
    match = re.search(rf"\b{name}(?:, \w+)?: (.*?)(?:\.|:)(?= |$)", text)
    return match[1].replace("%", "%%") if match else ""
