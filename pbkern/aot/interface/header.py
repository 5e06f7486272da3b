"""The C header of a library: valid from C99 and C++11 on, in the words of PolyBlocks's document where it has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from pbkern.core.lazy_dataclass import dataclass

from .arguments import CODES, FILE_CODES, SIZE_CODES, Argument
from .c_types import element_type, memref
from .names import distinct
from .sizes import Division
from .weights_file import FileLayout

# Names of arguments, from PolyBlocks's document: memory that the caller provides.
POOL = "user_device_memory"
# The name of the argument for a stream, from the same document.
STREAM = "stream"


@dataclass(frozen=True)
class Interface:
    """Contents of a header.

    Attributes:
      name: of its function.
      inputs, outputs: its arrays. shared: (input, output) pairs that may be one array.
      user_memory: whether the caller provides memory.
      memory_bytes: beside the arrays, on all threads.
      devices: names of what it is made for; threads: the most that it takes.
      weights: those that are no inputs. file: where they are in a file of weights, if they are in
        one. sizes: what the caller says of them, and how calls divide them.
    """

    name: str
    inputs: Sequence[Argument]
    outputs: Sequence[Argument]
    shared: Sequence[tuple[int, int]]
    user_memory: bool
    memory_bytes: int
    devices: Sequence[str]
    threads: int
    weights: Sequence[Argument] = ()
    file: FileLayout | None = None
    sizes: Division = field(default_factory=Division)

    @property
    def arguments(self) -> list[Argument]:
        return [*self.inputs, *self.outputs]

    @property
    def parameters(self) -> list[str]:
        """Parameters of the C function."""
        return [*map(declared, self.inputs), *self.behind_inputs]

    @property
    def behind_inputs(self) -> list[str]:
        parameters = [declared(output).removeprefix("const ") for output in self.outputs]
        parameters += [f"int64_t {symbol.name}" for symbol in self.sizes.symbols]
        return parameters + ([f"int8_t *{POOL}", f"void *{STREAM}"] if self.user_memory else [])

    @property
    def codes(self) -> dict[str, tuple[int, str]]:
        """Numbers that the function returns: name -> (number, meaning)."""
        further = (FILE_CODES if self.file else {}) | (SIZE_CODES if self.sizes.symbols else {})
        return CODES | further

    @property
    def declaration(self) -> str:
        return ", ".join(self.parameters) or "void"


def declared(array: Argument) -> str:
    """The declaration of an array that is read."""
    return f"const {element_type(array.type.dtype, array.path).c} *{array.name}"


def header_text(of: Interface) -> str:
    """The whole file."""
    guard, upper = f"{of.name.upper()}_H", of.name.upper()
    lines = [
        f"#ifndef {guard}",
        f"#define {guard}",
        "",
        "#include <stddef.h>",
        "#include <stdint.h>",
        "",
        "#ifdef __cplusplus",
        'extern "C" {',
        "#endif",
        "",
    ]
    lines += _described(of)
    lines += [f"void {of.name}({of.declaration});", ""]
    lines += [
        "/// The same; returns one of the codes below, where the function above prints a line and aborts.",
        f"int {of.name}_try({of.declaration});",
        "",
    ]
    lines += [
        f"#define {upper}_{code} {value} /* {meaning} */"
        for code, (value, meaning) in of.codes.items()
    ]
    lines += [
        "",
        "/// The words of a code.",
        f"const char *{of.name}_message(int code);",
        *_of_weights(of),
    ]
    sizes = "".join(f", int64_t {symbol.name}" for symbol in of.sizes.symbols)
    whose = f"the caller provides, as {POOL}" if of.user_memory else "each call allocates and frees"
    lines += [
        "",
        f"/// Bytes of memory that {whose}, at most; on so many threads{' and for such sizes' if sizes else ''}.",
        f"#define {upper}_MEMORY_BYTES {of.memory_bytes}",
        f"size_t {of.name}_memory_bytes(int threads{sizes});",
        "",
        "/// Arguments, types, sizes, device and version, as JSON.",
        f"extern const char {of.name}_metadata[];",
        "",
        "#ifdef __cplusplus",
        "}",
        "#endif",
        "",
        f"#endif /* {guard} */",
        "",
    ]
    return "\n".join(lines)


def _of_weights(of: Interface) -> list[str]:
    """The struct of weights that are arguments, or the functions that load a file of them."""
    if of.file:
        return [
            "",
            "/// Maps a file of weights read-only into memory, in place of one that is loaded; returns a code. Once for all",
            "/// threads, while no call runs.",
            f"int {of.name}_load(const char *path);",
            "/// Takes the file out of memory. No call runs.",
            f"void {of.name}_unload(void);",
        ]
    weights = [argument for argument in of.inputs if argument.is_weight]
    if not weights:
        return []
    struct = f"{of.name}_weights"
    inputs = [declared(argument) for argument in of.inputs if not argument.is_weight]
    *_, given = distinct([*(argument.name for argument in of.arguments), "weights"])
    parameters = ", ".join([*inputs, f"const {struct} *{given}", *of.behind_inputs])
    passed = [
        f"{given} ? {given}->{argument.name} : NULL" if argument.is_weight else argument.name
        for argument in of.inputs
    ]
    passed += [output.name for output in of.outputs]
    passed += [symbol.name for symbol in of.sizes.symbols]
    passed += [POOL, STREAM] if of.user_memory else []
    separator = ",\n      "
    lines = [
        "",
        "/// The weights.",
        "typedef struct {",
        *(f"  {declared(argument)};" for argument in weights),
        f"}} {struct};",
        "",
        "/// The same functions on a struct of weights.",
    ]
    for kind, end, before in (("void", "", ""), ("int", "_try", "return ")):
        lines += [
            f"static inline {kind} {of.name}{end}_with({parameters}) {{",
            f"  {before}{of.name}{end}({separator.join(passed)});",
            "}",
        ]
    return lines


def _described(of: Interface) -> list[str]:
    lines = ["/// Signature of the PolyBlocks-generated function."]
    if of.user_memory:
        lines += [
            f"/// Requires {of.memory_bytes} bytes ({of.memory_bytes / 2**20:e} MB) of memory to be supplied via a",
            "/// trailing argument.",
        ]
    for argument in of.arguments:
        note = element_type(argument.type.dtype, argument.path).note
        unused = "" if argument.is_used else "; it is not used"
        lines.append(
            f"/// Type/shape of {argument.name} is {memref(argument)}{f': {note}' if note else ''}{unused}."
        )
    lines += [
        f"/// {symbol.name} is a size, from {symbol.low} to {symbol.high}."
        for symbol in of.sizes.symbols
    ]
    if of.user_memory:
        lines += [
            f"/// Type/shape of {POOL} is memref<{of.memory_bytes}xi8>.",
            f"/// {STREAM} is not used on this target.",
        ]
    lines += [
        f"/// {of.inputs[i].name} and {of.outputs[output].name} may be the same array."
        for i, output in of.shared
    ]
    lines.append(
        f"/// Arrays are dense, rows first, and do not overlap. Made for {', '.join(of.devices)}; at most "
        f"{of.threads} thread{'s' if of.threads > 1 else ''}."
    )
    return lines
