"""PTX that loads arrays into registers of its lanes, runs instructions on them, and stores registers to arrays."""

import re

import numpy as np

import pbkern

CLASSES = {"p": "pred", "h": "b16", "r": "b32", "d": "b64"}


def text(
    body: str, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray], extra: str = ""
) -> str:
    """Registers are %p.., %h.., %r.., %d..: predicates, and those of 2, 4 and 8 bytes."""
    names = sorted(set(re.findall(r"%[phrd]\w*", body)) | {*inputs, *outputs})
    arrays = {**inputs, **outputs}
    lines = [f".reg .{CLASSES[n[1]]} {n};" for n in names]
    lines += [".reg .b32 %tid_;", ".reg .b64 %base, %at;", extra, "mov.u32 %tid_, %tid.x;"]

    def place(k: int, size: int) -> list[str]:
        return [
            f"ld.param.b64 %base, [p{k}];",
            f"mul.wide.u32 %at, %tid_, {size};",
            "add.s64 %at, %base, %at;",
        ]

    for k, (n, a) in enumerate(inputs.items()):
        lines += [*place(k, a.itemsize), f"ld.global.b{8 * a.itemsize} {n}, [%at];"]
    lines.append(body)
    for k, (n, a) in enumerate(outputs.items(), len(inputs)):
        lines += [*place(k, a.itemsize), f"st.global.b{8 * a.itemsize} [%at], {n};"]
    params = ", ".join(f".param .u64 p{k}" for k in range(len(arrays)))
    return "\n".join([".version 8.6", ".target sm_90a", ".address_size 64", f".visible .entry k({params})", "{", *lines,
                      "ret;", "}", ""])  # fmt: skip


def run(
    body: str, inputs: dict, results: dict, *, blocks: int = 1, extra: str = ""
) -> dict[str, np.ndarray]:
    """What registers hold in the end, a lane per element, as the types that `results` gives."""
    inputs = {n: np.ascontiguousarray(a) for n, a in inputs.items()}
    threads = len(next(iter(inputs.values())))
    outputs = {n: np.zeros(threads, t) for n, t in results.items()}
    made = text(body, inputs, outputs, extra)
    pbkern.simulate_ptx(made, blocks, threads, [*inputs.values(), *outputs.values()])
    return outputs
