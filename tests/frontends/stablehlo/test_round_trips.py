"""Functions exported by jax.export and imported again: the numbers of jax.jit, and about as many kernels."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from benchmarks.workloads import WORKLOADS
from tests.arrays import array
from tests.lowered import on

X = [1.5, 2.0, 1.0]
NHWC = ("NHWC", "HWIO", "NHWC")


def normal(*shape, dtype="float32"):
    return array(np.random.default_rng(len(shape) + sum(shape)).standard_normal(shape), dtype)


def integers(*shape, high=9, dtype="int32"):
    return array(np.random.default_rng(sum(shape)).integers(0, high, shape), dtype)


def conv(x, w):
    return jax.nn.relu(
        lax.conv_general_dilated(x, w, (2, 1), "SAME", rhs_dilation=(1, 2), dimension_numbers=NHWC)
    )


def loss(w1, b, w2, x, y):
    return jnp.mean((jax.nn.log_softmax(jnp.tanh(x @ w1 + b) @ w2) * y).sum(-1))


def decay(carry, x):
    return carry * 0.9 + x, jnp.sin(carry)


def pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


FUNCTIONS = {
    "softmax": (jax.nn.softmax, normal(5, 8)),
    "convolution": (conv, normal(2, 9, 8, 3), normal(3, 3, 3, 8)),
    "gradient of a convolution": (jax.grad(lambda x, w: conv(x, w).sum(), (0, 1)), normal(2, 9, 8, 3), normal(3, 3, 3, 8)),
    "transposed convolution": (lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"), normal(1, 5, 4, 3), normal(3, 3, 3, 2)),
    "grouped convolution": (
        lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "VALID", feature_group_count=4, dimension_numbers=NHWC),
        normal(1, 7, 6, 4), normal(3, 3, 1, 8)),
    "attention": (lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True), *[normal(2, 8, 4, 16)] * 3),
    "scan": (lambda x: lax.scan(decay, jnp.zeros(3), x), normal(5, 3)),
    "gradient of a scan": (jax.grad(lambda x: lax.scan(decay, jnp.zeros(3), x)[1].sum()), normal(5, 3)),
    "reversed scan": (lambda x: lax.scan(decay, jnp.zeros(3), x, reverse=True), normal(5, 3)),
    "while": (lambda x: lax.while_loop(lambda s: s[1].sum() < 30, lambda s: (s[0] + 1, s[1] * 2), (0, x)), array(X, "float32")),
    "two loops": (lambda x: lax.fori_loop(0, 3, lambda i, y: lax.fori_loop(0, i, lambda j, z: z * 0.5 + j, y), x), normal(7)),
    "sort": (lambda x: jnp.sort(x, 0), normal(7, 3)),
    "argsort": (jnp.argsort, integers(7, 3)),
    "descending": (lambda x: jnp.sort(x, descending=True), normal(9)),
    "by two keys": (lambda x, y: lax.sort((x, y), num_keys=2), integers(20, dtype="float32"), normal(20)),
    "cumsum": (lambda x: jnp.cumsum(x, 1), normal(4, 9)),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 1), normal(4, 9)),
    "cumlogsumexp from the end": (lambda x: lax.cumlogsumexp(x, 0, reverse=True), normal(5, 3)),
    "argmax": (lambda x: (jnp.argmax(x, 1), jnp.argmin(x, 0), jnp.argmax(x)), normal(4, 9)),
    "argmax of integers and truth": (
        lambda x: (jnp.argmax(x, 1), jnp.argmax(x > 0, 1), jnp.argmin(x > 1, 0)),
        integers(4, 9, high=3)),
    "top_k": (lambda x: lax.top_k(x, 3), normal(4, 9)),
    "take": (lambda x, i: jnp.take(x, i, axis=1), normal(4, 9), array([[1, 20], [3, 0]])),
    "take along": (lambda x, i: jnp.take_along_axis(x, i, 1), normal(4, 9), integers(4, 2)),
    "gradient of a gather": (jax.grad(lambda x: (x[jnp.array([1, 1, 2])] ** 2).sum()), normal(4, 9)),
    "scatter": (lambda x: x.at[1:3, ::2].set(0.0).at[jnp.array([0, 9])].mul(2.0).at[0].max(1.0), normal(4, 9)),
    "gradient of an MLP": (
        jax.value_and_grad(loss, (0, 1, 2)), normal(8, 16), normal(16), normal(16, 4), normal(10, 8), normal(10, 4)),
    "pool": (pool, normal(2, 8, 7, 3)),
    "gradient of a pool": (jax.grad(lambda x: (pool(x) ** 2).sum()), normal(2, 8, 7, 3)),
    "cond": (lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), normal(4)),
    "switch": (lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, lambda v: v], x), array(1, "int32"), normal(4)),
    "random": (lambda k: jax.random.normal(jax.random.wrap_key_data(k), (5,)), array([0, 42], "uint32")),
    "gelu": (lambda x: jax.nn.gelu(x, approximate=False), normal(4)),
    "special functions": (lambda x: lax.erf_inv(jnp.tanh(x)) + lax.lgamma(x) + lax.erfc(x) + jnp.arcsinh(x), normal(4)),
    "bfloat16": (lambda x, w: x @ w * jnp.bfloat16(1.5), normal(4, 8, dtype="bfloat16"), normal(8, 3, dtype="bfloat16")),
    "complex": (lambda x: jnp.abs(jnp.fft.fft(x) * (1 + 2j)), normal(8)),
    "complex constants": (
        lambda x: x * np.array([1 + 2j, 3 - 1j, 0, 1j], "complex64") + np.arange(4, dtype="complex64").sum(),
        normal(4)),
    "a long complex constant": (lambda x: x * (np.arange(60) * (1 - 2j)).astype("complex64"), normal(60)),
    "an empty complex constant": (lambda x: jnp.concatenate([x * 1j, np.zeros(0, "complex64")]), normal(3)),
    "bits": (lambda x: jnp.bitwise_count(x) ^ (x << 3) | (x >> 1), integers(9)),
    "booleans": (lambda x: ((x > 0).any(0), (x > 0).all(1), jnp.isnan(x).sum()), normal(3, 4)),
    "slices at computed places": (
        lambda x, i: lax.dynamic_update_slice(x, lax.dynamic_slice(x, (i, 0), (2, 3)) * 2, (0, i)),
        normal(6, 6), array(2, "int32")),
    "pads": (lambda x: lax.pad(x, 0.0, ((1, 2, 1), (-1, 0, 0))), normal(4, 5)),
    "no elements": (lambda x: (x + 1, x.sum(0), x.reshape(3, 0)), array(np.zeros((0, 3)), "float32")),
    "one element": (lambda x: (x - x.mean(), jnp.sort(x), x @ x), normal(1)),
    "a long constant": (lambda x: x * (np.arange(150, dtype="bfloat16") - 70).reshape(50, 3), normal(50, 3, dtype="bfloat16")),
    "a constant": (lambda x: x * jnp.arange(12, dtype="float32").reshape(3, 4) + np.eye(3, 4, dtype="bfloat16"), normal(3, 4)),
}  # fmt: skip


def exported(f, *args):
    return jax.export.export(jax.jit(f))(*args)


def assert_as_jax(got, want):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        error = 2e-2 if g.dtype == "bfloat16" else 2e-5
        wide = "complex128" if g.dtype.kind == "c" else "float64"
        np.testing.assert_allclose(
            np.asarray(g).astype(wide), np.asarray(w).astype(wide), rtol=error, atol=error
        )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_before_the_export(name):
    f, *args = FUNCTIONS[name]
    want = jax.jit(f)(*args)
    got = pbkern.from_stablehlo(exported(f, *args))(*args)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert_as_jax(got, want)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [w.name for w in WORKLOADS.values()])
def test_workloads_keep_their_kernels(name):
    """At most one kernel more, and nothing more that is left to XLA."""
    workload = WORKLOADS[name]
    types = [jax.ShapeDtypeStruct(s.shape, jnp.int32 if s.high else s.dtype) for s in workload.full]
    with on():
        imported = pbkern.from_stablehlo(exported(workload.function, *types)).explain(*types)
        plan = pbkern.jit(workload.function).explain(*types)
    assert len(imported.kernels) <= len(plan.kernels) + 1
    assert len(imported.left) <= len(plan.left)


BY_DEFAULT = ("unsharp", "attention_1024_causal", "gradient_descent", "cross_entropy", "jacobi")
SLOW = [
    pytest.param(n, marks=pytest.mark.slow)
    for n, w in WORKLOADS.items()
    if n not in BY_DEFAULT and w.numpy is not None
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*BY_DEFAULT, *SLOW])
def test_workloads_keep_their_numbers(name):
    workload = WORKLOADS[name]
    args = workload.arguments(workload.small)
    got = pbkern.from_stablehlo(exported(workload.function, *args))(*args)
    want = workload.numpy(
        *[np.asarray(a, "float64" if a.dtype.kind == "f" else None) for a in args]
    )
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert abs(g - w).max() <= workload.tolerance * abs(w).max()


def test_loops_that_count_have_a_known_length():
    x = normal(5, 3)
    jaxpr = pbkern.from_stablehlo(exported(lambda x: lax.scan(decay, jnp.zeros(3), x), x)).as_text(
        x, stage="jaxpr"
    )
    assert "scan" in jaxpr
    assert "while" not in jaxpr


def test_64_bit_numbers_stay_what_they_are():
    with jax.enable_x64(True):
        x, n = jnp.asarray(np.linspace(0, 1, 7)), jnp.arange(7)
        program = exported(lambda x, n: (x * x + 1e-12, n * 2**40), x, n)
    got = pbkern.from_stablehlo(program)(np.linspace(0, 1, 7), np.arange(7))
    assert [a.dtype.name for a in got] == ["float64", "int64"]
    np.testing.assert_allclose(got[0], np.linspace(0, 1, 7) ** 2 + 1e-12, rtol=1e-15)
    np.testing.assert_array_equal(got[1], np.arange(7) * 2**40)


def test_arguments_that_nothing_reads_and_structures():
    def f(weights, x, *, scale):
        return {"y": weights["w"] * scale, "n": (x.sum(),)}

    args = {"w": normal(3), "unused": normal(4)}, normal(2, 2)
    program = jax.export.export(jax.jit(f))(*args, scale=normal(1))
    got = pbkern.from_stablehlo(program)(*args, scale=normal(1))
    assert_as_jax(got, f(*args, scale=normal(1)))
    assert set(got) == {"y", "n"}


def test_every_form_of_a_program(tmp_path):
    x = normal(4, 5)
    program, want = exported(lambda x: jnp.tanh(x) * 2, x), np.tanh(np.asarray(x)) * 2
    text, artefact, blob = (
        program.mlir_module(),
        program.mlir_module_serialized,
        program.serialize(),
    )
    forms = {"a.mlir": text.encode(), "a.mlirbc": artefact, "a.jax": bytes(blob)}
    for name, contents in forms.items():
        (tmp_path / name).write_bytes(contents)
    for source in (
        program,
        text,
        artefact,
        blob,
        *(tmp_path / n for n in forms),
        str(tmp_path / "a.mlir"),
    ):
        np.testing.assert_allclose(pbkern.from_stablehlo(source)(x), want, rtol=1e-5)


def test_imported_functions_are_transformed():
    x = normal(4, 5)
    f = pbkern.from_stablehlo(exported(lambda x: (jnp.sin(x) ** 2).sum(), x))
    np.testing.assert_allclose(jax.grad(f)(x), np.sin(2 * np.asarray(x)), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(f)(jnp.stack([x, x])), [f(x)] * 2, rtol=1e-6)
    assert "float32[4,5]" in repr(f) or "f32[4,5]" in repr(f)
