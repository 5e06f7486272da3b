"""Operators by the table, run by plain JAX, beside eager Torch; whole functions beside Torch in float64."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
import torch
from jax.extend import core as jex
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from pbkern.api.direct_plan import DirectPlan
from pbkern.core.options import CompileOptions
from pbkern.frontends.torch.capture import GraphArgument, ResultPlace, array_of, capture
from pbkern.frontends.torch.decompositions import decompositions
from pbkern.frontends.torch.memory import TorchMemory


@dataclass(frozen=True)
class Traced:
    """A function that was traced already, for arguments of these shapes."""

    function: Callable
    graph: torch.fx.GraphModule

    def __call__(self, *tensors):
        return self.function(*tensors)


def graph_of(f, *tensors):
    """What the table sees of f: a graph of operators, without writes to tensors."""
    if isinstance(f, Traced):
        return f.graph
    pure = torch.func.functionalize(f, remove="mutations")
    return make_fx(pure, decompositions(), tracing_mode="fake")(*tensors)


def by_table(f, *tensors, seed=0, compiled=False):
    """Results of f, as the table's jaxpr gives them under plain JAX, in a list; compiled: as pbkern does."""
    return by_graph(graph_of(f, *tensors), *tensors, seed=seed, compiled=compiled)


def by_graph(graph, *tensors, seed=0, compiled=False):
    """The same of a graph of operators."""
    captured = capture(graph, tensors, views=False)
    given = [t if order is None else t.permute(order) for t, order in zip(tensors, captured.orders)]
    if compiled:
        made = DirectPlan(captured.jaxpr, "f", CompileOptions(), TorchMemory())(given)
    else:
        arrays = [array_of(t) for t in given] + ([np.int64(seed)] if captured.draws else [])
        with jax.enable_x64(True):
            made = [tensor_of(a) for a in jax.jit(jex.jaxpr_as_fun(captured.jaxpr))(*arrays)]
    shaped = lambda r: made[r.number] if r.shape is None else made[r.number].view(r.shape)
    placed = lambda r: shaped(r) if r.permuted is None else shaped(r).permute(r.permuted)
    other = lambda r: tensors[r.number] if isinstance(r, GraphArgument) else r
    return [placed(r) if isinstance(r, ResultPlace) else other(r) for r in captured.results]


def check_table(f, *tensors, rtol=None, atol=None, compiled=False):
    """Types, shapes and numbers of f by the table are eager Torch's; compiled: as pbkern runs the table."""
    results = f(*[t.clone() if t.is_contiguous() else t for t in tensors])
    _check_results(by_table(f, *tensors, compiled=compiled), results, rtol, atol)


def check_decomposed(f, *tensors):
    """Results as pbkern gives them are those of the operators that Torch takes f apart into, run by eager Torch."""
    graph = graph_of(f, *tensors)
    expected = graph(*[t.clone() for t in tensors])
    _check_results(by_graph(graph, *tensors, compiled=True), expected)


def check_numbers(f, *tensors):
    """Results as pbkern gives them are eager Torch's wherever neither is NaN."""
    _check_results(
        by_table(f, *tensors, compiled=True), f(*[t.clone() for t in tensors]), no_nan=True
    )


def _check_results(made, results, rtol=None, atol=None, no_nan=False):
    expected = [t for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]
    made = [tensor_of(m) for m in made if m is not None]
    for m, e in zip(made, expected, strict=True):
        assert m.dtype == e.dtype, (m.dtype, e.dtype, m.shape, e.shape)
        assert m.shape == e.shape, (m.dtype, e.dtype, m.shape, e.shape)
        if no_nan:
            numbers = ~(m.isnan() | e.isnan())
            m, e = m[numbers], e[numbers]
        check_close(m, e, rtol, atol)


