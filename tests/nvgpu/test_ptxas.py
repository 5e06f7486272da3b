"""NVIDIA's tools: where they are looked for, and what is said where they are missing or refuse a text."""

import pathlib
import types

import jax.numpy as jnp
import pytest

import pbkern
from pbkern.errors import TargetError
from pbkern.targets.nvgpu import ptxas


def tool(folder, name="ptxas", text="exit 0"):
    """An executable of one's own."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def found(tmp_path, monkeypatch):
    """Looks for a tool, on a machine that has none but those in this folder."""
    wheels = types.SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(
        ptxas,
        "importlib",
        types.SimpleNamespace(util=types.SimpleNamespace(find_spec=lambda name: wheels)),
    )
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "path"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    path = lambda p: pathlib.Path(str(p).replace("/usr/local/cuda", str(tmp_path / "none")))
    monkeypatch.setattr(ptxas, "pathlib", types.SimpleNamespace(Path=path))
    return ptxas._find.__wrapped__


def test_a_wheels_tool_comes_first_then_a_toolkits_then_that_in_path(found, tmp_path):
    assert found("ptxas") is None
    for folder in ("bin", "path/bin", "home/bin", "nvidia/cu13/bin"):
        path = tool(tmp_path / folder)
        assert found("ptxas") == path
    (tmp_path / "nvidia/cu12/bin").mkdir(parents=True)
    (tmp_path / "nvidia/cu12/bin/ptxas").write_text("no program")
    assert found("ptxas") == path


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(ptxas, "find", lambda: None)
    monkeypatch.setattr(ptxas, "_find", lambda name: None)
    with pytest.raises(
        TargetError, match=r"ptxas was not found.*\n?.*CUDA_HOME.*\n?.*pip install nvidia-cuda-nvcc"
    ):
        ptxas.assemble("", "sm_90a")
    with pytest.raises(TargetError, match=r"cannot be disassembled.*\n?.*nvdisasm was not found"):
        ptxas.disassembled(b"")


def test_a_text_that_is_rejected_is_an_error_with_the_reason(tmp_path, monkeypatch):
    path = tool(
        tmp_path,
        text='[ "$1" = --version ] && echo 1.0 && exit 0\necho "line 3: syntax error" >&2\nexit 255',
    )
    monkeypatch.setattr(ptxas, "find", lambda: path)
    with pytest.raises(
        TargetError,
        match=r"ptxas rejects a kernel.*\n?.*line 3: syntax error.*\n?.*ptxas -arch=sm_90a",
    ):
        ptxas.assemble("wrong", "sm_90a")


def test_machine_code_as_text(tmp_path, monkeypatch):
    """The tools of this test count registers, assemble to the architecture's name, and print the file that they are given."""
    assembler = tool(tmp_path, text="echo $1 > $5\necho 'ptxas info : Used 17 registers, 24 bytes spill stores, "
                     "8 bytes spill loads, 128 bytes smem' >&2")  # fmt: skip
    shown = tool(tmp_path, "nvdisasm", 'while read -r line; do echo "code of $line"; done < $1')
    monkeypatch.setattr(ptxas, "find", lambda: assembler)
    monkeypatch.setattr(ptxas, "_find", lambda name: shown)
    with pbkern.config.override(cache=False):
        f = pbkern.jit(lambda x: x * 3 - 1, compile_options={"target": "nvgpu"})
        assert f.as_text(jnp.zeros(8), stage="sass").strip() == "code of -arch=sm_90a"
        made = ptxas.assemble("anything", "sm_80")
    assert made == ptxas.Cubin(b"-arch=sm_80\n", 17, 32, 128)


def test_what_ptxas_warns_of_is_kept(tmp_path, monkeypatch):
    slow = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to a call"
    path = tool(
        tmp_path,
        text=f'[ "$1" = --version ] && echo 1.0 && exit 0\necho code > $5\n'
        f"echo '{slow}' >&2\necho 'ptxas info : Used 17 registers' >&2\necho 'ptxas warning : old' >&2",
    )
    monkeypatch.setattr(ptxas, "find", lambda: path)
    with pbkern.config.override(cache=False):
        made = ptxas.assemble("anything", "sm_90a")
    assert made.warnings == (slow, "ptxas warning : old")
    assert ptxas.Cubin.of_entry(made.entry()) == made


def test_a_kernel_that_spills_is_assembled_for_fewer_resident_blocks(tmp_path, monkeypatch):
    """The tool of this test has registers for two blocks, and writes the number of blocks."""
    text = (
        'blocks=$(sed -n "s/.minnctapersm //p" $3)\n[ $blocks -gt 2 ] && spilled=8 || spilled=0\necho $blocks > $5\n'
        'echo "Used 168 registers, $spilled bytes spill stores, $spilled bytes spill loads" >&2'
    )
    path = tool(tmp_path, text=text)
    monkeypatch.setattr(ptxas, "find", lambda: path)
    with pbkern.config.override(cache=False):
        spills, fits = (
            ptxas.assemble(f".reqntid 128\n.minnctapersm {blocks}\n", "sm_80") for blocks in (4, 1)
        )
    assert spills == ptxas.Cubin(b"2\n", 168, 0, 0)
    assert fits == ptxas.Cubin(b"1\n", 168, 0, 0)
