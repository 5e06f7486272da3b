"""Libraries whose caller says sizes: rows in parts or a program per size, from Python, from C and from the shell."""

import ctypes
import json
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export, lax

import pbkern
from pbkern.aot import build
from pbkern.aot.dynamic.divide import divide
from pbkern.aot.dynamic.independence import FEWER, MORE, why_rows_depend
from pbkern.aot.dynamic.sizes import TracedForSizes, divided, linear_dimensions
from pbkern.aot.interface.sizes import Symbol as SizeSymbol
from pbkern.cli.main import main
from pbkern.errors import KernelError, OptionError, UnsupportedOp

from . import programs

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
W = programs.numbers(6, 5)


def rows(*shape, most=20, name="b"):
    (size,) = export.symbolic_shape(name, constraints=[f"{name} <= {most}"])
    return jax.ShapeDtypeStruct((size, *shape), jnp.float32)


def library(fn, *args, folder, **options):
    options = {"aot_name": "f"} | options
    return pbkern.polyblocks_aot_jax(
        compile_options=options, output=folder, emit=["obj", "header", "shared"]
    )(fn)(*args)


# --- rows in parts


def layer(x):
    return jax.nn.softmax(jnp.tanh(x @ W), axis=-1)


def test_any_number_of_rows(tmp_path):
    call = library(layer, rows(6), folder=tmp_path).load()
    for count in range(1, 21):
        x = programs.numbers(count, 6)
        want = np.exp(np.tanh(x.astype("f8") @ W))
        want /= want.sum(-1, keepdims=True)
        np.testing.assert_allclose(call(x), want, rtol=2e-5, atol=1e-6)


def test_several_arrays_with_several_elements_per_row(tmp_path):
    """A row of `x` is two elements of its first dimension; `bias` has no rows; a result is an argument."""
    (b,) = export.symbolic_shape("b", constraints=["b <= 9"])
    types = (
        jax.ShapeDtypeStruct((2 * b, 3), jnp.float32),
        jax.ShapeDtypeStruct((3,), jnp.float32),
        jax.ShapeDtypeStruct((b,), jnp.int32),
    )

    def f(x, bias, n):
        pairs = x.reshape(-1, 2, 3).sum(1) + bias
        return pairs, n, x[:, ::-1] * 2

    made = library(f, *types, folder=tmp_path)
    sizes = [
        dimension["sizes"]
        for argument in made.metadata["inputs"]
        for dimension in argument.get("dimensions", [])
        if dimension["sizes"]
    ]
    assert sizes == [{"b": 2}, {"b": 1}]
    assert "memref<?x3xf32>, dimension 0 is 2 * b" in made.header
    call = made.load()
    for count in (1, 5, 9):
        x, bias = programs.numbers(2 * count, 3), programs.numbers(3)
        n = np.arange(count, dtype=np.int32)
        pairs, same, turned = call(x, bias, n)
        np.testing.assert_allclose(pairs, x.reshape(count, 2, 3).sum(1) + bias, rtol=1e-6)
        np.testing.assert_array_equal(same, n)
        np.testing.assert_array_equal(turned, x[:, ::-1] * 2)


@pytest.mark.parametrize(
    ("name", "parameter"), [("x", "x_2"), ("out", "out_2"), ("int", "int_"), ("stream", "stream_")]
)
def test_sizes_have_names_that_no_other_parameter_has(tmp_path, name, parameter):
    made = library(lambda x: x * 2, rows(6, most=3, name=name), folder=tmp_path)
    assert f"int64_t {parameter})" in made.header
    x = programs.numbers(3, 6)
    np.testing.assert_array_equal(made.load()(x), x * 2)


def test_memory_grows_with_the_size(tmp_path):
    def deep(x):
        return jnp.sort(jnp.tanh(x @ W) @ W.T, axis=-1) @ W

    made = library(deep, rows(6, most=64), folder=tmp_path)
    memory = made.load()._library.f_memory_bytes
    memory.restype = ctypes.c_size_t
    needed = [memory(2, ctypes.c_int64(count)) for count in (1, 8, 64)]
    assert needed == sorted(needed)
    assert needed[-1] == made.metadata["memory_bytes"] > needed[0]


