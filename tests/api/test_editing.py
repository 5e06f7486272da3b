"""Kernels of functions as source: named block sizes, ejected modules, edited kernels back in the function."""

import os
import pathlib
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import pbkern
from benchmarks.workloads import WORKLOADS
from pbkern.api.measured.measure import agree
from pbkern.cli import demo
from pbkern.cli.main import main
from pbkern.core.errors import ArgumentError, KernelError, PbkernError, UnsupportedOp
from pbkern.dsl.printer import same_kernel

CONSTANT = re.compile(r"^([A-Z_0-9]+) = (\d+)  # .*$", re.M)
# One of each kind of kernel: the other workloads are slow cases.
SAMPLE = ("matmul_1024", "attention_1024_causal", "elementwise", "gradient_descent", "blur")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in WORKLOADS if name not in SAMPLE]


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype("f"))


def module_of(text):
    module = types.ModuleType("ejected")
    exec(compile(text, "<ejected>", "exec"), vars(module))
    return module


def assert_same(got, want):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    assert all(map(agree, got, want))


@pbkern.jit
def layer(params, x):
    return jnp.tanh(x @ params["w"] + params["b"])


PARAMS, X = {"w": array(64, 48), "b": array(48, seed=1)}, array(300, 64, seed=2)


def expected(params, x):
    x, w, b = (np.asarray(a, np.float64) for a in (x, params["w"], params["b"]))
    return np.tanh(x @ w + b)


# --- source ---------------------------------------------------------------------------------------------------------


def test_block_sizes_are_constants_and_operands_have_the_functions_names():
    (kernel,) = layer.kernels(PARAMS, X)
    text = kernel.source()
    (rows,) = [name for name, _ in CONSTANT.findall(text) if name == "ROWS"]
    size = kernel.outputs[0].ref_shape[0]
    assert 1 < size < 300
    assert re.findall(rf"\b{size}\b", text) == [str(size)]  # the constant alone
    assert text.count(rows) > 3
    assert "ROWS_GRID = pbkern.cdiv(300, ROWS)" in text
    assert "(params_b, params_w, x, out0):" in text


