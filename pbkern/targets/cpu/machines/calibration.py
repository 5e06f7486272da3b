"""Bandwidths of this computer's cores, measured once where somebody asks for it, rounded to classes, kept by processor.

    pbkern calibrate    read bursts of two sizes on all usable cores -> 87 and 21 GB/s per core -> classes 100 and 20

A figure counts only if a second round repeats it. Classes, not figures, enter the machine: plans and
the keys of what is kept on disk are then the same after each calibration that finds the same class.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np

from pbkern.core.errors import OptionError, TargetError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.process import disk_cache
from pbkern.targets import mlir
from pbkern.targets.host.objects import elf_loader
from pbkern.targets.host.objects.cache_key import processor

from .cores import DRAM_CLASSES, L3_CLASSES
from .machine import CpuMachine

KIND = "calibration"
# Seconds of bursts of one round: with two rounds of two sizes, and the memory they fill, half a second.
ROUND_SECONDS = 0.06
# Bytes of one burst of one core, about 0.2 ms of the memory's: shorter than a turn of the scheduler.
BURST_BYTES = 2 << 20
# Largest difference between two rounds, as a part of the larger, that counts as a repetition: less than
# half of the way from a class to the next.
TOLERANCE = 0.15
# Rounds after which a figure that does not repeat is given up.
MOST_ROUNDS = 6
# Second caches that the bursts in the third one go around, so that they do not come from the second.
L2_ROUNDS = 4
# Least bytes that all cores go around together in memory.
LEAST_FAR_BYTES = 128 << 20
# Most bytes.
MOST_FAR_BYTES = 1 << 30
# Vectors of one step of the loop that reads.
VECTORS_PER_STEP = 8


@dataclass(frozen=True)
class Calibration:
    """GB/s of one core while all cores read: the classes, and what was measured."""

    l3_class: int
    dram_class: int
    l3_measured: float
    dram_measured: float

    def __str__(self) -> str:
        return f"calibrated: L3 {self.l3_class} and memory {self.dram_class} GB/s per core"

    @property
    def sources(self) -> dict[str, str]:
        """Sources of the figures of CpuMachine that are made of it."""
        rates = {"l3_bandwidth": self.l3_measured, "dram_bandwidth": self.dram_measured}
        return {
            figure: f"class by calibration, {rate:.0f} GB/s per core measured"
            for figure, rate in rates.items()
        }


def stored() -> Calibration | None:
    """The calibration of this processor that is on disk; None where there is none."""
    store = disk_cache.current()
    return None if store is None else _read(store.folder)


@functools.cache
def _read(folder: object) -> Calibration | None:
    """Once per folder and process: plans of one process are for one machine."""
    store = disk_cache.current()
    payload = store.get(KIND, _key()) if store is not None else None
    return None if payload is None else Calibration(**json.loads(payload))


def keep(calibration: Calibration) -> None:
    """Stores it. Raises OptionError where nothing is kept on disk."""
    store = disk_cache.current()
    if store is None or not store.put(KIND, _key(), json.dumps(asdict(calibration)).encode()):
        raise OptionError(
            "a calibration cannot be kept",
            why="there is no cache on disk that can be written to",
            hint="unset PBKERN_CACHE, or set PBKERN_CACHE_DIR",
        )
    _read.cache_clear()


def forget() -> None:
    """Removes this processor's calibration from the disk."""
    store = disk_cache.current()
    if store is not None:
        store.remove(KIND, _key())
    _read.cache_clear()


def _key() -> str:
    return disk_cache.digest(processor())


