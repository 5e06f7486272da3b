"""Random graphs (tests/robustness/random_graphs.py) become code objects, in one process; a failure prints graph and seed."""

import jax
import pytest

from pbkern.targets.amdgpu.devices import KINDS
from tests.robustness.random_graphs import draw

from .test_amdgpu import codes, needs_lld

pytestmark = needs_lld


def check(seed: int) -> None:
    graph, architecture = draw(seed), list(KINDS)[seed % len(KINDS)]
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in graph.args]
    try:
        made = codes(graph.function, *types, device=architecture)
        assert all(c.assembled.image[:4] == b"\x7fELF" for c in made)
    except Exception as e:
        raise AssertionError(
            f"{type(e).__name__}: {e}\nseed {seed} for {architecture}\n" + "\n".join(graph.lines)
        ) from e


@pytest.mark.parametrize("seed", [3, 1111, 1402])
def test_compiles(seed):
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(10))
def test_five_hundred(batch):
    for seed in range(1000 + 50 * batch, 1000 + 50 * (batch + 1)):
        check(seed)
