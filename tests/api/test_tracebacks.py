"""Tracebacks show the user's frames, as those of jax.jit do; errors name the classes where users find them."""

import os
import re
import subprocess
import sys
import textwrap
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern

PROGRAM = """
import jax, jax.numpy as jnp, pbkern
x = jnp.ones(6)

def product(x):
    return x * 2 @ jnp.ones((5, 3))

def branch(x):
    if x.sum() > 0:
        return x

def kernel_body(x, o):
    if x[0] > 0:
        o[...] = x[...]

def shapes(x, o):
    o[...] = helper(x[...])

def helper(x):
    return x.reshape(4)

out = jax.ShapeDtypeStruct((6,), "f4")
"""


@pytest.fixture
def lines(tmp_path):
    """lines(call): what Python prints for the error of a program that ends in `call`."""
    return lambda call, **environment: _lines(tmp_path / "program.py", call, environment)


def _lines(file, call, environment) -> list[str]:
    file.write_text(textwrap.dedent(PROGRAM) + call)
    run = subprocess.run(
        [sys.executable, file], capture_output=True, text=True, env=os.environ | environment
    )
    assert run.returncode == 1, run.stdout + run.stderr
    return run.stderr.splitlines()


@pytest.mark.parametrize("f", ["product", "branch"])
def test_errors_of_decorated_functions_are_as_long_as_those_of_jit(lines, f):
    ours, theirs = lines(f"pbkern.jit({f})(x)"), lines(f"jax.jit({f})(x)")
    assert len(ours) <= len(theirs)
    assert not any("/pbkern/" in line for line in ours)


@pytest.mark.parametrize("call", ["pbkern.kernel({f}, out_shape=out)(x)", "pbkern.jit(pbkern.kernel({f}, out_shape=out))(x)",
                                  "pbkern.kernel({f}, out_shape=out).trace(x)"])  # fmt: skip
@pytest.mark.parametrize("f", ["kernel_body", "shapes"])
def test_errors_of_kernels_show_the_bodys_frames_and_no_other_error(lines, f, call):
    found = lines(call.format(f=f))
    assert len(found) <= 24
    assert sum(line.startswith("Traceback") for line in found) == 1
    assert not any("/pbkern/" in line or "contextlib" in line for line in found)
    assert any(f"in {f}" in line for line in found)
    assert any(line.startswith("pbkern.errors.KernelError: ") for line in found)
    assert f == "kernel_body" or any("in helper" in line for line in found)


def test_the_unfiltered_traceback_has_the_cause(lines):
    found = lines("pbkern.kernel(kernel_body, out_shape=out)(x)", JAX_TRACEBACK_FILTERING="off")
    assert any("direct cause" in line for line in found)
    assert any("/pbkern/" in line for line in found)


@pytest.mark.parametrize("name", pbkern.errors.__all__)
def test_errors_are_named_where_users_find_them(name):
    assert getattr(pbkern.errors, name).__module__ == "pbkern.errors"


# ---- jax.disable_jit, jax_debug_nans --------------------------------------------------------------------------------


@pbkern.jit
def chosen_by_value(x):
    return jnp.sqrt(x) if x.sum() > 0 else x


def test_disable_jit_runs_the_body_eagerly():
    x = np.arange(1.0, 6.0, dtype="f")
    with jax.disable_jit():
        np.testing.assert_allclose(chosen_by_value(x), np.sqrt(x), rtol=1e-6)
        np.testing.assert_allclose(chosen_by_value(-x), -x)
        gradient = jax.grad(lambda x: chosen_by_value(x).sum())(x)
    np.testing.assert_allclose(gradient, 0.5 / np.sqrt(x), rtol=1e-6)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        chosen_by_value(x)


@pbkern.jit
def shifted(x):
    return x - 1 if isinstance(x, jax.core.Tracer) else x + 1


def test_disable_jit_reaches_functions_with_pooled_results():
    x = np.zeros((1024, 2048), "f")
    assert shifted(x)[0, 0] == -1 == shifted(x)[5, 5]
    with jax.disable_jit():
        assert shifted(x)[0, 0] == 1


@pbkern.jit
def roots(x):
    doubled = x * 2
    return jnp.sqrt(doubled) + 1  # makes the NaN


@pbkern.jit
def quotient(x):
    return x / (x - x) * 2  # makes the infinity


def jitted_twice(x):
    return jax.jit(lambda x: roots(x) * 2)(x)


LINE = roots.__wrapped__.__code__.co_firstlineno + 3
WAYS = {
    "called": roots,
    "differentiated": jax.grad(lambda x: roots(x).sum()),
    "inside jax.jit": jitted_twice,
    "batched": jax.vmap(roots),
    "compiled before": lambda x: roots(np.full((1024, 2048), x[0, 0])),
}


@pytest.mark.parametrize("way", WAYS)
def test_debug_nans_names_the_operation_and_the_users_line(way):
    roots(np.ones((1024, 2048), "f"))
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as e:
        WAYS[way](np.full((2, 3), -1.0, "f"))
    shown = "".join(traceback.format_exception(e.value))
    assert "encountered in sqrt" in str(e.value)
    assert "makes the NaN" in shown  # the text of the user's line