def test_memory_of_the_caller(tmp_path):
    made = library(layer, rows(6), folder=tmp_path, user_device_memory=True)
    x = programs.numbers(7, 6)
    np.testing.assert_allclose(made.load()(x), layer(x), rtol=2e-5, atol=1e-6)


def test_two_devices(tmp_path):
    made = library(layer, rows(6), folder=tmp_path, device="x86-64-v3,x86-64-v4")
    x = programs.numbers(11, 6)
    np.testing.assert_allclose(made.load()(x), layer(x), rtol=2e-5, atol=1e-6)


# --- a program for each size


SEVERAL = {
    "mean over rows": lambda x: x - x.mean(0),
    "softmax over rows": lambda x: jax.nn.softmax(x, axis=0),
    "the number of rows": lambda x: x / x.shape[0],
    "places": lambda x: x + jnp.arange(x.shape[0])[:, None],
    "the next row": lambda x: jnp.roll(x, 1, axis=0),
    "a loop over rows": lambda x: lax.scan(lambda c, row: (c + row, c), jnp.zeros(6), x)[1],
    "other operations for one row": lambda x: x if x.shape[0] == 1 else x * 2,
}


@pytest.mark.parametrize("name", SEVERAL)
def test_rows_that_depend_on_each_other(tmp_path, name):
    f = SEVERAL[name]
    made = library(f, rows(6, most=6), folder=tmp_path)
    call = made.load()
    for count in range(1, 7):
        x = programs.numbers(count, 6)
        np.testing.assert_allclose(call(x), f(jnp.asarray(x)), rtol=1e-5, atol=1e-6)


def test_too_many_programs_are_refused_with_the_reason(tmp_path):
    with pytest.raises(UnsupportedOp) as raised:
        library(lambda x: x - x.mean(0), rows(6, most=4096), folder=tmp_path)
    message = str(raised.value)
    assert "would hold 4096 programs" in message
    assert "rows of `b` cannot be computed apart" in message
    assert not list(tmp_path.iterdir())


def test_sizes_of_other_dimensions(tmp_path):
    """Batches in parts, and a program for each length of the sequence."""
    b, s = export.symbolic_shape("b, s", constraints=["b <= 4", "s <= 3"])

    def f(x):
        return jax.nn.softmax(x @ x.mT, axis=-1) @ x

    call = library(f, jax.ShapeDtypeStruct((b, s, 6), jnp.float32), folder=tmp_path).load()
    for batch in range(1, 5):
        for length in range(1, 4):
            x = programs.numbers(batch, length, 6)
            np.testing.assert_allclose(call(x), f(x), rtol=2e-5, atol=1e-5)


def test_a_donated_argument(tmp_path):
    """Computed once for each size: a part that is computed twice would be updated twice."""
    made = library(lambda x: x + 1, rows(6, most=4), folder=tmp_path, donate_argnums=0)
    x = programs.numbers(3, 6)
    np.testing.assert_array_equal(made.load()(x, out=x.copy()), x + 1)


# --- mistakes


def test_sizes_out_of_range_are_refused(tmp_path):
    made = library(layer, rows(6, most=8), folder=tmp_path)
    call = made.load()
    with pytest.raises(KernelError, match="is not made for this size") as raised:
        call(programs.numbers(9, 6))
    assert "b is 9" in str(raised.value)
    pointer = ctypes.c_void_p(programs.numbers(9, 6).ctypes.data)
    for size in (0, -1, 9, 1 << 40):
        assert call._library.f_try(pointer, pointer, ctypes.c_int64(size)) == 7
    assert "F_UNSUITABLE_SIZE 7" in made.header