@pytest.mark.parametrize("rows", [1, 7, 64, 299, 300])
def test_another_size_in_the_text_is_another_kernel_that_is_right(rows):
    (kernel,) = layer.kernels(PARAMS, X)
    edited = pbkern.rebuild(re.sub(r"^ROWS = \d+", f"ROWS = {rows}", kernel.source(), flags=re.M))
    assert edited.grid == (-(-300 // rows),)
    operands = PARAMS["b"], PARAMS["w"], X
    want = expected(PARAMS, X)
    np.testing.assert_allclose(edited(*operands), want, atol=1e-5)
    np.testing.assert_allclose(jax.jit(edited)(*operands), want, atol=1e-5)
    inside = pbkern.jit(lambda params, x: 2 * edited(params["b"], params["w"], x))
    np.testing.assert_allclose(inside(PARAMS, X), 2 * want, atol=2e-5)


def test_sizes_with_halos_follow_from_the_constant():
    def sums(x):
        return x[:-4, 1:-1] + x[4:, 2:] * x[2:-2, :-2]

    x = array(515, 514)
    (kernel,) = pbkern.jit(sums).kernels(x)
    text = kernel.source()
    assert same_kernel(pbkern.rebuild(text), kernel)
    assert "pbkern.Element(ROWS + 4" in text
    edited = pbkern.rebuild(re.sub(r"^ROWS = \d+", "ROWS = 19", text, flags=re.M))
    np.testing.assert_allclose(edited(x), sums(np.asarray(x)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SAMPLE + tuple(SLOW))
def test_texts_with_constants_rebuild_the_kernels(name):
    workload = WORKLOADS[name]
    args = [
        jax.ShapeDtypeStruct(spec.shape, np.int32 if spec.high else spec.dtype)
        for spec in workload.full
    ]
    for kernel in pbkern.jit(workload.function).kernels(*args):
        assert same_kernel(pbkern.rebuild(kernel.source()), kernel)


@pytest.mark.parametrize(
    ("parameters", "printed"),
    [
        ("in_, lambda_", "in_, lambda_"),
        ("_in, None_", "_in, None_"),
        ("ROWS, ROWS_GRID", "ROWS_, ROWS_GRID_"),
        ("jnp, lax", "jnp_, lax_"),
        ("slice, sum", "slice_, sum_"),
        ("_, out0", "__, out0"),
        ("λ, match", "λ, match"),
    ],
)
def test_names_of_operands_hide_nothing_that_the_source_uses(parameters, printed):
    first, second = parameters.split(", ")
    body = f"lambda {parameters}: sin({first}[::-1]) * {second}"
    f, a, b = pbkern.jit(eval(body, {"sin": jnp.sin})), array(1003, 257), array(1003, 257, seed=1)
    (kernel,) = f.kernels(a, b)
    text = kernel.source()
    assert re.search(rf"^def \w+\({re.escape(printed)}, out0_?\):$", text, re.M)
    assert re.search(r"^ROWS = \d+", text, re.M)
    assert same_kernel(pbkern.rebuild(text), kernel)
    want = np.sin(np.asarray(a, np.float64)[::-1]) * np.asarray(b, np.float64)
    np.testing.assert_allclose(pbkern.rebuild(text, ROWS=5)(a, b), want, atol=1e-5)
    module = module_of(pbkern.eject(f, a, b))
    np.testing.assert_allclose(module.kernel_lambda(a, b), want, atol=1e-5)
    np.testing.assert_allclose(pbkern.adopt(f, module)(a, b), want, atol=1e-5)


def test_keys_that_become_one_name_are_told_apart():
    f = pbkern.jit(lambda p: p["a b"] + 2 * p["a_b"] + 3 * p["in"] + 4 * p["²"] + 5 * p["1"])
    tree = {key: array(30, 20, seed=n) for n, key in enumerate(("a b", "a_b", "in", "²", "1"))}
    (kernel,) = f.kernels(tree)
    text = kernel.source()
    assert "(p_1, p_a_b, p_a_b_, p_in, p_2, out0):" in text
    assert same_kernel(pbkern.rebuild(text), kernel)
    want = sum((n + 1) * np.asarray(x, np.float64) for n, x in enumerate(tree.values()))
    np.testing.assert_allclose(pbkern.rebuild(text)(*jax.tree.leaves(tree)), want, atol=1e-5)


@pytest.mark.parametrize("name", ["slice", "np", "example_args", "in_", "_", "f²", "lambda"])
def test_functions_and_kernels_of_any_name_are_printed(name):
    def called(x, **named):
        return jnp.tanh(x) * 2 + named["in"] - named["lax"] * named["a.b"] + named["y"]

    called.__name__ = name
    f, x = pbkern.jit(called), array(300, 40)
    named = {key: array(300, 40, seed=n) for n, key in enumerate(("in", "lax", "a.b", "y"), 1)}
    a, b, c, d = (np.asarray(value, np.float64) for value in named.values())
    want = np.tanh(np.asarray(x, np.float64)) * 2 + a - b * c + d
    (kernel,) = f.kernels(x, **named)
    assert same_kernel(pbkern.rebuild(kernel.source()), kernel)
    text = pbkern.eject(f, x, **named)
    function = re.findall(r"^def (\w+)\(x, \*, y, \*\*others\):$", text, re.M)[0]
    np.testing.assert_allclose(vars(module_of(text))[function](x, **named), want, atol=1e-5)
    exec(compile(text, "<ejected>", "exec"), {"__name__": "__main__"})


def test_kernels_by_hand_whose_names_mean_something_are_printed():
    @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((8,), "float32"), name="slice")
    def copied(slice, max):
        max[...] = jnp.exp(pbkern.load(slice, (pbkern.ds(0, 8),), mask=jnp.arange(8) < 5, other=0))

    x = array(16)
    kernel = copied.trace(x)
    rebuilt = pbkern.rebuild(kernel.source())
    assert same_kernel(rebuilt, kernel)
    want = np.exp(np.where(np.arange(8) < 5, np.asarray(x[:8], np.float64), 0))
    np.testing.assert_allclose(rebuilt(x), want, atol=1e-5)


# --- modules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLE + tuple(SLOW))
def test_ejected_modules_compute_the_same_and_take_other_sizes(name):
    workload, rng = WORKLOADS[name], np.random.default_rng(0)
    check_ejection(pbkern.jit(workload.function), [spec.draw(rng) for spec in workload.small])


def check_ejection(f, args):
    text = pbkern.eject(f, *args)
    want = f(*args)
    function = module_of(text)
    assert_same(vars(function)[f.__name__](*args), want)
    edited = CONSTANT.sub(
        lambda line: line[0].replace(f"= {line[2]} ", f"= {max(int(line[2]) // 2, 1)} "), text
    )
    assert_same(pbkern.adopt(f, module_of(edited), *args)(*args), want)


DEMOS = {
    "blur": (demo.blur_x_blur_y, (array(3, 60, 80),)),
    "unsharp mask": (demo.unsharp_mask, (array(60, 80, 3),)),
    "corners": (demo.harris_corners, (array(60, 80),)),
    "transformer": (
        demo.transformer_block,
        (demo.transformer_parameters(jax.random.key(0), 64), array(48, 64)),
    ),
}


@pytest.mark.parametrize("name", DEMOS)
def test_functions_of_the_demo_are_ejected_and_take_other_sizes(name):
    function, args = DEMOS[name]
    check_ejection(pbkern.jit(function), args)


def test_a_module_runs_alone_with_jax_and_numpy(tmp_path):
    path = tmp_path / "kernels.py"
    pbkern.eject(layer, PARAMS, X, path=path)
    imported = re.findall(r"^(?:import|from) (\w+)", path.read_text(), re.M)
    assert set(imported) == {"jax", "numpy", "pbkern"}
    np.savez(tmp_path / "arrays.npz", x=X, **PARAMS)
    script = (
        "import numpy as np, kernels\n"
        "arrays = dict(np.load('arrays.npz'))\n"
        "x = arrays.pop('x')\n"
        "np.save('result.npy', kernels.layer(arrays, x))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), str(tmp_path)])}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True)
    np.testing.assert_allclose(np.load(tmp_path / "result.npy"), expected(PARAMS, X), atol=1e-5)


@pytest.mark.parametrize(
    ("f", "args"),
    [
        (lambda x: jax.lax.fori_loop(0, 5, lambda i, a: jnp.tanh(a) + i, x), (array(70, 80),)),
        (lambda x: jax.lax.scan(lambda c, r: (c + r, jnp.sin(c)), x[0], x), (array(9, 400),)),
        (
            lambda x: jax.lax.while_loop(lambda a: a.sum() < 90, lambda a: a * 1.5 + 1, x),
            (array(8, 8),),
        ),
        (lambda i, x: jax.lax.cond(i > 0, jnp.sin, jnp.cos, x), (jnp.int32(1), array(60, 60))),
        (lambda x: (x, [jnp.fft.fft(x).real, None], {"twice": 2 * x}), (array(64),)),
        (lambda x: x * (1 + 2j), (array(300),)),
        (lambda key, x: x + jax.random.normal(key, x.shape), (jax.random.PRNGKey(3), array(64, 9))),
        (lambda x, *, scale: x * scale, (array(64),)),
        (lambda *xs: xs[0] @ xs[1], (array(64, 32), array(32, 16))),
        (lambda x: x + np.arange(48, dtype="f"), (array(30, 48),)),
    ],
    ids=[
        "fori",
        "scan",
        "while",
        "cond",
        "pytree",
        "complex",
        "random",
        "named",
        "starred",
        "closed",
    ],
)
def test_control_flow_and_what_xla_keeps_are_written_too(f, args):
    def ejected(*args, **named):
        return f(*args, **named)

    named = {"scale": jnp.float32(3)} if "scale" in f.__code__.co_varnames else {}
    function = pbkern.jit(f)
    text = pbkern.eject(function, *args, **named)
    (name,) = [
        name
        for name, value in vars(module_of(text)).items()
        if isinstance(value, types.FunctionType) and name != "drawn"
    ]
    assert_same(vars(module_of(text))[name](*args, **named), f(*args, **named))


def test_pallas_calls_are_kernels_of_the_module():
    def doubled(x, o):
        o[...] = 2 * x[...]

    spec = pl.BlockSpec((16, 32), lambda i: (i, 0))
    call = pl.pallas_call(
        doubled,
        grid=(4,),
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct((64, 32), "float32"),
    )
    x = array(64, 32)
    with pbkern.pallas.installed():
        f = pbkern.jit(lambda x: jnp.exp(call(x)))
        text = pbkern.eject(f, x)
        assert "def doubled(" in text
        assert "pallas" not in text
        want = np.exp(2 * np.asarray(x))
        np.testing.assert_allclose(f(x), want, rtol=1e-5)
    function = next(
        value
        for name, value in vars(module_of(text)).items()
        if isinstance(value, types.FunctionType) and "lambda" in name
    )
    np.testing.assert_allclose(function(x), want, rtol=1e-5)


def test_what_cannot_be_written_is_said():
    with pytest.raises(ArgumentError, match="decorated function"):
        pbkern.eject(lambda x: x, X)
    keyed = pbkern.jit(lambda key, x: x + jax.random.normal(key, x.shape))
    with pytest.raises(ArgumentError, match="typed random keys"):
        pbkern.eject(keyed, jax.random.key(0), X)
    large = np.arange(1 << 19)
    with pytest.raises(ArgumentError, match="too large"):
        pbkern.eject(pbkern.jit(lambda x: x + large.astype("f")), jnp.ones(1 << 19))

    @jax.tree_util.register_dataclass
    @__import__("dataclasses").dataclass
    class Pair:
        left: jax.Array

    with pytest.raises(ArgumentError, match="Pair"):
        pbkern.eject(pbkern.jit(lambda x: Pair(x * 2)), X)


# --- adopted kernels ------------------------------------------------------------------------------------------------


def edited_kernel(old="", new="", f=layer, args=(PARAMS, X)):
    (kernel,) = f.kernels(*args)
    assert old in kernel.source()
    return kernel.name, pbkern.rebuild(kernel.source().replace(old, new))


def test_adopted_kernels_are_called_and_keep_derivatives():
    name, kernel = edited_kernel("lax.tanh(", "1e-6 + lax.tanh(")
    adopted = layer.with_kernels({name: kernel})
    assert (adopted(PARAMS, X) != layer(PARAMS, X)).any()  # by less than the tolerance
    np.testing.assert_allclose(adopted(PARAMS, X), expected(PARAMS, X), atol=1e-5)
    assert [k.grid for k in adopted.kernels(PARAMS, X)] == [kernel.grid]

    def gradient(f):
        return jax.grad(lambda params, x: (f(params, x) ** 2).sum())(PARAMS, X)

    plain = gradient(lambda params, x: jnp.tanh(x @ params["w"] + params["b"]))
    for got, want in zip(jax.tree.leaves(gradient(adopted)), jax.tree.leaves(plain)):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
    batched = jax.vmap(adopted, (None, 0))(PARAMS, jnp.stack([X, 2 * X]))
    np.testing.assert_allclose(batched[1], expected(PARAMS, 2 * X), atol=1e-5)


def test_kernels_of_loops_static_and_donated_arguments_and_wide_types_are_adopted():
    looped = pbkern.jit(
        lambda x: jax.lax.fori_loop(0, 50, lambda i, a: jnp.tanh(a @ a.T) @ a * 0.01 + i, x)
    )
    x = array(96, 96)
    adopted = pbkern.adopt(looped, module_of(pbkern.eject(looped, x)), x)
    np.testing.assert_allclose(adopted(x), looped(x), rtol=1e-4)
    assert len(looped.kernels(x)) > 1

    scaled = pbkern.jit(lambda x, n: x * n + 1, static_argnums=1, donate_argnums=0)
    adopted = pbkern.adopt(scaled, module_of(pbkern.eject(scaled, x, 3)), x, 3)
    np.testing.assert_allclose(
        adopted(jnp.array(x), 3), np.asarray(x) * 3 + 1, rtol=1e-5, atol=1e-6
    )

    with jax.enable_x64(True):
        wide = pbkern.jit(lambda x: jnp.cumsum(x * 2, 0))
        x = jnp.asarray(np.random.default_rng(0).normal(size=(100, 30)))
        adopted = pbkern.adopt(wide, module_of(pbkern.eject(wide, x)), x)
        np.testing.assert_allclose(adopted(x), np.cumsum(np.asarray(x) * 2, 0), rtol=1e-12)


def test_a_rule_of_an_adopted_kernel_is_its_derivative():
    name, kernel = edited_kernel()

    @jax.custom_vjp
    def with_rule(*operands):
        return kernel(*operands)

    with_rule.defvjp(
        lambda *operands: (kernel(*operands), operands),
        lambda operands, _: tuple(jnp.full_like(x, 7) for x in operands),
    )
    adopted = layer.with_kernels({name: with_rule})
    gradient = jax.grad(lambda params: adopted(params, X).sum())(PARAMS)
    np.testing.assert_array_equal(gradient["b"], 7)

    @pbkern.jit
    def with_rules_of_its_own(params, x):
        return jax.nn.relu(x @ params["w"] + params["b"])

    name, kernel = edited_kernel(f=with_rules_of_its_own)
    adopted = with_rules_of_its_own.with_kernels({name: with_rule})
    with pytest.raises(UnsupportedOp, match="has no derivative"):
        jax.grad(lambda params: adopted(params, X).sum())(PARAMS)
    adopted = with_rules_of_its_own.with_kernels({name: kernel})
    gradient = jax.grad(lambda params: adopted(params, X).sum())(PARAMS)
    active = np.asarray(X @ PARAMS["w"] + PARAMS["b"]) > 0
    np.testing.assert_allclose(gradient["b"], active.sum(0), rtol=1e-5)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("out0[...] = ", "out0[...] = 0.01 + ", r"output 0 at \[0, 0\] is .*, not .* \(tolerance"),
        (
            "300",
            "310",
            "other types",
        ),
    ],
)
def test_wrong_edits_are_refused(old, new, message):
    name, kernel = edited_kernel(old, new)
    with pytest.raises(KernelError, match=message):
        layer.with_kernels({name: kernel})(PARAMS, X)


def test_the_first_difference_is_named():
    f, x = pbkern.jit(lambda x: jnp.exp(x) * 2), array(40, 30)
    (kernel,) = f.kernels(x)

    @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((40, 30), "float32"))
    def wrong_in_one_place(x, o):
        rows, columns = (jax.lax.broadcasted_iota("int32", (40, 30), axis) for axis in (0, 1))
        o[...] = jnp.where((rows == 3) & (columns == 7), -5.0, jnp.exp(x[...]) * 2)

    with pytest.raises(KernelError, match=r"output 0 at \[3, 7\] is -5\.0, not"):
        f.with_kernels({kernel.name: wrong_in_one_place})(x)


