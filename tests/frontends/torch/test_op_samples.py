"""Torch's own samples of its operators, by the table: the same numbers and types, or an error, never other numbers.

As they are, with NaN, infinities, zeros of both signs and ties planted into them, and the gradients of both.
"""

import functools
import itertools
import warnings

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

try:
    from torch.testing._internal.common_methods_invocations import op_db
except ImportError as e:  # it needs expecttest
    pytest.skip(f"Torch's samples cannot be imported: {e}", allow_module_level=True)

from torch.utils import _pytree as pytree  # noqa: E402

from pbkern.frontends.torch.capture import NotCompiled, unsupported  # noqa: E402

from .comparing import (  # noqa: E402
    Traced,
    check_decomposed,
    check_errors,
    check_numbers,
    check_table,
    graph_of,
)

DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)
MOST = 6
# Results that are undefined memory, drawn, or that depend on how a sort breaks ties.
UNDEFINED = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "randn_like", "rand_like",
    "randn", "randint_like", "randint", "bernoulli", "normal", "uniform", "exponential", "multinomial", "nn.functional.rrelu",
    "topk", "sort", "argsort", "msort",
}  # fmt: skip
# Torch's own sums of powers overflow in another way; digamma and lgamma have errors of their own near their zeros.
INEXACT = {("__rpow__", torch.int64), ("pow", torch.int64), ("float_power", torch.int64), ("lgamma", torch.bool),
           ("digamma", torch.bool), ("digamma", torch.int64)}  # fmt: skip

# Where not all numbers are finite, eager Torch's kernels have results of another kind than the operators that Torch takes them
# apart into: those of the latter are then right as well.
DECOMPOSED = {
    # Weights of zero: of points beside, of points outside.
    "nn_functional_interpolate_linear", "nn_functional_interpolate_bilinear", "nn_functional_interpolate_trilinear",
    "nn_functional_upsample_bilinear", "nn_functional_grid_sample", "grid_sampler_2d",
    # Comparisons that NaN fails.
    "nn_functional_multi_margin_loss", "nn_functional_multilabel_margin_loss",
    # Products in another order.
    "_softmax_backward_data",
}  # fmt: skip
GRADIENT_DECOMPOSED = DECOMPOSED | {
    # Eager Torch has NaN, or zero, for a vector and the gradient for what remains of a row.
    "nn_functional_hardswish", "nn_functional_hardtanh",
    # Decompositions have zeros where eager Torch multiplies NaN by zero.
    "nn_functional_smooth_l1_loss",
    # Eager Torch divides the product by the element, unless one of the row is zero: [2, 3, nan] has the gradient nan last,
    # [2, 0, nan] has 0 there. Decompositions multiply the others.
    "prod", "masked_prod", "cumprod", "masked_cumprod", "linalg_vander",
}  # fmt: skip
# Eager Torch or pbkern has NaN where the other has a number: all others must be equal.
NAN_IN_ONE = {
    # Welford's means of infinities are NaN, those of torch.mean are infinities.
    "var_mean", "var_mean_unbiased", "std_mean", "std_mean_unbiased", "native_layer_norm", "native_group_norm",
    # Zeros between elements, and beside them, times infinite weights.
    "nn_functional_conv_transpose1d", "nn_functional_conv_transpose2d", "nn_functional_conv_transpose3d",
    # Flash attention in float32 has 0 in a row of scores that are NaN; eager Torch in float64 has NaN.
    "nn_functional_scaled_dot_product_attention",
}  # fmt: skip
GRADIENT_NAN_IN_ONE = NAN_IN_ONE | {
    "nn_functional_conv1d", "nn_functional_conv2d", "nn_functional_conv3d"
}  # fmt: skip
# What becomes of boundaries that are not in order depends on the search.
UNSORTED = {"bucketize", "searchsorted"}
# Eager Torch reads memory at NaN, which ends the process.
GRADIENT_READS_ANYWHERE = {"nn_functional_grid_sample", "grid_sampler_2d", "grid_sampler_3d"}


def samples_of(op, dtype):
    try:
        found = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 200))
    except Exception:  # Torch has none here
        return []
    return found[:: max(1, len(found) // MOST)][:MOST]


def as_function(op, sample):
    """(f, tensors): f of the sample's tensors is the operator with all its arguments; None where it takes none."""
    flat, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [k for k, x in enumerate(flat) if isinstance(x, torch.Tensor)]
    if not places or any(flat[k].layout is not torch.strided for k in places):
        return None

    def f(*tensors):
        given = list(flat)
        for k, t in zip(places, tensors):
            given[k] = t
        first, args, kwargs = pytree.tree_unflatten(given, spec)
        return op.op(first, *args, **kwargs)

    return f, [flat[k].detach() for k in places]


def planted(tensors):
    """The same with NaN, infinities, zeros and repeated elements in a third of the places of floating tensors."""
    kinds = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0])

    def one(t):
        if not t.is_floating_point() or not t.numel():
            return t
        chance, t = torch.rand(t.shape), t.clone()
        special = kinds[torch.randint(0, len(kinds), t.shape)].to(t.dtype)
        again = t.reshape(-1)[torch.randint(0, t.numel(), t.shape)]
        return torch.where(chance < 0.2, special, torch.where(chance < 0.35, again, t))

    return [one(t) for t in tensors]


