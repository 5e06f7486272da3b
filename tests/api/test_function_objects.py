"""Decorated functions as objects: names, signatures, methods, copies, pickles, as of jax.jit's functions and of plain ones."""

import copy
import functools
import inspect
import pickle
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern

X = np.arange(4, dtype=np.float32)


def scaled(x, by=2):
    """x times a number."""
    return x * by


@pbkern.jit
def decorated(x):
    return x + 1


@pbkern.kernel(out_shape=jax.ShapeDtypeStruct((4,), jnp.float32))
def doubled(x, o):
    """Twice x."""
    o[...] = x[...] * 2


def body(x, o):
    o[...] = x[...] * 3


class Layer:
    factor = 3

    @functools.partial(pbkern.jit, static_argnums=0)
    def apply(self, x):
        return x * self.factor

    @staticmethod
    @pbkern.jit
    def plain(x):
        return x * 5

    @classmethod
    @functools.partial(pbkern.jit, static_argnums=0)
    def of_class(cls, x):
        return x * cls.factor


@pytest.mark.parametrize("jit", [jax.jit, pbkern.jit])
def test_names_and_signatures_are_the_functions(jit):
    f = jit(scaled)
    assert (f.__name__, f.__qualname__, f.__module__, f.__doc__) == (
        "scaled",
        "scaled",
        __name__,
        scaled.__doc__,
    )
    assert f.__wrapped__ is scaled
    assert inspect.signature(f) == inspect.signature(scaled)
    assert inspect.getsource(f) == inspect.getsource(scaled)
    assert "scaled" in repr(f)
    assert hash(f) == hash(f)
    assert f == f != jit(scaled)
    assert weakref.ref(f)() is f

    @functools.wraps(f)
    def around(*args):
        return f(*args)

    assert (around.__name__, around.__wrapped__) == ("scaled", f)
    np.testing.assert_array_equal(around(X), X * 2)


@pytest.mark.parametrize("jit", [jax.jit, pbkern.jit])
def test_partial_functions_have_the_name_of_what_they_call(jit):
    f = jit(functools.partial(scaled, by=3))
    assert f.__name__ == "scaled"
    assert "jit_scaled" in f.lower(X).as_text()
    np.testing.assert_array_equal(f(X), X * 3)
    np.testing.assert_array_equal(functools.partial(jit(scaled), by=4)(X), X * 4)


def test_kernels_of_partial_functions_have_its_name():
    (kernel,) = pbkern.jit(functools.partial(scaled, by=3)).kernels(X)
    assert kernel.name.startswith("scaled_")


def test_methods_are_bound():
    layer = Layer()
    for f in (layer.apply, functools.partial(Layer.apply, layer), Layer.of_class, layer.of_class):
        np.testing.assert_array_equal(f(X), X * 3)
    np.testing.assert_array_equal(layer.plain(X), X * 5)
    assert inspect.ismethod(layer.apply)
    assert str(inspect.signature(layer.apply)) == "(x)"
    assert layer.apply == layer.apply
    assert Layer.apply is Layer.__dict__["apply"]


@pytest.mark.parametrize(
    "f", [decorated, doubled, Layer.apply], ids=["function", "kernel", "method"]
)
def test_what_a_module_holds_is_pickled_by_name(f):
    assert pickle.loads(pickle.dumps(f)) is f


def test_others_are_pickled_with_their_options():
    f = pbkern.jit(
        scaled, static_argnames=("by",), compile_options={"mlir_disable_fast_math": True}
    )
    g = pickle.loads(pickle.dumps(f))
    np.testing.assert_array_equal(g(X, by=5), X * 5)
    assert g.call_of(X, by=5)[2] == f.call_of(X, by=5)[2]


def test_kernels_are_pickled_without_their_traces():
    kernel = pbkern.kernel(body, out_shape=jax.ShapeDtypeStruct((4,), jnp.float32))
    np.testing.assert_array_equal(kernel(X), X * 3)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(kernel))(X), X * 3)


def test_another_process_runs_what_is_pickled(tmp_path):
    (tmp_path / "calls.py").write_text(
        "import pbkern\n\n@pbkern.jit\ndef f(x):\n    return x + 1\n"
    )
    made = tmp_path / "f"
    for program in (
        "open(path, 'wb').write(pickle.dumps(calls.f))",
        "print(pickle.loads(open(path, 'rb').read())(1.0))",
    ):
        run = subprocess.run(
            [sys.executable, "-c", f"import pickle, calls; path = {str(made)!r}; {program}"],
            env={"PYTHONPATH": f"{pbkern.__path__[0]}/..:{tmp_path}", "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "2.0"


@pytest.mark.parametrize(
    "f", [pbkern.jit(scaled), decorated, doubled], ids=["made", "function", "kernel"]
)
def test_copies_are_the_function(f):
    f(X)
    assert copy.copy(f) is f
    assert copy.deepcopy({"f": f})["f"] is f


def test_missing_attributes_name_the_object():
    with pytest.raises(AttributeError, match="'JitFunction' object has no attribute 'nothing'"):
        getattr(pbkern.jit(scaled), "nothing")  # noqa: B009


def test_names_of_any_alphabet_compile():
    @pbkern.jit
    def größe(x):
        return x * 2 + x.T

    x = np.ones((8, 8), np.float32)

    @pbkern.kernel(out_shape=x)
    def 倍(x, out):
        out[...] = x[...] * 2

    with pbkern.config.override(fallback=False, cache=False):
        np.testing.assert_array_equal(größe(x), x * 3)
        np.testing.assert_array_equal(倍(x), x * 2)
        assert [kernel.name for kernel in größe.kernels(x)] == ["größe_map0"]
