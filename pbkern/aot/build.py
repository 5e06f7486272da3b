"""Functions, one per device -> Library: variants, entry, object file, header, and the files that are asked for."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pbkern.core import config
from pbkern.core.errors import OptionError
from pbkern.core.options import CompileOptions, nearest
from pbkern.core.process import gc_pause, progress, recursion
from pbkern.targets.cpu.devices import Device, devices_of

from . import link
from .codegen.emit import emitted, require_llvmlite
from .codegen.entry import Entry, Part
from .codegen.variant import variant_of
from .function import Function
from .interface.c_types import element_type
from .interface.header import Interface, header_text
from .interface.metadata import metadata_of
from .interface.names import check_function_name
from .library import Library, all_or_none

# What can be asked for, and the ends of its files' names.
KINDS = {"obj": ".o", "header": ".h", "shared": ".so", "static": ".a", "asm": ".s", "llvm": ".ll", "mlir": ".mlir",
         "kernels": ".py", "metadata": ".json"}  # fmt: skip
EMITTED = ("obj", "asm", "llvm")
DEFAULT_KINDS = ("obj", "header")
DEFAULT_NAME = CompileOptions().aot_name


@dataclass(frozen=True)
class Wanted:
    """Name of the function, and kind -> path of each file."""

    name: str
    files: Mapping[str, pathlib.Path]


def wanted(own_name: str, options: CompileOptions, output: str | pathlib.Path | None, kinds: Iterable[str] | None) -> Wanted:
    """What is to be made. Raises OptionError for names that C does not allow, and for kinds that there are not.

    own_name: of the function in Python. output: a folder, or the name of one file, whose end says what it is; None: the folder
    in which the process runs. kinds: of KINDS.
    """
    given = options.aot_name != DEFAULT_NAME
    name = check_function_name(options.aot_name if given else own_name, given)
    stem = name if given else DEFAULT_NAME
    path = pathlib.Path(output) if output is not None else pathlib.Path()
    kinds = list(dict.fromkeys(kinds)) if kinds is not None else None
    for kind in kinds or ():
        if kind not in KINDS:
            raise OptionError(f"there is no `{kind}` to emit", why=f"there are {', '.join(KINDS)}", hint=nearest(kind, KINDS))
    if path.is_dir() or output is None:
        return Wanted(name, {k: path / _file_name(stem, k) for k in kinds or DEFAULT_KINDS})
    own = next((k for k, end in KINDS.items() if end == path.suffix), None)
    if own is None:
        raise OptionError(f"what {path.name} is to be is not known", why=f"it ends in `{path.suffix}` and is no folder",
                          hint=f"an existing folder, or an end of {', '.join(KINDS.values())}")  # fmt: skip
    beside = path.name.removesuffix(path.suffix)
    files = {
        k: path.with_name(_file_name(beside, k)) for k in kinds or (["header"] if own in ("obj", "shared", "static") else [])
    }
    return Wanted(name, files | {own: path})


def _file_name(stem: str, kind: str) -> str:
    return f"{'lib' if kind in ('shared', 'static') and not stem.startswith('lib') else ''}{stem}{KINDS[kind]}"


def build_library(asked: Wanted, options: CompileOptions, make: Callable[[CompileOptions], Function]) -> Library:
    """Makes a library and writes its files. Nothing is written after an error.

    make: the function as it is planned under such options, for one device.
    """
    require_llvmlite()
    devices = devices_of(options.device)
    with progress.compiling(asked.name), gc_pause.paused(), recursion.headroom():
        times: dict[str, float] = {}
        parts = [_part(d, options, make, times) for d in devices]
        threads = max(map(lambda d: most_threads(options, d), devices))
        first = parts[0].function
        interface = Interface(
            asked.name, first.inputs, first.outputs, first.shared, options.user_device_memory,
            max(p.memory_bytes(threads) for p in parts), [d.name for d in devices], threads,
        )  # fmt: skip
        described = metadata_of(interface, options, devices, [p.variant.mlir if p.variant else "" for p in parts])
        entry = Entry(asked.name, parts, threads, options.user_device_memory, json.dumps(described))
        kinds = {"obj", *(k for k in asked.files if k in EMITTED)}
        made = _timed(times, "LLVM", emitted, entry, [p.variant for p in parts], devices[0], kinds)
        texts = {
            "header": header_text(interface).encode(), "metadata": json.dumps(described, indent=1).encode() + b"\n",
            "mlir": "\n".join(p.variant.mlir for p in parts if p.variant).encode(),
            "kernels": "\n\n".join(k.source() for k in first.build.record.kernels).encode() + b"\n", **made,
        }  # fmt: skip
        _write(asked.files, texts, devices[0], options.openmp, times)
    if options.debug:
        _report(asked.name, times)
    return Library(asked.name, dict(asked.files), texts["header"].decode(), described, made["obj"], devices[0], options.openmp)


def plan_options(options: CompileOptions, device: Device) -> CompileOptions:
    """The options of a plan: the same as just in time where the device is the one at hand."""
    kept = {
        k: v
        for k, v in options.differing().items()
        if k not in ("aot", "aot_name", "user_device_memory", "openmp", "num_threads")
    }
    return CompileOptions(**(kept | {"device": None if device.name == "native" else device.name}))


def most_threads(options: CompileOptions, device: Device) -> int:
    """Of one call."""
    if not options.openmp:
        return 1
    here = config.num_threads() if device.name == "native" else None
    return options.num_threads or here or device.machine.cores


def _part(device: Device, options: CompileOptions, make: Callable, times: dict[str, float]) -> Part:
    function = _timed(times, f"plan for {device.name}", make, plan_options(options, device))
    for a in function.arguments:
        element_type(a.type.dtype, a.path)
    if function.program is None:
        return Part(device, function, None)
    threads = most_threads(options, device)
    variant = _timed(
        times, f"lowering for {device.name}", variant_of, function.program, options, device, threads, options.openmp
    )
    return Part(device, function, variant)


def _timed(times: dict[str, float], what: str, f: Callable, *args: Any) -> Any:
    progress.step(what)
    start = time.perf_counter()
    result = f(*args)
    times[what] = (time.perf_counter() - start) * 1e3
    return result


def _write(
    files: Mapping[str, pathlib.Path], texts: Mapping[str, bytes], device: Device, use_openmp: bool, times: dict
) -> None:
    extra = {} if "obj" in files or not {"shared", "static"} & files.keys() else {"obj": None}
    with all_or_none(files) as places:
        for kind, place in places.items():
            if kind in texts:
                place.write_bytes(texts[kind])
        for kind in ("shared", "static"):
            if kind in places:
                code = places["obj"] if not extra else places[kind].with_name(f"{files[kind].stem}.o")
                code.write_bytes(texts["obj"])
                if kind == "shared":
                    _timed(times, "link", link.link, places[kind], [code], device, use_openmp)
                else:
                    _timed(times, "archive", link.archive, places[kind], [code], device)


def _report(name: str, times: Mapping[str, float]) -> None:
    import sys

    rows = "\n".join(f"{ms:10.2f} ms  {what}" for what, ms in times.items())
    print(f"library {name}\n{rows}", file=sys.stderr)
