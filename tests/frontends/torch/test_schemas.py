"""Every rule of the table beside the schemas of its operator: names, order, defaults, arguments that may be None."""

import collections
import inspect

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from pbkern.frontends.torch import aten, recurrent  # noqa: E402
from pbkern.frontends.torch.aten.table import WHERE, arguments_of, rule_of  # noqa: E402
from pbkern.frontends.torch.decompositions import decompositions  # noqa: E402

from .comparing import check_table, graph_of  # noqa: E402

ATEN = torch.ops.aten
# Names of parameters in rules, beside those of the schemas: what an operator may call the same.
MEANS = {
    "bag": "offset2bag",
    "base": "self",
    "causal": "is_causal",
    "ceil": "ceil_mode",
    "correction": "unbiased",
    "count": "num_weights",
    "dim": "dimension other",
    "dims": "dim unbiased",
    "dropout": "dropout_p",
    "edges": "boundaries sorted_sequence",
    "g": "grad grad_out grad_output",
    "high": "max max_val to",
    "index": "indices",
    "k": "key",
    "kernel": "kernel_size",
    "last": "include_last_offset",
    "low": "min min_val from",
    "made": "out",
    "most": "maximum_indices",
    "padding": "padding_idx",
    "pads": "pad padding",
    "q": "query",
    "rate": "lambd",
    "rows": "num_weights",
    "scale": "scale_grad_by_freq",
    "shape": "size",
    "size": "abs output_size",
    "sizes": "bag_size input_sizes output_size split_size split_sizes",
    "sums": "logsumexp",
    "test": "condition pred",
    "tests": "test_element test_elements",
    "v": "value",
    "value": "fill_value s",
    "values": "source src value",
    "w": "weight",
    "weights": "per_sample_weights",
    "x": "a batch1 element elements inp input mat mat1 real self",
    "xs": "tensors",
    "y": "b batch2 end exponent imag mat2 other output src tensor tensor1 vec vec2",
    "z": "c tensor2",
}
# Overloads that no rule takes: they run in Torch.
REFUSED = {
    "aten::addmm.dtype",
    "aten::baddbmm.dtype",
    "aten::bmm.dtype",
    "aten::mm.dtype",
    "aten::repeat_interleave.Tensor",
    "aten::where",
}


def overloads():
    """(rule, operator) of all that makes tensors and writes to none."""
    recurrent.operators()
    decompositions()
    for name in aten.names():
        namespace, _, base = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), base, None)
        for overload in packet.overloads() if packet is not None else ():
            target = getattr(packet, overload)
            text = str(target._schema)
            writes = any(
                a.is_out or (a.alias_info is not None and a.alias_info.is_write)
                for a in target._schema.arguments
            )
            if (
                torch._C._dispatch_has_kernel(target.name())
                and not writes
                and "Dimname" not in text
                and "Tensor" in text.rpartition("->")[2]
            ):
                yield aten.TABLE.lookup(name), target


def placed(target):
    return [a for a in target._schema.arguments if not a.kwarg_only and a.name not in WHERE]


def parameters(rule):
    return [
        p
        for p in list(inspect.signature(rule).parameters.values())[1:]
        if not p.name.startswith("_")
    ]


def test_each_overload_has_a_rule_that_takes_its_arguments_or_is_refused():
    refused = {str(t._schema).partition("(")[0] for rule, t in overloads() if rule_of(t) is None}
    assert refused == REFUSED
    assert sum(1 for _ in overloads()) > 400


def test_parameters_mean_what_the_schema_has_at_their_place():
    wrong = []
    for rule, target in overloads():
        if rule_of(target) is None:
            continue
        for p, a in zip(parameters(rule), placed(target)):
            if p.kind is p.VAR_POSITIONAL:
                break
            # `full` and its like make no use of the tensor whose type they take
            if p.name != a.name and a.name not in MEANS.get(p.name, "").split():
                wrong.append((str(target._schema), p.name, a.name))
    assert not wrong


def test_no_rule_repeats_a_default():
    """A parameter's default is for overloads that lack the argument: at least one does."""
    lacking, having = collections.defaultdict(bool), collections.defaultdict(set)
    for rule, target in overloads():
        if rule_of(target) is None:
            continue
        names = [p.name for p in parameters(rule)]
        found = set(names[: len(placed(target))]) | {
            a.name for a in target._schema.arguments if a.kwarg_only
        }
        for p in parameters(rule):
            if p.default is not inspect.Parameter.empty:
                lacking[rule, p.name] |= p.name not in found
                having[rule, p.name].add(target)
    repeated = [
        (rule.__qualname__, name, *map(str, having[rule, name]))
        for (rule, name), is_used in lacking.items()
        if not is_used
    ]
    assert repeated == []


