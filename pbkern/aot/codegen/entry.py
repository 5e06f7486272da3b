"""The functions that a library shows: NAME, NAME_try, NAME_memory_bytes, and NAME_metadata.

LLVM IR text.

    NAME      calls the same as NAME_try; after an error prints one line and aborts
    NAME_try  null pointers? -> which variant suits the processor -> memory -> arrays of addresses -> @pbk_main -> copies

All are compiled for any processor of the kind: nothing of a variant runs before the processor is
known to have what it uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

import numpy as np

from pbkern.aot.function import ArraySource, LibraryFunction
from pbkern.aot.interface.arguments import (
    FILE_CODES,
    NO_WEIGHTS,
    NULL_POINTER,
    OUT_OF_MEMORY,
    UNSUITABLE_PROCESSOR,
    UNSUITABLE_SIZE,
    Argument,
)
from pbkern.aot.interface.header import Interface
from pbkern.aot.interface.sizes import Sizes, Symbol, row_extent
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.scratch import BUFFER_ALIGNMENT
from pbkern.targets.cpu.machines.devices import CpuDevice

from .loading import LOADED, LOADED_TEST, loading_text
from .messages import messages_text
from .processor_check import bits_of, features_text
from .variant import ProcessorVariant

# In what @pbk_call returns, the number of an argument stands above the code.
ARGUMENT_SHIFT = 8


@dataclass(frozen=True)
class SizedProgram:
    """A function for certain sizes: all of it, or a part of the rows."""

    sizes: Sizes
    function: LibraryFunction
    variant: ProcessorVariant | None

    @property
    def mlir(self) -> str:
        return self.variant.mlir if self.variant else ""


@dataclass(frozen=True)
class DevicePart:
    """A library's half for one device. programs: in the order in which a call tries them."""

    device: CpuDevice
    programs: tuple[SizedProgram, ...]

    @property
    def function(self) -> LibraryFunction:
        return self.programs[0].function

    def aligned_bytes(self, threads: int) -> int:
        """Memory of a call of the largest sizes, from a cache line's start on."""
        return max(
            program.variant.memory_bytes(threads) if program.variant else 0
            for program in self.programs
        )

    def memory_bytes(self, threads: int) -> int:
        """Bytes that it needs, the same wherever it starts."""
        wanted = self.aligned_bytes(threads)
        return wanted + BUFFER_ALIGNMENT - 1 if wanted else 0


