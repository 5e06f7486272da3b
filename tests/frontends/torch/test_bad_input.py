"""Options and arguments that mean nothing: an error of pbkern with a reason and a hint."""

import subprocess
import sys
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import pbkern  # noqa: E402
from pbkern.api import torch_functions  # noqa: E402
from pbkern.errors import FallbackWarning, OptionError, TargetError, UnsupportedOp  # noqa: E402

jit = pbkern.polyblocks_jit_torch
double = jit(lambda x: x * 2)


def quantised():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8)


BAD_TENSORS = {
    "meta": (lambda: torch.rand(3, device="meta"), "argument 0 is on device `meta`", "no elements"),
    "quantised": (quantised, "argument 0 is quantised", "dequantize()"),
    "float8": (
        lambda: torch.rand(3).to(torch.float8_e4m3fn),
        "dtype torch.float8_e4m3fn are not compiled",
        "float32",
    ),
}


@pytest.mark.parametrize("kind", BAD_TENSORS)
def test_tensors_that_kernels_cannot_read(kind):
    make, says, hint = BAD_TENSORS[kind]
    with pytest.raises(UnsupportedOp) as e:
        double(make())
    assert says in str(e.value)
    assert hint in str(e.value)
    assert "\n  why " in str(e.value)


SPARSE = {
    "coo": lambda x: x.to_sparse(), "csr": lambda x: x.to_sparse_csr(), "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", SPARSE)
def test_a_graph_of_a_sparse_argument_runs_in_torch(kind):
    """With one warning; graphs of the same function without such arguments are compiled."""
    f = lambda a, x: a @ x + 1
    fast, x = jit(f), torch.rand(4, 2)
    a = SPARSE[kind](torch.rand(4, 4))
    with pytest.warns(
        FallbackWarning, match=f"runs in Torch: argument 0 is torch.sparse_{kind}"
    ) as seen:
        torch.testing.assert_close(fast(a, x), f(a, x))
        torch.testing.assert_close(fast(a, x + 1), f(a, x + 1))
    assert sum(w.category is FallbackWarning for w in seen) == 1
    dense = a.to_dense()
    torch.testing.assert_close(fast(dense, x), f(dense, x))
    assert fast.graphs[-1].kernels()
    with pytest.raises(UnsupportedOp, match=f"argument 0 is torch.sparse_{kind}"):
        jit(compile_options={"strict_target": True})(f)(a, x)


def test_the_gradient_beside_a_sparse_argument():
    a, x = torch.eye(3).to_sparse(), torch.rand(3, 2, requires_grad=True)
    module = jit(nn.Linear(3, 2))
    with pytest.warns(FallbackWarning, match="argument 0 is torch.sparse_coo"):
        torch.testing.assert_close(module(a), module(a.to_dense()))
    with pytest.warns(FallbackWarning):
        y = jit(lambda a, x: torch.sparse.mm(a, x) * 3)(a, x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3, 2), 3.0))


def test_a_sparse_tensor_in_a_container_runs_in_torch():
    """And the report says so."""
    a, x = torch.eye(4).to_sparse(), torch.rand(4, 2)
    f = jit(lambda pair, more: pair[0] @ more["x"][0] * 2)
    with pytest.warns(FallbackWarning, match="argument 0 is torch.sparse_coo"):
        torch.testing.assert_close(f((a, 1), {"x": [x]}), x * 2)
    assert "run in Torch: argument 0 is torch.sparse_coo, and kernels read dense arrays" in str(
        f.explain((a, 1), {"x": [x]})
    )
    torch.testing.assert_close(f((a.to_dense(), 1), {"x": [x]}), x * 2)
    assert f.graphs[-1].kernels()


