"""The command: what it prints, how it fails, and what it says of itself."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

import pbkern
from pbkern.cli import main, option_flags

MODEL = """
import jax.numpy as jnp
import pbkern

@pbkern.jit
def loss(x, w, scale=2.0):
    return (jnp.tanh(x @ w) * scale).sum()

def plain(x):
    return jnp.exp(x) + 1

def many(x):
    for i in range(100):
        x = jnp.sort(x @ x, axis=i % 2)
    return x

example_args = lambda: (jnp.ones((8, 8)),)
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


def run(*arguments, **options):
    command = [sys.executable, "-m", "pbkern", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def test_a_reader_that_stops_reading_ends_the_command_quietly(model):
    """More than a pipe holds, of which one line is read."""
    command = (
        f"{sys.executable} -m pbkern explain {model}:many --args 'f32[16,16]' --verbose | head -1"
    )
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.startswith("many: ")
    assert done.stdout.count("\n") == 1
    assert not done.stderr
    assert done.returncode in (0, main.BROKEN_PIPE)


def test_a_closed_pipe_is_no_traceback(model):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "pbkern", "targets", "--coverage"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=300)
    os.close(write)
    assert done.returncode == main.BROKEN_PIPE
    assert not done.stderr


@pytest.mark.parametrize(
    ("function", "types", "why"),
    [
        (
            "loss",
            ["f32[8,8]"],
            "loss(x, w, scale=2.0), given f32[8,8]: missing a required argument: 'w'",
        ),
        (
            "plain",
            ["f32[8]", "f32[8]"],
            "plain(x), given f32[8] f32[8]: too many positional arguments",
        ),
        (
            "loss",
            None,
            "loss(x, w, scale=2.0), given float32[8, 8]: missing a required argument: 'w'",
        ),
    ],
)
@pytest.mark.parametrize("command", ["explain", "dump", "tune"])
def test_a_wrong_number_of_arguments_is_explained(
    model, capsys, monkeypatch, command, function, types, why
):
    monkeypatch.chdir(model.parent)
    assert main.main([command, f"{model}:{function}", *(["--args", *types] if types else [])]) == 2
    err = capsys.readouterr().err
    assert f"OptionError: `{function}` does not take {len(types or [1])} argument" in err
    assert f"why  {why}" in err
    assert "one type for each parameter" in err
    assert "Traceback" not in err


def test_right_arguments(model, capsys):
    assert main.main(["explain", f"{model}:loss", "--args", "f32[8,8]", "f32[8,8]"]) == 0
    assert main.main(["explain", f"{model}:loss", "--args", "f32[8,8]", "f32[8,8]", "f32[]"]) == 0
    assert main.main(["explain", f"{model}:plain"]) == 0
    assert capsys.readouterr().out.count("kernel(s)") == 3
    assert main.main(["explain", f"{model}:plain", "--json", "--top", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["explain", "nothing.py:f"], "there is no file nothing.py"),
    (["explain", "model"], "no function is named"),
    (["explain", "{model}:absent"], "has no function `absent`"),
    (["explain", "{model}:plain", "--args", "f33[2]"], "a type is not understood"),
    (["explain", "{model}:plain", "--args", "f32[3,4], f32[4]"], "a word for each argument: --args 'f32[3,4]' 'f32[4]'"),
])  # fmt: skip
def test_wrong_names_are_explained(model, capsys, arguments, message):
    assert main.main([a.format(model=model) for a in arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_versions(capsys):
    with pytest.raises(SystemExit) as e:
        main.main(["--version"])
    assert e.value.code == 0
    assert capsys.readouterr().out.startswith(
        f"pbkern {pbkern.__version__} (jax {jax.__version__}, jaxlib "
    )


def test_help_shows_examples(capsys):
    for arguments in ([], *([name] for name in main.EXAMPLES if name != "bench")):
        with pytest.raises(SystemExit) as e:
            main.main([*arguments, "--help"])
        out = capsys.readouterr().out
        assert e.value.code == 0
        assert "examples:\n  pbkern " in out
        for line in (
            main.EXAMPLES[arguments[0]]
            if arguments
            else (lines[0] for lines in main.EXAMPLES.values())
        ):
            assert line in out


@pytest.mark.parametrize("line", [line for lines in main.EXAMPLES.values() for line in lines])
def test_examples_are_commands(line):
    name, *arguments = line.replace("'", "").split()
    options, rest = main._parser().parse_known_args(main.normalised(arguments))
    assert name == "pbkern"
    assert not rest or options.command == "bench"


def test_the_package_shows_its_public_names_alone():
    assert dir(pbkern) == sorted([*pbkern.__all__, "__version__"])
    assert all(hasattr(pbkern, name) for name in dir(pbkern))
    assert not {"api", "core", "dsl", "fuse", "lower", "targets", "frontends", "_jax"} & set(
        dir(pbkern)
    )
    assert pathlib.Path(pbkern.__file__).with_name("py.typed").exists()


SWITCHES = [("--openmp=false", False), ("--openmp=no", False), ("-openmp=0", False), ("--no-openmp", False), ("--openmp", True),
            ("--openmp=TRUE", True), ("-openmp=on", True)]  # fmt: skip


@pytest.mark.parametrize(("argument", "value"), SWITCHES)
def test_switches_are_turned_on_and_off(argument, value):
    parsed = main._parser().parse_args(main.normalised(["compile", argument, "model.py:f"]))
    assert option_flags.given(parsed) == {"openmp": value}
    assert parsed.function == "model.py:f"


def test_a_switch_is_true_or_false(model, capsys):
    with pytest.raises(SystemExit):
        main.main(["compile", f"{model}:plain", "--args", "f32[9]", "--openmp=maybe"])
    assert "--openmp" in capsys.readouterr().err


def test_help_names_both_sides_of_a_switch(capsys):
    with contextlib.suppress(SystemExit):
        main.main(["compile", "--help"])
    assert "--no-openmp" in capsys.readouterr().out


def test_a_folder_that_cannot_be_made_is_explained(tmp_path, capsys, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    (tmp_path / "f.py").write_text("def f(x):\n    return x + 1\n")
    monkeypatch.setattr(pathlib.Path, "mkdir", refuse)
    function, output = f"{tmp_path / 'f.py'}:f", f"{tmp_path / 'new'}/"
    assert main.main(["compile", function, "--args", "f32[4]", "-o", output]) == 2
    said = capsys.readouterr().err
    assert "cannot be made" in said
    assert "Permission denied" in said


def test_the_module_of_the_command_runs_it():
    done = subprocess.run(
        [sys.executable, "-m", "pbkern.cli.main", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "usage: pbkern" in done.stdout
