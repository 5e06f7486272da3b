"""What is installed: a wheel and an sdist, built, installed where nothing else of the project is, and used there."""

import ast
import email
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = (
    "pbkern", "tests", "docs", "tutorials", "examples", "benchmarks", "scripts", "pyproject.toml", "setup.py", "MANIFEST.in",
    "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile",
)  # fmt: skip
BUILD = (
    "import sys, setuptools.build_meta as b; print(getattr(b, f'build_{sys.argv[1]}')(sys.argv[2]))"
)

PROGRAM = """
import jax
import jax.numpy as jnp
import numpy as np

import pbkern
from pbkern import cpu, errors, pallas, testing

rows = pbkern.BlockSpec((8, 128), lambda i: (i, 0))
ARRAY = jax.ShapeDtypeStruct((100, 128), jnp.float32)  # type: ignore[no-untyped-call]


@pbkern.jit
def softmax(x: jax.Array) -> jax.Array:
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pbkern.polyblocks_jit_jax(compile_options={"target": "cpu"}, static_argnums=1)
def power(x: jax.Array, n: int) -> jax.Array:
    return x**n


@pbkern.kernel(
    grid=(pbkern.cdiv(100, 8),),
    in_specs=[rows, pbkern.BlockSpec()],
    out_specs=rows,
    out_shape=ARRAY,
    scratch_shapes=[pbkern.Scratch((8, 128), np.dtype("float32"))],
    compiler_params=cpu.CompilerParams(dimension_semantics=("parallel",)),
)
def scale(x_ref: jax.Ref, s_ref: jax.Ref, o_ref: jax.Ref, t_ref: jax.Ref) -> None:
    @pbkern.when(pbkern.program_id(0) == 0)
    def _() -> None:
        t_ref[...] = jnp.zeros((8, 128), jnp.float32)

    @pbkern.loop(0, 8)
    def _rows(k: jax.Array) -> None:
        t_ref[k] = x_ref[k] * s_ref[0]

    pbkern.check(pbkern.num_programs(0) > 0, "no programs")
    pbkern.store(o_ref, ..., pbkern.load(t_ref, (pbkern.ds(0, 8), slice(None))))


def main() -> None:
    x = jnp.ones((100, 128))
    y: jax.Array = softmax(x)
    np.testing.assert_allclose(y, 1 / 128, rtol=1e-6)
    np.testing.assert_allclose(scale(y, 2 * jnp.ones(1)), 2 / 128, rtol=1e-6)
    np.testing.assert_allclose(power(x * 2, 3), 8)
    traced = scale.trace(x, jnp.ones(1))
    assert "def scale" in traced.source() and pbkern.rebuild(traced.source()).grid == (13,)
    assert softmax.explain(x).kernels and softmax.kernels(x)
    gradient: jax.Array = jax.grad(lambda v: softmax(v)[0, 0])(x)
    assert gradient.shape == x.shape and softmax.lower(x).compile() is not None
    testing.assert_kernels(softmax, (x,), 1)
    with pallas.installed(), pbkern.config.override(num_threads=1):
        pbkern.polymage_jit_jax(lambda v: v, compile_options=pbkern.CompileOptions(num_iters=2))(x)
    try:
        pbkern.jit(lambda v: v, compile_options={"targt": "cpu"})
    except errors.OptionError as e:
        print(e.hint, pbkern.__file__)


if __name__ == "__main__":
    main()
"""


def run(*command, cwd) -> str:
    env = {
        k: v for k, v in os.environ.items() if k != "PYTHONPATH"
    }  # this checkout is not what is tried
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with a wheel and an sdist; the wheel is built of the unpacked sdist."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "checkout").mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / "checkout" / name)
    run(sys.executable, "-c", BUILD, "sdist", folder / "dist", cwd=folder / "checkout")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    run(sys.executable, "-c", BUILD, "wheel", folder / "dist", cwd=source)
    return folder


