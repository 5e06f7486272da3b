"""Decorated functions under every JAX transformation give what the plain functions give."""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import pbkern
import pbkern.pallas
from tests.arrays import array

pj = pbkern.polyblocks_jit_jax


def rand(*shape, seed=0):
    return array(np.random.default_rng(seed).normal(size=shape).astype("f"))


def same(a, b, tolerance=2e-5):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


PARAMS = {"w": rand(4, 5, seed=1), "b": rand(5, seed=2)}
X = rand(3, 4)


def layer(p, x):
    y = x @ p["w"] + p["b"]
    return {"y": y / (1.0 + y * y), "s": jnp.sum(x * x)}


def loss_of(f):
    return lambda p, x: (f(p, x)["y"] ** 2).sum() + f(p, x)["s"]


jitted = pj(compile_options={"target": "cpu"})(layer)
loss, plain_loss = loss_of(jitted), loss_of(layer)


def test_pytrees_go_in_and_out():
    same(jitted(PARAMS, X), layer(PARAMS, X))


def test_keywords_and_python_scalars():
    f = lambda x, scale=2.0, *, shift: x * scale + shift
    same(pj(f)(X, shift=1), f(X, shift=1))
    same(pj(f)(X, 3, shift=X), f(X, 3, shift=X))


def test_results_without_arrays():
    f = pj(lambda x: (None, {"a": x * 2, "b": ()}, x))
    assert jax.tree.structure(f(X)) == jax.tree.structure((None, {"a": 0, "b": ()}, 0))


@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_grad(argnums):
    same(jax.grad(loss, argnums)(PARAMS, X), jax.grad(plain_loss, argnums)(PARAMS, X))


def test_value_and_grad_under_jit():
    same(jax.jit(jax.value_and_grad(loss))(PARAMS, X), jax.value_and_grad(plain_loss)(PARAMS, X))


def test_grad_agrees_with_differences_in_float64():
    f = lambda x: (x**3 / (1 + x * x)).sum()
    x = np.linspace(-2, 2, 7)
    step = 1e-5
    points = [(np.eye(7)[i] * step) for i in range(7)]
    g = lambda v: float(np.sum(v**3 / (1 + v * v)))
    differences = [(g(x + d) - g(x - d)) / (2 * step) for d in points]
    np.testing.assert_allclose(
        jax.grad(pj(f))(jnp.asarray(x, "f")), differences, rtol=1e-4, atol=1e-5
    )


def test_jvp_and_linearize():
    f, plain = lambda x: jitted(PARAMS, x)["y"], lambda x: layer(PARAMS, x)["y"]
    same(jax.jvp(f, (X,), (X,)), jax.jvp(plain, (X,), (X,)))
    same(jax.linearize(f, X)[1](X), jax.jvp(plain, (X,), (X,))[1])


def test_jacobians_and_hessian():
    f, plain = lambda x: jitted(PARAMS, x)["y"], lambda x: layer(PARAMS, x)["y"]
    same(jax.jacfwd(f)(X), jax.jacfwd(plain)(X))
    same(jax.jacrev(f)(X), jax.jacrev(plain)(X))
    same(
        jax.hessian(lambda x: loss(PARAMS, x))(X),
        jax.hessian(lambda x: plain_loss(PARAMS, x))(X),
        1e-4,
    )


def test_vmap():
    xs = rand(6, 3, 4)
    same(jax.vmap(jitted, (None, 0))(PARAMS, xs), jax.vmap(layer, (None, 0))(PARAMS, xs))
    columns = lambda h: jax.vmap(lambda p, x: h(p, x)["y"], (None, 1), 1)(PARAMS, rand(3, 6, 4))
    same(columns(jitted), columns(layer))


def test_vmap_with_a_named_axis():
    f = lambda x: x - jax.lax.pmean(x, "i")
    same(jax.vmap(pj(f), axis_name="i")(X), jax.vmap(f, axis_name="i")(X))


def test_vmap_of_grad_and_grad_of_vmap():
    xs = rand(6, 3, 4)
    over = lambda h: jax.vmap(jax.grad(h), (None, 0))(PARAMS, xs)
    under = lambda h: jax.grad(lambda p: jax.vmap(h, (None, 0))(p, xs).sum())(PARAMS)
    same(over(loss), over(plain_loss))
    same(under(loss), under(plain_loss), 1e-4)


def test_inside_jit_and_around_it():
    same(jax.jit(lambda p, x: jitted(p, x)["y"] + 1)(PARAMS, X), layer(PARAMS, X)["y"] + 1)
    same(pj(lambda p, x: jax.jit(layer)(p, x)["y"] + 1)(PARAMS, X), layer(PARAMS, X)["y"] + 1)


