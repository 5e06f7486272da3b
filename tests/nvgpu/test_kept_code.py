"""Code of GPU kernels between processes: what is on disk is used, what is damaged is made again, what differs is apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core import config
from pbkern.core.options import CompileOptions
from pbkern.core.process import disk_cache
from pbkern.targets.nvgpu import ptxas
from pbkern.targets.nvgpu import target as nvgpu
from pbkern.targets.simt import kept_code
from pbkern.targets.simt import target as simt

X = jax.ShapeDtypeStruct((40, 64), jnp.float32)


@pytest.fixture
def folder(tmp_path):
    with config.override(cache_dir=tmp_path, cache=True):
        yield tmp_path


@pytest.fixture
def lowerings(monkeypatch):
    """Kernels that were lowered, by name."""
    found, plain = [], simt.device_function
    monkeypatch.setattr(
        simt, "device_function", lambda *args: (found.append(args[-1]), plain(*args))[1]
    )
    return found


def compiled(f, **options):
    """As a process does that has compiled nothing yet."""
    build, _ = pbkern.jit(f, compile_options={"target": "nvgpu"}).build((X,), {})
    (program,) = build.plan.programs()
    return nvgpu.NvgpuTarget().compile(program, CompileOptions(target="nvgpu", **options))


def softmax(x):
    return jax.nn.softmax(x * 1.25, -1)


def test_another_process_lowers_nothing(folder, lowerings):
    first = compiled(softmax)
    assert len(lowerings) == 1
    assert len(list(folder.glob("nvgpu-*.pbk"))) == 1
    second = compiled(softmax)
    assert len(lowerings) == 1
    (a,), (b,) = first.distinct(), second.distinct()
    assert a.ptx == b.ptx
    assert a.function == b.function
    assert a is not b
    x = np.random.default_rng(0).normal(size=X.shape).astype("f4")
    np.testing.assert_allclose(second.simulated([x])[0][0], jax.nn.softmax(x * 1.25, -1), rtol=1e-5)


def test_devices_and_options_are_apart(folder, lowerings):
    for options in ({}, {"device": "a100"}, {"mlir_disable_fast_math": True}, {"device": "sm_80"}):
        compiled(softmax, **options)
    assert len(lowerings) == 3  # an A100 is sm_80


def test_lines_are_apart(folder, lowerings):
    """Errors name the line of the function that is called, not that of an equal one."""
    compiled(lambda x: jnp.exp(x) * 3.5)
    compiled(lambda x: jnp.exp(x) * 3.5)
    assert len(lowerings) == 2


def test_damaged_entries_are_made_again(folder, lowerings):
    compiled(softmax)
    (path,) = folder.glob("nvgpu-*.pbk")
    kind, key = path.stem.split("-", 1)
    disk_cache.current().put(kind, key, b"\x07" + bytes(100))
    (code,) = compiled(softmax).distinct()
    assert len(lowerings) == 2
    assert ".visible .entry" in code.ptx
    compiled(softmax)
    assert len(lowerings) == 2


def test_without_a_store_everything_is_made_anew(folder, lowerings):
    with config.override(cache=False):
        compiled(softmax)
        compiled(softmax)
    assert len(lowerings) == 2
    assert not list(folder.glob("*.pbk"))


def test_what_is_packed_is_unpacked():
    (code,) = compiled(softmax).distinct()
    function, made = kept_code.unpacked(kept_code.packed(code.function, code.ptx.encode()))
    assert function == code.function
    assert made.decode() == code.ptx


@pytest.fixture
def assemblies(monkeypatch):
    """Texts that ptxas was given."""
    found, plain = [], ptxas._assembled
    monkeypatch.setattr(ptxas, "_assembled", lambda *args: (found.append(args[1]), plain(*args))[1])
    return found


@pytest.mark.skipif(ptxas.find() is None, reason="ptxas is not installed")
def test_machine_code_is_kept_by_text_architecture_and_version(folder, assemblies, monkeypatch):
    (code,) = compiled(softmax).distinct()
    first, again = code.assembled, ptxas.assemble(code.ptx, "sm_90a")
    assert first == again
    assert first.cubin.startswith(b"\x7fELF")
    assert first.registers > 0
    assert len(assemblies) == 1
    (_path,) = folder.glob("cubin-*.pbk")
    ptxas.assemble(code.ptx.replace("sm_90a", "sm_80"), "sm_80")
    monkeypatch.setattr(ptxas, "_version", lambda tool: "another")
    ptxas.assemble(code.ptx, "sm_90a")
    assert len(assemblies) == 3
    assert len(list(folder.glob("cubin-*.pbk"))) == 3


@pytest.mark.skipif(ptxas.find() is None, reason="ptxas is not installed")
def test_damaged_machine_code_is_made_again(folder, assemblies):
    (code,) = compiled(softmax).distinct()
    first = code.assembled
    (path,) = folder.glob("cubin-*.pbk")
    disk_cache.current().put(*path.stem.split("-", 1), b"short")
    assert ptxas.assemble(code.ptx, "sm_90a") == first
    assert len(assemblies) == 2
    assert ptxas.assemble(code.ptx, "sm_90a") == first
    assert len(assemblies) == 2