def test_names_and_types_that_do_not_fit_are_errors():
    name, kernel = edited_kernel()
    with pytest.raises(KernelError, match="has no kernel `layer`"):
        layer.with_kernels({"layer": kernel})(PARAMS, X)
    with pytest.raises(KernelError, match="other types"):
        layer.with_kernels({name: kernel})(PARAMS, X[:100])
    with pytest.raises(ArgumentError, match="no kernel of `layer`"):
        pbkern.adopt(layer, types.ModuleType("empty"), PARAMS, X)


# --- messages -------------------------------------------------------------------------------------------------------

DOUBLED, WIDE = pbkern.jit(lambda x: jnp.exp(x) * 2 + x), array(1003, 257)


def doubled_text():
    (kernel,) = DOUBLED.kernels(WIDE)
    return kernel.name, kernel.source()


@pytest.mark.parametrize("rows", [np.int64(4), np.array(4), jnp.int32(4), np.uint8(4), 4])
def test_constants_are_integers_of_any_kind(rows):
    _, text = doubled_text()
    assert pbkern.rebuild(text, ROWS=rows).grid == (251,)


@pytest.mark.parametrize(
    ("rows", "what", "why"),
    [
        (0, "cdiv divides by 0", "cdiv(1003, 0)"),
        (np.int64(0), "cdiv divides by 0", "cdiv(1003, 0)"),
        (-8, "a grid has a size", "grid=(-125,)"),
        ("8", "`ROWS` has to be an integer", "ROWS='8' of type str; the source has ROWS = "),
        (None, "`ROWS` has to be an integer", "ROWS=None of type NoneType"),
        ([4], "`ROWS` has to be an integer", "ROWS=[4] of type list"),
        (4.0, "`ROWS` has to be an integer", "ROWS=4.0 of type float"),
        (True, "`ROWS` has to be an integer", "ROWS=True of type bool"),
    ],
)
def test_constants_that_are_no_sizes_are_errors(rows, what, why):
    _, text = doubled_text()
    with pytest.raises(KernelError) as caught:
        pbkern.rebuild(text, ROWS=rows)
    assert what in caught.value.what
    assert caught.value.why.startswith(why)
    assert caught.value.hint


