"""Random graphs (tests/robustness/random_graphs.py) as PTX, simulated, agree with jax.jit; a failure prints graph and seed."""

import jax
import numpy as np
import pytest

import pbkern
from tests.robustness.random_graphs import draw


def check(seed: int) -> None:
    graph = draw(seed)
    text = f"seed {seed}\n" + "\n".join(graph.lines)
    want = jax.jit(graph.function)(*graph.args)
    try:
        got = pbkern.simulate(graph.function, *graph.args).results
    except Exception as e:
        raise AssertionError(f"{type(e).__name__}: {e}\n{text}") from e
    for g, w in zip(got, want):
        g, w = np.asarray(g).astype(np.float64), np.asarray(w).astype(np.float64)
        np.testing.assert_allclose(
            g, w, rtol=1e-5 if graph.rounds else 0, atol=1e-6 if graph.rounds else 0, err_msg=text
        )


@pytest.mark.parametrize("seed", [1, 1023, 1098, 1407])
def test_agrees(seed):
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(10))
def test_five_hundred(batch):
    for seed in range(1000 + 50 * batch, 1000 + 50 * (batch + 1)):
        check(seed)
