"""The phases of partitioning are passes: shown one by one, and left out by options."""

import jax
import jax.numpy as jnp
import pytest

import pbkern
from pbkern.core.passes import watched
from pbkern.fuse.partition.passes import KERNEL_PASSES, PARTITION_PASSES, WHOLE_PASSES

ROWS = jax.ShapeDtypeStruct((256, 64), jnp.float32)
PASSES = (*PARTITION_PASSES, *WHOLE_PASSES, *KERNEL_PASSES)
NAMES = [step.name for step in PASSES]


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


def ran(**options) -> list[str]:
    f = pbkern.jit(lambda *args: attention(*args), compile_options=options)
    with watched() as runs:
        f.kernels(ROWS, ROWS, ROWS)
    return [run.name for run in runs if run.stage == "partition"]


def test_every_phase_runs_in_order():
    assert ran() == NAMES
    assert all(step.why for step in PASSES)


@pytest.mark.parametrize(
    ("option", "left_out"),
    [
        (
            "polyblocks_disable_affine_fusion",
            set(NAMES) - {"grow groups", "search blocks of products", "leave layouts"},
        ),
        ("polyblocks_disable_reduce_reduce_fusion", {"rematerialise", "join last stages"}),
    ],
)
def test_options_leave_phases_out(option, left_out):
    assert ran(**{option: True}) == [name for name in NAMES if name not in left_out]


def test_bodies_of_loops_are_split_by_the_thresholds_that_are_given():
    def f(x):
        return jax.lax.fori_loop(0, 3, lambda _, x: x * (1 + x.sum()), x)

    x = jax.ShapeDtypeStruct((2048, 1024), jnp.float32)
    usual, other = (
        pbkern.jit(f).as_text(x, stage=f"partition:split reductions{settings}")
        for settings in ("", "{run_elements=16384}")
    )
    assert usual.startswith("jaxpr of scan:")
    assert "partial_reduce" in usual
    assert "partial_reduce" in other
    assert usual != other


def test_groups_are_shown_after_a_phase():
    f = pbkern.jit(attention)
    grown = f.as_text(ROWS, ROWS, ROWS, stage="partition:grow groups")
    final = f.as_text(ROWS, ROWS, ROWS, stage=f"partition:{NAMES[-1]}")
    assert grown.count("group of") == 2
    assert "group of 5" in grown
    assert "-> float32[256,256]" in grown
    assert final.count("group of") == 1
