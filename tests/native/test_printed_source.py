"""Every fused kernel prints as source; running that source rebuilds it, and the rebuilt kernels give the same results."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.cli import demo
from pbkern.dsl import same_kernel
from pbkern.dsl.host_program import Cond, HostProgram, HostWhile, Launch, Loop
from pbkern.lower.rules.coverage import supports
from tests.arrays import array
from tests.fuse import checking, workloads

from .running import native_program


def rng(*shape):
    return array(np.random.default_rng(0).standard_normal(shape), jnp.float32)


DEMO = {
    "blur_x_blur_y": (demo.blur_x_blur_y, (rng(3, 19, 37),)),
    "unsharp_mask": (demo.unsharp_mask, (rng(19, 37, 3),)),
    "harris_corners": (demo.harris_corners, (rng(29, 37),)),
    "transformer_block": (
        demo.transformer_block,
        (demo.transformer_parameters(jax.random.key(0), 64), rng(24, 64)),
    ),
}
CASES = {**{n: (f, args) for n, (f, args, *_) in workloads.WORKLOADS.items()}, **DEMO}


def rebuilt(program: HostProgram) -> HostProgram:
    """The program with every kernel made anew from its printed source."""

    def steps(items):
        return tuple(map(step, items))

    def step(s):
        match s:
            case Launch(kernel=k):
                again = pbkern.rebuild(k.source())
                assert same_kernel(k, again), k.source()
                return dataclasses.replace(s, kernel=again)
            case Loop():
                return dataclasses.replace(s, steps=steps(s.steps))
            case HostWhile():
                return dataclasses.replace(s, condition=steps(s.condition), steps=steps(s.steps))
            case Cond():
                return dataclasses.replace(s, branches=tuple(map(steps, s.branches)))
        return s

    return dataclasses.replace(program, steps=steps(program.steps))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_printed_kernels_give_the_same_result(name, monkeypatch):
    f, args = CASES[name]
    f = inspect.unwrap(f)
    monkeypatch.setattr(
        checking, "run_program", lambda program, inputs: native_program(rebuilt(program), inputs)
    )
    plan = checking.planned(f, *args, supports=supports)
    assert not plan.left_to_xla()
    checking.compare(plan, f, args, 1e-4)
