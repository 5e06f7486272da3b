"""Weights as arguments, in the object, and in a file that a library maps, from Python and from C."""

import os
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.cli.main import main
from pbkern.errors import OptionError, TargetError

from . import programs

PLACES = ("arguments", "embed", "file")
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
X = programs.numbers(6, 5)
PARAMS = {
    "layer": {"w": programs.numbers(5, 7), "b": programs.numbers(7)},
    "unused": programs.numbers(3),
}


def mlp(params, x, scale):
    return jnp.tanh(x @ params["layer"]["w"] + params["layer"]["b"]) * scale


def expected(x, scale):
    layer = PARAMS["layer"]
    product = x.astype("f8") @ layer["w"].astype("f8") + layer["b"]
    return np.tanh(product) * scale.astype("f8")


SCALE = np.float32(3)


def library(folder, fn=mlp, args=(PARAMS, X, SCALE), **options):
    options = {"aot_name": "mlp", "weights_argnums": 0} | options
    return pbkern.polyblocks_aot_jax(
        compile_options=options, output=folder, emit=["obj", "header"]
    )(fn)(*args)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("device", [None, "x86-64-v3,x86-64-v4"])
def test_a_function_of_jax(tmp_path, place, device):
    made = library(tmp_path, weights=place, device=device)
    scale = np.float32(3)
    inputs = [argument["name"] for argument in made.metadata["inputs"]]
    own, weights = ["x", "scale"], ["params_layer_b", "params_layer_w", "params_unused"]
    assert inputs == (weights + own if place == "arguments" else own)
    assert ("weights" in made.paths) == (place == "file")
    given = [*jax.tree.leaves(PARAMS), X, scale] if place == "arguments" else [X, scale]
    got = made.load()(*(np.asarray(x) for x in given))
    np.testing.assert_allclose(got, expected(X, scale), rtol=1e-5, atol=1e-6)


def test_weights_by_name_of_an_argument(tmp_path):
    def f(x, *, w):
        return x @ w

    w = programs.numbers(5, 2)
    options = {"aot_name": "named", "weights": "embed", "weights_argnames": "w"}
    made = pbkern.polyblocks_aot_jax(compile_options=options, output=tmp_path)(f)(X, w=w)
    np.testing.assert_allclose(made.load()(X), X @ w, rtol=1e-5, atol=1e-5)


def test_weights_of_every_type(tmp_path):
    """Bits of a file are those of the arrays, whatever they are."""
    weights = {
        "flag": np.array([True, False]),
        "half": np.arange(5, dtype=jnp.bfloat16),
        "big": np.arange(3, dtype=np.int32) - 1,
        "z": np.array(1 + 2j, np.complex64),
        "key": jax.random.key(7),
        "empty": np.zeros((0, 3), np.float32),
    }

    def f(weights, x):
        return jax.tree.map(lambda w: w, {**weights, "key": jax.random.key_data(weights["key"])}), x

    for place in ("embed", "file"):
        made = library(tmp_path / place, f, (weights, X), weights=place, aot_name="types")
        *got, x = made.load()(X)
        want = jax.tree.leaves({**weights, "key": jax.random.key_data(weights["key"])})
        np.testing.assert_array_equal(x, X)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, np.asarray(b))


def test_what_is_no_weight(tmp_path):
    for change, said in (
        ({"weights_argnums": (), "weights": "embed"}, "has no weights"),
        ({"weights_argnums": 5}, "weights_argnums of `mlp` names an argument that it lacks"),
        ({"weights_argnames": "y"}, "no such arguments: y"),
        ({"weights_argnums": 2, "static_argnums": 2}, "no such arguments: 2"),
        ({"weights": "somewhere"}, "'arguments', 'embed', 'file'"),
    ):
        with pytest.raises(OptionError, match=said):
            library(tmp_path, args=(PARAMS, X, 3.0), **change)
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    with pytest.raises(OptionError, match=r"`params\['layer'\]\['b'\]` are not known"):
        library(tmp_path, args=(types, X, np.float32(3)), weights="file")
    with pytest.raises(OptionError, match="`w` is donated, and a weight"):
        library(
            tmp_path, lambda w, x: w + x, (X, X), weights="file", donate_argnums=0, aot_name="sum"
        )
    with pytest.raises(OptionError, match="weights are too many for an object"):
        large = np.zeros((4 << 20, 5), np.float32)
        library(tmp_path, lambda w, x: w[0] + x, (large, X), weights="embed", aot_name="large")
    with pytest.raises(OptionError, match=r"`matmul_kernel` has no weights(.|\n)*kernel has none"):
        library(tmp_path, programs.matmul_kernel, (), weights="embed", weights_argnums=())
    for name in ("weights_argnums", "donate_argnums", "static_argnums"):
        with pytest.raises(OptionError, match=f"`{name}` concerns functions of JAX arrays"):
            library(tmp_path, programs.matmul_kernel, (), **{"weights_argnums": (), name: 0})
    with pytest.raises(OptionError, match="concerns ahead-of-time"):
        pbkern.jit(mlp, compile_options={"weights": "embed"})
    assert not list(tmp_path.iterdir())


