"""Functions, one per device -> Library: variants, entry, object file, header, and the files that are asked for."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pbkern.api import stages
from pbkern.core.affine import Affine
from pbkern.core.option_uses import AOT_ONLY
from pbkern.core.options import CompileOptions
from pbkern.core.process import gc_pause, progress, recursion
from pbkern.core.version import VERSION
from pbkern.dsl.kernel import ArrayType
from pbkern.targets.cpu.machines.devices import CpuDevice, devices_of
from pbkern.targets.llvm import process

from . import link
from .codegen.emit import emitted, require_llvmlite
from .codegen.entry import DevicePart, Entry, SizedProgram
from .codegen.variant import variant_of
from .dynamic.divide import Divided, divide
from .dynamic.sizes import FunctionOfSizes
from .files import Wanted, all_or_none
from .interface import companions
from .interface.arguments import Argument
from .interface.c_types import element_type
from .interface.header import Interface, header_text
from .interface.metadata import metadata_of
from .interface.sizes import Sizes, size_at
from .interface.weights_file import FileLayout
from .library import Library
from .weights import Weights, placed

# Threads of one call at most, where no option says another number. Source: chosen; two AMD EPYC 9754
# have 256 cores.
MOST_THREADS = 256
EMITTED = ("obj", "asm", "llvm")


def build_library(
    asked: Wanted,
    options: CompileOptions,
    function: FunctionOfSizes,
    weights: Weights,
    is_donated: bool = False,
) -> Library:
    """Makes a library and writes its files. Nothing is written after an error.

    Args:
      asked: its name and files.
      options: what it is compiled with.
      function: plans it for sizes.
      weights: which of its inputs are weights.
      is_donated: whether an argument may be a result.
    Raises UnsupportedOp for sizes that would need too many programs, and what planning and lowering
    raise.
    """
    require_llvmlite()
    process.warm()
    devices = devices_of(options.device)
    with progress.compiling(asked.name), gc_pause.paused(), recursion.headroom():
        times: dict[str, float] = {}
        sizes = _timed(times, "sizes", divide, function, is_donated)
        parts = [_part(device, options, function, sizes, weights, times) for device in devices]
        threads = most_threads(options)
        interface = _interface(asked.name, parts, options, threads, sizes)
        described = metadata_of(
            interface,
            options,
            devices,
            [program.mlir for part in parts for program in part.programs],
        )
        entry = Entry(interface, parts, json.dumps(described))
        kinds = {"obj", *(file for file in asked.files if file in EMITTED)}
        contents = _timed(times, "LLVM", emitted, entry, devices[0], kinds)
        texts = _texts(asked, interface, options, parts, described) | contents
        if interface.file is not None:
            texts["weights"] = interface.file.content(weights.known)
        _write(asked.files, texts, devices[0], options.openmp, times)
    if options.debug:
        record = parts[0].function.build.record
        record.milliseconds |= times
        stages.report(record)
    header = texts["header"].decode()
    return Library(
        asked.name,
        dict(asked.files),
        header,
        described,
        contents["obj"],
        devices[0],
        options.openmp,
    )


def _interface(
    name: str, parts: Sequence[DevicePart], options: CompileOptions, threads: int, sizes: Divided
) -> Interface:
    """Describes the interface that all programs share: plans may differ in the arguments that they read or overwrite."""
    functions = [program.function for part in parts for program in part.programs]
    inputs = [
        dataclasses.replace(of[0], is_used=any(argument.is_used for argument in of))
        for of in zip(*(function.inputs for function in functions))
    ]
    outputs = list(functions[0].outputs)
    most = sizes.division.most
    if most:
        arguments = [sizes.arguments[argument.number] for argument in inputs]
        inputs = list(map(functools.partial(_at_most, most), inputs, arguments))
        outputs = list(map(functools.partial(_at_most, most), outputs, sizes.results))
    shared = [
        pair
        for pair in functions[0].shared
        if all(pair in function.shared for function in functions)
    ]
    memory = max(part.memory_bytes(threads) for part in parts)
    devices = [part.device.name for part in parts]
    weights = functions[0].weights
    return Interface(
        name,
        inputs,
        outputs,
        shared,
        options.user_device_memory,
        memory,
        devices,
        threads,
        weights,
        FileLayout.of(weights) if options.weights == "file" else None,
        sizes.division,
    )


def _at_most(most: Sizes, argument: Argument, dimensions: Sequence[Affine[str]]) -> Argument:
    """An array of the largest sizes, with its dimensions as expressions."""
    shape = tuple(size_at(dimension, most) for dimension in dimensions)
    type_ = ArrayType(shape, argument.type.dtype)
    return dataclasses.replace(argument, type=type_, dimensions=tuple(dimensions))


def _texts(
    asked: Wanted,
    of: Interface,
    options: CompileOptions,
    parts: Sequence[DevicePart],
    described: Mapping,
) -> dict[str, bytes]:
    """Texts of the kinds in KINDS that are texts."""
    names = {kind: path.name for kind, path in asked.files.items()}
    makers: dict[str, Callable[[], str]] = {
        "header": lambda: header_text(of),
        "metadata": lambda: json.dumps(described, indent=1) + "\n",
        "mlir": lambda: "\n".join(program.mlir for part in parts for program in part.programs),
        "kernels": lambda: (
            "\n\n".join(kernel.source() for kernel in parts[0].function.build.record.kernels) + "\n"
        ),
        "cmake": lambda: companions.cmake(of, names, options.openmp),
        "pkgconfig": lambda: companions.pkgconfig(of, names, options.openmp, VERSION),
        "cpp": lambda: companions.cpp(of, names),
        "bench": lambda: companions.bench(of, names, options.openmp),
    }
    return {
        kind: make().encode() for kind, make in makers.items() if kind in (*asked.files, "header")
    }


def plan_options(options: CompileOptions, device: CpuDevice) -> CompileOptions:
    """The options of a plan: the same as just in time where the device is the one at hand."""
    used_options = {k: value for k, value in options.differing().items() if k not in AOT_ONLY}
    return CompileOptions(
        **(used_options | {"device": None if device.name == "native" else device.name})
    )


def most_threads(options: CompileOptions) -> int:
    """Most threads of one call; the caller says how many there are."""
    return options.num_threads or MOST_THREADS if options.openmp else 1


def _part(
    device: CpuDevice,
    options: CompileOptions,
    function: FunctionOfSizes,
    sizes: Divided,
    weights: Weights,
    times: dict[str, float],
) -> DevicePart:
    programs = (
        _program(device, options, function, of_program, weights, times)
        for of_program in sizes.division.programs
    )
    return DevicePart(device, tuple(programs))


def _program(
    device: CpuDevice,
    options: CompileOptions,
    of_sizes: FunctionOfSizes,
    sizes: Sizes,
    weights: Weights,
    times: dict[str, float],
) -> SizedProgram:
    """A device's program for certain sizes."""
    of = "".join(f", {name}={size}" for name, size in sizes.items())
    function = _timed(
        times, f"plan for {device.name}{of}", of_sizes.make, plan_options(options, device), sizes
    )
    for argument in function.arguments:
        element_type(argument.type.dtype, argument.path)
    function = placed(function, weights, options)
    if function.program is None:
        return SizedProgram(sizes, function, None)
    variant = _timed(
        times,
        f"lowering for {device.name}{of}",
        variant_of,
        function.program,
        options,
        device,
        most_threads(options),
        options.openmp,
    )
    return SizedProgram(sizes, function, variant)


def _timed(times: dict[str, float], what: str, function: Callable, *args: Any) -> Any:
    progress.step(what)
    start = time.perf_counter()
    result = function(*args)
    times[what] = (time.perf_counter() - start) * 1e3
    return result


def _write(
    files: Mapping[str, pathlib.Path],
    texts: Mapping[str, bytes],
    device: CpuDevice,
    use_openmp: bool,
    times,
) -> None:
    with all_or_none(files) as places, tempfile.TemporaryDirectory() as folder:
        code = (
            pathlib.Path(folder) / f"{next(iter(files.values())).stem}.o"
        )  # its name is in an archive
        code.write_bytes(texts["obj"])
        for kind, place in places.items():
            if kind == "shared":
                _timed(times, "link", link.link, place, [code], device, use_openmp)
            elif kind == "static":
                _timed(times, "archive", link.archive, place, [code], device)
            else:
                place.write_bytes(texts[kind])