@dataclass
class Entry:
    """Writes the functions. parts: the most demanding device first; metadata: a text of JSON."""

    interface: Interface
    parts: Sequence[DevicePart]
    metadata: str
    lines: list[str] = field(default_factory=list)
    constants: dict[bytes, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.interface.name

    @property
    def threads(self) -> int:
        return self.interface.threads

    @property
    def user_memory(self) -> bool:
        return self.interface.user_memory

    @property
    def keep(self) -> list[str]:
        """Names that are global."""
        ends = ["", "_try", "_memory_bytes", "_metadata", "_message"]
        ends += ["_load", "_unload"] if self.interface.file else []
        return [f"{self.name}{end}" for end in ends]

    def main(self, number: int, k: int) -> str:
        """Name of the @pbk_main of a part's program `k`."""
        return f"pbk_main_{number}_{k}"

    @property
    def mains(self) -> list[tuple[str, ProcessorVariant]]:
        """Each variant with the name of its @pbk_main."""
        return [
            (self.main(number, k), program.variant)
            for number, part in enumerate(self.parts)
            for k, program in enumerate(part.programs)
            if program.variant is not None
        ]

    @property
    def _sizes(self) -> list[str]:
        """Parameters of the sizes that the caller says."""
        return [f"i64 %size{k}" for k in range(len(self.interface.sizes.symbols))]

    @property
    def _arguments(self) -> list[Argument]:
        return self.interface.arguments

    @property
    def _needs(self) -> list[str]:
        return list(dict.fromkeys(need for part in self.parts for need in part.device.asked))

    @property
    def _arrays(self) -> str:
        """Parameters of the arrays, as they are declared and as they are passed on."""
        return ", ".join(f"ptr %a{k}" for k in range(len(self._arguments)))

    @property
    def _parameters(self) -> str:
        """All parameters of the C function."""
        return ", ".join(
            filter(
                None,
                [
                    self._arrays,
                    *self._sizes,
                    "ptr %memory, ptr %stream" if self.user_memory else "",
                ],
            )
        )

    def text(self) -> str:
        """The module."""
        device = self.parts[0].device
        for n, part in enumerate(self.parts):
            for k, program in enumerate(part.programs):
                self._run(n, k, program)
            self._all(n, part)
        self._call()
        self._shown()
        self._failure()
        self._memory_bytes()
        self._message()
        if self.interface.file:
            self.lines.append(loading_text(self.name, self.interface.file))
        baseline = f'"target-cpu"="{"x86-64" if device.is_x86 else "generic"}"'
        calls_kernel = device.is_x86 and device.system == "linux"
        needs = self._needs
        allocates = not self.user_memory and any(part.memory_bytes(1) for part in self.parts)
        asks_threads = allocates and self.threads > 1
        return "\n".join(
            [
                *(
                    f'@{name} = internal constant [{len(data)} x i8] c"{escaped(data)}", align {BUFFER_ALIGNMENT}'
                    for data, name in self.constants.items()
                ),
                self._string(f"{self.name}_metadata", self.metadata.encode() + b"\0", "constant"),
                *self.lines,
                *([features_text(needs, device.is_x86)] if needs else []),
                messages_text(calls_kernel),
                "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)",
                "declare i64 @llvm.umin.i64(i64, i64)",
                "declare i64 @llvm.umax.i64(i64, i64)",
                *(["declare i32 @omp_get_max_threads()"] if asks_threads else []),
                *(
                    ["declare ptr @aligned_alloc(i64, i64)", "declare void @free(ptr)"]
                    if allocates
                    else []
                ),
                *(f"declare void @{name}(ptr, ptr, ptr)" for name, _ in self.mains),
                f"attributes #0 = {{ nounwind {baseline} }}",
                f"attributes #1 = {{ noreturn nounwind cold noinline {baseline} }}",
                "",
            ]
        )

    def _string(self, name: str, data: bytes, kind: str = "internal constant") -> str:
        return f'@{name} = {kind} [{len(data)} x i8] c"{escaped(data)}", align 1'

    def _constant(self, x: np.ndarray) -> str:
        data = np.ascontiguousarray(x).tobytes()
        return self.constants.setdefault(data, f"pbk_constant{len(self.constants)}")

    # ---------------------------------------------------------------- one variant

    def _run(self, number: int, k: int, program: SizedProgram) -> None:
        """@pbk_run{n}_{k}(arguments..., memory): a program on memory that starts anywhere, then copies."""
        function = program.function
        lines = [f"define internal void @pbk_run{number}_{k}({self._with('ptr %memory')}) #0 {{"]
        if self.interface.file:
            lines.append(f"  %weights = load ptr, ptr @{LOADED}, align 8")
            lines += [
                f"  %w{n} = getelementptr i8, ptr %weights, i64 {offset}"
                for n, offset in enumerate(self.interface.file.offsets)
            ]
        if program.variant is not None:
            total = len(function.buffers)
            lines += [f"  %buffers = alloca [{max(total, 1)} x ptr], align 8"]
            for b, source in enumerate(function.buffers):
                lines += [
                    f"  %b{b} = getelementptr i8, ptr %buffers, i64 {8 * b}",
                    f"  store ptr {self._pointer(function, source)}, ptr %b{b}, align 8",
                ]
            lines += [
                "  %at = ptrtoint ptr %memory to i64",
                f"  %past = add i64 %at, {BUFFER_ALIGNMENT - 1}",
                f"  %line = and i64 %past, {-BUFFER_ALIGNMENT}",
                "  %arena = inttoptr i64 %line to ptr",
                f"  call void @{self.main(number, k)}(ptr null, ptr %buffers, ptr %arena)",
            ]
        for output, source in function.copies:
            size = function.outputs[output].type.nbytes
            to = self._pointer(function, ArraySource("output", output))
            if size:
                lines.append(
                    f"  call void @llvm.memcpy.p0.p0.i64(ptr {to}, ptr {self._pointer(function, source)}, i64 {size}, i1 false)"
                )
        self.lines += [*lines, "  ret void", "}", ""]

    def _all(self, number: int, part: DevicePart) -> None:
        """@pbk_all{n}(arguments..., sizes..., memory): the programs that compute these sizes.

        Rows that are computed in parts: each program takes as many as it is made for, as long as
        so many are left.
        """
        parameters = ", ".join(filter(None, [self._arrays, *self._sizes, "ptr %memory"]))
        lines = [f"define internal void @pbk_all{number}({parameters}) #0 {{"]
        rows = self.interface.sizes.rows
        if rows is not None:
            lines += ["  %done = alloca i64, align 8", "  store i64 0, ptr %done, align 8"]
        lines.append("  br label %test0")
        for k, program in enumerate(part.programs):
            lines += [f"test{k}:", *self._suits(program.sizes, str(k))]
            lines += [f"  br i1 %suits{k}, label %body{k}, label %test{k + 1}", f"body{k}:"]
            arrays = [f"ptr %a{n}" for n in range(len(self._arguments))]
            if rows is not None:
                for n, argument in enumerate(self._arguments):
                    bytes_of_row = _row_bytes(argument, program, n, rows)
                    if bytes_of_row:
                        lines += [
                            f"  %past{k}.{n} = mul i64 %done{k}, {bytes_of_row}",
                            f"  %p{k}.{n} = getelementptr i8, ptr %a{n}, i64 %past{k}.{n}",
                        ]
                        arrays[n] = f"ptr %p{k}.{n}"
            passed = ", ".join([*arrays, "ptr %memory"])
            lines.append(f"  call void @pbk_run{number}_{k}({passed})")
            if rows is None:
                lines.append("  ret void")
                continue
            lines += [
                f"  %after{k} = add i64 %done{k}, {program.sizes[rows]}",
                f"  store i64 %after{k}, ptr %done, align 8",
                f"  br label %test{k}",
            ]
        self.lines += [*lines, f"test{len(part.programs)}:", "  ret void", "}", ""]

    def _suits(self, sizes: Sizes, end: str, done: bool = True) -> list[str]:
        """Lines of %suits{end}: whether a program of these sizes has work to do.

        done: whether rows that %done counts are finished; otherwise none are.
        """
        lines, tests = [], []
        for n, symbol in enumerate(self.interface.sizes.symbols):
            name, size = f"%is{end}.{n}", sizes[symbol.name]
            tests.append(name)
            if symbol.name != self.interface.sizes.rows:
                lines.append(f"  {name} = icmp eq i64 %size{n}, {size}")
                continue
            left = f"%size{n}"
            if done:
                left = f"%left{end}"
                lines += [
                    f"  %done{end} = load i64, ptr %done, align 8",
                    f"  {left} = sub i64 %size{n}, %done{end}",
                ]
            lines.append(f"  {name} = icmp uge i64 {left}, {size}")
        both = "true"
        for n, test in enumerate(tests):
            lines.append(f"  %both{end}.{n} = and i1 {both}, {test}")
            both = f"%both{end}.{n}"
        return [*lines, f"  %suits{end} = and i1 {both}, true"]

    def _with(self, memory: str) -> str:
        """The arrays and one more pointer."""
        return ", ".join(filter(None, [self._arrays, memory]))

    def _pointer(self, function: LibraryFunction, source: ArraySource) -> str:
        match source.kind:
            case "input":
                return f"%a{source.n}"
            case "weight":
                return f"%w{source.n}"
            case "output":
                return f"%a{len(function.inputs) + source.n}"
        return f"@{self._constant(function.constants[source.n])}"

    # ---------------------------------------------------------------- what all variants share

    def _call(self) -> None:
        """@pbk_call(arguments...) -> 0, or a code and an argument's number."""
        lines = [f"define internal i32 @pbk_call({self._parameters}) #0 {{"]
        for k, argument in enumerate(self._arguments):
            if argument.is_used and argument.type.nbytes:
                lines += self._null_test(f"%a{k}", k)
        for k, symbol in enumerate(self.interface.sizes.symbols):
            lines += self._size_test(k, symbol)
        if self.interface.file:
            lines.append(LOADED_TEST)
        if self._needs:
            lines.append("  %has = call i64 @pbk_features()")
        for n, part in enumerate(self.parts):
            mask = bits_of(part.device.asked, self._needs)
            if mask:
                lines += [
                    f"  %part{n} = and i64 %has, {mask}",
                    f"  %suits{n} = icmp eq i64 %part{n}, {mask}",
                    f"  br i1 %suits{n}, label %run{n}, label %next{n}",
                ]
            else:
                lines.append(f"  br label %run{n}")
            lines += [f"run{n}:", *self._with_memory(n, part), *([f"next{n}:"] if mask else [])]
            if not mask:
                break
        else:
            lines.append(f"  ret i32 {UNSUITABLE_PROCESSOR}")
        self.lines += [*lines, "}", ""]

    def _null_test(self, pointer: str, number: int) -> list[str]:
        code = NULL_POINTER | number << ARGUMENT_SHIFT
        label = f"null{number}"
        return [
            f"  %is.{label} = icmp eq ptr {pointer}, null",
            f"  br i1 %is.{label}, label %{label}, label %not.{label}",
            f"{label}:",
            f"  ret i32 {code}",
            f"not.{label}:",
        ]

    def _size_test(self, k: int, symbol: Symbol) -> list[str]:
        code = UNSUITABLE_SIZE | k << ARGUMENT_SHIFT
        return [
            f"  %above{k} = sub i64 %size{k}, {symbol.low}",
            f"  %in{k} = icmp ule i64 %above{k}, {symbol.high - symbol.low}",
            f"  br i1 %in{k}, label %sized{k}, label %unsized{k}",
            f"unsized{k}:",
            f"  ret i32 {code}",
            f"sized{k}:",
        ]

    def _with_memory(self, number: int, part: DevicePart) -> list[str]:
        """Lines that run one variant with its memory, up to their return."""
        size = part.memory_bytes(self.threads)
        passed = filter(None, [self._arrays, *self._sizes])
        run = lambda memory: (
            f"  call void @pbk_all{number}({', '.join([*passed, f'ptr {memory}'])})"
        )
        if not size:
            return [run("null"), "  ret i32 0"]
        if self.user_memory:
            code = NULL_POINTER | len(self._arguments) << ARGUMENT_SHIFT
            return [
                f"  %none{number} = icmp eq ptr %memory, null",
                f"  br i1 %none{number}, label %without{number}, label %with{number}",
                f"without{number}:",
                f"  ret i32 {code}",
                f"with{number}:",
                run("%memory"),
                "  ret i32 0",
            ]
        return [
            *self._threads_of_call(number),
            f"  %bytes{number} = call i64 @pbk_bytes{number}({', '.join([f'i32 %threads{number}', *self._sizes])})",
            f"  %past{number} = add i64 %bytes{number}, {BUFFER_ALIGNMENT - 1}",
            f"  %whole{number} = and i64 %past{number}, {-BUFFER_ALIGNMENT}",
            f"  %memory{number} = call ptr @aligned_alloc(i64 {BUFFER_ALIGNMENT}, i64 %whole{number})",
            f"  %none{number} = icmp eq ptr %memory{number}, null",
            f"  br i1 %none{number}, label %without{number}, label %with{number}",
            f"without{number}:",
            f"  ret i32 {OUT_OF_MEMORY}",
            f"with{number}:",
            run(f"%memory{number}"),
            f"  call void @free(ptr %memory{number})",
            "  ret i32 0",
        ]

    def _threads_of_call(self, number: int) -> list[str]:
        """Lines of %threads: as many as OpenMP gives the caller at most."""
        if self.threads == 1:
            return [f"  %threads{number} = add i32 1, 0"]
        return [f"  %threads{number} = call i32 @omp_get_max_threads()"]

    def _shown(self) -> None:
        """NAME and NAME_try."""
        call = f"  %r = call i32 @pbk_call({self._parameters})"
        self.lines += [
            f"define i32 @{self.name}_try({self._parameters}) #0 {{",
            call,
            f"  %code = and i32 %r, {(1 << ARGUMENT_SHIFT) - 1}",
            "  ret i32 %code",
            "}",
            "",
            f"define void @{self.name}({self._parameters}) #0 {{",
            call,
            "  %bad = icmp ne i32 %r, 0",
            "  br i1 %bad, label %fail, label %done",
            "fail:",
            "  call void @pbk_fail(i32 %r)",
            "  unreachable",
            "done:",
            "  ret void",
            "}",
            "",
        ]

    def _failure(self) -> None:
        """@pbk_fail(what @pbk_call returned): one line on stderr, then the end."""
        said = {
            NULL_POINTER | k << ARGUMENT_SHIFT: f"argument `{argument.name}` is a null pointer\n"
            for k, argument in enumerate(self._arguments)
        }
        if self.user_memory:
            said[NULL_POINTER | len(self._arguments) << ARGUMENT_SHIFT] = (
                "argument `user_device_memory` is a null pointer\n"
            )
        else:
            said[OUT_OF_MEMORY] = (
                f"{self.interface.memory_bytes} bytes of memory cannot be allocated\n"
            )
        for k, symbol in enumerate(self.interface.sizes.symbols):
            said[UNSUITABLE_SIZE | k << ARGUMENT_SHIFT] = (
                f"size `{symbol.name}` is out of its range, {symbol.low} to {symbol.high}\n"
            )
        if self.interface.file:
            said[NO_WEIGHTS] = f"{FILE_CODES['NO_WEIGHTS'][1]}: {self.name}_load\n"
        last = self.parts[-1].device
        if last.asked:
            said[UNSUITABLE_PROCESSOR] = f"made for {last.name}; this processor lacks"
        strings, cases, blocks = [], [], []
        for code, text in said.items():
            data = f"{self.name}: {text}".encode()
            strings.append(self._string(f"pbk_said{code}", data))
            cases.append(f"    i32 {code}, label %case{code}")
            end = self._lacking(last) if code == UNSUITABLE_PROCESSOR else ["  br label %end"]
            blocks += [
                f"case{code}:",
                f"  call void @pbk_write(ptr @pbk_said{code}, i64 {len(data)})",
                *end,
            ]
        for name in last.asked:
            strings.append(self._string(f"pbk_set_{name}", f" {name}".encode()))
        strings.append(self._string("pbk_newline", b"\n"))
        self.lines += [
            *strings,
            "",
            "define internal void @pbk_fail(i32 %what) #1 {",
            "  switch i32 %what, label %end [",
            *cases,
            "  ]",
            *blocks,
            "end:",
            "  call void @pbk_abort()",
            "  unreachable",
            "}",
            "",
        ]

    def _lacking(self, device: CpuDevice) -> list[str]:
        """Lines that name the instruction sets that are not there."""
        lines = ["  %has = call i64 @pbk_features()"]
        for name in device.asked:
            bit = 1 << self._needs.index(name)
            lines += [
                f"  %bit.{name} = and i64 %has, {bit}",
                f"  %there.{name} = icmp ne i64 %bit.{name}, 0",
                f"  br i1 %there.{name}, label %after.{name}, label %lacks.{name}",
                f"lacks.{name}:",
                f"  call void @pbk_write(ptr @pbk_set_{name}, i64 {len(name) + 1})",
                f"  br label %after.{name}",
                f"after.{name}:",
            ]
        return [*lines, "  call void @pbk_write(ptr @pbk_newline, i64 1)", "  br label %end"]

    def _memory_bytes(self) -> None:
        """NAME_memory_bytes(threads, sizes...), for whichever variant runs; @pbk_bytes{n}, for one, from a cache line on.

        Fewer than one thread, and more than the most, count as the most.
        """
        most = "0"
        parameters = ", ".join(["i32 %threads", *self._sizes])
        lines = [f"define i64 @{self.name}_memory_bytes({parameters}) #0 {{"]
        for n, part in enumerate(self.parts):
            self._bytes(n, part)
            past = BUFFER_ALIGNMENT - 1 if part.aligned_bytes(1) else 0
            lines += [
                f"  %aligned{n} = call i64 @pbk_bytes{n}({parameters})",
                f"  %bytes{n} = add i64 %aligned{n}, {past}",
                f"  %most{n} = call i64 @llvm.umax.i64(i64 {most}, i64 %bytes{n})",
            ]
            most = f"%most{n}"
        self.lines += [*lines, f"  ret i64 {most}", "}", ""]

    def _bytes(self, number: int, part: DevicePart) -> None:
        """@pbk_bytes{n}(threads, sizes...): the most that a program needs which may run for these sizes."""
        lines = [
            f"define internal i64 @pbk_bytes{number}({', '.join(['i32 %threads', *self._sizes])}) #0 {{",
            "  %before = sub i32 %threads, 1",
            f"  %fits = icmp ult i32 %before, {self.threads}",
            f"  %chosen = select i1 %fits, i32 %threads, i32 {self.threads}",
            "  %count = zext i32 %chosen to i64",
        ]
        most = "0"
        for p, program in enumerate(part.programs):
            if program.variant is None:
                continue
            scratch = "0"
            for k, (size, threads) in enumerate(program.variant.scratch):
                lines += [
                    f"  %slots{p}.{k} = call i64 @llvm.umin.i64(i64 %count, i64 {threads})",
                    f"  %size{p}.{k} = mul i64 %slots{p}.{k}, {size}",
                    f"  %scratch{p}.{k} = call i64 @llvm.umax.i64(i64 {scratch}, i64 %size{p}.{k})",
                ]
                scratch = f"%scratch{p}.{k}"
            lines += [
                *self._suits(program.sizes, str(p), done=False),
                f"  %own{p} = add i64 {scratch}, {program.variant.temporary_bytes}",
                f"  %asked{p} = select i1 %suits{p}, i64 %own{p}, i64 0",
                f"  %most{p} = call i64 @llvm.umax.i64(i64 {most}, i64 %asked{p})",
            ]
            most = f"%most{p}"
        self.lines += [*lines, f"  ret i64 {most}", "}", ""]

    def _message(self) -> None:
        """NAME_message(code): the words of a code."""
        words = dict(self.interface.codes.values()) | {-1: "no code"}
        self.lines += [
            self._string(f"pbk_words{code}".replace("-", "_"), text.encode() + b"\0")
            for code, text in words.items()
        ]
        cases = [f"    i32 {code}, label %code{code}" for code in words if code >= 0]
        self.lines += [
            f"define ptr @{self.name}_message(i32 %code) #0 {{",
            "  switch i32 %code, label %code_1 [",
            *cases,
            "  ]",
        ]
        for code in words:
            end = str(code).replace("-", "_")
            self.lines += [f"code{end}:", f"  ret ptr @pbk_words{end}"]
        self.lines += ["}", ""]


def _row_bytes(argument: Argument, program: SizedProgram, number: int, rows: str) -> int:
    """Bytes of the part of an array that belongs to one row, for a program's other sizes; 0 where it has no rows."""
    extent = row_extent(argument.dimensions, rows) if argument.dimensions else None
    type_ = program.function.arguments[number].type
    return (extent or 0) * type_.nbytes // max(type_.shape[0] if type_.shape else 1, 1)


def escaped(data: bytes) -> str:
    """Bytes as LLVM writes them in a string."""
    table = np.array([list(f"\\{n:02X}".encode()) for n in range(256)], np.uint8)
    return table[np.frombuffer(data, np.uint8)].tobytes().decode()
