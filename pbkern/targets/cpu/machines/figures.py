"""CpuMachine -> its figures as rows: what each is, its unit, and where it comes from."""

from __future__ import annotations

from typing import NamedTuple

from .machine import CpuMachine

# Field of CpuMachine, what it is, its unit, and how many of the field's units that is.
PLAIN = (
    ("cores", "cores", "hardware threads", 1),
    ("vector_bits", "widest vectors", "bits", 1),
    ("registers", "vector registers", "registers", 1),
    ("l1_bytes", "first data cache of a core", "KB", 1024),
    ("l1_ways", "ways of it", "lines", 1),
    ("l2_bytes", "second cache of a core", "KB", 1024),
    ("l3_bytes", "shared cache", "KB", 1024),
    ("l2_bandwidth", "second caches, all cores", "GB/s", 1e9),
    ("l3_bandwidth", "shared cache, all cores", "GB/s", 1e9),
    ("dram_bandwidth", "memory, all cores", "GB/s", 1e9),
    ("clock_hz", "clock", "GHz", 1e9),
    ("shift_cycles", "shift of the lanes of two vectors", "cycles", 1),
    ("crossing_accesses", "load across two lines", "accesses", 1),
    ("gathers_by_lanes", "gathers by loads of one element each", "0 or 1", 1),
    ("followed_row_bytes", "least row that prefetchers follow beside others, 0: none", "bytes", 1),
)
# Fields of CpuMachine that have a figure for each dtype, and what these are.
BY_DTYPE = (
    ("peak_flops", "multiply-adds of {}, counted as two"),
    ("tile_flops", "multiply-adds of {} by tiles, counted as two"),
)
# Primitives whose prices are those of one instruction.
PRICED = ("div", "sqrt")


class Figure(NamedTuple):
    """One figure of a machine."""

    name: str
    value: float
    unit: str
    source: str


def figures(machine: CpuMachine) -> list[Figure]:
    """Every figure that plans or schedules read, but for prices of functions that several instructions compute."""
    sources = machine.sources
    rows = [
        Figure(name, getattr(machine, field) / scale, unit, sources.get(field, "instruction sets"))
        for field, name, unit, scale in PLAIN
    ]
    rows += [
        Figure(name.format(dtype), rate / 1e9, "Gop/s", sources[field])
        for field, name in BY_DTYPE
        for dtype, rate in getattr(machine, field).items()
    ]
    return rows + [
        Figure(f"{name} of float32", machine.op_cycles[name], "additions", sources[name])
        for name in PRICED
    ]