def test_a_donated_weight_that_is_an_argument(tmp_path):
    made = library(tmp_path, lambda w, x: w + x, (X, X), donate_argnums=0, aot_name="sum")
    assert made.metadata["shared"] == [[0, 0]]
    np.testing.assert_array_equal(made.load()(X, X), X + X)


def test_donated_inputs_keep_their_numbers(tmp_path):
    made = library(
        tmp_path, lambda w, x: w + x, (X, X), donate_argnums=1, weights="embed", aot_name="sum"
    )
    assert made.metadata["shared"] == [[0, 0]]
    assert "/// x and out may be the same array." in made.header
    x = X.copy()
    made.load()(x, out=x)
    np.testing.assert_array_equal(x, X + X)


def test_the_file_beside_a_shared_library(tmp_path, capsys):
    (tmp_path / "m.py").write_text(
        "import numpy as np\nW = np.full((4, 4), 2, np.float32)\n"
        "def f(w, x): return x @ w\nexample_args = (W, np.ones((3, 4), np.float32))\n"
    )
    command = [
        "compile",
        f"{tmp_path}/m.py:f",
        "-aot-name",
        "twice",
        "-o",
        f"{tmp_path}/libtwice.so",
    ]
    assert main([*command, "--weights=file", "--weights-argnums=0"]) == 0
    assert str(tmp_path / "twice.weights") in capsys.readouterr().out.split()
    assert main(["run", f"{tmp_path}/libtwice.so"]) == 0
    content = (tmp_path / "twice.weights").read_bytes()
    (tmp_path / "twice.weights").write_bytes(content[:-64])
    assert main(["run", f"{tmp_path}/libtwice.so"]) == 2
    assert "does not hold the weights of this function" in capsys.readouterr().err


def test_other_weights_of_the_same_layout(tmp_path):
    """A file belongs to all libraries whose weights have its names, types and shapes, and to no others."""
    other = jax.tree.map(lambda x: x * 2, PARAMS)
    first, scale = library(tmp_path / "a", weights="file"), np.array(1, np.float32)
    second = library(tmp_path / "b", args=(other, X, scale), weights="file")
    assert first.paths["obj"].read_bytes() == second.paths["obj"].read_bytes()
    third = library(
        tmp_path / "c", lambda weights, x: x @ weights, (programs.numbers(5, 9), X), weights="file"
    )
    shutil.copy(second.paths["weights"], first.paths["weights"])
    np.testing.assert_array_equal(first.load()(X, scale), second.load()(X, scale))
    shutil.copy(third.paths["weights"], first.paths["weights"])
    with pytest.raises(TargetError, match="other names, types or shapes"):
        first.load()
    first.paths["weights"].unlink()
    with pytest.raises(TargetError, match="the file of weights cannot be read"):
        first.load()


# --- from C


CALLS = """
#include <string.h>
#include "mlp.h"
#include <stdio.h>
#include <stdlib.h>
int main(int count, char **words) {
  float x[30], scale = 3, out[42];
  for (int k = 0; k < 30; k++) x[k] = (float)k / 30;
  if (count < 2) { mlp(x, &scale, out); return 0; }
  int code = mlp_try(x, &scale, out);
  if (code != MLP_NO_WEIGHTS) return 20 + code;
  for (int k = 1; k < count; k++) {
    code = mlp_load(strcmp(words[k], "-") ? words[k] : NULL);
    printf("%d %s\\n", code, mlp_message(code));
    printf("%d\\n", mlp_try(x, &scale, out));
  }
  for (int k = 0; k < 42; k++) printf("%.8g\\n", (double)out[k]);
  mlp_unload();
  mlp_unload();
  return mlp_try(x, &scale, out) == MLP_NO_WEIGHTS ? strcmp(mlp_message(77), "no code") : 1;
}
"""


