"""PTX text -> Program: instructions of one kernel, its parameters, its memory. Source: PTX ISA 8.7."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import field

from pbkern.core.errors import InternalError
from pbkern.core.lazy_dataclass import dataclass

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)\s*([^{]*)\{", re.DOTALL)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+[^,]*?([\w$]+)(\[\d+\])?\s*$")
_VARIABLE = re.compile(
    r"\.(shared|local|const|global)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?"
)
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?')
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)")
_LABEL = re.compile(r"([\w$]+):")
_INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\[[^\]]*\]|\{[^}]*\}|[^,\s]+")
_TARGETS = re.compile(r"\$?[\w$]+")
SIZES = {
    **{f"{kind}{bits}": bits // 8 for kind in "bsuf" for bits in (8, 16, 32, 64)},
    "bf16": 2,
    "pred": 1,
    "b128": 16,
}


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      op: its name and modifiers, split at dots. operands: as they are written.
      predicate: register that decides whether a lane takes part, or None; `negated`: those where it
        is false do.
      line: of the text, from 1. at: the user's line, or "".
    """

    op: tuple[str, ...]
    operands: tuple[str, ...]
    predicate: str | None
    negated: bool
    text: str
    line: int
    at: str


@dataclass
class PtxProgram:
    """One kernel.

    Attributes:
      parameters: name -> (position, type). labels: name -> place in `code`.
      shared, local: name -> offset. shared_bytes: static. local_bytes: of a thread.
      tables: branch targets by name. dynamic_shared: name of memory whose size the launch gives, or
        "".
      threads: of a block, where the kernel requires a number.
    """

    name: str
    parameters: dict[str, tuple[int, str]] = field(default_factory=dict)
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    local: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    shared_bytes: int = 0
    local_bytes: int = 0
    dynamic_shared: str = ""
    threads: int | None = None

    @functools.cached_property
    def registers(self) -> frozenset[str]:
        """Registers that some instruction writes."""
        written = (name for step in self.code for name in step.operands[:1])
        return frozenset(part for name in written for part in re.findall(r"%[\w.]+", name))

    @functools.cached_property
    def used_registers(self) -> frozenset[str]:
        """Registers that more than one instruction names: the one that writes them, and another."""
        names: Counter[str] = Counter()
        for step in self.code:
            text = " ".join((*step.operands, step.predicate or ""))
            names.update(set(re.findall(r"%[\w.]+", text)))
        return frozenset(name for name, count in names.items() if count > 1)

    @functools.cached_property
    def named_predicates(self) -> frozenset[str]:
        """Predicates that inline assembly declares, whose names begin with no %."""
        return frozenset(step.operands[0] for step in self.code if step.op[0] == "setp")


def parse(text: str) -> PtxProgram:
    """The kernel of a text. Raises InternalError if there is none, or more than one."""
    blank = _COMMENT.sub(lambda comment: re.sub(r"[^\n]", " ", comment[0]), text)
    entries = list(_ENTRY.finditer(blank))
    if len(entries) != 1:
        raise InternalError(
            f"PTX with {len(entries)} kernels cannot be run", why="one text, one kernel"
        )
    (entry,) = entries
    program = PtxProgram(entry[1])
    for position, parameter in enumerate(
        filter(None, (piece.strip() for piece in entry[2].split(",")))
    ):
        match = _PARAM.match(parameter)
        if match is None:
            raise InternalError("a parameter of a kernel was not understood", why=parameter)
        program.parameters[match[2]] = (position, match[1] + (match[3] or ""))
    required = re.search(r"\.reqntid\s+(\d+)", entry[3])
    program.threads = int(required[1]) if required else None
    for match in _VARIABLE.finditer(blank):
        _variable(program, match)
    files = {n: name for n, name, *_ in (directive.groups() for directive in _FILE.finditer(blank))}
    _body(program, blank, entry.end(), files)
    return program


def _variable(program: PtxProgram, match: re.Match) -> None:
    space, align, kind, name, count = match.groups()
    if space in ("const", "global"):
        raise InternalError(
            f"PTX has a variable `{name}` in {space} memory",
            why="the simulator does not have such memory",
        )
    if count == "":
        program.dynamic_shared = name
        return
    size, step = SIZES[kind] * int(count or 1), int(align or SIZES[kind])
    places, used = (
        (program.shared, program.shared_bytes)
        if space == "shared"
        else (program.local, program.local_bytes)
    )
    places[name] = -(-used // step) * step
    if space == "shared":
        program.shared_bytes = places[name] + size
    else:
        program.local_bytes = places[name] + size


def _body(program: PtxProgram, text: str, start: int, files: dict[str, str]) -> None:
    line, at, depth, counted = 1, "", 1, 0
    for statement, first in _statements(text, start):
        line += text.count("\n", counted, first)  # from the last statement on: texts are long
        counted = first
        for brace in statement if statement in ("{", "}") else "":
            depth += 1 if brace == "{" else -1
        if depth == 0:
            return
        if statement in ("{", "}"):
            continue
        if match := _LOC.match(statement):
            name = files.get(match[1], "")
            at = (
                f"{name}:{match[2]}:{match[3]}" if name not in ("", "-") and match[2] != "0" else ""
            )
            continue
        while label := _LABEL.match(statement):
            rest = statement[label.end() :].strip()
            if rest.startswith(".branchtargets"):
                program.tables[label[1]] = tuple(
                    _TARGETS.findall(rest.removeprefix(".branchtargets"))
                )
                rest = ""
            program.labels[label[1]] = len(program.code)
            statement = rest
        if not statement or statement.startswith("."):
            continue
        match = _INSTRUCTION.match(statement)
        if match is None:
            raise InternalError(
                "an instruction of PTX was not understood", why=f"line {line}: {statement}"
            )
        operands = tuple(_OPERAND.findall(match[4]))
        shown = re.sub(r"\s+", " ", statement)
        program.code.append(
            Instruction(
                tuple(match[3].split(".")), operands, match[2], bool(match[1]), shown, line, at
            )
        )


def _statements(text: str, start: int) -> Iterator[tuple[str, int]]:
    """(statement, where it begins): they end at semicolons, directives of lines at the end of the line."""
    end = start
    for match in re.finditer(r"[;{}]|\n", text[start:]):
        at = start + match.start()
        piece = text[end:at]
        stripped = piece.strip()
        mark = match[0]
        opens = piece.count("{") > piece.count("}")
        if mark == "\n":
            if stripped.startswith((".loc", ".file", ".reg")) or (
                stripped.endswith(":") and not stripped.startswith("{")
            ):
                yield stripped.rstrip(";"), end + len(piece) - len(piece.lstrip())
                end = at + 1
            continue
        if mark == ";":
            yield stripped, end + len(piece) - len(piece.lstrip())
            end = at + 1
        elif not stripped and not opens:  # a block, and no list of registers
            yield mark, at
            end = at + 1