def test_sizes_of_an_edited_text_that_are_none_are_errors_at_its_line():
    _, text = doubled_text()
    for rows, what in (("0", "cdiv divides by 0"), ("'8'", "cdiv takes integers")):
        with pytest.raises(KernelError, match=what) as caught:
            pbkern.rebuild(re.sub(r"^ROWS = \d+", f"ROWS = {rows}", text, flags=re.M))
        line = next(n for n, row in enumerate(text.splitlines(), 1) if "cdiv" in row)
        assert caught.value.at.startswith("<pbkern kernel ")
        assert f">:{line}:" in caught.value.at


def test_traced_constants_are_errors_and_others_than_integers_are_written():
    _, text = doubled_text()
    with pytest.raises(KernelError, match="`ROWS` has to be an integer"):
        jax.jit(lambda rows: pbkern.rebuild(text, ROWS=rows)(WIDE))(4)
    scaled = "SCALE = 0.5\n" + text.replace("out0[...] = ", "out0[...] = SCALE * ")
    want = (np.exp(np.asarray(WIDE, np.float64)) * 2 + np.asarray(WIDE, np.float64)) * 0.25
    got = pbkern.rebuild(scaled, SCALE=np.float32(0.25))(WIDE)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    with pytest.raises(KernelError, match="`SCALE` cannot be written as source") as caught:
        pbkern.rebuild(scaled, SCALE=np.ones(1000))
    assert len(caught.value.why) < 120


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        (None, "source is no text", "kernel.source()"),
        (3, "source is no text", "kernel.source()"),
        (b"import jax", "source is no text", "read_text()"),
        (pbkern.rebuild, "source is no text", "kernel.source()"),
        ("/tmp/k.py", "not a path", "pbkern.rebuild(pathlib.Path('/tmp/k.py').read_text())"),
        (pathlib.Path("k.py"), "not a path", "pbkern.rebuild(pathlib.Path('k.py').read_text())"),
    ],
)
def test_what_is_no_source_is_an_error(text, what, hint):
    with pytest.raises(ArgumentError) as caught:
        pbkern.rebuild(text)
    assert what in caught.value.what
    assert hint in caught.value.hint
    assert caught.value.why.startswith("given ")
    assert len(caught.value.why) < 80


