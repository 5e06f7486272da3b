"""The CPU's cases for NVIDIA GPUs: what tests/native runs as machine code of the CPU is PTX here, and simulated.

Every n-th case by default, all of them with `-m slow`. What asks the CPU's compiler itself is left out.
"""

import importlib
import inspect

import pytest

from .simulated import gpu

# Module of tests/native -> tests of it that look into the CPU's code, or hand their kernels to XLA on their own.
MODULES = {
    "test_bodies": {"test_many_random_bodies"},
    "test_edges": set(),
    "test_uniform_axes": set(),
    "test_integer_division": set(),
}
EVERY = 12


def cases():
    for module, left_out in MODULES.items():
        tests = importlib.import_module(f"tests.native.{module}")
        found = [(n, f) for n, f in vars(tests).items() if n.startswith("test_") and inspect.isfunction(f)
                 and n not in left_out]
        for n, f in found:
            yield from ((module, n, f, values) for values in parameters(f))


def parameters(f) -> list[dict]:
    """Values of a test's parameters, all combinations; none for tests with fixtures."""
    marks = [m for m in getattr(f, "pytestmark", ()) if m.name == "parametrize"]
    if any(m.name in ("skipif", "skip") for m in getattr(f, "pytestmark", ())):
        return []
    combinations: list[dict] = [{}]
    for m in marks:
        names = [n.strip() for n in m.args[0].split(",")] if isinstance(m.args[0], str) else list(m.args[0])
        rows = []
        for v in m.args[1]:
            v = v.values if hasattr(v, "values") and hasattr(v, "marks") else v
            values = tuple(v) if len(names) > 1 else (v,)
            rows.append(dict(zip(names, values)))
        combinations = [{**a, **b} for a in combinations for b in rows]
    asked = set(inspect.signature(f).parameters)
    return [c for c in combinations if asked == set(c)]


ALL = list(cases())
# Kernels that carry parameters of a class that tests invent for another target.
FOREIGN = {"test_tiled_matmul_accumulates_in_scratch"}


@pytest.mark.parametrize("case", [pytest.param(c, id=f"{c[0]}-{c[1]}-{n}", marks=() if n % EVERY == 0 else pytest.mark.slow)
                                  for n, c in enumerate(ALL)])
def test_case_of_the_cpu(case):
    _, _, f, values = case
    if set(map(str, values.values())) & FOREIGN:
        pytest.skip("its compiler_params are of another class")
    with gpu():
        f(**values)


def test_there_are_cases():
    assert len(ALL) > 150
