"""Functions of TensorFlow against TensorFlow itself: results, structures, types, variables."""

import concurrent.futures
import os

import numpy as np
import pytest
import tensorflow as tf

import pbkern
from pbkern.frontends.tf import memory

HEIGHT, WIDTH = 24, 36


def uniform(*shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).random(shape).astype(dtype)


def blur_x_blur_y(img):
    kernel = tf.constant([0.0625, 0.25, 0.375, 0.25, 0.0625], dtype=tf.float32)
    blur_kernel = tf.reshape(kernel, [1, 5, 1, 1])
    img_reshaped = tf.reshape(img, [3, HEIGHT, WIDTH, 1])
    blurx = tf.nn.conv2d(img_reshaped, blur_kernel, [1, 1, 1, 1], "VALID")
    blur_kernel = tf.reshape(kernel, [5, 1, 1, 1])
    blury = tf.nn.conv2d(blurx, blur_kernel, [1, 1, 1, 1], "VALID")
    return tf.reshape(blury, [3, HEIGHT - 4, WIDTH - 4])


def conv_bias_add_relu(img, filters, bias):
    conv = tf.nn.conv2d(img, filters, strides=(1, 1), padding="SAME", dilations=(1, 1))
    return tf.nn.relu(tf.nn.bias_add(conv, bias))


def counted(x):
    i = tf.constant(0)
    while i < 5:
        x = x * 0.5 + tf.sin(x)
        i += 1
    return {"x": x, "n": i}


def until_large(x):
    while tf.reduce_sum(x) < 100.0:
        x = x * 2.0 + 1.0
    return x


def either(x):
    if tf.reduce_mean(x) > 0.5:
        return x - 1.0
    return x + 1.0


def gradients(x, w):
    with tf.GradientTape() as tape:
        tape.watch(w)
        y = tf.reduce_sum(tf.square(tf.nn.gelu(tf.matmul(x, w))))
    return tape.gradient(y, w), (y, None)


def attention(q, k, v):
    scores = tf.matmul(q, k, transpose_b=True) / q.shape[-1] ** 0.5
    return tf.matmul(tf.nn.softmax(scores), v)


def normalised(x):
    return tf.nn.batch_normalization(x, *tf.nn.moments(x, [0, 1, 2]), None, None, 1e-3)


def special(x):
    return (
        tf.math.erf(x)
        + tf.math.lgamma(x + 1)
        + tf.asin(x)
        + tf.math.erfc(x)
        + tf.math.digamma(x + 1)
    )


def orders(x):
    return (
        tf.sort(x, direction="DESCENDING"),
        tf.argsort(x),
        tf.argmax(x, 1),
        tf.argmin(x, 0),
        tf.math.top_k(x, 3),
    )


def moved(x):
    return (
        tf.gather(x, [2, 0, 1], axis=1),
        tf.reverse(x, [0]),
        tf.pad(x, [[1, 0], [0, 2]]),
        tf.cumsum(x, 1),
        tf.one_hot([1, 3], 4),
    )


def pools(x):
    return (
        tf.nn.max_pool2d(x, 2, 2, "SAME"),
        tf.nn.avg_pool2d(x, 3, 2, "VALID"),
        tf.image.resize(x, (16, 10)),
    )