def check_errors(f, *tensors):
    """Errors of pbkern's results beside float64 are within the tolerance, at most four times eager Torch's, or in the last bit
    of one: zero may be what ones leave. What is not finite is where eager Torch has it."""
    wide = [t.double() if t.is_floating_point() else t for t in tensors]
    exact, eager = (
        [t for t in pytree.tree_leaves(f(*given)) if isinstance(t, torch.Tensor)]
        for given in (wide, [t.clone() for t in tensors])
    )
    made = [tensor_of(m) for m in by_table(f, *tensors, compiled=True) if m is not None]
    for m, e, x in zip(made, eager, exact, strict=True):
        assert m.dtype == e.dtype, (m.dtype, e.dtype, m.shape, e.shape)
        assert m.shape == e.shape, (m.dtype, e.dtype, m.shape, e.shape)
        finite = torch.isfinite(e)
        assert torch.equal(torch.isfinite(m), finite), (m, e)
        torch.testing.assert_close(m[~finite], e[~finite], equal_nan=True)
        if not m.is_floating_point() or not finite.any():
            assert m.is_floating_point() or torch.equal(m, e), (m, e)
            continue
        tolerance, last_bit = TOLERANCES.get(e.dtype, 1e-10), torch.finfo(e.dtype).eps
        e, m, x = (t[finite].double() for t in (e, m, x))
        x = torch.where(torch.isfinite(x), x, e)  # beyond float32's own ends, or NaN there alone
        theirs, ours = (float((t - x).abs().max()) for t in (e, m))
        allowed = max(4 * theirs, tolerance * float(x.abs().max()), last_bit)
        assert ours <= allowed, (ours, theirs, m, e, x)


def tensor_of(x) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return x
    array = np.array(x)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-5, torch.complex64: 2e-5}


def check_close(t, e, rtol=None, atol=None) -> None:
    """Relative to the largest element: sums of other order differ by that."""
    rtol = TOLERANCES.get(e.dtype, 1e-10) if rtol is None else rtol
    if e.dtype.is_floating_point or e.dtype.is_complex:
        finite = e[torch.isfinite(e)].abs().to(torch.float64)
        atol = rtol * float(finite.max() if finite.numel() else 0) if atol is None else atol
        torch.testing.assert_close(t, e, rtol=rtol, atol=atol, equal_nan=True)
    else:
        assert torch.equal(t, e), (t, e)


def gradients(module, *args):
    """(results, gradients of parameters and of floating arguments) of a sum of squares of what a module returns."""
    args = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args]
    results = [r for r in pytree.tree_leaves(module(*args)) if isinstance(r, torch.Tensor)]
    wanted = [
        *(a for a in args if a.requires_grad),
        *(p for p in _parameters(module) if p.requires_grad),
    ]
    loss = sum((r.double() * torch.linspace(0.5, 1.5, r.numel(), dtype=torch.float64).reshape(r.shape)).pow(2).mean()
               for r in results if r.requires_grad)  # fmt: skip
    return results, torch.autograd.grad(loss, wanted, allow_unused=True)


def _parameters(module):
    return list(module.parameters()) if isinstance(module, torch.nn.Module) else []


def check_gradients(fast, module, *args) -> None:
    """Results and gradients are as near to those of the module in float64 as eager float32 is, within a factor of four, or
    within 1e-5 of the largest."""
    wide = copy.deepcopy(module).double() if isinstance(module, torch.nn.Module) else module
    exact = gradients(wide, *[a.double() if a.is_floating_point() else a for a in args])
    eager, ours = gradients(module, *args), gradients(fast, *args)
    for group in range(2):
        assert len(ours[group]) == len(exact[group])
        for k, (mine, plain, truth) in enumerate(zip(ours[group], eager[group], exact[group])):
            assert (mine is None) == (truth is None)
            if mine is None:
                continue
            mine, plain, truth = mine.detach(), plain.detach(), truth.detach()
            assert mine.dtype == plain.dtype
            assert mine.shape == plain.shape
            largest = float(truth.abs().max()) if truth.numel() else 0.0
            allowed = max(
                4 * float((plain.double() - truth).abs().max()) if truth.numel() else 0.0,
                1e-5 * largest,
            )
            error = float((mine.double() - truth).abs().max()) if truth.numel() else 0.0
            assert error <= allowed, (group, k, error, allowed)