def metadata(built) -> email.message.Message:
    (wheel,) = (built / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def environment(built):
    """Python of an environment that has the wheel, and what this one has of other projects."""
    run(sys.executable, "-m", "venv", built / "environment", cwd=built)
    python = built / "environment" / "bin" / "python"
    (wheel,) = (built / "dist").glob("*.whl")
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=built)
    site = run(
        python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=built
    ).strip()
    (pathlib.Path(site) / "others.pth").write_text(
        sysconfig.get_paths()["purelib"] + "\n"
    )  # after its own
    return python


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(built):
    (wheel,) = (built / "dist").glob("*.whl")
    found = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    package = (ROOT / "pbkern").rglob("*")
    files = {str(p.relative_to(ROOT)) for p in package if p.suffix in (".py", ".js", ".css")}
    assert found == files | {"pbkern/py.typed"}


@pytest.mark.slow
def test_what_an_index_shows(built):
    """The tag names no system, since kernels are interpreted anywhere; the description has no link to a file."""
    (wheel,) = (built / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    shown = metadata(built)
    assert shown["License-Expression"] == "MIT"
    assert shown["License-File"] == "LICENSE"
    assert "Operating System :: POSIX :: Linux" in shown.get_all("Classifier")
    assert shown.get_all("Project-URL") is None
    description = shown.get_payload()
    assert description.startswith("# pbkern")
    links = re.findall(r"\]\(([^)]+)\)", description)
    assert all(link.startswith(("https://", "#")) for link in links), links


@pytest.mark.slow
def test_the_sdist_holds_what_its_tests_need(built):
    """Some of them, run where it was unpacked."""
    (source,) = (built / "unpacked").iterdir()
    some = ["tests/test_readme.py", "tests/dsl/test_spelling.py", "tests/test_golden.py"]
    out = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *some, cwd=source)
    assert " passed" in out
    assert "failed" not in out


@pytest.mark.slow
def test_an_installed_package_works(built, environment):
    (built / "user.py").write_text(textwrap.dedent(PROGRAM))
    out = run(environment, "user.py", cwd=built)
    assert "did you mean `target`?" in out
    assert str(built / "environment") in out
    command = environment.with_name("pbkern")
    assert run(command, "--version", cwd=built).startswith("pbkern ")
    assert "kernel softmax" in run(
        command, "explain", "user.py:softmax", "--args", "f32[64,128]", cwd=built
    )


@pytest.mark.slow
def test_mypy_strict_accepts_a_users_program(built, environment):
    pytest.importorskip("mypy")
    (built / "user.py").write_text(textwrap.dedent(PROGRAM))
    found = run(
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--python-executable",
        environment,
        "user.py",
        cwd=built,
    )
    assert "no issues found" in found


# --- imports


def test_importing_the_package_imports_little():
    """Neither JAX nor a front end; what a first decorated function does not need comes when it is used."""
    program = """
import sys
import pbkern
few = [name for name in sys.modules if name.startswith("pbkern.")]
assert "jax" not in sys.modules and len(few) < 10, few
assert callable(pbkern.simulate) and callable(pbkern.kernel) and pbkern.errors.OptionError
pbkern.jit(lambda x: x)
for unneeded in ("pallas", "aot.decorator", "api.tf_functions", "frontends.stablehlo.importer", "api.tune"):
    assert f"pbkern.{unneeded}" not in sys.modules, unneeded
import pbkern.cli.main, gc
assert gc.isenabled()
"""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("call", ["scale(x)", "jax.jit(scale)(x)"])
def test_a_kernel_compiles_where_nothing_else_was_used(call):
    program = f"""
import jax, jax.numpy as jnp
from pbkern import kernel
@kernel(out_shape=jax.ShapeDtypeStruct((8,), jnp.float32))
def scale(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2
x = jnp.ones(8)
assert {call}[0] == 2
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [[], ["compile"], ["demo"], ["cache"]])
def test_help_needs_no_jax(command):
    program = (
        "import sys, pbkern.cli.main as m\ntry: m.main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "sys.exit('jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *command, "--help"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "usage: pbkern" in done.stdout


def test_type_checkers_and_python_see_the_same_names():
    """The imports that type checkers read have the homes from which names are imported when they are used."""
    import pbkern

    tree = ast.parse((ROOT / "pbkern" / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    homes = {
        name.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    modules = {name for name, home in homes.items() if home == "pbkern"}
    assert {k: home for k, home in homes.items() if k not in modules} == pbkern._HOME_OF
    assert set(pbkern.__all__) == set(homes)
    assert all(getattr(pbkern, name) is not None for name in pbkern.__all__)
    assert not hasattr(pbkern, "nothing")