@needs_gcc
def test_files_that_are_not_these_weights(tmp_path):
    made = library(tmp_path, weights="file", openmp=False)
    program = programs.compile_c(CALLS, tmp_path, made.paths["obj"])
    good = made.paths["weights"].read_bytes()
    (tmp_path / "short").write_bytes(good[:-1])
    (tmp_path / "none").write_bytes(b"")
    for place in (0, 40):
        (tmp_path / f"other{place}").write_bytes(
            good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
        )
    names = ["mlp.weights", "short", "none", "other0", "other40", ".", "absent", "-", "mlp.weights"]
    done = subprocess.run([program, *names], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stdout)
    lines = done.stdout.splitlines()
    codes = [0, 6, 6, 6, 6, 6, 5, 1, 0]
    assert [int(line.split()[0]) for line in lines[: 2 * len(codes) : 2]] == codes
    assert lines[1 : 2 * len(codes) : 2] == ["0"] * len(codes)  # what was loaded stays
    assert (
        lines[2]
        == "6 the file does not hold the weights of this function: other names, types or shapes"
    )
    got = np.array(lines[2 * len(codes) :], "f8").reshape(6, 7)
    x = (np.arange(30, dtype="f4") / 30).reshape(6, 5)
    np.testing.assert_allclose(got, expected(x, np.float32(3)), rtol=1e-5, atol=1e-6)
    done = subprocess.run([program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == -6
    assert done.stderr == "mlp: no file of weights is loaded: mlp_load\n"


STRUCT = """
#include "mlp.h"
int main() {
  float x[30] = {1}, b[7] = {2, 3}, w[35] = {4}, scale = 3, out[42] = {0}, same[42] = {0};
  mlp_weights weights;
  weights.params_layer_b = b;
  weights.params_layer_w = w;
  weights.params_unused = NULL;
  if (mlp_try_with(x, &scale, &weights, out) != MLP_OK) return 1;
  mlp_with(x, &scale, &weights, same);
  for (int k = 0; k < 42; k++) if (out[k] != same[k]) return 2;
  mlp(b, w, NULL, x, &scale, same);
  for (int k = 0; k < 42; k++) if (out[k] != same[k] || !out[0]) return 3;
  return mlp_try_with(x, &scale, NULL, out) == MLP_NULL_POINTER ? 0 : 4;
}
"""


@needs_gcc
@pytest.mark.parametrize("compiler", [("gcc", "-std=c99"), ("g++", "-std=c++11")])
def test_a_struct_of_weights(tmp_path, compiler):
    made = library(tmp_path, openmp=False)
    program = programs.compile_c(STRUCT, tmp_path, made.paths["obj"], compiler=compiler)
    assert subprocess.run([program]).returncode == 0


def test_an_argument_that_is_called_weights(tmp_path):
    made = library(tmp_path, lambda w, weights: w + weights, (X, X), aot_name="sum")
    assert "sum_with(const float *weights, const sum_weights *weights_2, float *out)" in made.header


# --- other front ends


def encoder(torch):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2).eval()


ENCODER = """
#include "encoder.h"
#include <stdio.h>
static float x[2 * 9 * 32], out[2 * 9 * 32];
int main(void) {
  LOAD
  FILE *f = fopen("x.bin", "rb");
  if (fread(x, 1, sizeof x, f) != sizeof x) return 9;
  fclose(f);
  int code = encoder_try(x, out);
  if (code) return code;
  f = fopen("out.bin", "wb");
  if (fwrite(out, 1, sizeof out, f) != sizeof out) return 8;
  fclose(f);
  return 0;
}
"""


@needs_gcc
@pytest.mark.parametrize("place", ["embed", "file"])
@pytest.mark.parametrize(
    "before",
    [
        (),
        pytest.param(
            ("valgrind", "--error-exitcode=7", "--leak-check=full", "-q"), marks=pytest.mark.slow
        ),
    ],
    ids=["alone", "valgrind"],
)
def test_an_encoder_of_torch_from_c(tmp_path, place, before):
    torch = pytest.importorskip("torch")
    if before and shutil.which(before[0]) is None:
        pytest.skip("there is no valgrind")
    model, x = encoder(torch), torch.randn(2, 9, 32)
    options = {"aot_name": "encoder", "weights": place, "openmp": False, "device": "x86-64-v3"}
    made = pbkern.polyblocks_aot_torch(compile_options=options, output=tmp_path)(model)(x)
    load = 'if (encoder_load("encoder.weights")) return 10;' if place == "file" else ""
    source = ENCODER.replace("LOAD", load).replace(
        "  return 0;", f"  {'encoder_unload();' if load else ''}\n  return 0;"
    )
    program = programs.compile_c(source, tmp_path, made.paths["obj"])
    (tmp_path / "x.bin").write_bytes(x.numpy().tobytes())
    done = subprocess.run([*before, program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)
    got = np.fromfile(tmp_path / "out.bin", "f4").reshape(2, 9, 32)
    want = model.double()(x.double()).detach().numpy()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_the_fields_of_a_module_are_its_parameters(tmp_path):
    torch = pytest.importorskip("torch")
    made = pbkern.polyblocks_aot_torch(output=tmp_path, compile_options={"aot_name": "encoder"})(
        encoder(torch)
    )(torch.randn(2, 9, 32))
    fields = made.header.split("typedef struct {")[1].split("}")[0].split(";")
    names = [field.split("*")[1] for field in fields if "*" in field]
    assert names == [name.replace(".", "_") for name in encoder(torch).state_dict()]
    assert (
        "encoder_try_with(const float *src, const encoder_weights *weights, float *output)"
        in made.header
    )


def test_buffers_and_exported_programs(tmp_path):
    torch = pytest.importorskip("torch")

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.rand(4))
            self.register_buffer("unsaved", torch.rand(4), persistent=False)
            self.w = torch.nn.Parameter(torch.rand(4).to(torch.bfloat16))

        def forward(self, x):
            return (x * self.kept + self.unsaved) * self.w.float() + torch.tensor([1.0, 2, 3, 4])

    model, x = Module().eval(), torch.rand(3, 4)
    want, program = model(x).detach().numpy(), torch.export.export(model, (x,))
    torch.export.save(program, tmp_path / "module.pt2")
    for place in ("embed", "file"):
        options = {"aot_name": "module", "weights": place}
        made = pbkern.polyblocks_aot_torch(
            program, compile_options=options, output=tmp_path / place
        )()
        assert [argument["name"] for argument in made.metadata["inputs"]] == ["x"]
        np.testing.assert_allclose(made.load()(x.numpy()), want, rtol=1e-6)
        folder = tmp_path / f"{place}2"
        folder.mkdir()
        command = ["compile", f"{tmp_path}/module.pt2", "-o", str(folder / "module.o")]
        assert main([*command, f"--weights={place}"]) == 0
        assert (folder / "module.weights").exists() == (place == "file")
    with pytest.raises(OptionError, match=r"has no weights(.|\n)*module or function keeps"):
        pbkern.polyblocks_aot_torch(compile_options={"weights": "file"})(torch.nn.ReLU())(x)
    with pytest.raises(OptionError, match="`weights_argnums` concerns functions of JAX arrays"):
        pbkern.polyblocks_aot_torch(compile_options={"weights_argnums": 0})(model)


def test_variables_of_tensorflow(tmp_path):
    tf = pytest.importorskip("tensorflow")
    scale, table = tf.Variable(programs.numbers(5), name="scale"), tf.constant(programs.numbers(5))
    for place in PLACES:
        options = {"aot_name": "scaled", "weights": place}
        made = pbkern.polyblocks_aot_tf(compile_options=options, output=tmp_path / place)(
            lambda x: x * scale + table
        )(X)
        given = [X, scale.numpy()] if place == "arguments" else [X]
        want = X * scale.numpy() + table.numpy()
        np.testing.assert_allclose(made.load()(*given), want, rtol=1e-6, atol=1e-6)
        assert ("scaled_weights" in made.header) == (place == "arguments")


# --- threads


THREADS = """
#include <dirent.h>
#include "softmax.h"
static float x[300000], y[300000];
int main(void) {
  if (softmax_try(x, y)) return 101;
  DIR *tasks = opendir("/proc/self/task");
  int count = -2;
  while (readdir(tasks)) count++;
  closedir(tasks);
  return count;
}
"""


@needs_gcc
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="there is no /proc")
def test_the_caller_says_how_many_threads(tmp_path):
    """A library that was compiled on one thread runs on more, if its caller has them."""
    with pbkern.config.override(num_threads=1):
        made, inputs, (want,) = programs.library("softmax", tmp_path)
    assert made.metadata["threads"] == 256
    program = programs.compile_c(
        "#define _DEFAULT_SOURCE\n" + THREADS, tmp_path, made.paths["obj"], "-lgomp"
    )
    for threads in (1, 3, 7):
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        assert subprocess.run([program], env=environment).returncode == threads
    calling = programs.compile_c(
        programs.calling_program(made), tmp_path, made.paths["obj"], "-lgomp", name="calling"
    )
    (got,) = programs.run_c(calling, made, inputs, tmp_path, {**os.environ, "OMP_NUM_THREADS": "7"})
    np.testing.assert_array_equal(got, want)


@needs_gcc
def test_memory_as_a_function_of_threads(tmp_path):
    """It is enough at each number of threads: a page that cannot be touched follows it."""
    made, inputs, want = programs.library("attention", tmp_path, user_device_memory=True)
    source = programs.calling_program(made, guarded=True)
    bytes_of = 'attention_memory_bytes(atoi(getenv("OMP_NUM_THREADS")))'
    source = source.replace("guarded(NULL, ATTENTION_MEMORY_BYTES)", f"guarded(NULL, {bytes_of})")
    assert bytes_of in source
    program = programs.compile_c(source, tmp_path, made.paths["obj"], "-lgomp")
    for threads in (1, 2, 5):
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        for a, b in zip(
            programs.run_c(program, made, inputs, tmp_path, environment), want, strict=True
        ):
            np.testing.assert_array_equal(a, b)
