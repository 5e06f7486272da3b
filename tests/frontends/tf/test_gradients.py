"""Gradients that tapes take through decorated functions, against TensorFlow's of the same functions, undecorated."""

import numpy as np
import pytest
import tensorflow as tf

import pbkern
from pbkern.errors import UnsupportedOp


def normal(*shape, dtype="float32", seed=0):
    values = np.random.default_rng(seed).normal(size=shape)
    if np.dtype(dtype).kind == "c":
        values = values + 1j * np.random.default_rng(seed + 1).normal(size=shape)
    return tf.constant(values.astype(dtype))


def same(given, expected, rtol=1e-5):
    """Compares structures of tensors and None. A gradient that is IndexedSlices equals the tensor that it stands for."""
    dense = lambda x: tf.convert_to_tensor(x) if isinstance(x, tf.IndexedSlices) else x
    given, expected = (
        tf.nest.flatten([dense(x) for x in tf.nest.flatten([structure])], expand_composites=True)
        for structure in (given, expected)
    )
    assert len(given) == len(expected)
    for one, other in zip(given, expected):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            wide = tf.complex128 if one.dtype.is_complex else tf.float64
            np.testing.assert_allclose(tf.cast(one, wide), tf.cast(other, wide), rtol, rtol)


def total(results):
    """A number of all floating-point results, each element with a weight of its own."""
    parts = []
    for number, x in enumerate(tf.nest.flatten(results, expand_composites=True)):
        if x is not None and (x.dtype.is_floating or x.dtype.is_complex):
            weights = tf.cast(normal(*x.shape, seed=number + 7), x.dtype)
            parts.append(tf.cast(tf.math.real(tf.reduce_sum(x * weights)), tf.float64))
    return tf.add_n(parts)


def gradients(f, args, sources, **options):
    with tf.GradientTape(**options) as tape:
        tape.watch(sources)
        loss = total(f(*args))
    return tape.gradient(loss, sources)


@tf.custom_gradient
def doubled_gradient(x):
    return tf.sin(x), lambda upstream: upstream * 2.0


def counted(x):
    for _ in tf.range(4):
        x = tf.sin(x) * 1.5
    return x


def of_integers(x, n):
    return {"scaled": x * tf.cast(n, x.dtype), "none": None, "largest": [tf.argmax(x), n + 1]}


