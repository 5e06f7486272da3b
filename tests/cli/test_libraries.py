"""`pbkern compile` and `pbkern run`: what they write and print, and how every misuse ends."""

import dataclasses
import re
import shutil
import stat
import zlib

import numpy as np
import pytest

import pbkern
from pbkern.cli import main
from pbkern.cli.run import _compared
from pbkern.core.errors import TargetError

MODEL = """
import jax, jax.numpy as jnp, numpy as np
import pbkern

def blur(img):
    return img[1:-1] * 0.5 + img[2:] * 0.25 + img[:-2] * 0.25

@pbkern.jit
def softmax(x, axis=-1):
    return jax.nn.softmax(x, axis)

def two(x, y):
    return x + y

def same(x):
    return jnp.flip(x, 0)

def shapes(x):
    return x @ x.T + jnp.ones(7)

def branches(x):
    return x if x.sum() > 0 else -x

def eigen(x):
    return jnp.linalg.eigh(x)[0]

large = np.zeros((1 << 24) + 1, np.float32)

def constant(x):
    return x + large[: x.shape[0]].sum() + jnp.asarray(large)[:4]

@pbkern.kernel(out_shape=jax.ShapeDtypeStruct((8,), jnp.float32), in_types=[jax.ShapeDtypeStruct((8,), jnp.float32)])
def checked(x, y):
    pbkern.check(x[0] > 0, "negative")
    y[...] = x[...]

@pbkern.kernel(out_shape=jax.ShapeDtypeStruct((8,), jnp.float32), in_types=[jax.ShapeDtypeStruct((8,), jnp.float32)])
def twice(x, y):
    y[...] = x[...] * 2

number = 3
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model_file.py").write_text(MODEL)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return folder / "model_file.py"


def run(capsys, *arguments) -> tuple[int, str, str]:
    """(exit status, stdout, stderr); argparse's own exit counts."""
    try:
        status = main.main(list(map(str, arguments)))
    except SystemExit as e:
        status = e.code
    said = capsys.readouterr()
    return status, said.out, said.err


def test_compile_with_sizes_by_name(model, capsys, tmp_path):
    arguments = [
        "--args",
        "f32[H,W]",
        "-D",
        "H=20",
        "-D",
        "W=30",
        "-aot-name",
        "blur_lines",
        "--num-threads=1",
    ]
    status, out, _ = run(capsys, "compile", f"{model}:blur", *arguments)
    assert status == 0
    assert out.splitlines() == ["blur_lines.o", "blur_lines.h"]
    text = (tmp_path / "work" / "blur_lines.h").read_text()
    assert "memref<20x30xf32>" in text
    assert "at most\n" not in text
    assert "1 thread." in text


def test_the_document_s_form(model, capsys, tmp_path):
    status, out, _ = run(
        capsys, f"{model}:softmax", "-aot", "-aot-name", "polyblocks", "--args", "f32[4,5]"
    )
    assert status == 0
    assert {p.name for p in (tmp_path / "work").iterdir()} == {
        "polyblocks.o",
        "polyblocks.h",
    }
    status, out, _ = run(
        capsys,
        f"{model}:softmax",
        "--args",
        "f32[4,5]",
        "-num-iters",
        "2",
        "-skip-std",
        "-skip-xla",
    )
    assert status == 0
    assert out.startswith("polyblocks")
    assert "median of 2" in out
    assert "xla" not in out


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_folder_takes_all_and_a_library_runs(model, capsys, tmp_path):
    types = ["--args", "f32[100]", "f32[100]"]
    status, out, _ = run(
        capsys, "compile", f"{model}:two", *types, "-o", tmp_path, "-aot-name", "add_up"
    )
    made = [line.rsplit("/")[-1] for line in out.splitlines()]
    assert status == 0
    assert {
        "add_up.o",
        "add_up.h",
        "libadd_up.so",
        "libadd_up.a",
        "add_up.s",
        "add_up.ll",
        "add_up.mlir",
    } < set(made)
    status, out, _ = run(capsys, "run", tmp_path / "libadd_up.so", "-num-iters", "3")
    assert status == 0
    assert out.startswith("add_up")
    assert "out memref<100xf32>  checksum " in out
    for name in "xy":
        np.save(tmp_path / f"{name}.npy", np.full(100, 1.5, np.float32))
    status, out, _ = run(
        capsys, "run", tmp_path / "libadd_up.so", tmp_path / "x.npy", tmp_path / "y.npy"
    )
    assert status == 0
    assert f"checksum {zlib.crc32(np.full(100, 3, np.float32).tobytes()):08x}" in out
    status, _, err = run(capsys, "run", tmp_path / "libadd_up.so", tmp_path / "x.npy")
    assert status == 2
    assert "takes 2 arrays" in err
    status, _, err = run(capsys, "run", tmp_path / "libadd_up.so", "--args", "f32[3]")
    assert status == 2
    assert "concerns functions" in err
    status, _, err = run(capsys, "run", tmp_path / "add_up.o.so")
    assert status == 2
    assert "there is no file" in err
    (tmp_path / "other.so").write_bytes(b"x" * 100)
    status, _, err = run(capsys, "run", tmp_path / "other.so")
    assert status == 2
    assert "is no library of pbkern's" in err


