"""Programs on threads: each runs once, whatever their number, and spilled vectors lie in cache lines of their own."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.core import config
from pbkern.core.passes import with_settings
from pbkern.targets import get_target
from tests.cores import of_several_cores

PARALLEL = pbkern.cpu.CompilerParams(dimension_semantics=("parallel",))


def counted(programs: int):
    """Adds one to an element, in its place, for each program that runs."""

    def body(start, result):
        result[...] = start[...] + 1

    block = pbkern.BlockSpec((1,), lambda i: (i,))
    return pbkern.kernel(
        body, grid=(programs,), in_specs=[block], out_specs=block, compiler_params=PARALLEL,
        out_shape=jax.ShapeDtypeStruct((programs,), "i4"), input_output_aliases={0: 0},
    )  # fmt: skip


@of_several_cores
@pytest.mark.sampled(3)
@pytest.mark.parametrize("task_ns", [1.0, 40.0])
@pytest.mark.parametrize("programs", [2, 3, 5, 8, 31, 100])
def test_each_program_runs_once(programs, task_ns, monkeypatch):
    monkeypatch.setattr("pbkern.targets.cpu.schedule.task_size.TASK_NS", task_ns)
    monkeypatch.setattr("pbkern.targets.cpu.schedule.task_size.SERIAL_NS", 0.0)
    get_target("cpu")._compiled.clear()  # which does not know of such numbers
    with config.override(cache=False):
        kernel = jax.jit(lambda x: lax.fori_loop(0, 20, lambda _, s: counted(programs)(s), x))
        assert "pbk_parallel" in pbkern.jit(counted(programs)).as_text(
            jnp.zeros(programs, "i4"), stage="mlir"
        )
        for turn in range(20):
            np.testing.assert_array_equal(
                kernel(jnp.full(programs, turn, "i4")), np.full(programs, turn + 20)
            )
    get_target("cpu")._compiled.clear()


@pytest.mark.skipif(
    get_target("cpu").machine().vector_bits < 512, reason="looks for the names of wide registers"
)
def test_spilled_vectors_do_not_cross_cache_lines():
    def f(x, y):
        def step(_, state):
            a, b, n = state
            a, b = a * a - b * b + x, 2 * a * b + y
            return a, b, n + (a * a + b * b < 4)

        return lax.fori_loop(0, 20, step, (x * 0, y * 0, jnp.zeros(x.shape, jnp.int32)))[2]

    x = np.ones((300, 300), "f")
    with with_settings("put loops in kernels", {"most_equations": 0}):  # ten steps at once
        text = pbkern.jit(f).as_text(x, x, stage="asm")
    spills = re.findall(r"(vmov\w+)\s+%zmm\d+,-?(?:0x)?[0-9a-f]*\(%rsp\)", text)
    assert spills
    assert set(spills) <= {"vmovaps", "vmovapd", "vmovdqa64", "vmovdqa32"}
