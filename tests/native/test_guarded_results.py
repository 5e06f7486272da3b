"""Nothing is written beside a result: results of every length in the middle of memory that holds a pattern."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core import config
from pbkern.targets.cpu.codegen.compile import compile_program
from pbkern.targets.host import loaded_program
from pbkern.targets.host.processor import cpu_flags, cpuinfo
from tests.fuse.checking import planned
from tests.lowered import TABLE, lowered

BF16 = np.dtype(jnp.bfloat16)
LENGTHS = range(1, 71)
# Bytes of the pattern before and behind a result: those of the widest vector, and a cache line's.
GUARD = 64
PATTERN = 0xA5
HAS_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= cpu_flags(cpuinfo())
DEVICES = [
    None,
    "x86-64-v3",
    pytest.param("x86-64-v4", marks=pytest.mark.skipif(not HAS_AVX512, reason="no AVX-512")),
]
# Type of the arguments, a function of one, and the same of NumPy's.
ELEMENTWISE = {
    "bfloat16": (BF16, lambda x: x * 2, lambda x: x * 2),
    "float16": (np.float16, lambda x: x * 2, lambda x: x * 2),
    "bfloat16 of float32": (np.float32, lambda x: x.astype(BF16), lambda x: x.astype(BF16)),
    "float16 of float32": (
        np.float32,
        lambda x: x.astype(np.float16),
        lambda x: x.astype(np.float16),
    ),
    **{
        f"{kind.__name__}{of}": (
            source or kind,
            lambda x, kind=kind: (x + x).astype(kind),
            lambda x, kind=kind: (x + x).astype(kind),
        )
        for kind in (np.int8, np.uint8, np.int16)
        for of, source in (("", None), (" of int32", np.int32))
    },
    "bool": (np.bool_, lambda x: ~x, lambda x: ~x),
    "bool of float32": (np.float32, lambda x: x > 1, lambda x: x > 1),
}
each_kind = pytest.mark.parametrize("kind", ELEMENTWISE)


class Guarded:
    """Results in the middle of memory of a pattern."""

    def __init__(self) -> None:
        self.memories: list[tuple[np.ndarray, int]] = []

    def array(self, shape: tuple[int, ...], dtype) -> np.ndarray:
        """A new result, which starts at a cache line and holds the pattern."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = np.full(size + 3 * GUARD, PATTERN, np.uint8)
        start = GUARD + -memory.ctypes.data % GUARD
        memory = memory[start - GUARD : start + size + GUARD]
        self.memories.append((memory, size))
        return memory[GUARD : GUARD + size].view(dtype).reshape(shape)

    def written(self) -> dict[int, list[int]]:
        """By number of a result: the places, from its start, that hold the pattern no more."""
        found = {}
        for number, (memory, size) in enumerate(self.memories):
            places = np.flatnonzero(memory != PATTERN) - GUARD
            beside = [int(place) for place in places if not 0 <= place < size]
            if beside:
                found[number] = beside
        return found


def vectors(kind: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(arguments, results) of all lengths."""
    dtype, _, reference = ELEMENTWISE[kind]
    values = np.arange(max(LENGTHS)) % 23 - 7
    arguments = [(values[:n] + n).astype(dtype) for n in LENGTHS]
    return arguments, [reference(x) for x in arguments]


def each(kind: str):
    f = ELEMENTWISE[kind][1]
    return lambda *xs: tuple(f(x) for x in xs)


def library(folder, device: str | None, f, *arguments):
    """A C library of a function, loaded."""
    options = {"aot_name": "f", **({"device": device} if device else {})}
    made = pbkern.polyblocks_aot_jax(compile_options=options, output=folder)(f)(*arguments)
    return made.load()


@each_kind
@pytest.mark.parametrize("device", DEVICES)
def test_libraries_write_results_and_nothing_beside_them(kind, device, tmp_path):
    arguments, expected = vectors(kind)
    made = library(tmp_path, device, each(kind), *arguments)
    guarded = Guarded()
    results = [guarded.array(x.shape, x.dtype) for x in expected]
    made(*arguments, out=results)
    assert guarded.written() == {}
    for found, wanted in zip(results, expected):
        np.testing.assert_array_equal(found, wanted)


@each_kind
def test_programs_in_memory_write_results_and_nothing_beside_them(kind, monkeypatch):
    guarded = Guarded()
    monkeypatch.setattr(
        loaded_program, "_aligned", lambda spec: guarded.array(spec.shape, spec.dtype)
    )
    arguments, expected = vectors(kind)
    programs = planned(each(kind), *arguments).programs()
    with config.override(cache=False):
        (compiled,) = map(compile_program, programs)
    results = compiled(*arguments)
    assert len(guarded.memories) == len(expected)
    assert guarded.written() == {}
    for found, wanted in zip(results, expected):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_and_products_of_bfloat16(device, tmp_path):
    """The last row of a softmax, and sums of products that are kept in float32."""
    x, w = (
        np.random.default_rng(n).normal(size=shape).astype(BF16)
        for n, shape in enumerate([(7, 17), (17, 33)])
    )

    def f(x, w):
        return jax.nn.softmax(x, -1), jnp.dot(x, w), jnp.dot(x, w)[:, :17] + x

    made = library(tmp_path, device, f, x, w)
    guarded = Guarded()
    results = [guarded.array(shape, BF16) for shape in ((7, 17), (7, 33), (7, 17))]
    made(x, w, out=results)
    assert guarded.written() == {}
    x, w = x.astype(np.float64), w.astype(np.float64)
    powers = np.exp(x - x.max(-1, keepdims=True))
    for found, wanted in zip(
        results, (powers / powers.sum(-1, keepdims=True), x @ w, (x @ w)[:, :17] + x)
    ):
        np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("length", "is_masked"), [(17, False), (18, True), (33, False)])
def test_the_last_element_alone_is_stored_without_a_mask(length, is_masked):
    """On every LLVM, also where vectors have mask registers."""
    wide = dataclasses.replace(TABLE, vector_bits=512)
    text = lowered(lambda x: x * 2, jnp.zeros(length, BF16), stage="mlir", machine=wide)
    assert ("vector.maskedstore" in text) == is_masked
