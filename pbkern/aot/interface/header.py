"""The C header of a library: valid from C99 and C++11 on, in the words of PolyBlocks's document where it has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .arguments import CODES, Argument
from .c_types import element_type, memref

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
    """

    name: str
    inputs: Sequence[Argument]
    outputs: Sequence[Argument]
    shared: Sequence[tuple[int, int]]
    user_memory: bool
    memory_bytes: int
    devices: Sequence[str]
    threads: int

    @property
    def arguments(self) -> list[Argument]:
        return [*self.inputs, *self.outputs]

    @property
    def parameters(self) -> list[str]:
        """Parameters of the C function."""
        parameters = [
            f"const {element_type(operand.type.dtype, operand.path).c} *{operand.name}"
            for operand in self.inputs
        ]
        parameters += [
            f"{element_type(output.type.dtype, output.path).c} *{output.name}"
            for output in self.outputs
        ]
        return parameters + ([f"int8_t *{POOL}", f"void *{STREAM}"] if self.user_memory else [])

    @property
    def declared(self) -> str:
        return ", ".join(self.parameters) or "void"


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
    lines += [f"void {of.name}({of.declared});", ""]
    lines += [
        "/// The same; returns one of the codes below, where the function above prints a line and aborts.",
        f"int {of.name}_try({of.declared});",
        "",
    ]
    lines += [
        f"#define {upper}_{code} {value} /* {meaning} */"
        for code, (value, meaning) in CODES.items()
    ]
    whose = f"the caller provides, as {POOL}" if of.user_memory else "each call allocates and frees"
    lines += [
        "",
        f"/// Bytes of memory that {whose}, at most; on so many threads.",
        f"#define {upper}_MEMORY_BYTES {of.memory_bytes}",
        f"size_t {of.name}_memory_bytes(int threads);",
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
            f"/// Type/shape of {argument.name} is {memref(argument.type, argument.path)}{f': {note}' if note else ''}{unused}."
        )
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
