"""Checks of what a kernel's definition gives beside its body: grid, number of specs, CompilerParams, names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pbkern.core.errors import KernelError
from pbkern.core.options import TARGETS, nearest
from pbkern.dsl.specs import BlockSpec


def checked_grid(grid: Any, at: str | None) -> tuple[int, ...]:
    """The size of each grid dimension, from a size or a sequence of sizes.

    Raises KernelError, with the place `at`, unless all are non-negative integers.
    """
    grid = (grid,) if isinstance(grid, (int, np.integer)) else grid
    try:
        sizes = tuple(grid)
    except TypeError:
        sizes = (None,)
    if not all(
        isinstance(size, (int, np.integer)) and not isinstance(size, bool) and size >= 0
        for size in sizes
    ):
        raise KernelError(
            "a grid has a size that is not a non-negative integer",
            at=at,
            why=f"grid={grid!r}",
            hint="static integers, e.g. (pbkern.cdiv(n, 128),)",
        )
    return tuple(int(size) for size in sizes)


def checked_specs(what: str, specs: Any, types: Sequence, things: str, at: str | None) -> list:
    """One BlockSpec per array.

    Args:
      what: name of the argument, for messages.
      specs: a BlockSpec, a sequence of them, or None for whole arrays.
      types: the arrays'.
      things: "operands" or "results", for messages.
      at: place of the definition, for messages.

    Raises:
      KernelError: there are not as many specs as arrays.
    """
    if specs is None:
        return [BlockSpec()] * len(types)
    specs = [specs] if isinstance(specs, BlockSpec) else list(specs)
    if len(specs) != len(types):
        raise KernelError(
            f"{what} has {len(specs)} entries for {len(types)} {things}",
            at=at,
            why=f"{things} {', '.join(map(str, types)) or 'none'}",
            hint=f"one BlockSpec each; BlockSpec() for a whole array, {what}=None for all",
        )
    return specs


def array_labels(body: Callable, num_inputs: int, num_outputs: int) -> list[str]:
    """Names of operands and results in messages, with the body's names for their Refs where it has some."""
    try:
        parameters = list(inspect.signature(body).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [
        parameter.name if parameter.kind is not parameter.VAR_POSITIONAL else None
        for parameter in parameters
    ]
    labels = [f"input {n}" for n in range(num_inputs)]
    labels += [f"output {n}" for n in range(num_outputs)]
    if None in names or len(names) < len(labels):
        return labels
    return [f"{label} (`{ref}`)" for label, ref in zip(labels, names)]


def params_by_target(params: Any, at: str | None = None) -> dict[str, Any]:
    """{target name: CompilerParams}, from one target's CompilerParams, a sequence of them, such a dict, or None.

    Raises KernelError, with the place `at`, for other values, and for two of one target.
    """
    if params is None:
        return {}
    if isinstance(params, Mapping):
        for target, param in params.items():
            _check_params(target, param, at)
        return dict(params)
    by_target = {}
    for param in params if isinstance(params, (tuple, list)) else (params,):
        target = getattr(param, "target_name", None)
        if target is None or target in by_target:
            raise KernelError(
                "compiler_params names no target"
                if target is None
                else f"two compiler_params for target `{target}`",
                at=at,
                why=f"{param!r}",
                hint="a target's CompilerParams, or {target name: CompilerParams}",
            )
        _check_params(target, param, at)
        by_target[target] = param
    return by_target


# TPUs are a target of CompilerParams alone: `to_pallas` hands kernels to JAX's compiler.
PARAMS_TARGETS = (*TARGETS, "tpu")


def _check_params(target, params: Any, at: str | None) -> None:
    if target not in PARAMS_TARGETS:
        raise KernelError(
            f"compiler_params for a target that there is not, `{target}`",
            at=at,
            why=f"the targets are {', '.join(PARAMS_TARGETS)}",
            hint=nearest(str(target), PARAMS_TARGETS),
        )
    if getattr(params, "target_name", None) != target:
        raise KernelError(
            f"compiler_params for target `{target}` are not that target's CompilerParams",
            at=at,
            why=f"{params!r}",
            hint=f"{{'{target}': pbkern.{target}.CompilerParams(...)}}",
        )