def test_sources_stand_for_kernels_and_what_is_none_is_an_error():
    name, text = doubled_text()
    np.testing.assert_allclose(DOUBLED.with_kernels({name: text})(WIDE), DOUBLED(WIDE), rtol=1e-6)
    for kernels, what, why in (
        ({3: text}, "a kernel's name is a text", "given 3 of type int"),
        ({name: 3}, f"replace kernel `{name}` is no kernel", "given 3 of type int"),
        ({name: None}, f"replace kernel `{name}` is no kernel", "given None of type NoneType"),
        ({name: "k.py"}, "not a path", "given 'k.py'"),
        (None, "by the names of those that they replace", "given None"),
        ([text], "by the names of those that they replace", "given ["),
    ):
        with pytest.raises(ArgumentError) as caught:
            DOUBLED.with_kernels(kernels)
        assert what in caught.value.what
        assert caught.value.why.startswith(why)
        assert caught.value.hint


def test_what_is_no_module_is_an_error(tmp_path):
    _, text = doubled_text()
    (tmp_path / "kernels.txt").write_text(text)
    for module, what in (
        (None, "from a module, or from the path of its file"),
        (3, "from a module, or from the path of its file"),
        (text, "from a module, or from the path of its file"),
        (tmp_path / "missing.py", "there is no file "),
        ("x" * 5000, "there is no file 'xxx"),
        (tmp_path / "kernels.txt", "no file of Python"),
    ):
        with pytest.raises(ArgumentError) as caught:
            pbkern.adopt(DOUBLED, module, WIDE)
        assert what in caught.value.what
        assert len(str(caught.value)) < 400


