"""Libraries for AArch64: what the innermost loops of their machine code do, as LLVM prints it on any computer."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern

# Arithmetic on scalars of floats, by the syntax of Arm's manual, C7: the destination is h, s or d.
SCALAR = re.compile(r"f(add|sub|n?mul|n?madd|n?msub|div|sqrt|max\w*|min\w*|abs|neg)\s+[hsd]\d")
VECTOR = re.compile(r"f\w+\s+v\d+\.(4s|2d|8h)")
BRANCH = re.compile(r"(b|b\.\w+|cbn?z|tbn?z)\s.*?(\.L\w+)$")


def loops_of(assembly: str) -> list[list[str]]:
    """Instructions of each loop that contains no other: nested strongly connected parts of the graph of basic blocks."""
    blocks, follows, current = {}, {}, None
    for line in (line.partition("//")[0].strip() for line in assembly.splitlines()):
        label = re.fullmatch(r"(\.?\w+):", line)
        if label or (current is not None and blocks[current] and ends(blocks[current][-1])):
            before, current = current, label[1] if label else f"{current}'"
            blocks[current], follows[current] = [], set()
            if before is not None and not (blocks[before] and leaves(blocks[before][-1])):
                follows[before].add(current)
        if current is None or label or not line or line.startswith("."):
            continue
        blocks[current].append(line)
        if branch := BRANCH.match(line):
            follows[current].add(branch[2])
    return [
        [line for name in blocks if name in loop for line in blocks[name]]
        for loop in innermost(set(blocks), follows)
    ]


def ends(instruction: str) -> bool:
    return bool(BRANCH.match(instruction)) or leaves(instruction)


def leaves(instruction: str) -> bool:
    return instruction.split()[0] in ("b", "ret", "br")


def innermost(names: set[str], follows: dict[str, set[str]]) -> list[set[str]]:
    """Loops without loops inside: of a strongly connected part, its first block closes the outermost one."""
    found = []
    for part in connected(names, follows):
        first = min(part, key=list(follows).index)
        inner = innermost(part - {first}, follows)
        if not inner and (len(part) > 1 or first in follows[first]):
            inner = [part]
        found += inner
    return found


def connected(names: set[str], follows: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected parts of a graph: what a node reaches, and what reaches it."""

    def reached(start: str, graph) -> set[str]:
        seen, waiting = {start}, [start]
        while waiting:
            new = (graph.get(waiting.pop(), set()) & names) - seen
            seen |= new
            waiting += new
        return seen

    back = {name: {other for other in names if name in follows[other]} for name in names}
    parts, left = [], set(names)
    while left:
        start = min(left, key=list(follows).index)
        parts.append(reached(start, follows) & reached(start, back) & left)
        left -= parts[-1]
    return parts


def layer_norm(x, scale, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + bias


def stencil(x):
    around = x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:]
    return around * 0.25 - x[1:-1, 1:-1]


FUNCTIONS = {
    "matmul": (jnp.matmul, ((300, 300), (300, 300))),
    "softmax": (jax.nn.softmax, ((512, 1001),)),
    "layer_norm": (layer_norm, ((512, 1001), (1001,), (1001,))),
    "stencil": (stencil, ((514, 1003),)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_innermost_loops_compute_with_vectors(name, tmp_path):
    function, shapes = FUNCTIONS[name]
    arrays = [np.zeros(shape, np.float32) for shape in shapes]
    options = {"aot_name": name, "device": "neoverse-n1"}
    made = pbkern.polyblocks_aot_jax(compile_options=options, output=tmp_path, emit=["asm"])(
        function
    )(*arrays)
    loops = [
        loop
        for loop in loops_of(made.paths["asm"].read_text())
        if any(SCALAR.match(line) or VECTOR.match(line) for line in loop)
    ]
    assert loops
    for loop in loops:
        assert not [line for line in loop if SCALAR.match(line)], "\n".join(loop)
    if name == "matmul":  # sums stay where they are, and each load is for several of them
        largest = max(loops, key=products)
        assert products(largest) == 24
        assert len(largest) <= 2 * products(largest)
        assert not [line for line in largest if re.match(r"mov\s+v", line) or "[sp" in line]


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32"])
@pytest.mark.parametrize(
    "function", [lambda a, b: (a + b.T).sum(1), lambda a, b: (a + b.T).max()], ids=["sum", "max"]
)
def test_squares_that_registers_turn_are_as_wide_as_halves_allow(function, dtype, tmp_path):
    """28 registers hold 14 rows, of which the largest power of two is turned."""
    arrays = [np.zeros(shape, dtype) for shape in ((50, 90), (90, 50))]
    options = {"aot_name": "turned", "device": "neoverse-n1"}
    with pbkern.config.override(fallback=False):
        made = pbkern.polyblocks_aot_jax(compile_options=options, output=tmp_path, emit=["asm"])(
            function
        )(*arrays)
    assert re.search(r"\b(trn|zip|uzp|tbl)\w*\s+v", made.paths["asm"].read_text())


def products(loop: list[str]) -> int:
    return sum(line.startswith("fmla") for line in loop)


NESTED = """
f:
\tmov x0, xzr
.LBB0_1:
\tfdiv s0, s1, s2
\tmov x1, xzr
.LBB0_2:
\tfmul v0.4s, v1.4s, v2.4s
\tadd x1, x1, #1
\tcmp x1, #9
\tb.le .LBB0_2
\tadd x0, x0, #1
\tcmp x0, #9
\tb.le .LBB0_1
\tmov x2, xzr
.LBB0_3:
\tfadd s0, s0, s1
\tcbz x2, .LBB0_5
\tb .LBB0_3
.LBB0_5:
\tret
"""


def test_loops_are_found_in_assembly():
    vectors, scalars = loops_of(NESTED)
    assert [line.split()[0] for line in vectors] == ["fmul", "add", "cmp", "b.le"]
    assert [line.split()[0] for line in scalars] == ["fadd", "cbz", "b"]
    assert SCALAR.match(scalars[0])
    assert not SCALAR.match(vectors[0])
    assert VECTOR.match(vectors[0])