def with_gradients(f, tensors):
    """f and the gradients of what it returns, with respect to floating tensors; None where it has none."""
    floats = [k for k, t in enumerate(tensors) if t.is_floating_point()]
    if not floats:
        return None

    def g(*given):
        def of_floats(*some):
            mixed = list(given)
            for k, t in zip(floats, some):
                mixed[k] = t
            made = pytree.tree_leaves(f(*mixed))
            return tuple(m for m in made if isinstance(m, torch.Tensor) and m.is_floating_point())

        made, back = torch.func.vjp(of_floats, *[given[k] for k in floats])
        # Not ones: the gradient of a softmax's sum is zero, and all that is left of it is rounding.
        return (*made, *back(tuple(_ramp(m) for m in made)))

    try:
        g(*[t.clone() for t in tensors])
    except Exception:  # nothing to differentiate
        return None
    return g


def _ramp(x):
    return torch.linspace(1, 2, x.numel(), dtype=x.dtype).view(x.shape)


def traced(f, tensors):
    """f and its graph; None if it cannot be traced, or the table lacks something that it is made of."""
    try:
        graph = graph_of(f, *tensors)
        if unsupported(graph.graph):
            return None
        # Only then: LAPACK ends the process for some matrices that are not finite.
        f(*[t.clone() for t in tensors])
        return Traced(f, graph)
    except Exception:  # results whose shapes depend on data, or arguments that Torch refuses
        return None


def cases(op, dtype, is_planted, gradients):
    for sample in samples_of(op, dtype):
        found = as_function(op, sample)
        if found is None:
            continue
        f, tensors = found
        tensors = planted(tensors) if is_planted else tensors
        f = with_gradients(f, tensors) if gradients else f
        f = None if f is None else traced(f, tensors)
        if f is not None:
            yield f, tensors


def check(f, tensors, name, gradients):
    """Results are eager Torch's.

    XLA, which runs the table here, makes a product with booleans a choice: where that shows, with numbers that are not finite,
    pbkern itself runs it. Where results are what cancellation leaves, eager Torch's own errors are beyond the tolerance:
    pbkern's may be four times as large, as it sums in another order."""
    ways = [check_table, check_errors]
    if not all(torch.isfinite(t).all() for t in tensors):
        ways.insert(1, functools.partial(check_table, compiled=True))
        ways += [check_decomposed] * (name in (GRADIENT_DECOMPOSED if gradients else DECOMPOSED))
        ways += [check_numbers] * (name in (GRADIENT_NAN_IN_ONE if gradients else NAN_IN_ONE))
    for way in ways[:-1]:
        try:
            return way(f, *tensors)
        except AssertionError:
            pass
    ways[-1](f, *tensors)
    return None


def check_samples(op, dtypes, is_planted, gradients):
    name = op.formatted_name
    if op.name in UNDEFINED or "dropout" in op.name:
        pytest.skip("excluded: its results are not determined")
    if is_planted and (name in UNSORTED or (gradients and name in GRADIENT_READS_ANYWHERE)):
        pytest.skip("excluded: its results are not determined, or eager Torch ends the process")
    warnings.simplefilter("ignore")
    compiled = refused = 0
    for dtype in dtypes:
        if dtype not in op.supported_dtypes("cpu") or (op.name, dtype) in INEXACT:
            continue
        torch.manual_seed(0)
        for f, tensors in cases(op, dtype, is_planted, gradients):
            try:
                check(f, tensors, name, gradients)
                compiled += 1
            except NotCompiled:
                refused += 1
    if not compiled:
        pytest.skip("not compiled" if refused else "the table lacks it")


by_name = pytest.mark.parametrize("op", op_db, ids=lambda op: op.formatted_name)


@by_name
def test_samples(op):
    check_samples(op, DTYPES, False, False)


@by_name
def test_planted_samples(op):
    check_samples(op, (torch.float32,), True, False)


@by_name
def test_gradients_of_samples(op):
    check_samples(op, (torch.float32,), False, True)


@by_name
def test_gradients_of_planted_samples(op):
    check_samples(op, (torch.float32,), True, True)
