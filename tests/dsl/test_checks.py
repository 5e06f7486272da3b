"""check and fail: interpreted and native kernels report the message, the line, the values and the program."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core.errors import CheckError, KernelError
from pbkern.dsl.printer import same_kernel

X = np.arange(32, dtype="f4")
ROWS = pbkern.BlockSpec((8,), lambda i: (i,))


def below(limit, name="body"):
    def body(x_ref, o_ref):
        x = x_ref[...]
        pbkern.check(jnp.all(x < limit), "{} is not below {limit}", x.max(), limit=limit)
        o_ref[...] = x * 2

    out = jax.ShapeDtypeStruct((32,), "f4")
    return pbkern.kernel(body, grid=(4,), in_specs=[ROWS], out_specs=ROWS, out_shape=out, name=name)


# XLA raises one or the other, as it calls back at once or later.
FROM_JAX = (jax.errors.JaxRuntimeError, ValueError)
FAILURE = r"23.0 is not below 20.0\n  at   .*test_checks.py:\d+:\d+ \(below.*\n  why  a check failed in program \(2,\)"


def ways(kernel):
    """The same call: interpreted, by itself, from its printed source."""
    traced = kernel.trace(X)
    return {
        "interpreted": lambda x: pbkern.interpret(traced, x)[0],
        "interpreted by a call": lambda x: pbkern.call_kernel(traced, x, interpret=True)[0],
        "native": kernel,
    }


@pytest.mark.parametrize("way", ways(below(20.0)))
def test_a_failed_check_is_a_check_error(way):
    with pytest.raises(
        CheckError,
        match=FAILURE if way != "native" else r"is not below 20.0\n  at   .*test_checks.py",
    ):
        ways(below(20.0))[way](X)
    np.testing.assert_array_equal(ways(below(99.0))[way](X), X * 2)


@pytest.mark.parametrize("jit", [jax.jit, pbkern.jit])
def test_a_jitted_function_raises_after_the_call(jit):
    f = jit(lambda x: below(24.5)(x + 1) - 1)
    with pytest.raises(FROM_JAX, match=r"is not below 24.5[\s\S]*test_checks.py"):
        jax.block_until_ready(f(X))
    np.testing.assert_array_equal(jit(lambda x: below(99.0)(x + 1) - 1)(X), (X + 1) * 2 - 1)


def repeated(error, kernel):
    """Runs the file that an error names; returns its variables and the error that it raises."""
    path = re.search(rf"of kernel `{kernel}`\n  file (.*\.py)", str(error.value))[1]
    names: dict = {}
    with pytest.raises(CheckError) as again:
        exec(pathlib.Path(path).read_text(), names)
    return names, str(again.value)


@pytest.mark.parametrize("jit", [jax.jit, pbkern.jit])
def test_a_check_among_several_kernels_leaves_a_file_of_its_kernel_and_operands(jit):
    def f(x):
        return below(24.5, "second")(below(99.0, "first")(x + 1) - 1)

    with pytest.raises(
        FROM_JAX, match=r"31.0 is not below 24.5\n  at   .*test_checks.py[\s\S]*program \(1,\)"
    ) as e:
        jax.block_until_ready(jit(f)(X))
    names, again = repeated(e, "second")
    np.testing.assert_array_equal(names["ARGS"][0], (X + 1) * 2 - 1)
    assert "31.0 is not below 24.5" in again


@pytest.mark.parametrize("jit", [jax.jit, pbkern.jit])
def test_the_file_has_the_operands_of_the_iteration_that_failed(jit):
    def f(x):
        return jax.lax.fori_loop(0, 6, lambda _, c: below(100.0, "step")(c), x)

    with pytest.raises(FROM_JAX, match=r"124.0 is not below 100.0") as e:
        jax.block_until_ready(jit(f)(X))
    names, again = repeated(e, "step")
    np.testing.assert_array_equal(names["ARGS"][0], X * 4)
    assert "124.0 is not below 100.0" in again


def test_the_file_has_operands_updated_in_place_as_they_were_before():
    def body(n_ref, x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = x + 1000
        pbkern.check(jnp.all(x < n_ref[0]), "{} is not below {}", x.max(), n_ref[0])

    kernel = pbkern.kernel(
        body, grid=(4,), in_specs=[pbkern.BlockSpec(), ROWS], out_specs=ROWS, out_shape=jax.ShapeDtypeStruct((32,), "f4"),
        input_output_aliases={1: 0}, name="update",
    )  # fmt: skip
    calls = {
        "alone": lambda n, x: kernel(n, x + 1),
        "in a program": pbkern.jit(lambda n, x: kernel(n * 2, x + 1) * 3),
        "donated": pbkern.jit(lambda n, x: kernel(n, x), donate_argnums=1),
    }
    for name, call in calls.items():
        limit = np.array([13 if name == "in a program" else 26], "f4")
        with pytest.raises((CheckError, *FROM_JAX), match=r"is not below 26.0") as e:
            jax.block_until_ready(call(limit, jnp.asarray(X)))
        names, again = repeated(e, "update")
        np.testing.assert_array_equal(names["ARGS"][1], X if name == "donated" else X + 1)
        np.testing.assert_array_equal(names["ARGS"][0], [26])
        assert "is not below 26.0" in again


def test_large_operands_of_a_check_among_several_are_drawn_anew(monkeypatch):
    monkeypatch.setattr("pbkern.lower.rules.debug_callbacks.LARGEST_OPERANDS", 16)
    f = pbkern.jit(lambda x: below(2.5, "large")(below(99.0, "small")(x)))
    with pytest.raises(FROM_JAX) as e:
        jax.block_until_ready(f(X))
    text = pathlib.Path(re.search(r"file (.*\.py)", str(e.value))[1]).read_text()
    assert "too large, so these are random" in text


def test_checks_run_under_vmap_and_in_control_flow():
    def body(x_ref, o_ref):
        @pbkern.loop(0, 8)
        def _(i):
            @pbkern.when(x_ref[i] == 13)
            def _():
                pbkern.fail("found {} at {}", x_ref[i], i)

        o_ref[...] = x_ref[...]

    kernel = pbkern.kernel(
        body,
        grid=(4,),
        in_specs=[ROWS],
        out_specs=ROWS,
        out_shape=jax.ShapeDtypeStruct((32,), "f4"),
    )
    assert same_kernel(pbkern.rebuild(kernel.trace(X).source()), kernel.trace(X))
    for call in (kernel, lambda x: pbkern.interpret(kernel.trace(x), x)):
        with pytest.raises(CheckError, match=r"found 13.0 at 5[\s\S]*program \(1,\)"):
            call(X)
    batch = np.stack([X * 0, X])
    with pytest.raises(FROM_JAX, match=r"found 13.0 at 5[\s\S]*program \(1, 1\)"):
        jax.block_until_ready(jax.jit(jax.vmap(kernel))(batch))
    np.testing.assert_array_equal(kernel(X + 100), X + 100)


def test_one_failure_does_not_reach_the_next_call():
    for _ in range(3):
        with pytest.raises(CheckError):
            below(3.0)(X)
    np.testing.assert_array_equal(below(50.0)(X), X * 2)


def test_a_check_takes_a_scalar():
    def body(o_ref):
        pbkern.check(jnp.ones(3, bool), "no")

    with pytest.raises(KernelError, match=r"jnp.all"):
        pbkern.kernel(body, out_shape=jax.ShapeDtypeStruct((4,), "f4")).trace()