def test_nested_decorators_inline():
    f = pj(lambda p, x: jitted(p, x)["y"] + 1)
    same(f(PARAMS, X), layer(PARAMS, X)["y"] + 1)
    assert not f.explain(PARAMS, X).left
    assert len(f.kernels(PARAMS, X)) == 1


def test_scan_over_it():
    def body(f):
        return lambda c, x: (f(c) * x, c.sum())

    f = lambda c: c * 0.5 + 1
    xs = rand(3)
    run = lambda h: lambda c: jax.lax.scan(body(h), c, xs)
    same(run(pj(f))(X), run(f)(X))
    same(jax.grad(lambda c: run(pj(f))(c)[0].sum())(X), jax.grad(lambda c: run(f)(c)[0].sum())(X))


def test_scan_inside_it():
    def f(x):
        return jax.lax.scan(lambda c, _: (c * 0.9 + x, None), x, None, length=4)[0]

    same(pj(f)(X), f(X))
    same(jax.grad(lambda x: pj(f)(x).sum())(X), jax.grad(lambda x: f(x).sum())(X))


def test_remat():
    same(jax.grad(jax.checkpoint(loss))(PARAMS, X), jax.grad(plain_loss)(PARAMS, X))
    f = lambda x: (x * x / (1 + x * x)).sum()
    same(jax.grad(pj(jax.checkpoint(f)))(X), jax.grad(f)(X))
    policy = jax.checkpoint_policies.dots_saveable
    same(jax.grad(jax.checkpoint(loss, policy=policy))(PARAMS, X), jax.grad(plain_loss)(PARAMS, X))


def test_custom_vjp_inside_is_respected():
    @jax.custom_vjp
    def h(x):
        return x * x

    h.defvjp(lambda x: (h(x), x), lambda residual, ct: (ct * 7,))
    same(jax.grad(lambda x: pj(h)(x).sum())(X), jnp.full_like(X, 7))
    same(pj(h)(X), X * X)


def test_custom_jvp_inside_is_respected():
    @jax.custom_jvp
    def h(x):
        return x * x

    h.defjvp(lambda primals, tangents: (h(*primals), 5 * tangents[0]))
    same(jax.grad(lambda x: pj(h)(x).sum())(X), jnp.full_like(X, 5))


def test_softmax_grad():
    f = lambda x: (jax.nn.softmax(jax.nn.relu(x)) ** 2).sum()
    same(jax.grad(pj(f))(X), jax.grad(f)(X))


def test_closed_over_tracers_and_arrays_become_operands():
    same(jax.grad(lambda a: pj(lambda x: x * a)(X).sum())(2.0), X.sum())
    table = rand(3, 4, seed=5)
    same(pj(lambda x: x * table)(X), X * table)
    jaxpr = jax.make_jaxpr(pj(lambda x: x * table))(X)
    assert "pbkern_call" in str(jaxpr)


def test_integer_inputs():
    f = lambda x, i: x[i].sum() + i.sum()
    i = jnp.array([0, 1])
    same(pj(f)(X, i), f(X, i))
    same(jax.grad(pj(f))(X, i), jax.grad(f)(X, i))
    same(pj(lambda i: i * 3 // 2)(i), i * 3 // 2)


def test_integer_results_have_no_tangent():
    f = lambda x: ((x * 2).sum(), jnp.arange(3))
    same(jax.grad(f, has_aux=True)(X), jax.grad(pj(f), has_aux=True)(X))


def test_random_keys():
    f = lambda k: jax.random.normal(k, (3,))
    same(pj(f)(jax.random.key(0)), f(jax.random.key(0)))


def test_debug_print_stays_with_xla(capfd):
    f = pj(lambda x: (jax.debug.print("sum {}", x.sum()), x * 2)[1])
    same(f(X), X * 2)
    jax.effects_barrier()
    assert f"sum {float(X.sum()):.4f}"[:8] in capfd.readouterr().out


def test_ordered_effects_keep_their_order(capfd):
    def f(x):
        jax.debug.print("first {}", x.sum(), ordered=True)
        jax.debug.print("second", ordered=True)
        return x + 1

    same(pj(f)(X), X + 1)
    jax.effects_barrier()
    out = capfd.readouterr().out
    assert 0 <= out.index("first") < out.index("second")


def test_callbacks_stay_with_xla():
    f = lambda x: (
        jax.pure_callback(
            lambda a: np.asarray(a) * 3, jax.ShapeDtypeStruct((3, 4), "float32"), x * 2
        )
        + 1
    )
    same(pj(f)(X), f(X))


def test_no_arguments_and_no_results():
    same(pj(lambda: jnp.ones((3,)) * 2)(), jnp.full((3,), 2.0))
    assert pj(lambda x: None)(X) is None


def test_empty_arrays():
    f = lambda x: (x * 2, x.sum())
    same(pj(f)(jnp.zeros((0, 4))), f(jnp.zeros((0, 4))))


def test_disable_jit():
    with jax.disable_jit():
        same(jitted(PARAMS, X), layer(PARAMS, X))


def test_x64():
    with jax.enable_x64(True):
        x = jnp.linspace(0, 1, 12).reshape(3, 4)
        assert x.dtype == np.float64
        same(pj(lambda x: (x * x).sum(0))(x), (x * x).sum(0), 1e-12)


def test_metadata_is_kept():
    assert jitted.__name__ == "layer"
    assert jitted.__wrapped__ is not None
    assert jax.eval_shape(jitted, PARAMS, X)["y"].shape == (3, 5)


def test_refs_inside():
    def f(x):
        r = jax.new_ref(x)
        r[0] = x[1]
        return r[...]

    same(pj(f)(X), f(X))
    same(jax.grad(lambda x: (pj(f)(x) ** 2).sum())(X), jax.grad(lambda x: (f(x) ** 2).sum())(X))


def test_constant_and_forwarded_results_keep_their_types():
    f = lambda x: (2.0, x, True, 3, x > 0)
    same(pj(f)(X), jax.jit(f)(X))


def test_control_flow_inside():
    count = lambda x: jax.lax.while_loop(
        lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 2), (0, x)
    )[1]
    same(pj(count)(X), X * 32)
    choose = lambda x: jax.lax.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * x, x).sum()
    same(jax.value_and_grad(pj(choose))(X), jax.value_and_grad(choose)(X))