# --- the command ----------------------------------------------------------------------------------------------------

FILE = """
import jax
import jax.numpy as jnp
import pbkern

@pbkern.jit
def softmax(x):
    return jax.nn.softmax(x * 2)

example_args = (jax.ShapeDtypeStruct((300, 64), "float32"),)
"""


def test_the_command_ejects_and_adopts(tmp_path, capsys):
    (tmp_path / "functions.py").write_text(FILE)
    function, kernels = f"{tmp_path}/functions.py:softmax", tmp_path / "kernels.py"
    assert main(["eject", function, "-o", str(kernels)]) == 0
    text = kernels.read_text()
    assert main(["eject", function]) == 0
    assert capsys.readouterr().out.strip() == text.strip()
    assert main(["adopt", function, str(kernels)]) == 0
    assert re.search(
        r"accepted: softmax_\w+; .* ms before, .* ms with them", capsys.readouterr().out
    )
    kernels.write_text(text.replace("out0[...] = ", "out0[...] = 1 + "))
    assert main(["adopt", function, str(kernels)]) == 2
    assert "output 0 at [0, 0] is" in capsys.readouterr().err
    assert main(["adopt", function, str(tmp_path / "missing.py")]) == 2
    assert isinstance(ArgumentError("x"), PbkernError)


