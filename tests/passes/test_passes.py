"""What each pass over nests does to small programs: files of before, `----` and after, in a folder per pass.

A file begins with what the pass may ask its context for:

    # options: vectors=512/32, vnni=True       fields of the target's options that differ from their defaults
    # bounds: %g0 in 0 .. 7                    symbols whose values are known to be in a range
    # persistent: %t3                          scratch whose contents outlive the statements

`pytest --update-golden` rewrites what stands behind `----`.
"""

import ast
import pathlib
import re
from dataclasses import replace

import numpy as np
import pytest

from pbkern.core.passes import Pass
from pbkern.lower.nest import interpret
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.ir import Buf, Let, Names, bodies, every
from pbkern.lower.nest.parse import Program, parse, program_text
from pbkern.lower.nest.verify import verify
from pbkern.lower.passes.shared import SHARED_PASSES
from pbkern.targets.cpu.lower_options import LowerOptions
from pbkern.targets.cpu.machines.machine import Vectors
from pbkern.targets.cpu.passes import CPU_PASSES
from pbkern.targets.cpu.schedule.nest_schedule import CPU_DIALECT
from pbkern.targets.simt.options import ThreadOptions
from pbkern.targets.simt.passes import THREAD_PASSES
from pbkern.targets.simt.schedule.instructions import MATRIX_INSTRUCTIONS
from tests.lower.same_program import difference

HERE = pathlib.Path(__file__).parent
FILES = sorted(HERE.glob("*/*.txt"))
# Numbers of the names that passes make begin here, apart from those in the files.
FIRST_NEW_NAME = 100
OPTIONS = {"shared": LowerOptions, "cpu": LowerOptions, "simt": ThreadOptions}
# Words of all targets.
DIALECT = replace(CPU_DIALECT, instructions={**CPU_DIALECT.instructions, **MATRIX_INSTRUCTIONS})
TABLES = {"shared": SHARED_PASSES, "cpu": CPU_PASSES, "simt": THREAD_PASSES}
FOLDERS = {
    f"{table}_{step.name.replace(' ', '_')}": (step, OPTIONS[table])
    for table, passes in TABLES.items()
    for step in passes
}


def header(text: str, word: str) -> list[str]:
    """What the lines `# word: a, b` list."""
    lines = re.findall(rf"^# {word}: (.*)$", text, re.M)
    return [part.strip() for line in lines for part in line.split(", ")]


def option(text: str) -> object:
    """A value as Python writes it, or vectors as bits/registers."""
    vectors = re.fullmatch(r"(\d+)/(\d+)", text)
    return Vectors(int(vectors[1]), int(vectors[2])) if vectors else ast.literal_eval(text)


def read(text: str, options: type) -> tuple[Program, NestContext]:
    """The program of a text and the context that its header describes."""
    fields = (part.split("=", 1) for part in header(text, "options"))
    chosen = options(**{name: option(value) for name, value in fields})
    context = NestContext(chosen, Names(FIRST_NEW_NAME))
    program = parse(text, context, DIALECT)
    context.persistent = frozenset(program.buffers[name] for name in header(text, "persistent"))
    for name, low, high in (
        re.fullmatch(r"(\S+) in (-?\d+) .. (-?\d+)", part).groups()
        for part in header(text, "bounds")
    ):
        context.bounds[name] = int(low), int(high)
    return program, context


def case(path: pathlib.Path) -> tuple[str, str, Pass, type]:
    before, _, after = path.read_text().partition("----\n")
    return before, after, *FOLDERS[path.parent.name]


def identifier(path: pathlib.Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def test_every_pass_has_a_text():
    assert {path.parent.name for path in FILES} == FOLDERS.keys()


@pytest.mark.apart
@pytest.mark.parametrize("path", FILES, ids=identifier)
def test_text(path, request):
    before, expected, step, options = case(path)
    program, context = read(before, options)
    known = {symbol for stmt in every(program.statements) for symbol in names_of(stmt)}
    verify(program.statements, frozenset(known | context.bounds.keys()))
    result = step.function(program.statements, context)
    inner = [block for stmt in every(result) for block in bodies(stmt)]
    assert all(isinstance(block, tuple) for block in inner), "statements hold tuples"
    text = program_text(result) + "\n"
    if request.config.getoption("--update-golden"):
        path.write_text(f"{before}----\n{text}")
        return
    assert text == expected, f"differs from {path}; run pytest --update-golden and review the diff"
    assert text != program_text(program.statements) + "\n", "the pass changes nothing here"


@pytest.mark.apart
@pytest.mark.parametrize("path", FILES, ids=identifier)
def test_both_sides_compute_the_same(path):
    before, after, _, options = case(path)
    program, context = read(before, options)
    changed, _ = read(header_of(before) + after, options)
    rng = np.random.default_rng(0)
    inputs = {
        buf.name: contents(buf, rng)
        for buf in (*program.buffers.values(), *changed.buffers.values())
        if buf.storage is None and (not buf.arena or buf.name in header(before, "persistent"))
    }
    for end in range(2):
        symbols = {name: bounds[end] for name, bounds in context.bounds.items()}
        left, right = (run(each, inputs, symbols) for each in (program, changed))
        agree(left, right)


def agree(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    for name, expected in left.items():
        np.testing.assert_allclose(
            wide(right[name]),
            wide(expected),
            rtol=3e-2 if expected.dtype.itemsize < 4 else 2e-5,
            atol=1e-4,
            err_msg=name,
        )


@pytest.mark.apart
@pytest.mark.parametrize("path", FILES, ids=identifier)
def test_texts_are_read_as_they_are_written(path):
    before, after, _, options = case(path)
    for text in (before, header_of(before) + after):
        program, _ = read(text, options)
        again, _ = read(program_text(program.statements), options)
        assert difference(tuple(program.statements), tuple(again.statements)) is None
        assert program_text(again.statements) == program_text(program.statements)


def header_of(text: str) -> str:
    return "".join(line + "\n" for line in text.splitlines() if line.startswith("# options"))


def names_of(stmt) -> list[str]:
    return [stmt.name] if isinstance(stmt, Let) else []


def contents(buf: Buf, rng: np.random.Generator) -> np.ndarray:
    """Small numbers of a buffer's type."""
    shape = (max(buf.size, 1),)
    if buf.dtype == bool:
        return rng.random(shape) < 0.5
    if buf.dtype.kind in "iu":
        return rng.integers(0, 5, shape).astype(buf.dtype)
    return rng.standard_normal(shape).astype(buf.dtype)


def run(
    program: Program, inputs: dict[str, np.ndarray], symbols: dict[str, int]
) -> dict[str, np.ndarray]:
    """The buffers from outside after a run."""
    outside = {name: buf for name, buf in program.buffers.items() if name in inputs}
    memory = interpret.NestMemory({buf: inputs[name].copy() for name, buf in outside.items()})
    interpret.run(program.statements, memory, dict(symbols), lambda site, values: None)
    return {name: memory.read(buf) for name, buf in outside.items()}


def wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)