def test_sizes_that_disagree_are_refused(tmp_path):
    (b,) = export.symbolic_shape("b", constraints=["b <= 8"])
    types = [jax.ShapeDtypeStruct((b, 2), jnp.float32)] * 2
    call = library(lambda x, y: x + y, *types, folder=tmp_path).load()
    with pytest.raises(KernelError, match="`y` has another type") as raised:
        call(programs.numbers(3, 2), programs.numbers(4, 2))
    assert "it is float32[3, 2] for b = 3" in str(raised.value)
    assert "agree on their sizes" in str(raised.value)


def test_a_maximum_is_asked_for(tmp_path):
    (b,) = export.symbolic_shape("b")
    with pytest.raises(OptionError, match="size `b` has no maximum"):
        library(layer, jax.ShapeDtypeStruct((b, 6), jnp.float32), folder=tmp_path)
    module = torch.nn.Linear(6, 5).eval()
    dynamic = {"input": {0: torch.export.Dim("b")}}
    program = torch.export.export(module, (torch.rand(3, 6),), dynamic_shapes=dynamic)
    with pytest.raises(UnsupportedOp, match="has no maximum"):
        pbkern.polyblocks_aot_torch(program, output=tmp_path)()


def test_kernels_and_calls_want_numbers(tmp_path):
    @pbkern.kernel(grid=(2,), out_shape=jax.ShapeDtypeStruct((16,), jnp.float32))
    def twice(x, out):
        out[...] = x[...] * 2

    with pytest.raises(
        UnsupportedOp, match="kernel `twice` is compiled for sizes that are numbers"
    ):
        pbkern.polyblocks_aot_jax(twice, output=tmp_path)(rows())
    with pytest.raises(UnsupportedOp, match="an argument is float32\\[b,6\\]"):
        pbkern.jit(layer).explain(rows(6))


def test_a_function_that_calls_a_kernel(tmp_path):
    def scaled(x):
        @pbkern.kernel(
            grid=(x.shape[0],),
            in_specs=[pbkern.BlockSpec((1, 6), lambda i: (i, 0))],
            out_specs=[pbkern.BlockSpec((1, 6), lambda i: (i, 0))],
            out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32),
        )
        def kernel(x, out):
            out[...] = x[...] * 3

        return kernel(x)

    call = library(scaled, rows(6, most=5), folder=tmp_path).load()
    for count in (1, 3, 5):
        x = programs.numbers(count, 6)
        np.testing.assert_array_equal(call(x), x * 3)


def test_dimensions_that_are_no_sums_of_sizes():
    symbols = [SizeSymbol("n", 1, 5)]
    assert linear_dimensions("x", lambda at: (2 * at["n"] + 1, 4), symbols)[0].const == 1
    with pytest.raises(UnsupportedOp, match="no sum of multiples"):
        linear_dimensions("x", lambda at: (at["n"] ** 2,), symbols)