FUNCTIONS = {
    "elements": (lambda x: tf.sin(x) * x + 1.0, [normal(3, 40)]),
    "softmax": (lambda x, w: tf.nn.softmax(tf.matmul(x, w)), [normal(9, 20), normal(20, 30, seed=1)]),
    "convolution": (lambda x, w: tf.nn.relu(tf.nn.conv2d(x, w, 1, "SAME")), [normal(2, 8, 9, 3), normal(3, 3, 3, 4, seed=1)]),
    "given": (lambda x: (x, tf.sin(x), x), [normal(5)]),
    "stopped": (lambda x, y: x * tf.stop_gradient(x * y), [normal(5), normal(5, seed=1)]),
    "custom": (lambda x: doubled_gradient(x) * x, [normal(5)]),
    "kinks": (lambda x: (tf.nn.relu(x), tf.abs(x), tf.maximum(x, 0.0), tf.reduce_max(x)), [tf.constant([0.0, 1.0, -1.0, 1.0])]),
    "gathered": (lambda x: tf.gather(x, [0, 2, 0]) ** 2, [normal(3, 4)]),
    "integers": (of_integers, [normal(6), tf.constant([1, 2, 3, 4, 5, 6])]),
    "unconnected": (lambda x, y: x * 2.0, [normal(4), normal(4, seed=1)]),
    "scalar": (lambda x: tf.sqrt(x), [tf.constant(2.0)]),
    "empty": (lambda x: (x * 2.0, tf.reduce_sum(x)), [tf.zeros((0, 3))]),
    "double": (lambda x: tf.exp(x) * x, [normal(7, dtype="float64")]),
    "half": (lambda x: tf.cast(x, tf.float32) ** 2, [tf.cast(normal(7), tf.bfloat16)]),
    "complex": (lambda x: (x * x * tf.constant(1 + 2j, tf.complex64), tf.abs(x)), [normal(7, dtype="complex64")]),
    "spectrum": (lambda x: tf.signal.ifft(tf.signal.fft(x) ** 2), [normal(4, 16, dtype="complex64")]),
    "conditional": (lambda x: tf.cond(x[0] > 0.0, lambda: tf.sin(x), lambda: x * x), [normal(4)]),
    "counted": (counted, [normal(3, 5)]),
    "slices": (lambda x: tf.IndexedSlices(x * 2.0, tf.constant([1, 0]), tf.constant([4, 5])), [normal(2, 5)]),
    "ragged": (lambda x: tf.RaggedTensor.from_row_splits(tf.sin(x), [0, 1, 1, 3]), [normal(3, 2)]),
    "sparse": (lambda x: tf.SparseTensor([[0, 0], [1, 1], [2, 0]], x * x, [3, 2]), [normal(3)]),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_of_arguments(name):
    f, args = FUNCTIONS[name]
    floating = [x for x in args if not x.dtype.is_integer]
    compiled = pbkern.polyblocks_jit_tf(f)
    rtol = 2e-2 if name == "half" else 1e-4
    for sources in (floating, floating[:1]):
        same(gradients(compiled, args, sources), gradients(f, args, sources), rtol)
    same(compiled(*args), f(*args), rtol)


def test_of_a_part_beside_other_parts():
    x, f = normal(6), lambda x: tf.sin(x)
    both = lambda f: lambda x: [f(f(x) * 2.0), x, tf.gather(f(x), [1, 1, 3])]
    same(gradients(both(pbkern.polyblocks_jit_tf(f)), [x], [x]), gradients(both(f), [x], [x]))


def test_of_variables_and_of_tensors_of_the_scope():
    trained, fixed = tf.Variable(normal(5)), tf.Variable(normal(5, seed=1), trainable=False)
    small, large = normal(5, seed=2), normal(300, 5, seed=3)
    f = lambda x: (x * trained + fixed, large * tf.sin(small) * trained**2)
    compiled, x = pbkern.polyblocks_jit_tf(f), normal(5, seed=4)
    sources = [x, trained, fixed, small, large]
    same(gradients(compiled, [x], sources), gradients(tf.function(f), [x], sources))
    same(gradients(compiled, [x], [large, trained]), gradients(f, [x], [large, trained]))
    for options in ({}, {"watch_accessed_variables": False}):
        for g in (compiled, f):
            with tf.GradientTape(**options) as tape:
                loss = total(g(x)) + tf.cast(tf.reduce_sum(x), tf.float64)
            watched = [trained.ref()] if not options else []
            assert [v.ref() for v in tape.watched_variables()] == watched
            if not options:
                given = tape.gradient(loss, [trained, fixed])
                assert given[1] is None
                with tf.GradientTape() as plain:
                    loss = total(f(x))
                same(given[0], plain.gradient(loss, trained))


def test_of_rows_of_a_variable():
    table, numbers = tf.Variable(normal(6, 3)), tf.constant([0, 4, 0])
    f = lambda numbers: tf.nn.embedding_lookup(table, numbers) ** 2
    given = gradients(pbkern.polyblocks_jit_tf(f), [numbers], [table])
    assert tf.is_tensor(given[0])
    same(given, gradients(f, [numbers], [table]))


def test_of_a_variable_that_is_an_argument():
    f = lambda w, x: tf.tanh(w * x)
    v, x = tf.Variable(normal(5)), normal(5, seed=1)
    same(gradients(pbkern.polyblocks_jit_tf(f), [v, x], [v, x]), gradients(f, [v, x], [v, x]))
    signed = pbkern.polyblocks_jit_tf(f, input_signature=[tf.TensorSpec([5])] * 2)
    same(gradients(signed, [v, x], [v, x]), gradients(f, [v, x], [v, x]))


def test_a_gradient_has_the_numbers_that_the_call_had():
    v = tf.Variable([2.0, 3.0])

    def f(x):
        y = x * v**2
        v.assign(v * x)
        return y, v.read_value()

    def run(f):
        v.assign([2.0, 3.0])
        x = tf.constant([1.5, -2.0])
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            losses = [total(f(x)), total(f(x))]
        v.assign([100.0, 100.0])
        given = [tape.gradient(loss, [x, v]) for loss in losses]
        assert v.numpy().tolist() == [100.0, 100.0]
        return given

    expected = run(tf.function(f, jit_compile=True))
    same(run(pbkern.polyblocks_jit_tf(f)), expected)
    same(run(tf.function(f)), expected)


def test_a_gradient_of_random_numbers_is_of_those_that_the_call_had():
    generator = tf.random.Generator.from_seed(1)
    f = pbkern.polyblocks_jit_tf(lambda x: x * generator.normal([50]))
    x = tf.ones(50)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = f(x)
    state = generator.state.numpy()
    np.testing.assert_allclose(tape.gradient(y, x), y, rtol=1e-6)
    np.testing.assert_array_equal(generator.state.numpy(), state)


def test_gradients_that_would_draw_other_random_numbers_are_refused():
    x = tf.ones(50)
    dropped = pbkern.polyblocks_jit_tf(lambda x: tf.nn.dropout(x, 0.5))
    noisy = pbkern.polyblocks_jit_tf(lambda x: x * x + tf.random.uniform([50]))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y, z = dropped(x), noisy(x)
    assert {0.0, 2.0} == set(y.numpy())
    with pytest.raises(UnsupportedOp, match="random numbers that a call drew"):
        tape.gradient(y, x)
    np.testing.assert_array_equal(tape.gradient(z, x), 2.0 * x)

    def seeded(x):
        return tf.nn.experimental.stateless_dropout(x, 0.5, seed=[1, 2])

    by_xla = tf.function(seeded, jit_compile=True)
    same(gradients(pbkern.polyblocks_jit_tf(seeded), [x], [x]), gradients(by_xla, [x], [x]))


def test_dropout_of_keras():
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dropout(0.5)])
    f, x = pbkern.polyblocks_jit_tf(lambda x: model(x, training=True) * 3.0), tf.ones((8, 6))
    for _ in range(2):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        np.testing.assert_array_equal(tape.gradient(y, x), y)
        assert set(y.numpy().ravel()) == {0.0, 6.0}