def test_what_a_graph_leaves_out_is_filled_in():
    for _, target in overloads():
        if rule_of(target) is None:
            continue
        schema = [a for a in target._schema.arguments if a.name not in WHERE]
        given = [
            object()
            for a in target._schema.arguments
            if not a.kwarg_only and not a.has_default_value()
        ]
        named = {
            a.name: object()
            for a in target._schema.arguments
            if a.kwarg_only and not a.has_default_value()
        }
        args, kwargs = arguments_of(target, given, named)
        assert len(args) == len(placed(target))
        assert list(kwargs) == [a.name for a in schema if a.kwarg_only]
        for a, value in zip([a for a in schema if not a.kwarg_only], args):
            assert value == a.default_value if a.has_default_value() else value in given
        for a in schema:
            if a.kwarg_only:
                assert (
                    kwargs[a.name] == a.default_value
                    if a.has_default_value()
                    else kwargs[a.name] is named[a.name]
                )


def test_arguments_by_name_come_to_their_place():
    assert arguments_of(ATEN.hardtanh.default, ["x"], {"max_val": 3}) == (["x", -1, 3], {})
    assert arguments_of(ATEN.sort.stable, ["x"], {"descending": True, "stable": None}) == (
        ["x"],
        {"stable": None, "dim": -1, "descending": True},
    )
    assert arguments_of(ATEN.clone.default, ["x"], {"memory_format": torch.channels_last}) == (
        ["x"],
        {},
    )


x = torch.tensor([[0.5, -3.0, 2.0, 1.5], [4.0, -0.25, 7.0, -1.0]])


@pytest.mark.parametrize(("low", "high"), [(-1, 1), (-1, 2.5), (-0.5, 1), (0, 6), (-2, 2), (1, 1)])
def test_hardtanh(low, high):
    check_table(lambda x: F.hardtanh(x, low, high), x)
    check_table(
        lambda x: torch.nn.functional.hardtanh(x.to(torch.int64), round(low), round(high)), x * 3
    )