def test_a_bad_tensor_among_keywords_and_attributes():
    with pytest.raises(UnsupportedOp, match="argument `x` is on device `meta`"):
        double(x=torch.rand(3, device="meta"))
    weight = torch.rand(3, device="meta")
    with pytest.raises(UnsupportedOp, match="input 0 of graph 0 is on device `meta`"):
        jit(lambda: weight * 2)()
    module = nn.Linear(3, 2).to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedOp, match="float8_e4m3fn are not compiled"):
        jit(nn.Sequential(nn.Flatten()))(module.weight.detach())


def test_torch_compile_passes_the_error_on():
    fast = torch.compile(lambda x: x * 2, backend=torch_functions.compile_fx)
    with pytest.raises(
        torch._dynamo.exc.BackendCompilerFailed, match="float8_e4m3fn are not compiled"
    ):
        fast(torch.rand(3).to(torch.float8_e4m3fn))


BAD_OPTIONS = [
    ({"fusion": True}, "unknown compile option `fusion`", "one of"),
    ({"tarjet": "cpu"}, "unknown compile option `tarjet`", "`target`"),
    ({"static_argnums": (0,)}, "`static_argnums` concerns functions of JAX arrays", "constant"),
    ({"donate_argnums": 1}, "`donate_argnums` concerns functions of JAX arrays", "leave it out"),
    ({"aot": True}, "`aot` concerns ahead-of-time compilation", "just in time"),
    ({"aot_name": "f"}, "`aot_name` concerns ahead-of-time compilation", "just in time"),
    ({"device": "sm_90a"}, "`device` concerns ahead-of-time compilation", "just in time"),
    ({"polyblocks_gpu_no_tensor_core": True}, "concerns the targets nvgpu and amdgpu", "cpu"),
    ({"target": "amdgpu"}, "not compiled for target 'amdgpu'", "'cpu'"),
    ({"target": "gpu"}, "`target` has a bad value", "nvgpu"),
    ({"execution_backend": "std"}, "concerns polymage_jit_torch", "polymage_jit_torch"),
    (
        {"torch_polyblocks_select_graphs": ["a"]},
        "`torch_polyblocks_select_graphs` has a bad value",
        None,
    ),
    (
        {"torch_polyblocks_filter_graphs": 1.5},
        "`torch_polyblocks_filter_graphs` has a bad value",
        None,
    ),
    (
        {"torch_polyblocks_select_graphs": (True,)},
        "`torch_polyblocks_select_graphs` has a bad value",
        None,
    ),
    ({"torch_polyblocks_select_graphs": (-1,)}, "graph -1", "0"),
    (
        {"torch_polyblocks_select_graphs": (1,), "torch_polyblocks_filter_graphs": (1, 2)},
        "graph 1",
        "one of the two",
    ),
]


@pytest.mark.parametrize(("options", "says", "hint"), BAD_OPTIONS, ids=lambda x: str(x)[:40])
def test_options_that_mean_nothing(options, says, hint):
    with pytest.raises(OptionError) as e:
        jit(compile_options=options)(lambda x: x)
    assert says in str(e.value)
    assert (hint or "") in str(e.value)
    assert "\n  why " in str(e.value)
    fast = torch.compile(lambda x: x * 2, backend=torch_functions.compile_fx, options=options)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as failed:
        fast(torch.rand(3))
    assert says in str(failed.value)


def test_options_that_are_no_dictionary_or_given_twice():
    with pytest.raises(OptionError, match="is not a dictionary"):
        jit(compile_options="cpu")(lambda x: x)
    with pytest.raises(OptionError, match="given twice"):
        jit(compile_options={}, runtime_args={})(lambda x: x)


@pytest.mark.parametrize("what", [nn.Linear, 3, "f"], ids=str)
def test_what_is_no_function(what):
    with pytest.raises(OptionError, match=r"compiles a function, a method or an nn.Module"):
        jit(what)


def test_options_of_jax_functions_refuse_graphs_by_number():
    with pytest.raises(OptionError, match="concerns the PyTorch front end"):
        pbkern.jit(compile_options={"torch_polyblocks_select_graphs": (0,)})(lambda x: x)