def test_run_compares_the_backends(model, capsys):
    status, out, _ = run(
        capsys, "run", f"{model}:softmax", "--args", "f32[30,50]", "-num-iters", "2"
    )
    rows = out.splitlines()
    assert status == 0
    assert [r.split()[0] for r in rows] == ["std", "xla", "polyblocks"]
    assert all("equal" in r or "differs by" in r for r in rows[1:])


def test_run_takes_arguments_of_every_kind(model, capsys):
    for types in ("bool[30,50]", "i32[30,50]", "f32[0,5]"):
        status, out, err = run(capsys, "run", f"{model}:same", "--args", types, "-num-iters", "1")
        assert status == 0, err
        assert out.count("equal") == 2, err
    status, out, err = run(capsys, "run", f"{model}:same", "x.npy", "--args", "f32[3]")
    assert status == 2
    assert "arrays are inputs of libraries" in err


def test_results_that_differ_end_the_command():
    x = np.array([1.0, 2.0, np.nan], "f4")
    assert _compared([x, x[:0]], [x, x[:0]]) == "equal"
    assert "differs by 1.2e-07" in _compared([x[:2] * np.float32(1 + 1e-7)], [x[:2]])
    for wrong in (x[::-1], x * 1.01, np.nan_to_num(x)):
        with pytest.raises(TargetError, match="result 1 differs between backends"):
            _compared([x, wrong], [x, x])


def test_kernels_take_no_arguments(model, capsys):
    assert run(capsys, "compile", f"{model}:twice")[0] == 0


def test_every_compile_option_is_an_option_of_every_command(model, capsys, monkeypatch):
    """Accepted, and planned and lowered with or refused with a reason, with one hyphen and with two."""
    monkeypatch.setattr(
        "pbkern.aot.build.emitted", lambda *_: {"obj": b""}
    )  # which takes longest and knows of no options
    values = {
        "str": "cpu_x",
        "int": "2",
        "int | None": "2",
        "str | None": "x86-64-v3",
        "tuple[int, ...]": "0",
    }
    special = {"target": "cpu", "execution_backend": "polyblocks", "mm_conv_precision_mode": "fp32", "static_argnums": "1",
               "static_argnames": "axis", "donate_argnums": "0", "donate_argnames": "x", "debug": None}  # fmt: skip
    refused = {"on_gpu_tensors", "polyblocks_gpu_no_tensor_core", "torch_polyblocks_select_graphs",
               "torch_polyblocks_filter_graphs"}  # fmt: skip
    for k, f in enumerate(dataclasses.fields(pbkern.CompileOptions)):
        name, value = (
            f"{'-' * (1 + k % 2)}{f.name.replace('_', '-')}",
            special.get(f.name, values.get(str(f.type))),
        )
        given = [name] if f.type == "bool" else [f"{name}={value}"] if k % 3 else [name, value]
        status, _, err = run(capsys, "compile", f"{model}:softmax", "--args", "f32[4,5]", *given)
        assert status == (2 if f.name in refused else 0), (name, err)
        assert (f.name in refused) == (f"`{f.name}` concerns" in err)
        status, _, err = run(capsys, "explain", f"{model}:softmax", "--args", "f32[4,5]", *given)
        assert status == 0 or "concerns" in err, (name, err)


def test_options_act(model, capsys):
    kernels = lambda *given: run(
        capsys, "explain", f"{model}:softmax", "--args", "f32[40,50]", *given
    )[1].count("softmax_")
    assert kernels("-polyblocks-disable-affine-fusion") > kernels()
    status, _, err = run(
        capsys, "compile", f"{model}:softmax", "--args", "f32[4,5]", "--mm-conv-precision-mode=f16"
    )
    assert status == 2
    assert "did you mean `fp16`" in err
    status, out, _ = run(
        capsys,
        "compile",
        f"{model}:softmax",
        "--args",
        "f32[4,5]",
        "-emit",
        "metadata",
        "--no-openmp",
    )
    assert status == 0
    assert out == "polyblocks_mlir_artifact.json\n"


