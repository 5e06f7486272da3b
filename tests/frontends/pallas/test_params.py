"""Every field of Pallas's CompilerParams has an entry, and the documentation is the table."""

import dataclasses
import fractions
import pathlib

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plt

import pbkern
from pbkern.core.errors import UnsupportedOp
from pbkern.frontends.pallas.params import TABLES, cpu_params, markdown

CLASSES = [
    (pltpu.CompilerParams, "mosaic"),
    (plgpu.CompilerParams, "mosaic_gpu"),
    (plt.CompilerParams, "triton"),
]


@pytest.mark.parametrize(("cls", "table"), CLASSES)
def test_every_field_is_decided(cls, table):
    known = {f.name for f in TABLES[table][1]}
    assert {f.name for f in dataclasses.fields(cls)} <= known


def test_documentation_is_the_table():
    path = pathlib.Path(__file__).parents[3] / "docs" / "pallas-compiler-params.md"
    assert path.read_text() == markdown()


def test_semantics_of_all_back_ends():
    params = pltpu.CompilerParams(dimension_semantics=(pltpu.PARALLEL, pltpu.ARBITRARY))
    assert cpu_params(params, (2, 2), (), False, "")["cpu"].dimension_semantics == (
        "parallel",
        "arbitrary",
    )
    params = plgpu.CompilerParams(
        dimension_semantics=["parallel", "sequential"], approx_math=True, max_concurrent_steps=3
    )
    found = cpu_params(params, (3, 2, 2), (0,), False, "")["cpu"]
    assert found.dimension_semantics == ("parallel", "parallel", "sequential")
    assert found.approx_math
    assert found.max_concurrent_steps == 3
    assert cpu_params(params, (2, 2), (), True, "")["cpu"].dimension_semantics is None


def test_own_parameters_stay_and_others_are_refused():
    cpu, nvidia = pbkern.cpu.CompilerParams(approx_math=True), pbkern.nvgpu.CompilerParams()
    assert cpu_params(cpu, (2,), (), False, "") == {"cpu": cpu}
    assert cpu_params(nvidia, (2,), (), False, "") == {}
    assert cpu_params({"cpu": cpu, "nvgpu": nvidia}, (2,), (), False, "") == {"cpu": cpu}
    with pytest.raises(UnsupportedOp, match="compiler_params of type Fraction on CPU"):
        cpu_params(fractions.Fraction(1, 2), (2,), (), False, "")
    with pytest.raises(
        UnsupportedOp, match=r"(?s)dimension_semantics does not fit the grid.*grid=\(2, 2\)"
    ):
        cpu_params(pltpu.CompilerParams(dimension_semantics=("parallel",)), (2, 2), (), False, "")
