"""Generated code does not depend on the order in which a set of buffers is walked, which differs between processes."""

import random

import jax
import jax.numpy as jnp
import pytest

import pbkern
from pbkern import CompileOptions
from pbkern.core.process import recursion
from pbkern.lower.nest.ir import Buf
from pbkern.targets import backend, get_target
from tests.lowered import programs_of
from tests.test_golden import FUNCTIONS, array

PROGRAMS = FUNCTIONS | {
    "half_softmax": (lambda x: jax.nn.softmax(x, -1), array(64, 700, dtype=jnp.float16)),
    "layer_norm": (
        lambda x: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5),
        array(64, 300),
    ),
    "moments_of_rows": (
        lambda x: (
            (x - x.mean(-1, keepdims=True))
            * jnp.exp(-x.max(-1, keepdims=True))
            / (x.min(-1, keepdims=True) + jnp.sqrt((x * x).mean(-1, keepdims=True)))
        ),
        array(256, 3000),
    ),
    "attention": (
        lambda q, k, v: jax.nn.softmax(q @ k.T) @ v,
        array(64, 32),
        array(64, 32),
        array(64, 32),
    ),
}


@pytest.mark.parametrize("target", ["cpu", "nvgpu", "amdgpu"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_texts_are_the_same_whatever_buffers_hash_to(name, target, monkeypatch):
    f, *args = PROGRAMS[name]

    decorated = pbkern.jit(lambda *x: f(*x), compile_options={"target": target})
    programs, options = programs_of(decorated, *args), CompileOptions(target=target)

    def text(seed: int) -> str:
        hashes, rng = {}, random.Random(seed)

        def any_hash(buf: Buf) -> int:
            return hashes.setdefault(id(buf), (rng.getrandbits(60), buf))[0]

        with monkeypatch.context() as patch:
            patch.setattr(Buf, "__hash__", any_hash)
            texts = [lowered_for(target, program, options) for program in programs]
        assert hashes, "no set of buffers was made"
        return "\n".join(texts)

    assert len({text(seed) for seed in range(3)}) == 1


def lowered_for(target: str, program, options: CompileOptions) -> str:
    """The texts of a program's kernels, made anew."""
    chosen = get_target(target).backend
    staged = backend.in_stages(program)
    with recursion.headroom():
        functions = backend.device_functions(
            staged,
            lambda kernel: chosen.build_options(kernel, options, staged),
            chosen.passes,
            chosen.emit,
        )
    return "\n".join(map(str, functions.values()))