def test_scan_over_remat_over_it():
    run = lambda h: lambda x: jax.lax.scan(lambda c, _: (h(c), None), x, None, length=3)[0].sum()
    f = lambda c: c * c / (1 + c * c)
    same(jax.grad(run(jax.checkpoint(pj(f))))(X), jax.grad(run(f))(X))


def test_linear_transpose():
    f = lambda x: x * 2 + x
    same(jax.linear_transpose(pj(f), X)(X), jax.linear_transpose(f, X)(X))


def test_what_kernels_cannot_contain_stays_with_xla():
    f = lambda x: (jnp.linalg.inv(x @ x.T + jnp.eye(3)), jnp.fft.fft(x).real, (x + 1j * x).imag)
    same(pj(f)(X), f(X), 1e-4)
    assert pj(f).explain(X).left


class Model:
    scale = 3

    def __call__(self, x):
        return x * 2

    @pj(static_argnums=0)
    def method(self, x):
        return x * self.scale


def test_callables_of_every_kind():
    same(pj(Model())(X), X * 2)
    same(Model().method(X), X * 3)
    same(pj(functools.partial(jnp.add, X))(X), X + X)
    same(pj(pj(lambda x: x * 2))(X), X * 2)


def test_functions_compile_and_run_on_several_threads():
    functions = [pj(lambda x, n=n: x * n + 1) for n in range(1, 7)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for n, result in enumerate(pool.map(lambda f: f(X), functions), 1):
            same(result, X * n + 1)


@pytest.mark.parametrize("kind", ["while", "scan", "pallas"])
def test_calls_that_are_the_whole_body_of_a_loop(kind):
    """XLA took a call with two results, whose operands are the carries, for one that does not depend on the step."""
    body = pbkern.jit(lambda x: x * x)
    x = jnp.arange(9.0).reshape(3, 3)
    if kind == "while":
        got = jax.jvp(lambda x: lax.while_loop(lambda c: c[0, 2] <= 8, body, x), (x,), (x,))
    elif kind == "scan":
        got = jax.jvp(lambda x: lax.scan(lambda c, _: (body(c), None), x, length=2)[0], (x,), (x,))
    else:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)

        def kernel(x, t, o, p):
            o[...], p[...] = x[...] * x[...], 2 * t[...] * x[...]

        with pbkern.pallas.installed():
            square = pl.pallas_call(kernel, out_shape=(shape, shape))
            got = jax.jit(
                lambda x: lax.while_loop(
                    lambda c: c[0][0, 2] <= 8, lambda c: tuple(square(*c)), (x, x)
                )
            )(x)
    np.testing.assert_allclose(got[0], x**4, rtol=1e-6)
    np.testing.assert_allclose(got[1], 4 * x**4, rtol=1e-6)


def test_collectives_of_pmap_that_have_no_effect_of_jax():
    """Every collective of a decorated function in pmap; plans on disk cannot have what names an axis."""
    functions = (
        lambda x: jax.lax.ppermute(x * 2, "i", [(0, 0)]),
        lambda x: jax.lax.pmean(x * 2, "i") + jax.lax.axis_index("i"),
        lambda x: jax.lax.all_to_all(x[None] * 2, "i", 0, 0),
    )
    for function in functions:
        same(
            jax.pmap(pj(function), axis_name="i")(X[None]),
            jax.pmap(function, axis_name="i")(X[None]),
        )
