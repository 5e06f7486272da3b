"""Every public name says what it is, with an example that runs."""

import doctest
import inspect
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.api.decorators import JitFunction

# What examples may use without an import.
NAMESPACE = {"jax": jax, "jnp": jnp, "np": np, "pbkern": pbkern}
# Methods of decorated functions that users call.
METHODS = "as_text clear_cache dump eval_shape explain kernels lower memory_analysis trace".split()


def members(module: types.ModuleType) -> list[str]:
    """Public names that a module defines, or lists."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return list(listed)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def public_names() -> dict[str, object]:
    """Name -> what it is: of the package, of its public modules, and methods of decorated functions."""
    names: dict[str, object] = {}
    for name in pbkern.__all__:
        value = getattr(pbkern, name)
        if isinstance(value, types.ModuleType):
            names |= {f"{name}.{inner}": getattr(value, inner) for inner in members(value)}
        else:
            names[name] = value
    return names | {f"JitFunction.{name}": getattr(JitFunction, name) for name in METHODS}


NAMES = public_names()
# One example stands for all errors, the base class's; the settings are those of `override`.
DESCRIBED_ELSEWHERE = {"config.Config"} | {
    name for name in NAMES if name.startswith("errors.") and name != "errors.PbkernError"
}


def examples(name: str) -> doctest.DocTest:
    text = inspect.getdoc(NAMES[name]) or ""
    return doctest.DocTestParser().get_doctest(text, dict(NAMESPACE), name, None, 0)


@pytest.mark.parametrize("name", NAMES)
def test_public_names_are_described(name):
    text = inspect.getdoc(NAMES[name])
    assert text
    assert name in DESCRIBED_ELSEWHERE or examples(name).examples, f"{name} has no example"


@pytest.mark.parametrize("name", sorted(NAMES.keys() - DESCRIBED_ELSEWHERE))
def test_examples_print_what_they_say(name, monkeypatch):
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    report: list[str] = []
    results = doctest.DocTestRunner(verbose=False).run(examples(name), out=report.append)
    assert not results.failed, "".join(report)


def described(name: str) -> str:
    """A docstring, with those of the public names to which it refers: "as atomic_add", "see `check`"."""
    text = inspect.getdoc(NAMES[name]) or ""
    referred = re.findall(r"(?:as(?: of)?|see) `?(\w+)`?", text)
    return "\n".join(
        [text, *(inspect.getdoc(NAMES[other]) or "" for other in referred if other in NAMES)]
    )


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_described(name):
    """Each parameter of a function is in its docstring by name, or in one to which that refers."""
    value = NAMES[name]
    if not inspect.isfunction(inspect.unwrap(value)):
        return
    text = described(name)
    missing = [
        parameter
        for parameter in inspect.signature(value).parameters
        if parameter not in ("self", "args", "kwargs") and not re.search(rf"\b{parameter}\b", text)
    ]
    assert not missing, f"{name}: {', '.join(missing)}"