CPP = """
#include "f.hpp"
#include <vector>
int main() {
  std::vector<float> x(7 * 6, 1.f), y(7 * 5);
  if (pbkern::f(x, y, 7) != F_OK) return 1;
  if (y[34] <= 0.f || y[34] >= 1.f) return 2;
  if (pbkern::f(x, y, 6) != F_UNSUITABLE_SIZE) return 3;
  return pbkern::f(x, y, 21) == F_UNSUITABLE_SIZE ? 0 : 4;
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_spans_of_cpp_have_the_sizes_that_the_caller_says(tmp_path):
    options = {"aot_name": "f", "openmp": False}
    compiled = pbkern.polyblocks_aot_jax(
        layer, compile_options=options, output=tmp_path, emit=["obj", "header", "cpp"]
    )
    compiled(rows(6))
    (tmp_path / "main.cpp").write_text(CPP)
    command = ["g++", "-std=c++20", "-o", "main", "main.cpp", "f.o"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=100)
    assert subprocess.run(["./main"], cwd=tmp_path, timeout=100).returncode == 0


# --- which rows reach a result


def verdict(f, shape):
    """Why rows of f(x) depend on each other, or ""."""

    def at(count):
        x = jax.ShapeDtypeStruct((count, *shape), jnp.float32)
        return TracedForSizes(jax.make_jaxpr(f)(x), ())

    return why_rows_depend(at(FEWER), at(MORE), [1], [1])


def convolved(x):
    image = x.reshape(-1, 4, 6, 1)
    kernel = jnp.ones((3, 3, 1, 2))
    y = lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))  # fmt: skip
    return lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


APART = {
    "attention with heads between": lambda x: jnp.transpose(
        jnp.transpose(x.reshape(-1, 4, 6), (1, 0, 2)).reshape(4, -1, 2, 3), (1, 0, 2, 3)
    ).reshape(-1, 24),
    "rows merged with another dimension": lambda x: (x.reshape(-1, 6) @ W).reshape(-1, 4, 5),
    "merged behind another dimension": lambda x: (
        jnp.swapaxes(x.reshape(-1, 4, 6), 0, 1).reshape(-1, 6) @ W
    ).reshape(4, -1, 5).swapaxes(0, 1),
    "convolution and pooling": convolved,
    "a look-up": lambda x: jnp.asarray(W)[jnp.clip(x[:, 0].astype(int), 0, 5)],
    "a loop": lambda x: lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c), x),
    "a scan along another dimension": lambda x: lax.scan(
        lambda c, column: (c + column, c * column), jnp.zeros_like(x[:, 0]), x.T
    )[0],
    "sorted columns": lambda x: jnp.sort(x, axis=1)[:, :3],
    "top of columns": lambda x: lax.top_k(x, 2)[0],
    "a branch that all rows take": lambda x: lax.cond(jnp.asarray(W).sum() > 0, jnp.sin, jnp.cos, x),
    "one column at a place": lambda x: lax.dynamic_slice_in_dim(x, 2, 3, axis=1),
    "taken along columns": lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=1), axis=1),
}  # fmt: skip
TOGETHER = {
    "sorted rows": lambda x: jnp.sort(x, axis=0),
    "a look-up in rows": lambda x: x[jnp.clip(x[:, 0].astype(int), 0, 2)],
    "a loop that one row ends": lambda x: lax.while_loop(
        lambda c: (c < 1).any(), lambda c: c + 1, x
    ),
    "a branch that a row takes": lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "a product of rows": lambda x: x @ (x.T @ x),
    "rows in another order": lambda x: x[::-1],
    "reshaped across rows": lambda x: x.reshape(6 * 4, -1).T.reshape(-1, 24),
    "random numbers": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
    "one row for all": lambda x: x + x[0],
    "a result without rows of its own": lambda x: jnp.broadcast_to(x.sum(), x.shape),
    "statistics of a batch": lambda x: (x - x.mean(0)) / x.std(0),
}


@pytest.mark.parametrize("name", APART)
def test_rows_that_are_apart(name):
    assert verdict(APART[name], (24,)) == ""


@pytest.mark.parametrize("name", TOGETHER)
def test_rows_that_are_together(name):
    assert verdict(TOGETHER[name], (24,)) != ""


TABLE = programs.numbers(64, 24)
# Functions that are the same for two sizes, or whose rows are nothing of an argument's.
SIZED = {
    "a table cut to the batch": lambda x, p: x + p[: x.shape[0]],
    "the end of a table": lambda x, p: x + lax.slice_in_dim(p, 64 - x.shape[0], 64),
    "a part by a value": lambda x, p: x + lax.dynamic_slice_in_dim(p, 0, x.shape[0]),
    "a running count": lambda x, p: x + jnp.cumsum(jnp.ones(x.shape), 0),
    "a count": lambda x, p: x / jnp.ones((x.shape[0], 1)).sum(),
    "a count beside each row": lambda x, p: (
        x * (x[:, :1] * jnp.ones((x.shape[0], x.shape[0]))).sum(1, keepdims=True)
    ),
    "a first row that is another": lambda x, p: (
        x + jnp.concatenate([jnp.ones((1, 1)), jnp.zeros((x.shape[0] - 1, 1))])
    ),
    "padded to the size": lambda x, p: (
        x + jnp.pad(jnp.zeros((1, 24)), ((0, x.shape[0] - 1), (0, 0)), constant_values=3.0)
    ),
    "steps for rows": lambda x, p: (
        x + lax.scan(lambda c, _: (c + 1, c), 0.0, jnp.ones(x.shape[0]))[1][:, None]
    ),
    "windows over rows": lambda x, p: (
        x + lax.reduce_window(jnp.ones((x.shape[0], 1)), 0.0, lax.add, (2, 1), (1, 1), "SAME")
    ),
    "repeated rows, counted": lambda x, p: x + jnp.repeat(p[:1], x.shape[0], 0).cumsum(0),
    "an eighth of the size": lambda x, p: x + jnp.ones((x.shape[0] // 8, 1)).sum(),
    "rounds of a loop": lambda x, p: lax.fori_loop(0, x.shape[0] // 6, lambda _, c: c + 1, x),
    "at least six": lambda x, p: x * jnp.ones((jax.core.max_dim(x.shape[0], 6),)).sum(),
    "at most three": lambda x, p: x * jnp.ones((jax.core.min_dim(x.shape[0], 3),)).sum(),
    "another function for eleven": lambda x, p: x - x.mean(0) if x.shape[0] == 11 else x,
    "a triangle": lambda x, p: jnp.tri(x.shape[0]) @ x,
}
UNSIZED = {
    "ones for each row": lambda x, p: x * jnp.ones(x.shape) + jnp.ones((x.shape[0], 1)),
    "a repeated row": lambda x, p: x + jnp.tile(p[:1], (x.shape[0], 1)),
    "a token before the row": lambda x, p: jnp.concatenate(
        [jnp.broadcast_to(p[:1, None], (x.shape[0], 1, 24)), x[:, None]], 1
    ),
    "a matrix for each row": lambda x, p: jnp.einsum(
        "bi,bij->bj", x, jnp.broadcast_to(p[:24, :3], (x.shape[0], 24, 3))
    ),
    "a carry of zeros": lambda x, p: lax.fori_loop(0, 3, lambda _, c: c + x, jnp.zeros_like(x)),
    "a product of scalars": lambda x, p: x / (p[0] @ p[0]),
    "vmapped": lambda x, p: jax.vmap(lambda row: p[:5] @ row + jnp.cumsum(row)[:5])(x),
}


def rows_of_division(function):
    """The symbol whose rows a library would compute in parts, of f32[b, 24] with b <= 11 and a table."""
    found = []

    def divide_only(asked, options, of_sizes, *rest):
        found.append(divide(of_sizes, is_donated=False).division.rows)
        raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "build_library", divide_only)
        with pytest.raises(Stopped):
            pbkern.polyblocks_aot_jax(function)(rows(24, most=11), TABLE)
    return found[0]


class Stopped(Exception):
    pass


@pytest.mark.parametrize("name", SIZED)
def test_what_depends_on_the_size_is_not_computed_in_parts(name):
    assert rows_of_division(SIZED[name]) is None


@pytest.mark.parametrize("name", UNSIZED)
def test_arrays_made_for_each_row_are_parts_of_it(name):
    assert rows_of_division(UNSIZED[name]) == "b"


class Positions(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.table = kind, torch.nn.Parameter(torch.randn(64, 6))

    def forward(self, x):
        if self.kind == "table":
            return x + self.table[: x.shape[0]]
        if self.kind == "count":
            return x / torch.ones_like(x[:, :1]).sum()
        if self.kind == "third":
            return x + torch.ones(x.shape[0] // 3 + 5).sum()
        return x + torch.ones_like(x).cumsum(0)


@pytest.mark.parametrize("kind", ["table", "count", "running count", "third"])
def test_modules_whose_rows_depend_on_the_size(tmp_path, kind):
    torch.manual_seed(0)
    module = Positions(kind).eval()
    program = torch.export.export(
        module, (torch.rand(3, 6),), dynamic_shapes={"x": {0: torch.export.Dim("b", max=9)}}
    )
    options = {"aot_name": "f", "weights": "embed" if kind == "table" else "arguments"}
    call = pbkern.polyblocks_aot_torch(program, compile_options=options, output=tmp_path)().load()
    for count in (2, 3, 7, 9):
        x = torch.randn(count, 6)
        np.testing.assert_allclose(call(x.numpy()), module(x).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["embedding", "index", "compare"])
def test_indices_of_64_bits(tmp_path, kind):
    torch.manual_seed(0)

    class Index(torch.nn.Module):
        def forward(self, x, i):
            return x[i]

    class Compare(torch.nn.Module):
        def forward(self, i):
            return (i < 3).float() + i * 2

    indices = lambda count: torch.arange(5 * count).reshape(count, 5) % 11
    size, table = {0: torch.export.Dim("b", min=1, max=8)}, torch.rand(11, 4)
    module, first, sizes = {
        "embedding": (torch.nn.Embedding(11, 4), (), (size,)),
        "index": (Index(), (table,), (None, size)),
        "compare": (Compare(), (), (size,)),
    }[kind]
    program = torch.export.export(module.eval(), (*first, indices(3)), dynamic_shapes=sizes)
    options = {"aot_name": "f", "weights": "embed" if kind == "embedding" else "arguments"}
    call = pbkern.polyblocks_aot_torch(program, compile_options=options, output=tmp_path)().load()
    for count in (1, 2, 7):
        given = [x.numpy() for x in (*first, indices(count))]
        np.testing.assert_array_equal(call(*given), module(*first, indices(count)).detach())


STEPS = {
    "tanh": jnp.tanh,
    "sum of columns": lambda x: x + x.sum(1, keepdims=True),
    "sum of rows": lambda x: x + x.sum(0, keepdims=True),
    "flip columns": lambda x: x[:, ::-1],
    "flip rows": lambda x: x[::-1],
    "running sum of columns": lambda x: jnp.cumsum(x, axis=1),
    "running sum of rows": lambda x: jnp.cumsum(x, axis=0),
    "product": lambda x: x @ jnp.asarray(W[:, :1] @ W[:, :1].T),
    "merge": lambda x: (x.reshape(-1, 3) * 2).reshape(x.shape),
    "turn twice": lambda x: (x.T * 3).T,
    "turn across": lambda x: x.T.reshape(x.shape),
    "places": lambda x: x + jnp.arange(x.shape[0])[:, None],
    "columns' places": lambda x: x + jnp.arange(x.shape[1]),
}


@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4), st.integers(2, 6))
@settings(max_examples=25, deadline=None)
def test_functions_that_are_apart_give_rows_alone_what_they_give_together(steps, count):
    """The independent reference: each row computed alone by JAX."""

    def f(x):
        for step in steps:
            x = STEPS[step](x)
        return x

    x = np.random.default_rng(0).standard_normal((count, 6)).astype(np.float32)
    together, alone = f(jnp.asarray(x)), jnp.concatenate([f(row[None]) for row in jnp.asarray(x)])
    if verdict(f, (6,)) == "":
        np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-4)
    if not np.allclose(together, alone, rtol=1e-3, atol=1e-3):
        assert verdict(f, (6,)) != ""


def test_programs_of_rows_and_of_sizes():
    symbols = [SizeSymbol("b", 1, 7), SizeSymbol("s", 2, 3)]
    programs_of = divided(symbols, "b", "").programs
    assert [p["b"] for p in programs_of] == [4, 4, 2, 2, 1, 1]
    assert {p["s"] for p in programs_of} == {2, 3}


# --- from PyTorch, C and the shell


def exported(module, *shape, most):
    dynamic = ({0: torch.export.Dim("batch", min=1, max=most)},)
    return torch.export.export(module, (torch.rand(2, *shape),), dynamic_shapes=dynamic)


def encoder():
    torch.manual_seed(0)
    kind = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    return torch.nn.TransformerEncoder(kind, 2, enable_nested_tensor=False).eval()


def perceptron():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 8), torch.nn.GELU(), torch.nn.Linear(8, 16)
    ).eval()


CALLER = """
#include <stdio.h>
#include <stdlib.h>
#include "encoder.h"
int main(int count, char **words) {
  LOAD
  FILE *f = fopen(words[1], "rb");
  for (int k = 2; k < count; k++) {
    int64_t batch = atoi(words[k]);
    size_t size = 5 * 16 * batch;
    float *x = malloc(4 * size), *y = malloc(4 * size);
    if (fread(x, 4, size, f) != size) return 2;
    int code = encoder_try(x, y, batch);
    if (code) { fprintf(stderr, "%s\\n", encoder_message(code)); return 3; }
    fwrite(y, 4, size, stdout);
    free(x); free(y);
  }
  fclose(f);
  float one = 0;
  if (encoder_try(&one, &one, 65) != ENCODER_UNSUITABLE_SIZE) return 4;
  UNLOAD
  return 0;
}
"""


@needs_gcc
@pytest.mark.parametrize(("make", "place"), [(encoder, "embed"), (perceptron, "file")])
def test_a_module_with_a_dynamic_batch_from_c(tmp_path, make, place):
    module = make()
    program = exported(module, 5, 16, most=64)
    options = {"aot_name": "encoder", "weights": place, "openmp": False}
    pbkern.polyblocks_aot_torch(program, compile_options=options, output=tmp_path)()
    load = 'if (encoder_load("encoder.weights")) return 1;' if place == "file" else ""
    text = CALLER.replace("UNLOAD", "encoder_unload();" if load else "").replace("LOAD", load)
    (tmp_path / "caller.c").write_text(text)
    command = ["gcc", "-O1", "-g", "-o", "caller", "caller.c", "encoder.o"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=100)
    batches = (1, 7, 64)
    inputs = [torch.randn(batch, 5, 16) for batch in batches]
    (tmp_path / "x").write_bytes(b"".join(x.numpy().tobytes() for x in inputs))
    run = ["./caller", "x", *map(str, batches)]
    if shutil.which("valgrind"):
        run = ["valgrind", "-q", "--error-exitcode=9", "--leak-check=full", *run]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    got = np.frombuffer(done.stdout, np.float32)
    with torch.no_grad():
        want = np.concatenate([module(x).numpy().ravel() for x in inputs])
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


def test_from_the_shell(tmp_path, capsys):
    model = tmp_path / "model.py"
    model.write_text("import jax.numpy as jnp\ndef f(x):\n    return jnp.exp(x).sum(-1)\n")
    given = [f"{model}:f", "--args", "f32[B,8]", "-D"]
    out = ["-o", str(tmp_path / "f.o"), "--emit", "obj,metadata"]
    assert main(["compile", *given, "B=1..5", *out]) == 0
    (metadata,) = tmp_path.glob("*.json")
    assert json.loads(metadata.read_text())["sizes"] == [{"name": "B", "low": 1, "high": 5}]
    capsys.readouterr()
    for command, size, message in (
        ("compile", "B=5..1", "a size is not understood"),
        ("compile", "B=1..", "or -D B=1..64"),
        ("explain", "B=1..5", "a range of sizes is for `pbkern compile`"),
    ):
        assert main([command, *given, size]) == 2
        assert message in capsys.readouterr().err


def test_an_exported_program_from_the_shell(tmp_path, capsys):
    torch.export.save(exported(perceptron(), 5, 16, most=4), tmp_path / "net.pt2")
    assert main(["compile", str(tmp_path / "net.pt2"), "-o", str(tmp_path / "e.o")]) == 0
    assert "net takes the size `input_dim0`, 1 to 4" in capsys.readouterr().err
    assert "input_dim0 is a size, from 1 to 4." in (tmp_path / "e.h").read_text()