def test_backends_to_compare_with():
    f = lambda x: x * 2
    x = torch.rand(3)
    assert pbkern.polymage_jit_torch(compile_options={"execution_backend": "std"})(f) is f
    fast = pbkern.polymage_jit_torch(f, runtime_args={"execution_backend": "polyblocks"})
    assert torch.equal(fast(x), f(x))
    assert fast.graphs
    with pytest.raises(OptionError, match="no execution_backend 'xla'"):
        pbkern.polymage_jit_torch(compile_options={"execution_backend": "xla"})(f)
    with pytest.raises(OptionError, match="operator by operator"):
        pbkern.polymage_jit_torch(
            compile_options={"execution_backend": "std", "strict_target": True}
        )(f)


def test_operators_that_are_not_compiled_are_all_named_if_strict():
    @jit(compile_options={"strict_target": True})
    def f(x):
        return torch.linalg.qr(x)[1] + torch.linalg.eigvalsh(x)

    with pytest.raises(UnsupportedOp) as e:
        f(torch.eye(3))
    assert "2 operator(s) are not compiled" in str(e.value)
    assert "aten::linalg_qr at" in str(e.value)
    assert "aten::_linalg_eigh at" in str(e.value)
    assert "test_bad_input.py" in str(e.value)


def test_an_operator_that_is_not_compiled_with_these_arguments_if_strict():
    fast = jit(compile_options={"strict_target": True})(lambda x, m, v: x.index_put((m,), v))
    with pytest.raises(
        UnsupportedOp, match=r"`aten::index_put at .* is not compiled with these arguments"
    ):
        fast(torch.rand(3), torch.tensor([True, False, True]), torch.rand(2))


def test_a_second_derivative():
    x = torch.rand(3, requires_grad=True)
    (g,) = torch.autograd.grad(jit(lambda x: (x**3).sum())(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(g.sum(), x)


def test_graphs_are_chosen_by_number():
    def f(x):
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    x = torch.rand(3)
    cases = [
        ({"select": (1,)}, {1}),
        ({"filter": (0,)}, {1}),
        ({"select": (0, 1)}, {0, 1}),
        ({"filter": 1}, {0}),
    ]
    for options, chosen in cases:
        options = {f"torch_polyblocks_{k}_graphs": v for k, v in options.items()}
        fast = jit(compile_options=options)(f)
        assert torch.equal(fast(x), f(x))
        graphs = fast.explain(x).graphs
        assert [g.number for g in graphs] == [0, 1]
        assert {g.number for g in graphs if g.kernels()} == chosen
        assert "the graph was not chosen" in str(fast.explain(x)) or len(chosen) == 2
        torch._dynamo.reset()
        named = torch.compile(f, backend=torch_functions.compile_fx, options=options)
        assert torch.equal(named(x), f(x))


WITHOUT = """
import sys
import pbkern, jax.numpy as jnp
assert "torch" not in sys.modules
sys.modules["torch"] = None
assert pbkern.jit(lambda x: x + 1)(jnp.ones(3)).sum() == 6
try:
    pbkern.polyblocks_jit_torch(lambda x: x)
except pbkern.errors.TargetError as e:
    assert "pip install 'pbkern[torch]'" in str(e), e
else:
    raise AssertionError
"""


def test_importing_pbkern_neither_needs_nor_imports_torch():
    subprocess.run([sys.executable, "-c", WITHOUT], check=True)


def test_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        TargetError, match=r"(?s)PyTorch is not installed.*pip install 'pbkern\[torch\]'"
    ):
        jit(lambda x: x)


def test_an_old_version_is_named(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    with pytest.raises(
        TargetError, match=r"(?s)PyTorch 2.11.0\+cu130 is too old.*version 2\.13.*pip install"
    ):
        pbkern.polyblocks_jit_torch(lambda x: x + 1)(torch.ones(3))


def test_what_was_decorated_is_seen():
    assert repr(double).startswith("<pbkern.polyblocks_jit_torch of <function <lambda>")
