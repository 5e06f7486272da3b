"""Random bodies and hand-written kernels as machine code equal the interpreter."""

import inspect
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.targets.cpu.codegen.kernel import lower_kernel
from tests.dsl import test_kernels, test_random_bodies

from .running import native

# Half precision keeps float32 between the operations of one expression, the interpreter rounds after each.
TOLERANCE = {"float16": 2e-2, "bfloat16": 1e-1}


def agree(got, want, dtype) -> None:
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    tolerance = TOLERANCE.get(str(dtype), 1e-5)
    finite = np.isfinite(want)
    if str(dtype) not in TOLERANCE:  # which may overflow in one and not in the other
        np.testing.assert_array_equal(np.isfinite(got), finite)
    both = finite & np.isfinite(got)
    np.testing.assert_allclose(got[both], want[both], rtol=tolerance, atol=tolerance)


def random_kernel(seed: int):
    """A kernel of a few random steps, some under control flow, and its dtype."""
    r = random.Random(seed)
    make = test_random_bodies
    dtype = r.choice(make.DTYPES)
    names = [n for n in (*make.UNARY, *make.BINARY, "literal") if n != "tanh" or dtype != "uint8"]
    steps = [
        (
            r.choice(names),
            r.randint(0, 5),
            r.randint(0, 5),
            r.choice([0, 1, 2, 3, 0.5, 100]),
            r.choice(make.CONTROL),
        )
        for _ in range(r.randint(1, 5))
    ]

    def body(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.zeros(make.SHAPE, dtype)
        values = [x_ref[...], y_ref[...]]
        for name, i, j, literal, control in steps:
            f = lambda vs: make.apply(vs, name, i, j, literal)  # noqa: B023
            values.append(
                make.under_control(control, f, values, x_ref, o_ref, literal).astype(dtype)
            )
        o_ref[...] = values[-1]

    spec = pbkern.BlockSpec(make.SHAPE, lambda i: (i, 0))
    array = jax.ShapeDtypeStruct((8, 6), dtype)
    made = pbkern.kernel(body, grid=(2,), in_specs=[spec, spec], out_specs=spec, out_shape=array)
    return made.trace(array, array), dtype


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(40))
def test_random_body(seed):
    k, dtype = random_kernel(seed)
    rng = np.random.default_rng(seed)
    arrays = [rng.integers(0, 5, (8, 6)).astype(jnp.dtype(dtype)) for _ in range(2)]
    agree(native(k, *arrays)[0], pbkern.interpret(k, *arrays)[0], dtype)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(40, 1000, 60))
def test_many_random_bodies(start):
    for seed in range(start, start + 60):
        test_random_body(seed)


def run_native(kf, *arrays):
    results = native(kf.trace(*arrays), *map(np.asarray, arrays))
    return results[0] if len(results) == 1 else results


# What only the interpreter does, or what runs nothing.
NOT_NATIVE = {
    "test_results_that_a_program_leaves_out_are_poison",
    "test_compiler_params_print_with_their_import",
}
HANDWRITTEN = [
    n
    for n, f in vars(test_kernels).items()
    if n.startswith("test_")
    and n not in NOT_NATIVE
    and "run(" in inspect.getsource(f)
    and not f.__code__.co_argcount
]


@pytest.mark.parametrize("name", HANDWRITTEN)
def test_handwritten_kernel(name, monkeypatch):
    """The same tests, other engine."""
    monkeypatch.setattr(test_kernels, "run", run_native)
    getattr(test_kernels, name)()


@pytest.mark.sampled(9)
@pytest.mark.parametrize("step", [2, 3, 4, 5])
@pytest.mark.parametrize("count", [1, 16, 31, 33, 64, 100])
@pytest.mark.parametrize("dtype", [np.float32, np.int8, jnp.bfloat16])
def test_strided_reads(step, count, dtype):
    """Up to four whole vectors are shuffled into one; nothing behind the last element is read."""
    x = np.asarray(np.random.default_rng(step).integers(-60, 60, (3, count * step)), dtype)
    for offset in (0, 1):
        f = lambda x: x[:, offset::step] * 2  # noqa: B023
        np.testing.assert_array_equal(np.asarray(pbkern.jit(f)(x)), np.asarray(f(x)))


def test_reshapes_of_permuted_dimensions():
    def body(x_ref, o_ref):
        o_ref[...] = jax.lax.reshape(x_ref[...], (6, 20), dimensions=(2, 0, 1))

    x = np.arange(120, dtype="f4").reshape(4, 5, 6)
    kernel = pbkern.kernel(body, out_shape=jax.ShapeDtypeStruct((6, 20), "f4"))
    np.testing.assert_array_equal(
        native(kernel.trace(x), x)[0], x.transpose(2, 0, 1).reshape(6, 20)
    )