@pbkern.jit
def masked_roots(x):
    return jnp.where(x > 0, jnp.sqrt(x), 0.0)  # the gradient at 0 is 0 times infinity


@pbkern.jit
def deviation(x):
    return jnp.std(x * 3)  # a library function, whose operations have no lines of their own


def slope(f):
    return jax.grad(lambda x: f(x).sum())


BACKWARD = {
    "differentiated": (masked_roots, slope),
    "pulled back": (masked_roots, lambda f: lambda x: jax.vjp(f, x)[1](x + 1)),
    "batched": (masked_roots, lambda f: jax.vmap(jax.grad(f))),
    "the gradient compiled": (masked_roots, lambda f: pbkern.jit(slope(f))),
    "inside jax.jit": (masked_roots, lambda f: jax.jit(slope(f))),
    "of a library function": (deviation, slope),
}


@pytest.mark.parametrize("way", BACKWARD)
def test_debug_nans_names_operation_and_line_of_a_backward_pass(way):
    f, gradient = BACKWARD[way]
    line = f.__wrapped__.__code__.co_firstlineno + 2
    x = np.array([0.0, 3.0], "f") * (f is masked_roots)
    gradient(f)(np.ones(2, "f") + np.arange(2))  # what is compiled before is looked at as well
    with jax.debug_nans(True):
        jnp.var(jnp.ones(3))  # turns the setting off for a while
        with pytest.raises(FloatingPointError) as e:
            gradient(f)(jnp.asarray(x))
    assert "encountered in mul\n" in str(e.value)
    assert f"  at   {__file__}:{line}:" in str(e.value)
    assert f'File "{__file__}", line {line}, in ' in "".join(traceback.format_exception(e.value))


def test_debug_nans_where_jax_does_not_look_at_operations_again():
    """Once a function of JAX's own has turned the setting off for a while, JAX only looks at what it compiles."""
    program = """
import jax, jax.numpy as jnp, pbkern
jax.config.update("jax_debug_nans", True)
jax.lax.mul(jnp.ones(4), jnp.ones(4))
jax.grad(jnp.var)(jnp.arange(5.0))
f = pbkern.jit(lambda x: (jnp.sqrt(x) * 0).sum())
try:
    jax.grad(f)(jnp.arange(4.0))
except FloatingPointError as e:
    print(e)
"""
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert "encountered in mul\n  at   <string>:6" in shown


def test_a_number_that_no_operation_makes_alone():
    from pbkern.core.jaxprs.walks import equations
    from pbkern.frontends.jax import call

    traced = jax.make_jaxpr(masked_roots)(jnp.ones(2))
    (eqn,) = [eqn for eqn in equations(traced.jaxpr) if eqn.primitive is call.call_p]
    made = "invalid value (nan) encountered in pbkern_call"

    def explain(*operands):
        call._find_bad_number(FloatingPointError(made), *operands, **eqn.params)

    with pytest.raises(FloatingPointError, match=re.escape(made)) as e:
        explain(jnp.ones(2))
    assert "`masked_roots`, whose operations have none" in str(e.value)
    assert f"  at   {__file__}:" in str(e.value)


def test_debug_infs_names_the_operation():
    with (
        jax.debug_infs(True),
        pytest.raises(FloatingPointError, match=r"\(inf\) encountered in div"),
    ):
        quotient(jnp.ones(3))


def test_debug_nans_lets_numbers_pass():
    with jax.debug_nans(True):
        np.testing.assert_allclose(roots(np.full(3, 2.0, "f")), 3)


@pytest.mark.parametrize(
    "setting", [jax.debug_nans(True), jax.disable_jit()], ids=["debug_nans", "disable_jit"]
)
def test_explain_works_whatever_calls_do(setting):
    with setting:
        assert len(roots.explain(np.ones(3, "f")).kernels) == 1
        assert len(pbkern.jit(lambda: jnp.exp(jnp.arange(8.0)) * 2).explain().kernels) == 1


@pytest.mark.parametrize(
    ("call", "name", "lines_of_message"),
    [
        ("pbkern.simulate(lambda x: x + 1, x, device='h1000')", "OptionError", 3),
        ("pbkern.jit(compile_options={'mm_conv_precision_mode': 'half'})(product)", "OptionError", 3),
        ("pbkern.jit(product, compile_options={'fast': 1})", "OptionError", 3),
        (
            "pbkern.polyblocks_aot_jax(lambda x: jnp.fft.fft(x).real, "
            "compile_options={'aot_name': 'transform'})(x)",
            "UnsupportedOp", 4,
        ),
        ("pbkern.kernel(shapes, grid=(3,), out_shape=(3, 4))", "KernelError", 4),
        ("pbkern.call_kernel(3, x)", "", 1),
    ],
)  # fmt: skip
def test_mistakes_in_calls_show_the_user_s_line_alone(lines, call, name, lines_of_message):
    shown = lines(call)
    # Traceback, the user's frame with its text, at most one of a generated __init__, what JAX says of removed frames.
    assert len(shown) <= 5 + lines_of_message + 3, "\n".join(shown)
    assert any(f"pbkern.errors.{name}" in line for line in shown) or not name
    assert not any("/pbkern/" in line for line in shown if line.lstrip().startswith("File"))
