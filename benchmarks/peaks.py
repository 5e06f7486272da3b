"""Peaks of one core: chains of vector operations, to check the rates of pbkern.cpu.machine() and to fill the table of CPUs
(pbkern/targets/cpu/machines/cores.py). `div`, `sqrt` and `shift` of the lanes of two vectors are shown in additions.

    python -m benchmarks.peaks

A function of CHAINS independent chains keeps every pipe busy; its time is the thread's own. What the machine says of its
peak is for all cores, so that it is divided by their number.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import pbkern
from pbkern.targets import mlir
from pbkern.targets.host.objects import elf_loader

CHAINS, STEPS, SECONDS = 12, 1_000_000, 1.0
OPERATIONS = {"fma": 2, "add": 1}  # arithmetic operations per element
SLOWER = ("div", "sqrt", "shift")


def text(operation: str, lanes: int, element: str) -> str:
    """@run(result): STEPS times one operation in each of CHAINS registers; their sum is stored, so that it is computed."""
    v, regs = f"vector<{lanes}x{element}>", range(CHAINS)
    body = {
        "fma": "%n{0} = math.fma %x{0}, %m, %a : " + v,
        "add": "%n{0} = arith.addf %x{0}, %a : " + v,
        "div": "%n{0} = arith.divf %x{0}, %a : " + v,
        "sqrt": "%n{0} = math.sqrt %x{0} : " + v,
        "shift": f"%n{{0}} = vector.shuffle %x{{0}}, %m [{', '.join(map(str, range(1, lanes + 1)))}] : {v}, {v}",
    }[operation]
    lines = [f"%s0 = arith.addf %r#0, %r#1 : {v}"]
    lines += [f"%s{k} = arith.addf %s{k - 1}, %r#{k + 1} : {v}" for k in range(1, CHAINS - 1)]
    return f"""
func.func @run(%out: memref<{lanes}x{element}>) {{
  %zero = arith.constant 0 : index
  %one = arith.constant 1 : index
  %steps = arith.constant {STEPS} : index
  %m = vector.load %out[%zero] : memref<{lanes}x{element}>, {v}
  %a = arith.addf %m, %m : {v}
  %r:{CHAINS} = scf.for %i = %zero to %steps step %one iter_args({", ".join(f"%x{k} = %m" for k in regs)})
      -> ({", ".join([v] * CHAINS)}) {{
    {chr(10).join(body.format(k) for k in regs)}
    scf.yield {", ".join(f"%n{k}" for k in regs)} : {", ".join([v] * CHAINS)}
  }}
  {chr(10).join(lines)}
  vector.store %s{CHAINS - 2}, %out[%zero] : memref<{lanes}x{element}>, {v}
  return
}}"""


def compiled(operation: str, bits: int, element: str) -> Callable[[], None]:
    module = mlir.run_passes(
        mlir.parse(text(operation, bits // int(element[1:]), element)), mlir.KERNEL_PASSES
    )
    image = elf_loader.Image(mlir.object_code(module, 0, "run", {}), {})
    memory = (ctypes.c_char * (bits // 8 + 64))()
    aligned = ctypes.addressof(memory) + -ctypes.addressof(memory) % 64
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(image.address("run"))
    return lambda _keep=(image, memory): run(aligned)


def giga_operations(operation: str, bits: int, element: str) -> float:
    """1e9 operations per second of one core, the best of SECONDS."""
    run, best, end = compiled(operation, bits, element), float("inf"), time.monotonic() + SECONDS
    while time.monotonic() < end:
        begin = time.thread_time()
        run()
        best = min(best, time.thread_time() - begin)
    return CHAINS * STEPS * OPERATIONS.get(operation, 1) * bits / int(element[1:]) / best / 1e9


def main() -> None:
    machine = pbkern.cpu.machine()
    print(machine.source)
    names = {"f32": "float32", "f64": "float64"}
    for element, name in names.items():
        print(
            f"{name}: the machine's peak is {machine.flops(name) / machine.cores / 1e9:.0f} GFLOP/s per core"
        )
        for bits in (b for b in (512, 256, 128) if b <= machine.vector_bits):
            rates = ", ".join(f"{op} {giga_operations(op, bits, element):.0f}" for op in OPERATIONS)
            print(f"  {bits}-bit vectors, 1e9 operations per second: {rates}")
            additions = giga_operations("add", bits, element)
            times = {op: additions / giga_operations(op, bits, element) for op in SLOWER}
            print(
                f"    in additions: {', '.join(f'{op} {time:.1f}' for op, time in times.items())}"
            )


if __name__ == "__main__":
    main()