# What is given after `compile` and the file; what stderr says.
MISUSES = {
    "no file": (["nothing.py:f"], "there is no file nothing.py"),
    "no function": ([":absent"], "has no function `absent`"),
    "a number": ([":number"], "has no function `number`"),
    "no types": ([":blur"], "the function's arguments are not known"),
    "a bad type": ([":blur", "--args", "f33[2]"], "a type is not understood"),
    "a size that no type has": (
        [":blur", "--args", "f32[H,3]", "-D", "H=4", "-D", "W=4"],
        "has the size `W`",
    ),
    "a size beside arguments of the file": ([":blur", "-D", "H=4"], "has the size `H`"),
    "a size without value": ([":blur", "--args", "f32[H,3]"], "the size `H` has no value"),
    "a bad size": ([":blur", "--args", "f32[H,3]", "-D", "H=x"], "a size is not understood"),
    "too few arguments": ([":two", "--args", "f32[2]"], "missing a required argument: 'y'"),
    "too many arguments": (
        [":blur", "--args", "f32[2]", "f32[2]"],
        "too many positional arguments",
    ),
    "shapes that do not fit": ([":shapes", "--args", "f32[4,5]"], "Incompatible shapes"),
    "a branch on a value": ([":branches", "--args", "f32[4]"], "TracerBoolConversionError"),
    "XLA's operations": ([":eigen", "--args", "f32[40,40]"], "1 operation(s) need XLA"),
    "a check": ([":checked"], "it has checks"),
    "a large constant": ([":constant", "--args", "f32[4]"], "pass it as an argument"),
    "a keyword": ([":blur", "--args", "f32[9]", "-aot-name", "double"], "a keyword of C or C++"),
    "no identifier": ([":blur", "--args", "f32[9]", "-aot-name", "a-b"], "bad value"),
    "a function of C": (
        [":blur", "--args", "f32[9]", "-aot-name", "malloc"],
        "a name of the C library",
    ),
    "no device": (
        [":blur", "--args", "f32[9]", "-device", "pentium"],
        "there is no device `pentium`",
    ),
    "a device without FMA": (
        [":blur", "--args", "f32[9]", "-device", "x86-64-v2"],
        "no libraries are made for",
    ),
    "two systems": (
        [":blur", "--args", "f32[9]", "-device", "native,apple-m1"],
        "one kind of processor and one system",
    ),
    "a GPU": ([":blur", "--args", "f32[9]", "-target", "nvgpu"], "are not made yet"),
    "no folder": ([":blur", "--args", "f32[9]", "-o", "absent/x.o"], "there is no folder absent"),
    "no suffix": ([":blur", "--args", "f32[9]", "-o", "x.exe"], "what x.exe is to be is not known"),
    "no kind": ([":blur", "--args", "f32[9]", "--emit", "obj,exe"], "there is no `exe` to emit"),
    "no option": (
        [":blur", "--args", "f32[9]", "-aot-nam", "x"],
        "unrecognized arguments: --aot-nam",
    ),
    "OpenMP elsewhere": (
        [":blur", "--args", "f32[9]", "-device", "neoverse-n1", "--emit", "shared"],
        "cannot be linked",
    ),
    "no such argument": (
        [":blur", "--args", "f32[9]", "-static-argnums", "4"],
        "`blur` has no such arguments",
    ),
    "a bad number": (
        [":blur", "--args", "f32[9]", "-num-threads", "many"],
        "an integer of at least 1",
    ),
}


@pytest.mark.parametrize("case", MISUSES)
def test_every_misuse_ends_with_one_explanation_and_no_files(case, model, capsys, tmp_path):
    (function, *rest), message = MISUSES[case]
    function = f"{model}{function}" if function.startswith(":") else function
    status, out, err = run(capsys, "compile", function, *rest)
    assert status == 2, err
    assert message in err, err
    assert not out, err
    said = re.findall(r"^(?:\w+(?:Error|Op)|pbkern(?: compile)?: error): ", err, re.MULTILINE)
    assert "Traceback" not in err
    assert len(said) == 1
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.parametrize(("body", "message"), [
    ("def f(x:\n", "SyntaxError"), ("import nothing_of_this_name\n", "ModuleNotFoundError"), ("1 / 0\n", "ZeroDivisionError"),
    ("def f(x):\n    raise KeyError('x')\n", "KeyError"), ("f = lambda x: undefined\n", "NameError"),
])  # fmt: skip
def test_what_the_file_raises_is_explained_at_its_line(body, message, capsys, tmp_path):
    path = tmp_path / "broken_file.py"
    path.write_text(body)
    for command in ("compile", "explain", "run"):
        status, _, err = run(capsys, command, f"{path}:f", "--args", "f32[3]")
        assert status == 2, err
        assert message in err, err
        assert "broken_file.py:" in err, err
        assert "FunctionError" in err, err


