"""Libraries of PyTorch modules and TensorFlow functions compute what these do."""

import collections

import numpy as np
import pytest

import pbkern
from pbkern.cli.main import main
from pbkern.errors import ArgumentError, OptionError, UnsupportedOp


def uniform(*shape, seed=0):
    return np.random.default_rng(seed).random(shape, np.float32)


# --- PyTorch --------------------------------------------------------------------------------------------------------


def net(torch):
    torch.manual_seed(0)

    class ConvBiasAddRelu(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 8, 5)
            self.norm = torch.nn.BatchNorm2d(8)

        def forward(self, input):
            return torch.relu(self.norm(self.conv(input)))

    return ConvBiasAddRelu().eval()


def weights(model):
    return [
        t.detach().numpy() for n, t in model.state_dict().items() if n != "norm.num_batches_tracked"
    ]


def test_a_module(tmp_path):
    torch = pytest.importorskip("torch")
    model, x = net(torch), torch.from_numpy(uniform(2, 3, 12, 11))
    library = pbkern.polyblocks_aot_torch(output=tmp_path)(model)(x)
    assert library.name == "conv_bias_add_relu"
    assert set(library.paths) == {"obj", "header"}
    names = [a["name"] for a in library.metadata["inputs"]]
    own = [
        "conv_weight",
        "conv_bias",
        "norm_weight",
        "norm_bias",
        "norm_running_mean",
        "norm_running_var",
    ]
    assert names == ["input", *own]
    want = model(x).detach().numpy()
    np.testing.assert_allclose(
        library.load()(x.numpy(), *weights(model)), want, rtol=1e-4, atol=1e-5
    )


def test_an_exported_program_and_its_file(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    model, x = net(torch), torch.from_numpy(uniform(1, 3, 9, 9))
    program = torch.export.export(model, (x,))
    want = model(x).detach().numpy()
    library = pbkern.polyblocks_aot_torch(program, output=tmp_path)()
    np.testing.assert_allclose(
        library.load()(x.numpy(), *weights(model)), want, rtol=1e-4, atol=1e-5
    )
    torch.export.save(program, tmp_path / "net.pt2")
    assert main(["compile", str(tmp_path / "net.pt2"), "-o", str(tmp_path / "libnet.so")]) == 0
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "libnet.h"),
        str(tmp_path / "libnet.so"),
    ]
    assert main(["compile", str(tmp_path / "net.pt2"), "--args", "f32[7,4]"]) == 2
    assert "has types of its own" in capsys.readouterr().err
    (tmp_path / "no.pt2").write_text("nothing")
    assert main(["compile", str(tmp_path / "no.pt2")]) == 2
    said = capsys.readouterr().err
    assert "is no program of torch.export" in said
    assert "Traceback" not in said
    with pytest.raises(ArgumentError, match="takes no arguments here"):
        pbkern.polyblocks_aot_torch(program, output=tmp_path)(x)


def test_a_function_of_several_types(tmp_path):
    torch = pytest.importorskip("torch")

    def f(x, n):
        return x.to(torch.float64) * n, x.argmax(1), x

    x, n = torch.from_numpy(uniform(4, 5)), torch.arange(5)
    library = pbkern.polyblocks_aot_torch(compile_options={"aot_name": "several"}, output=tmp_path)(
        f
    )(x, n)
    for got, want in zip(library.load()(x.numpy(), n.numpy()), f(x, n), strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-12)
        assert got.dtype == want.numpy().dtype


