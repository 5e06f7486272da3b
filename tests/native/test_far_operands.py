"""Register tiles of products whose rows come from afar, and whose results fall into few sets of the first cache."""

import jax.numpy as jnp
import numpy as np
import pytest

import pbkern


def schedules(f, *args) -> list[str]:
    text = pbkern.jit(f).as_text(*args, stage="schedule")
    return [line for line in text.splitlines() if "jam=" in line and "transpose" not in line]


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("columns", [2048, 2080])
def test_rows_of_results_a_power_of_two_apart(columns):
    """A tile has fewer rows than the first cache has ways where all of them fall into the same sets."""
    a, b = drawn(500, 32), drawn(32, columns)
    np.testing.assert_allclose(
        pbkern.jit(jnp.matmul)(a, b), a.astype(np.float64) @ b, rtol=1e-5, atol=1e-4
    )
    (tile, *_) = schedules(jnp.matmul, a, b)
    rows = int(tile.split("jam={'d0': ")[1].split("}")[0])
    machine = pbkern.cpu.machine()
    if columns * 4 % (machine.l1_bytes // machine.l1_ways) == 0:
        assert rows < machine.l1_ways


def test_far_rows_are_read_by_wide_tiles():
    f = lambda x, e: (x @ e.T).max(-1)
    x, e = drawn(64, 256), drawn(16000, 256)
    want = (x.astype(np.float64) @ e.T).max(-1)
    np.testing.assert_allclose(pbkern.jit(f)(x, e), want, rtol=1e-5)
    (tile, *_) = schedules(f, x, e)
    # With 16 registers, a tile of four vectors leaves none for the operands of three rows.
    widest = 3 if "registers=16" in tile else 4
    assert f"unroll={widest}" in tile
