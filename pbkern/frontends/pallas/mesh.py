"""pl.kernel and pl.core_map over one mesh of cores -> parameters of a pallas_call whose grid is that mesh.

Each core is a program; the arrays are given where they are, not in blocks. Cores that only share
arrays run like the programs of any parallel grid. Those that signal or copy to one another are
refused where they do (dma.py).
"""

from __future__ import annotations

import dataclasses
import math

import jax
from jax.experimental import pallas as pl

from pbkern import _jax
from pbkern.core.errors import UnsupportedOp
from pbkern.targets.cpu.params import CompilerParams
from pbkern.targets.params import DimensionSemantics


def call_params(
    in_avals,
    *,
    jaxprs,
    meshes,
    external_meshes,
    out_avals,
    input_output_aliases,
    compiler_params,
    name,
    **unused,
) -> dict:
    """Arguments for import_call.

    `unused`: debug, interpret, cost_estimate, metadata: they say nothing about results.

    Raises UnsupportedOp for kernels over several meshes at once.
    """
    jaxpr = jaxprs[0]
    if len(jaxprs) != 1 or external_meshes:
        raise UnsupportedOp(
            f"a Pallas kernel over {len(jaxprs) + len(external_meshes)} meshes",
            at=jaxpr.debug_info.func_src_info,
            why="cores of different kinds would have to run at once and wait for one another",
            hint="one pl.kernel per mesh",
        )
    arrays = [_jax.ref_contents(var.aval) for var in jaxpr.invars[: len(in_avals) + len(out_avals)]]
    inputs, outputs = arrays[: len(in_avals)], arrays[len(in_avals) :]
    scratch = [
        pl.MemoryRef(_jax.ref_contents(var.aval), var.aval.memory_space)
        for var in jaxpr.invars[len(arrays) :]
    ]
    shared = [memory for memory in scratch if _jax.memory_space(memory) in ("vmem_shared", "hbm")]
    if shared and math.prod(meshes[0].shape.values()) > 1:
        raise UnsupportedOp(
            "scratch memory that cores share",
            at=jaxpr.debug_info.func_src_info,
            why=f"{shared[0]}: a core may run after another has ended",
            hint="a mesh of one core, or a pl.kernel for each step",
        )
    whole = pl.BlockSpec(memory_space=pl.ANY)
    blocks = {"in_specs": (whole,) * len(inputs), "out_specs": (whole,) * len(outputs)}
    spec = pl.GridSpec(grid=tuple(meshes[0].shape.items()), scratch_shapes=scratch, **blocks)
    trees = [jax.tree.structure(tuple(x)) for x in (inputs, outputs)]
    origins = (
        [f"operand {n}" for n in range(len(inputs))],
        [f"result {n}" for n in range(len(outputs))],
    )
    _, mapping = _jax.pallas().grid_mapping(
        spec, inputs, trees[0], origins[0], outputs, trees[1], origins[1]
    )
    return {
        "jaxpr": jaxpr,
        "grid_mapping": mapping,
        "input_output_aliases": tuple(input_output_aliases.items()),
        "compiler_params": _cores_in_parallel(compiler_params, len(spec.grid)),
        "name": name,
    }


def _cores_in_parallel(params, rank: int):
    parallel: DimensionSemantics = "parallel"
    words = (parallel,) * rank
    if params is None:
        return CompilerParams(dimension_semantics=words)
    return (
        dataclasses.replace(params, dimension_semantics=words)
        if hasattr(params, "dimension_semantics")
        else params
    )