def test_functions_whose_results_have_no_gradients():
    f, x = pbkern.polyblocks_jit_tf(lambda x: tf.argmax(x)), normal(5)
    g = pbkern.polyblocks_jit_tf(lambda x: tf.stop_gradient(x) * 2.0)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        n, y = f(x), g(x)
    assert n.numpy() == np.argmax(x)
    assert tape.gradient(y, x) is None


def test_second_and_third_derivatives():
    v = tf.Variable([0.5, 1.5, -1.0])

    def derivatives(f, x):
        with tf.GradientTape() as outer:
            outer.watch([x])
            with tf.GradientTape() as middle:
                middle.watch([x, v])
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = total(f(x))
                first = inner.gradient(y, x)
            second = middle.gradient(first, [x, v])
        return first, second, outer.gradient(second, [x, v])

    x, f = tf.constant([0.3, -0.7, 2.0]), lambda x: tf.sin(x * v) * x
    same(derivatives(pbkern.polyblocks_jit_tf(f), x), derivatives(f, x), 1e-4)


def test_a_persistent_tape_and_jacobians():
    f, x = lambda x: tf.nn.softmax(x) * x, normal(4)
    compiled = pbkern.polyblocks_jit_tf(f)

    def jacobian(f, **options):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = f(x)
        return tape.jacobian(y, x, **options), tape.gradient(y, x), tape.gradient(y, x)

    same(jacobian(compiled, experimental_use_pfor=False), jacobian(f))
    message = "(?s)UnsupportedOp: a gradient is computed of tensors.*experimental_use_pfor=False"
    with pytest.raises(Exception, match=message):  # AutoGraph makes an error of its own of ours
        jacobian(compiled)


@pytest.mark.parametrize("name", ["elements", "softmax", "gathered", "integers", "counted"])
def test_forward_accumulators(name):
    f, args = FUNCTIONS[name]
    compiled, tangent = pbkern.polyblocks_jit_tf(f), normal(*args[0].shape, seed=9)

    def products(f):
        with tf.autodiff.ForwardAccumulator(args[0], tangent) as accumulator:
            loss = total(f(*args)) + tf.cast(tf.reduce_sum(args[0]), tf.float64)
        return accumulator.jvp(loss)

    same(products(compiled), products(f))


def test_training_a_keras_model_with_the_tape_outside():
    keras = pytest.importorskip("keras")
    layers = [keras.layers.Input((6, 5, 2)), keras.layers.Conv2D(4, 3, activation="relu"), keras.layers.BatchNormalization(),
              keras.layers.Flatten(), keras.layers.Dense(3)]  # fmt: skip
    model = keras.Sequential(layers)
    x, y = normal(4, 6, 5, 2), normal(4, 3, seed=1)
    variables = [v.value for v in model.trainable_variables]

    def loss(x, y):
        return tf.reduce_mean((model(x) - y) ** 2)

    def step(f):
        with tf.GradientTape() as tape:
            value = f(x, y)
        return value, tape.gradient(value, variables)

    same(step(pbkern.polyblocks_jit_tf(loss)), step(loss), 1e-4)


def test_a_gradient_that_xla_does_not_have():
    def f(x):
        while tf.reduce_sum(x) < 100.0:
            x = x * 2.0 + 1.0
        return x

    compiled, x = pbkern.polyblocks_jit_tf(f), tf.ones(3)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = compiled(x)
    np.testing.assert_array_equal(y, f(x))
    with pytest.raises(UnsupportedOp, match=r"(?s)`f_gradient`.*within the decorated function"):
        tape.gradient(y, x)


def test_a_gradient_that_xla_has_within_a_function_alone():
    def mapped(x):
        return tf.map_fn(lambda row: tf.sin(row) * tf.reduce_sum(row), x)

    def within(x):
        return gradients(mapped, [x], [x])

    x = normal(3, 4)
    same(pbkern.polyblocks_jit_tf(within)(x), within(x))
    with pytest.raises(UnsupportedOp, match="within the decorated function"):
        gradients(pbkern.polyblocks_jit_tf(mapped), [x], [x])