def pool_gradient(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(tf.nn.max_pool2d(x, 3, 2, "SAME") ** 2)
    return tape.gradient(y, x)


FUNCTIONS = {
    "blur": (blur_x_blur_y, uniform(3, HEIGHT, WIDTH)),
    "convolution": (conv_bias_add_relu, uniform(2, 9, 8, 3), uniform(3, 3, 3, 8), uniform(8)),
    "float16": (
        conv_bias_add_relu,
        uniform(1, 6, 5, 2, dtype="f2"),
        uniform(3, 3, 2, 4, dtype="f2"),
        uniform(4, dtype="f2"),
    ),
    "counted loop": (counted, uniform(16)),
    "loop until": (until_large, uniform(7)),
    "branches": (either, uniform(5)),
    "gradients": (gradients, uniform(8, 16), tf.constant(uniform(16, 4))),
    "attention": (attention, *[uniform(2, 9, 16, seed=k) for k in range(3)]),
    "batch normalisation": (normalised, uniform(2, 5, 4, 3)),
    "special functions": (special, uniform(13)),
    "orders": (orders, uniform(5, 9)),
    "moved": (moved, uniform(4, 3)),
    "pools": (pools, uniform(1, 9, 7, 3)),
    "gradient of a pool": (pool_gradient, tf.constant(uniform(1, 7, 6, 2))),
    "integers": (
        lambda n: (n // 3, n % 3, tf.bitwise.bitwise_xor(n, 5), tf.cast(n, tf.float64)),
        np.arange(-7, 7),
    ),
    "truth values": (
        lambda x: (x > 0.5, tf.reduce_any(x > 2), tf.logical_not(x > 0.25)),
        uniform(9),
    ),
    "complex": (
        lambda x: tf.abs(tf.complex(x, x * 2)) + tf.math.real(tf.exp(tf.complex(x, x))),
        uniform(6),
    ),
    "no elements": (lambda x: (x + 1.0, tf.reduce_sum(x, 0)), np.zeros((0, 3), "f4")),
    "one element": (lambda x: x * 2.0, np.float32(3)),
    "rfft": (lambda x: tf.abs(tf.signal.rfft(x)), uniform(4, 16)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_tensorflow(name):
    f, *args = FUNCTIONS[name]
    want = tf.function(f)(*args)
    got = pbkern.polyblocks_jit_tf(f)(*args)
    tf.nest.assert_same_structure(got, want)
    for g, w in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
        if w is not None:
            assert tf.is_tensor(g)
            assert (g.shape, g.dtype) == (w.shape, w.dtype)
            error = 1e-2 if w.dtype == tf.float16 else 3e-5
            np.testing.assert_allclose(g.numpy(), w.numpy(), rtol=error, atol=error)


def inverse_and_solution(x):
    return tf.linalg.inv(x), tf.linalg.solve(x, x[..., :1] + 1.0), tf.linalg.inv(x, adjoint=True)


def orthogonal_factors(x):
    (q, r), (full_q, full_r) = tf.linalg.qr(x), tf.linalg.qr(x, full_matrices=True)
    return q @ r, full_q @ full_r, tf.linalg.adjoint(full_q) @ full_q


def eigenvectors(x):
    symmetric = x + tf.linalg.matrix_transpose(x)
    values, vectors = tf.linalg.eigh(symmetric)
    return values, symmetric @ vectors - vectors * values[..., None, :]


def gradient_of_inverse(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(tf.linalg.inv(x) ** 2)
    return tape.gradient(y, x)


DECOMPOSITIONS = {
    "inverse": (inverse_and_solution, (3, 3)), "inverses": (inverse_and_solution, (2, 1, 5, 5)),
    "one": (inverse_and_solution, (1, 1)), "large": (inverse_and_solution, (40, 40)),
    "factors": (orthogonal_factors, (4, 4)), "tall": (orthogonal_factors, (2, 5, 3)), "wide": (orthogonal_factors, (3, 5)),
    "eigenvectors": (eigenvectors, (2, 5, 5)), "gradient": (gradient_of_inverse, (4, 4)),
    "exponential": (tf.linalg.expm, (3, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_decompositions_are_tensorflows(name):
    f, shape = DECOMPOSITIONS[name]
    x = uniform(*shape, dtype="float64") + 2 * np.eye(*shape[-2:])
    got, want = pbkern.polyblocks_jit_tf(f)(x), f(tf.constant(x))
    for g, w in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["blur", "convolution", "attention", "gradients"])
def test_one_kernel(name):
    f, *args = FUNCTIONS[name]
    plan = pbkern.polyblocks_jit_tf(f).explain(*args)
    assert len(plan.kernels) == 1
    assert not plan.left


def test_as_a_decorator_with_a_signature():
    @pbkern.polyblocks_jit_tf(
        input_signature=[tf.TensorSpec((3, HEIGHT, WIDTH))], compile_options={"target": "cpu"}
    )
    def blur(img):
        """Doc."""
        return blur_x_blur_y(img)

    image = uniform(3, HEIGHT, WIDTH)
    want = blur_x_blur_y(image)
    np.testing.assert_allclose(blur(image), want, rtol=1e-5)
    np.testing.assert_allclose(blur(image.astype("f8").tolist()), want, rtol=1e-5)
    assert (blur.__name__, blur.__doc__) == ("blur", "Doc.")
    with pytest.raises(
        pbkern.errors.ArgumentError,
        match=r"no float32 of shape \(3, 24, 36\)\n.*why  shape \(3, 24, 35\)",
    ):
        blur(image[..., 1:])
    with pytest.raises(
        pbkern.errors.ArgumentError,
        match=r"does not match the input signature\n.*given 2 arguments, it has 1",
    ):
        blur(image, image)
    pairs = pbkern.polyblocks_jit_tf(
        lambda p: p["a"] + p["b"][0],
        input_signature=[{"a": tf.TensorSpec(3), "b": [tf.TensorSpec(3)]}],
    )
    np.testing.assert_array_equal(pairs({"a": [1, 2, 3], "b": [[1, 1, 1]]}), [2, 3, 4])
    with pytest.raises(pbkern.errors.ArgumentError, match=r"no float32 of shape \(3,\)"):
        pairs({"a": ["1", "2", "3"], "b": [[1, 1, 1]]})
    (kernel,) = blur.kernels(image)
    assert kernel.name in blur.as_text(image)
    with pytest.raises(
        pbkern.errors.ArgumentError, match=r"does not match the input signature\n.*given {'a': 1}"
    ):
        pairs({"a": 1})


def test_variables_are_read_at_each_call_and_assigned():
    total, scale, seen = tf.Variable(tf.zeros(4)), tf.Variable(3.0), tf.Variable(0, dtype=tf.int64)

    @pbkern.polyblocks_jit_tf
    def step(x):
        total.assign_add(x * scale)
        seen.assign(seen + 1)
        return total * 2.0

    x = uniform(4)
    np.testing.assert_allclose(step(x), x * 6, rtol=1e-6)
    np.testing.assert_allclose(step(x), x * 12, rtol=1e-6)
    scale.assign(0.0)
    np.testing.assert_allclose(step(x), x * 12, rtol=1e-6)
    assert seen.numpy() == 3
    np.testing.assert_allclose(total, x * 6, rtol=1e-6)


def test_a_function_without_results():
    v = tf.Variable(tf.ones(3))

    @pbkern.polyblocks_jit_tf
    def double():
        v.assign(v * 2.0)

    assert double() is None
    np.testing.assert_array_equal(v, [2, 2, 2])


def test_variables_as_arguments():
    v = tf.Variable(uniform(5))
    f = pbkern.polyblocks_jit_tf(lambda w, x: w * x)
    np.testing.assert_allclose(f(v, uniform(5, seed=1)), v * uniform(5, seed=1), rtol=1e-6)
    v.assign(tf.ones(5))
    np.testing.assert_allclose(f(v, uniform(5, seed=1)), uniform(5, seed=1), rtol=1e-6)


def test_other_types_shapes_and_constants_trace_anew():
    traces = []

    @pbkern.polyblocks_jit_tf
    def f(x, n, *, add=0.0, parts=()):
        traces.append(x.shape)
        for _ in range(n):
            x = x * 2
        return [x + tf.cast(add, x.dtype), {"sum": sum(parts)}]

    x = uniform(3)
    np.testing.assert_allclose(f(x, 2)[0], x * 4)
    np.testing.assert_allclose(f(tf.constant(x), 2)[0], x * 4)
    assert len(traces) == 1
    np.testing.assert_allclose(f(x, 3, add=1.5)[0], x * 8 + 1.5)
    np.testing.assert_allclose(
        f(uniform(2, 2), 1, parts=[uniform(2), uniform(2)])[1]["sum"], uniform(2) * 2
    )
    np.testing.assert_array_equal(f(np.arange(3), 1)[0], [0, 2, 4])
    assert len(traces) == 4


def test_structures_are_told_from_tensors_of_the_same_types():
    f = pbkern.polyblocks_jit_tf(lambda x: x[0])
    x = tf.constant(uniform(3, 4))
    for _ in range(2):
        assert f([x]).shape == (3, 4)
        assert f(x).shape == (4,)
        assert f((x, x)).shape == (3, 4)


def test_results_of_every_type_and_size():
    types = [tf.bool, tf.int8, tf.uint16, tf.int64, tf.bfloat16, tf.float16, tf.float64]
    f = pbkern.polyblocks_jit_tf(lambda x: [tf.cast(x * 3, t) for t in types])
    for shape in ((), (0, 3), (5,), (1100, 1000)):  # the last takes huge pages
        x = tf.constant(uniform(*shape))
        for made, t in zip(f(x), types):
            assert (made.dtype, made.shape) == (t, shape)
            np.testing.assert_array_equal(
                tf.cast(made, tf.float64), tf.cast(tf.cast(x * 3, t), tf.float64)
            )


class Weighted(tf.experimental.ExtensionType):
    values: tf.Tensor
    weight: tf.Tensor
    name: str


def embedded(x, numbers):
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(tf.gather(x, numbers) ** 2)
    return tape.gradient(loss, x)


@pytest.mark.parametrize(("f", "parts"), [
    (lambda x: embedded(x, [0, 2, 0]), ["values", "indices", "dense_shape"]),
    (lambda x: tf.IndexedSlices(x, tf.constant([2, 0, 1])), ["values", "indices", "dense_shape"]),
    (lambda x: tf.RaggedTensor.from_row_splits(x * 2.0, [0, 1, 1, 3]), ["values", "row_splits"]),
    (lambda x: tf.RaggedTensor.from_nested_row_splits(x, [[0, 2, 2], [0, 1, 3]]), ["flat_values", "nested_row_splits"]),
    (lambda x: tf.SparseTensor([[0, 0], [1, 1], [2, 0]], x[:, 0], [3, 2]), ["values", "indices", "dense_shape"]),
    (lambda x: Weighted(x * 2.0, x[0], "rows"), ["values", "weight", "name"]),
])  # fmt: skip
def test_results_of_several_tensors(f, parts):
    x = tf.constant(uniform(3, 2))
    compiled = pbkern.polyblocks_jit_tf(
        lambda x: {"first": x + 1.0, "none": None, "rest": [f(x), tf.reduce_sum(x)]}
    )
    for _ in range(2):
        results = compiled(x)
        given, expected = results["rest"][0], f(x)
        assert type(given) is type(expected)
        for part in parts:
            one, other = getattr(given, part), getattr(expected, part)
            if tf.is_tensor(other):
                assert one.dtype == other.dtype
                np.testing.assert_allclose(one, other, rtol=1e-6)
            elif isinstance(other, tuple):
                assert [y.numpy().tolist() for y in one] == [y.numpy().tolist() for y in other]
            else:
                assert one == other
        np.testing.assert_allclose(results["first"], x + 1.0)
        np.testing.assert_allclose(results["rest"][1], tf.reduce_sum(x), rtol=1e-6)


def test_several_threads_call():
    f, x = (
        pbkern.polyblocks_jit_tf(lambda x, k: tf.reduce_sum(x * k, 1)),
        tf.constant(uniform(300, 400)),
    )
    want = [f(x, tf.constant(float(k))).numpy() for k in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            made = list(pool.map(lambda k: f(x, tf.constant(float(k))).numpy(), range(8)))
            for m, w in zip(made, want):
                np.testing.assert_array_equal(m, w)


def test_a_keras_model_and_its_training():
    keras = pytest.importorskip("keras")
    layers = [keras.layers.Input((7, 6, 2)), keras.layers.Conv2D(4, 3, activation="relu"), keras.layers.Flatten(),
              keras.layers.LayerNormalization(), keras.layers.Dense(3)]  # fmt: skip
    model = keras.Sequential(layers)
    x = uniform(5, 7, 6, 2)
    np.testing.assert_allclose(pbkern.polyblocks_jit_tf(model)(x), model(x), rtol=1e-4, atol=1e-5)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        for v, g in zip(model.trainable_variables, tape.gradient(loss, model.trainable_variables)):
            (v.value if hasattr(v, "value") else v).assign_sub(0.002 * g)
        return loss

    compiled, y = pbkern.polyblocks_jit_tf(step), uniform(5, 3, seed=3)
    losses = [float(compiled(x, y)) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    start = [v.numpy() for v in model.trainable_variables]
    ours = float(compiled(x, y))
    after = [v.numpy() for v in model.trainable_variables]
    for v, s in zip(model.trainable_variables, start):
        v.assign(s)
    assert ours == pytest.approx(float(tf.function(step)(x, y)), rel=1e-4)
    for a, v in zip(after, model.trainable_variables):
        np.testing.assert_allclose(a, v.numpy(), rtol=1e-3, atol=1e-5)


def test_random_numbers_differ_from_call_to_call():
    f = lambda x: x + tf.random.stateless_uniform([4], [1, 2])
    want = tf.function(f, jit_compile=True)(uniform(4))
    np.testing.assert_allclose(pbkern.polyblocks_jit_tf(f)(uniform(4)), want, rtol=1e-6)
    generator = tf.random.Generator.from_seed(1)
    g = pbkern.polyblocks_jit_tf(lambda x: x + generator.normal([50]))
    first, second = g(np.zeros(50, "f4")), g(np.zeros(50, "f4"))
    assert abs(first - second).numpy().max() > 0
    assert abs(float(tf.reduce_mean(first))) < 1


@pytest.mark.parametrize("alg", ["philox", "threefry"])
@pytest.mark.parametrize("dtype", ["uint32", "int64"])
def test_random_bits_are_tensorflows(alg, dtype):
    def bits(seed):
        return tf.random.stateless_uniform(
            [7, 3], seed, None, None, tf.dtypes.as_dtype(dtype), alg=alg
        )

    seed = np.array([5, -1], "i4")
    np.testing.assert_array_equal(
        pbkern.polyblocks_jit_tf(bits)(seed), tf.function(bits, jit_compile=True)(seed)
    )


def test_methods():
    class Scale:
        def __init__(self):
            self.factor = 3.0

        @pbkern.polyblocks_jit_tf
        def of(self, x):
            return x * self.factor

    np.testing.assert_allclose(Scale().of(uniform(4)), uniform(4) * 3, rtol=1e-6)


@pytest.mark.parametrize("backend", ["std", "xla", "polyblocks"])
def test_backends(backend):
    f = pbkern.polymage_jit_tf(runtime_args={"execution_backend": backend})(blur_x_blur_y)
    image = uniform(3, HEIGHT, WIDTH)
    np.testing.assert_allclose(f(image), blur_x_blur_y(image), rtol=1e-5)


def test_kernels_name_the_lines_of_the_function():
    def scaled(x):
        y = tf.nn.softmax(x * 2.0)
        for _ in tf.range(3):
            y = tf.sort(y) + 1.0
        return y

    explained = pbkern.polyblocks_jit_tf(scaled).explain(tf.ones((400, 5)))
    first = scaled.__code__.co_firstlineno
    places = {op: at for kernel in explained.kernels for op, at in kernel.ops}
    assert places["exp"] == f"{__file__}:{first + 1} (scaled)"
    assert all(at.startswith(__file__) for at in places.values())
    loops = [kernel for kernel in explained.kernels if "sort" in dict(kernel.ops)]
    assert loops
    assert all(kernel.launches * kernel.steps == 3 for kernel in loops)


def test_what_xla_keeps_lies_between_programs():
    scale = tf.Variable([2.0, 0.5, 1.0, 3.0])

    def filtered(x):
        spectrum = tf.signal.fft(tf.cast(x * scale, tf.complex64))
        power = tf.math.real(spectrum) ** 2 + tf.math.imag(spectrum) ** 2
        scale.assign(scale + 1.0)
        return {
            "power": power,
            "large": power > 1.0,
            "half": tf.cast(power, tf.bfloat16),
            "given": x,
        }

    f = pbkern.polyblocks_jit_tf(filtered)
    x = tf.constant(np.random.default_rng(0).random((3, 4), np.float32))
    for call in range(2):
        expected = (
            np.abs(
                np.fft.fft(x.numpy().astype(np.float64) * (np.array([2.0, 0.5, 1.0, 3.0]) + call))
            )
            ** 2
        )
        made = f(x)
        np.testing.assert_allclose(made["power"], expected, rtol=1e-5)
        np.testing.assert_array_equal(made["large"], expected > 1)
        np.testing.assert_allclose(tf.cast(made["half"], tf.float32), expected, rtol=1e-2)
        np.testing.assert_array_equal(made["given"], x)
    assert f.explain(x).left
    assert f.explain(x).kernels
    np.testing.assert_allclose(scale.numpy(), [4.0, 2.5, 3.0, 5.0])


@pytest.mark.parametrize("chosen", [{}, {"OMP_WAIT_POLICY": "active"}])
def test_loading_the_threads_leaves_the_environment_as_it_was(chosen, monkeypatch):
    """While the runtime is loaded, its threads are told to spin for little, unless the user has said how they wait."""
    for name in memory.WAITING:
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    before, seen = dict(os.environ), {}
    with monkeypatch.context() as patch:
        patch.setattr(memory.ctypes, "CDLL", lambda name: seen.update(os.environ))
        assert memory._openmp() == memory.OPENMP
    assert dict(os.environ) == before
    assert {n: v for n, v in seen.items() if n in memory.WAITING} == (
        chosen or {"GOMP_SPINCOUNT": memory.OPENMP_SPINS}
    )


def test_without_the_threads_of_openmp_calls_go_through_jax(monkeypatch):
    def missing(name):
        raise OSError(name)

    with monkeypatch.context() as patch:
        patch.setattr(memory.ctypes, "CDLL", missing)
        assert memory._openmp() is None
    monkeypatch.setattr(memory.TfMemory, "openmp", None)
    x = tf.constant(np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4))
    made = pbkern.polyblocks_jit_tf(lambda x: (tf.tanh(x) * 2, x > 0))(x)
    np.testing.assert_allclose(made[0], np.tanh(x.numpy().astype(np.float64)) * 2, rtol=1e-6)
    np.testing.assert_array_equal(made[1], x.numpy() > 0)


def test_a_report_is_data_and_a_page_too():
    f = pbkern.polyblocks_jit_tf(lambda x: tf.nn.softmax(x) @ tf.transpose(x))
    report = f.explain(tf.ones((16, 8)))
    names = [kernel.name for kernel in f.kernels(tf.ones((16, 8)))]
    assert [kernel["name"] for kernel in report.as_dict()["kernels"]] == names
    assert all(name in report.html(stages=["kernels"]) for name in names)
    assert report._repr_html_().startswith("<iframe srcdoc=")


def test_an_object_that_is_gone_is_not_taken_for_a_later_one():
    @pbkern.polyblocks_jit_tf
    def scaled(x, settings):
        return x * settings.factor

    class Settings:
        __hash__ = None

        def __init__(self, factor):
            self.factor = factor

    x = tf.constant([1.0, 2.0])
    for factor in (2.0, 3.0, 4.0):  # each object may get the place of the one before
        np.testing.assert_allclose(scaled(x, Settings(factor)), [factor, 2 * factor])


@pytest.mark.parametrize("shape", [(1,), (3,), (8,), (9, 7), (8, 6, 5), (0, 4)])
def test_constants_of_truth_values(shape):
    """TensorFlow's text has eight of them in a byte."""
    mask = np.random.default_rng(0).integers(0, 2, shape).astype(bool)
    x = tf.constant(np.random.default_rng(1).normal(size=shape), tf.float32)
    got = pbkern.polyblocks_jit_tf(lambda a: tf.where(mask, a, -1.0))(x)
    np.testing.assert_array_equal(got, np.where(mask, x, -1.0))
