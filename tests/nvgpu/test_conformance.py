"""The CPU's cases for NVIDIA GPUs: what tests/native runs as machine code of the CPU is PTX here, and simulated.

One case of forty by default, all of them with `-m slow`. Tests that look into the CPU's code are left out: by the names that
they, or functions of their module that they call, use.
"""

import collections
import contextlib
import importlib
import inspect
import pathlib
import types
import zlib

import jax
import numpy as np
import pytest

from tests.native import test_bodies, test_product_orientations

from .simulated import ON_DEVICE, gpu

NATIVE = pathlib.Path(__file__).parents[1] / "native"
# Modules about the CPU's code generator, its threads and its tiles.
OWN = {
    "test_beside_tensorflow",
    "test_compile_units",
    "test_merge_functions",
    "test_threads",
    "test_tile_products",
}
LOOKS_INTO_CODE = {"lowered", "as_text", "compile_program", "LowerOptions", "kernel_nests"}
FIXTURES = {
    "rng": lambda mp: np.random.default_rng(5),
    "wide_types": lambda mp: None,
    "monkeypatch": lambda mp: mp,
}
# Of random bodies, those that truncate a result whose last bit differs between targets: tanh(9) is 1, or the float before it.
TRUNCATING = {642}
# Kernels that carry parameters of a class that tests invent for another target.
FOREIGN = {"test_tiled_matmul_accumulates_in_scratch"}
# Minutes in the simulator.
LONG = {
    "test_deep_products_are_packed_in_runs",
    "test_matmul",
    "test_products",
    "test_bfloat16_of_few_columns",
    "test_masked_attention",
    "test_equal_rows_and_columns_give_equal_bits",
    "test_special_values_of_live_keys",
    "test_keys_alone_and_with_a_companion",
    "test_vectors",
    "test_dynamic_strides",
    "test_private_results",
    "test_many_random_bodies",
    "test_numbers",
}
# About plans for the processor at hand, by their names, blocks and rounding: a device's computer has another processor.
ABOUT_PLANS = {
    "test_small_images_share_what_is_made_of_filters",
    "test_one_pair_of_features_is_packed",
}
# What the CPU promises as its last block overlaps the one before: blocks of GPUs do not, and lanes add in orders of their own.
OF_OVERLAPPING_BLOCKS = {"test_equal_rows_and_columns_give_equal_bits"}
# Tolerances of deep sums, as parts of those for a CPU, which adds partial sums: lanes add all terms in order (decision 107).
IN_ORDER = 3.0
EVERY = 40


def cases():
    for path in sorted(NATIVE.glob("test_*.py")):
        if path.stem in OWN:
            continue
        module = importlib.import_module(f"tests.native.{path.stem}")
        around = getattr(module, "pytestmark", [])
        for n, f in vars(module).items():
            if not n.startswith("test_") or not inspect.isfunction(f):
                continue
            if not names_of(f, set()) & LOOKS_INTO_CODE:
                marks = [
                    *(around if isinstance(around, list) else [around]),
                    *getattr(f, "pytestmark", ()),
                ]
                yield from (
                    (path.stem, n, f, values, is_wide(f, marks)) for values in parameters(f, marks)
                )


def names_of(f, seen) -> set[str]:
    """Names that a function uses, and those of its module's functions that it calls."""
    if f in seen:
        return set()
    seen.add(f)
    found, codes = set(), [f.__code__]
    while codes:
        code = codes.pop()
        found |= set(code.co_names)
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    inner = [f.__globals__.get(n) for n in found]
    return found.union(
        *(
            names_of(g, seen)
            for g in inner
            if inspect.isfunction(g) and g.__module__ == f.__module__
        )
    )


def is_wide(f, marks) -> bool:
    """Whether the test is one with 64-bit types."""
    used = [n for m in marks if m.name == "usefixtures" for n in m.args]
    return "wide_types" in (*used, *inspect.signature(f).parameters)


def parameters(f, marks) -> list[dict]:
    """Values of a test's parameters, all combinations; none for tests with other fixtures."""
    if any(m.name in ("skipif", "skip") for m in marks):
        return []
    combinations: list[dict] = [{}]
    for m in marks:
        if m.name != "parametrize":
            continue
        names = (
            [n.strip() for n in m.args[0].split(",")]
            if isinstance(m.args[0], str)
            else list(m.args[0])
        )
        rows = []
        for v in m.args[1]:
            of_param = hasattr(v, "values") and hasattr(v, "marks")
            rows.append(dict(zip(names, v.values if of_param else v if len(names) > 1 else (v,))))
        combinations = [{**a, **b} for a in combinations for b in rows]
    asked = set(inspect.signature(f).parameters) - FIXTURES.keys()
    return [c for c in combinations if asked == set(c)]


ALL = list(cases())


def named_cases():
    """The cases with names that do not change where tests are added elsewhere: by these, recorded times are known."""
    numbers = collections.Counter()
    for case in ALL:
        name = f"{case[0]}-{case[1]}"
        yield f"{name}-{numbers[name]}", case
        numbers[name] += 1


def is_sample(name: str, case: tuple) -> bool:
    """Whether a case runs by default: one of EVERY, by a checksum of its name."""
    return zlib.crc32(name.encode()) % EVERY == 0 and case[1] not in LONG


@pytest.mark.apart
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if is_sample(name, case) else pytest.mark.slow)
        for name, case in named_cases()
    ],
)
def test_case_of_the_cpu(case, monkeypatch):
    _, name, f, values, wide = case
    if ON_DEVICE and name in ABOUT_PLANS:
        pytest.skip("it looks into a plan for the processor at hand")
    if name in OF_OVERLAPPING_BLOCKS:
        pytest.skip("blocks do not overlap")
    if set(map(str, values.values())) & FOREIGN:
        pytest.skip("its compiler_params are of another class")
    given = {
        n: make(monkeypatch) for n, make in FIXTURES.items() if n in inspect.signature(f).parameters
    }
    random_body = test_bodies.test_random_body
    monkeypatch.setattr(
        test_bodies, "test_random_body", lambda seed: seed in TRUNCATING or random_body(seed)
    )
    monkeypatch.setattr(test_product_orientations, "IN_PARTS", IN_ORDER)
    with gpu(), jax.enable_x64(True) if wide else contextlib.nullcontext():
        f(**values, **given)


def test_there_are_cases():
    assert len(ALL) > 1500
    assert len({c[0] for c in ALL}) > 40