def test_the_command_names_the_edited_file_where_that_is_at_fault(tmp_path, capsys):
    (tmp_path / "functions.py").write_text(FILE)
    function, kernels = f"{tmp_path}/functions.py:softmax", tmp_path / "kernels.py"
    assert main(["eject", function, "-o", str(kernels)]) == 0
    text = kernels.read_text()
    line = next(n for n, row in enumerate(text.splitlines(), 1) if "out0[...] = " in row)
    for new, title, why in (
        ("out0[...] = )", "cannot be run", "SyntaxError: "),
        ("out0[...] = missing", "cannot be traced", "NameError: name 'missing'"),
    ):
        kernels.write_text(re.sub(r"out0\[\.\.\.\] = .*", new, text))
        capsys.readouterr()
        assert main(["adopt", function, str(kernels)]) == 2
        said = capsys.readouterr().err
        assert f"{kernels} {title}" in said
        assert "softmax` cannot" not in said
        assert f"{kernels}:{line}" in said
        assert why in said
    (tmp_path / "functions.py").write_text(FILE.replace("(x * 2)", "(x * two)"))
    kernels.write_text(text)
    assert main(["adopt", function, str(kernels)]) == 2
    assert "softmax` cannot be traced" in capsys.readouterr().err


def test_static_arguments_are_given_to_adopt(tmp_path):
    def descended(x, steps):
        return jax.lax.fori_loop(0, steps, lambda _, x: x - 0.1 * jnp.sin(x), x)

    f, x, path = pbkern.jit(descended, static_argnums=1), jnp.ones((40, 30)), tmp_path / "edited.py"
    pbkern.eject(f, x, 5, path=path)
    np.testing.assert_allclose(pbkern.adopt(f, path, x, 5)(x, 5), descended(x, 5), rtol=1e-6)
    with pytest.raises(ArgumentError, match="static arguments are no arrays"):
        pbkern.adopt(f, path)