def updating(value, mask=None, store=False):
    """A kernel that replaces its scratch, which holds x + 1, by value(scratch, a, b) where mask(scratch) holds.

    store: by a masked store, not by a select.
    """

    def body(x_ref, a_ref, b_ref, o_ref, t_ref):
        t_ref[...] = x_ref[...] + 1
        found = value(t_ref[...], a_ref[...], b_ref[...])
        if store:
            pbkern.store(t_ref, (slice(None), slice(None)), found, mask=mask(t_ref[...]))
        else:
            t_ref[...] = found if mask is None else jnp.where(mask(t_ref[...]), found, t_ref[...])
        o_ref[...] = t_ref[...]

    square = jax.ShapeDtypeStruct((40, 40), "f4")
    return pbkern.kernel(body, out_shape=square, scratch_shapes=[pbkern.Scratch((40, 40), "f4")])


UPDATES = {
    "sum": (lambda t, a, b: t * 0.5 + a @ b,),
    "reversed": (lambda t, a, b: t[::-1] + a @ b,),
    "transposed": (lambda t, a, b: t.T + a @ b,),
    "of itself": (lambda t, a, b: t + t @ b[:40],),
    "row sums": (lambda t, a, b: t + t.sum(1, keepdims=True),),
    "masked": (lambda t, a, b: t + a @ b, lambda t: t > 1),
    "masked by rows reversed": (lambda t, a, b: t + a @ b, lambda t: t[::-1] > 1),
    "masked store": (lambda t, a, b: t + a @ b, lambda t: t > 1, True),
    "store masked by rows reversed": (lambda t, a, b: t + a @ b, lambda t: t[::-1] > 1, True),
    "store of another value masked by rows reversed": (
        lambda t, a, b: a @ b,
        lambda t: t[::-1] > 1,
        True,
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("depth", [40, 1500])
def test_scratch_updated_by_products_of_itself_and_others(name, depth):
    value, mask, *_ = (*UPDATES[name], None)
    rng = np.random.default_rng(depth)
    x, a, b = (rng.normal(size=s).astype("f4") for s in [(40, 40), (40, depth), (depth, 40)])
    kernel = updating(*UPDATES[name]).trace(x, a, b)
    t = x.astype("f8") + 1
    want = value(t, *(m.astype("f8") for m in (a, b)))
    want = want if mask is None else np.where(mask(t), want, t)
    np.testing.assert_allclose(native(kernel, x, a, b)[0], want, rtol=2e-4, atol=2e-4)


def test_a_product_is_added_to_scratch_without_a_copy():
    kernel = updating(*UPDATES["sum"]).trace(*[np.zeros((40, 40), "f4")] * 3)
    nests = lower_kernel(kernel, "k").nests
    assert re.search(r"(%t\d+)\[(.*)\] = add\(mul\(\1\[\2\], 0.5\), acc0\)", nests), nests


@pytest.mark.parametrize(
    ("f", "shape"),
    [
        (lambda x: x.sum(), (0,)),
        (lambda x: jnp.max(x, initial=-3.0), (0, 4)),
        (lambda x: x.prod(1), (3, 0)),
        (lambda x: x.sum(0), (0, 40)),
        (lambda x: x @ x.T, (4, 0)),
    ],
)
def test_reductions_of_nothing(f, shape):
    def body(x_ref, o_ref):
        o_ref[...] = f(x_ref[...])

    x = np.zeros(shape, "f4")
    kernel = pbkern.kernel(body, out_shape=jax.eval_shape(f, x)).trace(x)
    np.testing.assert_array_equal(native(kernel, x)[0], np.asarray(f(x)))


def test_nests_over_transposed_spaces_stay_apart():
    """A copy of [192, 80] and the maximum of each of 80 rows of 192: one walk for both would go across the rows of one."""

    def body(x, y, copied, most):
        copied[...] = x[...] * 2
        most[...] = y[...].max(1)

    x, y = (
        np.random.default_rng(s).normal(size=shape).astype("f")
        for s, shape in enumerate([(192, 80), (80, 192)])
    )
    shapes = [jax.ShapeDtypeStruct((192, 80), "f"), jax.ShapeDtypeStruct((80,), "f")]
    kernel = pbkern.kernel(body, out_shape=shapes).trace(x, y)
    assert lower_kernel(kernel, "k").nests.count("nest") == 2
    np.testing.assert_array_equal(native(kernel, x, y)[0], x * 2)
    np.testing.assert_array_equal(native(kernel, x, y)[1], y.max(1))