def test_a_file_that_ends_the_program_is_explained(capsys, tmp_path):
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(5)\n")
    status, _, err = run(capsys, "compile", f"{tmp_path}/ends.py:f", "--args", "f32[3]")
    assert status == 2
    assert "it ended the program with status 5" in err


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_arrays_that_do_not_suit_a_library(model, capsys, tmp_path):
    assert (
        run(capsys, "compile", f"{model}:blur", "--args", "f32[9]", "-o", tmp_path / "libblur.so")[
            0
        ]
        == 0
    )
    np.save(tmp_path / "wide.npy", np.zeros(9))
    (tmp_path / "text.npy").write_text("text")
    for name, message in (
        ("wide.npy", "has another type"),
        ("absent.npy", "cannot be read"),
        ("text.npy", "cannot be read"),
    ):
        status, _, err = run(capsys, "run", tmp_path / "libblur.so", tmp_path / name)
        assert status == 2
        assert message in err
        assert "Traceback" not in err


def test_errors_of_pbkern_itself_are_not_taken_for_the_user_s(monkeypatch, model):
    monkeypatch.setattr("pbkern.aot.build.emitted", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main.main(["compile", f"{model}:blur", "--args", "f32[9]"])


def test_a_folder_that_cannot_be_written(model, capsys, tmp_path, monkeypatch):
    folder = tmp_path / "fixed"
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    status, _, err = run(
        capsys, "compile", f"{model}:blur", "--args", "f32[9]", "-o", folder / "x.o"
    )
    assert status == 2
    assert "nothing can be written to" in err


def test_devices_are_listed(capsys):
    status, out, _ = run(capsys, "targets", "--devices")
    assert status == 0
    assert "neoverse-n1: aarch64-unknown-linux-gnu" in out
    assert "x86-64-v3: " in out


def test_programs_of_stablehlo_and_of_jax_export(capsys, tmp_path, monkeypatch):
    import jax
    import jax.export
    import jax.numpy as jnp

    monkeypatch.chdir(tmp_path)
    f = jax.jit(lambda x, y: jnp.tanh(x) @ y)
    types = [jax.ShapeDtypeStruct((5, 6), jnp.float32), jax.ShapeDtypeStruct((6, 7), jnp.float32)]
    (tmp_path / "text.mlir").write_text(f.lower(*types).as_text())
    (tmp_path / "exported.bin").write_bytes(jax.export.export(f)(*types).serialize())
    for name in ("text.mlir", "exported.bin"):
        status, out, err = run(
            capsys, "compile", name, "-aot-name", "tanh_product", "--emit", "header,shared"
        )
        assert status == 0, err
        text = (tmp_path / "tanh_product.h").read_text()
        assert "memref<5x6xf32>" in text
        assert "memref<5x7xf32>" in text
        status, out, err = run(capsys, "run", name, "-num-iters", "2")
        assert status == 0, err
        assert out.count("median of 2") == 3, err
        assert run(capsys, "explain", name)[0] == 0
    status, _, err = run(capsys, "compile", "text.mlir", "--args", "f32[3]")
    assert status == 2
    assert "types of its own" in err
    (tmp_path / "no.mlir").write_text("nothing")
    assert run(capsys, "compile", "no.mlir")[0] == 2


@pytest.mark.parametrize("of_library", [False, True])
def test_no_calls_are_refused(model, capsys, tmp_path, of_library):
    what = [tmp_path / "libnone.so"] if of_library else [f"{model}:softmax", "--args", "f32[3]"]
    (tmp_path / "libnone.so").write_bytes(b"")
    status, _, err = run(capsys, "run", *what, "-num-iters", "0")
    assert status != 0
    assert "num_iters=0; it takes an integer of at least 1" in err


def test_running_a_program_that_pytorch_exported_says_what_to_do(capsys, tmp_path):
    (tmp_path / "some.pt2").write_bytes(b"PK")
    status, _, err = run(capsys, "run", tmp_path / "some.pt2")
    assert status != 0
    assert "try  pbkern compile" in err
    assert "some.pt2 -o model.so, then pbkern run model.so" in err