def measured(machine: CpuMachine) -> Calibration:
    """Measures it: about half a second. Raises TargetError where figures do not repeat."""
    near = L2_ROUNDS * machine.l2_bytes
    if near > machine.l3_bytes // machine.cores:
        near = machine.l3_bytes // machine.cores // 2
    far = min(max(2 * machine.l3_bytes, LEAST_FAR_BYTES), MOST_FAR_BYTES) // machine.cores
    read = _reader(machine.vector_bits)
    buffers = [np.ones(max(near, far) // 8, np.float64) for _ in range(machine.cores)]
    rates = []
    for name, size, classes in (("L3", near, L3_CLASSES), ("memory", far, DRAM_CLASSES)):
        rate = repeated(name, functools.partial(round_rate, read, buffers, size))
        rates.append((nearest_class(rate, classes), rate))
    (l3_class, l3), (dram_class, dram) = rates
    return Calibration(l3_class, dram_class, l3, dram)


def nearest_class(rate: float, classes: Sequence[int]) -> int:
    """The class whose ratio to a rate is nearest to 1."""
    return min(classes, key=lambda one: abs(math.log(rate / one)))


def repeated(name: str, measure: Callable[[], float]) -> float:
    """The first figure that the round before it repeats. Raises TargetError."""
    rates = [measure()]
    while len(rates) < MOST_ROUNDS:
        rates.append(measure())
        before, last = rates[-2:]
        if abs(last - before) <= TOLERANCE * max(last, before):
            return max(last, before)
    raise TargetError(
        f"the bandwidth of the {name} cannot be measured",
        why=f"rounds differ: {', '.join(f'{rate:.1f}' for rate in rates)} GB/s per core",
        hint="try again while the computer has less to do",
    )


def round_rate(read: Callable[[int, int], None], buffers: Sequence[np.ndarray], size: int) -> float:
    """GB/s per core: the best burst of each core, while all of them read the first `size` bytes of their buffers."""
    ready = threading.Barrier(len(buffers))

    def core(buffer: np.ndarray) -> float:
        burst = min(BURST_BYTES, size)
        places = [buffer.ctypes.data + burst * k for k in range(size // burst)]
        ready.wait()
        best, end = math.inf, time.perf_counter() + ROUND_SECONDS
        while time.perf_counter() < end:
            for place in places:
                start = time.perf_counter()
                read(place, burst)
                best = min(best, time.perf_counter() - start)
                if time.perf_counter() > end:
                    break
        return burst / best / 1e9

    with concurrent.futures.ThreadPoolExecutor(len(buffers)) as threads:
        return sum(threads.map(core, buffers)) / len(buffers)


def _reader(bits: int) -> Callable[[int, int], None]:
    """read(address, bytes) loads every vector of an aligned piece of memory."""
    vector, step = f"vector<{bits // 32}xi32>", VECTORS_PER_STEP * bits // 8
    lines = []
    for k in range(VECTORS_PER_STEP):
        lines += [
            f"%o{k} = llvm.mlir.constant({k * bits // 8} : i64) : i64",
            f"%i{k} = llvm.add %at, %o{k} : i64",
            f"%p{k} = llvm.getelementptr %from[%i{k}] : (!llvm.ptr, i64) -> !llvm.ptr, i8",
            f"%l{k} = llvm.load volatile %p{k} {{alignment = 4 : i64}} : !llvm.ptr -> {vector}",
        ]
    module = mlir.parse(
        f"""llvm.func @read(%from: !llvm.ptr, %bytes: i64) {{
  %zero = llvm.mlir.constant(0 : i64) : i64
  %step = llvm.mlir.constant({step} : i64) : i64
  llvm.br ^loop(%zero : i64)
^loop(%at: i64):
  {chr(10).join(lines)}
  %next = llvm.add %at, %step : i64
  %more = llvm.icmp "slt" %next, %bytes : i64
  llvm.cond_br %more, ^loop(%next : i64), ^end
^end:
  llvm.return
}}"""
    )
    image = elf_loader.Image(mlir.object_code(module, 0, "read", {}), {})
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(image.address("read"))

    def read(place: int, size: int, _image: elf_loader.Image = image) -> None:
        function(place, size)

    return read
