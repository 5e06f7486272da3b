"""Cases of tests/frontends/pallas as PTX, simulated: pipelines with ragged blocks, copies, views, meshes."""

import importlib
import inspect

import pytest

import pbkern

from .simulated import gpu
from .test_conformance import FIXTURES, LOOKS_INTO_CODE, names_of, parameters

SAMPLE = {"test_pipelines_of_whole_and_ragged_blocks", "test_copies_of_dynamic_size"}
MODULES = (
    "test_bitcasts",
    "test_copies",
    "test_masked_views",
    "test_meshes",
    "test_refs_made_in_bodies",
    "test_reorder_transforms",
    "test_transposed_operands",
)


def cases():
    for name in MODULES:
        module = importlib.import_module(f"tests.frontends.pallas.{name}")
        for n, f in vars(module).items():
            if not n.startswith("test_") or not inspect.isfunction(f):
                continue
            if not names_of(f, set()) & (LOOKS_INTO_CODE | {"explain", "lower"}):
                yield from (
                    (n, f, values) for values in parameters(f, getattr(f, "pytestmark", ()))
                )


ALL = list(cases())
FIRST = {n: next(k for k, c in enumerate(ALL) if c[0] == n) for n in SAMPLE}


@pytest.mark.parametrize("case", [
    pytest.param(c, id=f"{c[0]}-{k}", marks=() if FIRST.get(c[0]) == k else pytest.mark.slow) for k, c in enumerate(ALL)
])  # fmt: skip
def test_case_of_pallas(case, monkeypatch):
    _, f, values = case
    given = {
        n: make(monkeypatch) for n, make in FIXTURES.items() if n in inspect.signature(f).parameters
    }
    with gpu(), pbkern.pallas.installed():
        f(**values, **given)