def test_a_librarys_arrays_are_row_major(tmp_path):
    torch = pytest.importorskip("torch")

    def f(x, y):
        return x.t() * 2 + y, x + 1

    x = torch.from_numpy(uniform(5, 4)).t()
    y = torch.from_numpy(uniform(5, 4))
    library = pbkern.polyblocks_aot_torch(output=tmp_path)(f)(x, y)
    for got, want in zip(library.load()(np.ascontiguousarray(x), y.numpy()), f(x, y), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def with_tensors(torch):
    """Parameters and buffers are weights; a plain attribute and tensors of numbers are constants."""

    class WithTensors(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 4)
            self.scales = torch.arange(4.0)
            self.register_buffer("offset", torch.ones(4) * 2)

        def forward(self, x):
            chosen = self.linear(x) * self.scales + self.offset
            return chosen[torch.tensor([1, 0, 1])] * torch.tensor(0.5), torch.tensor([3, 4])

    return WithTensors().eval()


def test_tensors_of_numbers_are_constants(tmp_path):
    torch = pytest.importorskip("torch")
    model, x = with_tensors(torch), torch.from_numpy(uniform(2, 3))
    library = pbkern.polyblocks_aot_torch(output=tmp_path)(model)(x)
    weights = [model.linear.weight, model.linear.bias, model.offset]
    results = library.load()(x.numpy(), *(weight.detach().numpy() for weight in weights))
    for got, want in zip(results, model(x), strict=True):
        np.testing.assert_allclose(got, want.detach().numpy(), rtol=1e-5)


def test_what_torch_modules_may_not_do(tmp_path):
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(uniform(2, 3, 9, 9))
    with pytest.raises(
        UnsupportedOp, match=r"the module changes what it keeps\n.*norm.running_mean"
    ):
        pbkern.polyblocks_aot_torch(output=tmp_path)(net(torch).train())(x)
    with pytest.raises(UnsupportedOp, match=r"operator is not compiled\n.*fft_r2c"):
        pbkern.polyblocks_aot_torch(output=tmp_path)(lambda x: torch.fft.rfft(x).abs())(x)
    with pytest.raises(UnsupportedOp, match=r"draws random numbers\n.*\n.*model.eval"):
        pbkern.polyblocks_aot_torch(output=tmp_path)(lambda x: torch.nn.functional.dropout(x, 0.5))(
            x
        )
    with pytest.raises(UnsupportedOp, match=r"torch.export cannot capture"):
        pbkern.polyblocks_aot_torch(output=tmp_path)(lambda x: x * float(x.sum()))(x)
    with pytest.raises(OptionError, match="`static_argnums` concerns functions of JAX arrays"):
        pbkern.polyblocks_aot_torch(compile_options={"static_argnums": 0})(lambda x: x)
    assert not list(tmp_path.iterdir())


# --- TensorFlow -----------------------------------------------------------------------------------------------------


def test_a_tensorflow_function(tmp_path):
    tf = pytest.importorskip("tensorflow")
    scale, table = tf.Variable(uniform(4), name="scale"), tf.constant(uniform(4, seed=1))

    def f(x, n):
        return {"y": x * scale + table, "n": tf.cast(n, tf.int64) + 1}

    x, n = uniform(3, 4, seed=2), np.arange(3, dtype="i4")
    library = pbkern.polyblocks_aot_tf(output=tmp_path)(f)(x, n)
    assert [a["name"] for a in library.metadata["inputs"]] == ["x", "n", "scale"]
    assert [a["name"] for a in library.metadata["outputs"]] == ["out_n", "out_y"]
    got, want = library.load()(x, n, scale.numpy()), f(x, n)
    for g, w in zip(got, (want["n"], want["y"]), strict=True):
        np.testing.assert_allclose(g, w.numpy(), rtol=1e-6)
    signature = [tf.TensorSpec((3, 4)), tf.TensorSpec((3,), tf.int32)]
    again = pbkern.polyblocks_aot_tf(input_signature=signature, output=tmp_path)(f)()
    np.testing.assert_array_equal(again.load()(x, n, scale.numpy())[1], got[1])


def test_results_of_tensorflow_are_named_after_their_keys(tmp_path):
    tf = pytest.importorskip("tensorflow")
    pair = collections.namedtuple("pair", ["low", "high"])

    def f(x):
        ends = pair(tf.reduce_min(x), tf.reduce_max(x))
        ordered = collections.OrderedDict([("z", x + 1), ("a", x - 1)])
        return {"y": [x * 2, None, x * 3], "b": ends, "o": ordered}

    x = uniform(3)
    library = pbkern.polyblocks_aot_tf(output=tmp_path)(f)(x)
    want = {
        "out_b_low": x.min(),
        "out_b_high": x.max(),
        "out_o_a": x - 1,
        "out_o_z": x + 1,
        "out_y_0": x * 2,
        "out_y_2": x * 3,
    }
    got = dict(zip((a["name"] for a in library.metadata["outputs"]), library.load()(x)))
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-6)
    for single, names in ((lambda x: x, ["out"]), (lambda x: (x, x + 1), ["out0", "out1"])):
        made = pbkern.polyblocks_aot_tf(output=tmp_path, compile_options={"aot_name": "one"})(
            single
        )(x)
        assert [a["name"] for a in made.metadata["outputs"]] == names


def test_what_tensorflow_functions_may_not_do(tmp_path):
    tf = pytest.importorskip("tensorflow")
    v = tf.Variable(1.0, name="total")
    with pytest.raises(UnsupportedOp, match=r"would assign variables\n.*total"):
        pbkern.polyblocks_aot_tf(output=tmp_path)(lambda x: v.assign_add(tf.reduce_sum(x)))(
            uniform(3)
        )
    with pytest.raises(UnsupportedOp, match="would return a IndexedSlices"):
        pbkern.polyblocks_aot_tf(output=tmp_path)(lambda x: tf.IndexedSlices(x, tf.range(3)))(
            uniform(3)
        )
    with pytest.raises(ArgumentError, match="made for known shapes"):
        pbkern.polyblocks_aot_tf(input_signature=[tf.TensorSpec((None,))], output=tmp_path)(
            lambda x: x
        )()
    with pytest.raises(UnsupportedOp, match="fft"):
        pbkern.polyblocks_aot_tf(output=tmp_path)(lambda x: tf.abs(tf.signal.rfft(x)))(uniform(8))
    assert not list(tmp_path.iterdir())


def test_modules_that_change_their_arguments_are_refused():
    torch = pytest.importorskip("torch")

    class InPlace(torch.nn.Module):
        def forward(self, x):
            x.add_(1)
            return x * 2

    with pytest.raises(UnsupportedOp, match=r"changes its arguments in place\n  why  x"):
        pbkern.polyblocks_aot_torch()(InPlace().eval())(torch.ones(3))
