"""Exported programs with dynamic sizes: refused by name, not made for the example's size."""

import pytest
import torch

import pbkern
from pbkern.cli import main
from pbkern.errors import UnsupportedOp


def exported(tmp_path, **dynamic):
    program = torch.export.export(
        torch.nn.Linear(5, 3).eval(), (torch.rand(4, 5),), dynamic_shapes=dynamic or None
    )
    torch.export.save(program, tmp_path / "net.pt2")
    return program


def test_a_dynamic_batch_is_refused_by_name(tmp_path, capsys):
    program = exported(tmp_path, input={0: torch.export.Dim("rows", min=2, max=32)})
    with pytest.raises(
        UnsupportedOp,
        match=r"input `input` of the exported program has a dynamic size\n  why  dimension 0 ",
    ):
        pbkern.polyblocks_aot_torch(output=tmp_path)(program)()
    assert main.main(["compile", str(tmp_path / "net.pt2"), "-o", str(tmp_path / "net.o")]) == 2
    assert "dynamic size" in capsys.readouterr().err
    assert not (tmp_path / "net.o").exists()


def test_known_sizes_are_compiled(tmp_path):
    assert pbkern.polyblocks_aot_torch(output=tmp_path)(exported(tmp_path))().metadata["inputs"][0][
        "shape"
    ] == [4, 5]