TENSORS = (x, torch.tensor([[0, 2, 1], [1, 1, 0]]), torch.rand(3, 4), torch.rand(2, 3, 9, 8))
NONE = {
    "convolution": lambda x, i, w, image: F.conv2d(image, torch.ones(2, 3, 3, 3)) * x[0, 0],
    "convolution_backward": lambda x, i, w, image: ATEN.convolution_backward(
        torch.ones(2, 2, 7, 6),
        image,
        torch.ones(2, 3, 3, 3),
        None,
        [1, 1],
        [0, 0],
        [1, 1],
        False,
        [0, 0],
        1,
        [True, True, False],
    )[:2],
    "_convolution": lambda x, i, w, image: ATEN._convolution(
        image,
        torch.ones(2, 3, 3, 3),
        None,
        [1, 1],
        [0, 0],
        [1, 1],
        False,
        [0, 0],
        1,
        False,
        False,
        False,
        False,
    ),
    "linear": lambda x, i, w, image: ATEN.linear(x, w),
    "_embedding_bag": lambda x, i, w, image: ATEN._embedding_bag(
        x.T, i[0] % 2, torch.tensor([0, 1])
    )[0],
    "_embedding_bag_forward_only": lambda x, i, w, image: ATEN._embedding_bag_forward_only(
        x.T, i[0], torch.tensor([0, 1])
    )[0],
    "attention": lambda x, i, w, image: ATEN._scaled_dot_product_flash_attention_for_cpu(
        image, image, image
    )[0],
    "unsafe_index": lambda x, i, w, image: ATEN._unsafe_index(x, [None, i % 2]),
    "index": lambda x, i, w, image: x[:, i],
    "index_put": lambda x, i, w, image: ATEN.index_put(x, [None, i[0]], torch.ones(2, 3)),
    "unsafe_index_put": lambda x, i, w, image: ATEN._unsafe_index_put(
        x, [None, i[0]], torch.ones(2, 3)
    ),
    "all": lambda x, i, w, image: (ATEN.all.dims(x > 0, None), ATEN.any.dims(x > 9, None)),
    "argmax": lambda x, i, w, image: (torch.argmax(x), torch.argmin(x)),
    "as_strided": lambda x, i, w, image: ATEN.as_strided(x, (3, 2), (1, 2)),
    "as_strided_scatter": lambda x, i, w, image: ATEN.as_strided_scatter(
        x, torch.ones(3, 2), (3, 2), (1, 2)
    ),
    "avg_pool": lambda x, i, w, image: (F.avg_pool2d(image, 3), F.avg_pool3d(image, 2)),
    "clamp": lambda x, i, w, image: (
        ATEN.clamp.default(x, None, 1),
        ATEN.clamp(x, 0),
        ATEN.clip(x, max=1),
        ATEN.clip(x, 0),
    ),
    "clamp_tensors": lambda x, i, w, image: (
        ATEN.clamp.Tensor(x, None, x[0]),
        ATEN.clamp.Tensor(x, x[1]),
        ATEN.clip.Tensor(x, x[1]),
        ATEN.clip.Tensor(x, None, x[0]),
    ),
    "div": lambda x, i, w, image: (
        ATEN.div.Tensor_mode(x, x[0], rounding_mode=None),
        ATEN.div.Scalar_mode(x, 3, rounding_mode=None),
    ),
    "norm": lambda x, i, w, image: torch.linalg.vector_norm(x),
    "mean": lambda x, i, w, image: (ATEN.mean.dim(x, None), ATEN.sum.dim_IntList(x, None)),
    "nan_to_num": lambda x, i, w, image: torch.nan_to_num(x / 0),
    "dropout": lambda x, i, w, image: ATEN.native_dropout(x, 0.0, None),
    "repeat_interleave": lambda x, i, w, image: (
        x.repeat_interleave(2),
        ATEN.repeat_interleave.self_int(x, 2, output_size=None),
    ),
    "searchsorted": lambda x, i, w, image: (
        torch.searchsorted(x[0].sort()[0], x),
        torch.searchsorted(x[0].sort()[0], 1.5),
    ),
    "slice": lambda x, i, w, image: ATEN.slice(x),
    "slice_scatter": lambda x, i, w, image: x.slice_scatter(torch.zeros(2, 4)),
    "sort": lambda x, i, w, image: ATEN.sort.stable(x, stable=None),
    "std": lambda x, i, w, image: (
        ATEN.std.correction(x),
        ATEN.var.correction(x),
        *ATEN.var_mean.correction(x),
    ),
    "var": lambda x, i, w, image: (
        ATEN.std.dim(x, None),
        ATEN.var.dim(x, None),
        *ATEN.var_mean.dim(x, None),
    ),
    "upsample": lambda x, i, w, image: (
        F.interpolate(x[None], 7),
        F.interpolate(image, (4, 5)),
        F.interpolate(image[None], (4, 5, 6)),
    ),
    "upsample_vec": lambda x, i, w, image: (
        ATEN.upsample_nearest1d.vec(x[None], None, [2.0]),
        ATEN.upsample_nearest2d.vec(image, None, [2.0, 2.0]),
        ATEN.upsample_nearest3d.vec(image[None], None, [2.0] * 3),
    ),
    "upsample_sizes": lambda x, i, w, image: (
        ATEN.upsample_nearest1d.vec(x[None], [7], None),
        ATEN.upsample_nearest2d.vec(image, [4, 5], None),
        ATEN.upsample_nearest3d.vec(image[None], [4, 5, 6], None),
    ),
}


@pytest.mark.parametrize("name", NONE)
def test_arguments_that_are_none(name):
    check_table(NONE[name], *TENSORS)


# Which no sample of the above brings: gradients, whose samples are in test_operators.py, and what Torch itself refuses.
ELSEWHERE = {
    "prims::sum",
    "prims::prod",
    "_embedding_bag_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "avg_pool2d_backward",
    "avg_pool3d_backward",
}


def is_apart(target) -> bool:
    """Whether Torch takes an operator apart before any table sees it."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        target.name(), "CompositeImplicitAutograd"
    )


def test_every_argument_that_may_be_none_has_been():
    wanted = {
        (target._schema.name, a.name)
        for rule, target in overloads()
        if rule_of(target) is not None and not is_apart(target)
        for a in target._schema.arguments
        if "Optional" in str(a.type) and a.name not in (*WHERE, "dtype", "output_dtype")
    }
    seen = set()
    for f in NONE.values():
        for node in graph_of(f, *TENSORS).graph.nodes:
            if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
                continue
            args, kwargs = arguments_of(node.target, node.args, node.kwargs)
            named = {**dict(zip([a.name for a in placed(node.target)], args)), **kwargs}
            holds = lambda v: v is None or (isinstance(v, list | tuple) and None in v)
            seen |= {(node.target._schema.name, k) for k, v in named.items() if holds(v)}
    missing = {
        (name, a) for name, a in wanted - seen if name.removeprefix("aten::") not in ELSEWHERE
    }
    assert not missing
