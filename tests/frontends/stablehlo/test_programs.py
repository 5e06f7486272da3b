"""Programs that other compilers than JAX write, against NumPy: where operations mean other things than in lax."""

import itertools

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given, settings

import pbkern
from pbkern.frontends.stablehlo.importer import import_program
from pbkern.frontends.stablehlo.parse import parse
from pbkern.frontends.stablehlo.table import CHECKS, RULES


def program(types, result, body):
    """A module of one function; its lines name arguments %a, %b, ..., and its result %r."""
    arguments = ", ".join(f"%{n}: {t}" for n, t in zip("abcdef", types))
    return f"module {{ func.func @main({arguments}) -> ({result}) {{\n{body}\n return %r : {result}\n}} }}"


def run(text, *args):
    return pbkern.from_stablehlo(text)(*args)


X = np.array([[3, -1, 2.5, 0], [-0.0, 7, -2.5, 1], [0.5, 0.5, 9, -9]], np.float32)


@pytest.mark.parametrize("start", [-5, 0, 2, 9])
def test_starts_of_slices_are_clamped(start):
    text = program(
        ["tensor<3x4xf32>", "tensor<i32>"],
        "tensor<2x4xf32>",
        """
      %z = stablehlo.constant dense<0> : tensor<i32>
      %r = stablehlo.dynamic_slice %a, %b, %z, sizes = [2, 4]
        : (tensor<3x4xf32>, tensor<i32>, tensor<i32>) -> tensor<2x4xf32>""",
    )
    at = min(max(start, 0), 1)
    np.testing.assert_array_equal(run(text, X, np.int32(start)), X[at : at + 2])


@pytest.mark.parametrize("index", [-1, 0, 1, 7])
def test_numbers_of_no_branch_mean_the_last(index):
    text = program(
        ["tensor<i32>", "tensor<4xf32>"],
        "tensor<4xf32>",
        """
      %r = "stablehlo.case"(%a) ({ %0 = stablehlo.negate %b : tensor<4xf32>
        stablehlo.return %0 : tensor<4xf32> }, { stablehlo.return %b : tensor<4xf32> }) : (tensor<i32>) -> tensor<4xf32>""",
    )
    np.testing.assert_array_equal(run(text, np.int32(index), X[0]), -X[0] if index == 0 else X[0])


def test_reductions_that_start_elsewhere_and_combine_otherwise():
    text = """module {{ func.func @main(%a: tensor<3x4xf32>, %s: tensor<f32>) -> tensor<3xf32> {{
      %r = stablehlo.reduce(%a init: %s) across dimensions = [1] : (tensor<3x4xf32>, tensor<f32>) -> tensor<3xf32>
       reducer(%x: tensor<f32>, %y: tensor<f32>) {{ {region} stablehlo.return %z : tensor<f32> }}
      return %r : tensor<3xf32> }} }}"""
    add = text.format(region="%z = stablehlo.add %x, %y : tensor<f32>")
    np.testing.assert_allclose(run(add, X, np.float32(10)), X.sum(1) + 10, rtol=1e-6)
    largest = text.format(region="%z = stablehlo.maximum %y, %x : tensor<f32>")
    np.testing.assert_array_equal(run(largest, X, np.float32(2.75)), np.maximum(X.max(1), 2.75))
    squares = text.format(
        region="""%p = stablehlo.multiply %x, %y : tensor<f32>
          %q = stablehlo.abs %p : tensor<f32>
          %z = stablehlo.sqrt %q : tensor<f32>"""
    )
    assert run(squares, np.ones((3, 4), "f4"), np.float32(1)).tolist() == [1, 1, 1]


F32 = "(tensor<f32>, tensor<f32>) -> tensor<i1>"
COMPARATORS = {
    "ascending": ("%q = stablehlo.compare LT, %x, %y : (tensor<f32>, tensor<f32>) -> tensor<i1>", lambda x: np.sort(x)),
    "descending": ("%q = stablehlo.compare GT, %x, %y : (tensor<f32>, tensor<f32>) -> tensor<i1>", lambda x: -np.sort(-x)),
    "mirrored": ("%q = stablehlo.compare GT, %y, %x : (tensor<f32>, tensor<f32>) -> tensor<i1>", lambda x: np.sort(x)),
    "by bits": (f"%q = stablehlo.compare LT, %x, %y, TOTALORDER : {F32}", lambda x: np.sort(x)),
    "by bits, descending": (f"%q = stablehlo.compare GT, %x, %y, TOTALORDER : {F32}", lambda x: -np.sort(-x)),
}  # fmt: skip
SORT = """module {{ func.func @main(%a: tensor<3x4xf32>) -> tensor<3x4xf32> {{
  %r = "stablehlo.sort"(%a) <{{dimension = 1 : i64, is_stable = true}}> ({{ ^bb0(%x: tensor<f32>, %y: tensor<f32>):
    {region} stablehlo.return %q : tensor<i1> }}) : (tensor<3x4xf32>) -> tensor<3x4xf32>
  return %r : tensor<3x4xf32> }} }}"""


@pytest.mark.parametrize("name", COMPARATORS)
def test_sorts_by_what_their_comparators_mean(name):
    region, want = COMPARATORS[name]
    got = run(SORT.format(region=region), X)
    np.testing.assert_array_equal(got, want(X))


def test_the_order_of_bits_tells_zeros_and_nan_apart():
    x = np.array([[np.nan, 0.0, -np.inf, -0.0]] * 3, np.float32)
    x[1, 0] = -np.nan
    got = np.asarray(run(SORT.format(region=COMPARATORS["by bits"][0]), x))
    assert np.signbit(got[0]).tolist() == [True, True, False, False]
    assert np.isnan(got[0, 3])
    assert np.isnan(got[1, 0])


def test_two_keys_in_different_directions():
    text = """module { func.func @main(%a: tensor<9xi32>, %b: tensor<9xf32>) -> (tensor<9xi32>, tensor<9xf32>) {
      %r:2 = "stablehlo.sort"(%a, %b) <{dimension = 0 : i64, is_stable = true}> ({
       ^bb0(%x: tensor<i32>, %y: tensor<i32>, %u: tensor<f32>, %v: tensor<f32>):
        %p = stablehlo.compare GT, %x, %y : (tensor<i32>, tensor<i32>) -> tensor<i1>
        %e = stablehlo.compare EQ, %x, %y : (tensor<i32>, tensor<i32>) -> tensor<i1>
        %l = stablehlo.compare LT, %u, %v : (tensor<f32>, tensor<f32>) -> tensor<i1>
        %s = stablehlo.and %e, %l : tensor<i1>
        %q = stablehlo.or %p, %s : tensor<i1>
        stablehlo.return %q : tensor<i1> }) : (tensor<9xi32>, tensor<9xf32>) -> (tensor<9xi32>, tensor<9xf32>)
      return %r#0, %r#1 : tensor<9xi32>, tensor<9xf32> } }"""
    rng = np.random.default_rng(0)
    a, b = rng.integers(-2, 3, 9, np.int32), rng.standard_normal(9).astype("f4")
    got = run(text, a, b)
    order = np.lexsort((b, -a))
    np.testing.assert_array_equal(got[0], a[order])
    np.testing.assert_array_equal(got[1], b[order])


@pytest.mark.parametrize("region", [
    "%q = stablehlo.compare LE, %x, %y : (tensor<f32>, tensor<f32>) -> tensor<i1>",
    "%n = stablehlo.abs %x : tensor<f32> %q = stablehlo.compare LT, %n, %y : (tensor<f32>, tensor<f32>) -> tensor<i1>",
    "%q = stablehlo.constant dense<true> : tensor<i1>",
])  # fmt: skip
def test_comparators_that_are_no_known_order_are_refused(region):
    with pytest.raises(
        pbkern.errors.UnsupportedOp, match=r"stablehlo.sort.*: its comparator is no order"
    ):
        pbkern.from_stablehlo(SORT.format(region=region))


LOOP = """module {{ func.func @main(%a: tensor<f32>) -> (tensor<i32>, tensor<f32>) {{
  %start = stablehlo.constant dense<{start}> : tensor<i32>
  %r:2 = stablehlo.while(%i = %start, %x = %a) : tensor<i32>, tensor<f32>
   cond {{ %n = stablehlo.constant dense<{end}> : tensor<i32>
     %t = stablehlo.compare {test} : (tensor<i32>, tensor<i32>) -> tensor<i1>
     stablehlo.return %t : tensor<i1> }}
   do {{ %s = stablehlo.constant dense<{step}> : tensor<i32>
     %j = stablehlo.{sum} : tensor<i32>
     %one = stablehlo.constant dense<1.0> : tensor<f32>
     %y = stablehlo.add %x, %one : tensor<f32>
     stablehlo.return %j, %y : tensor<i32>, tensor<f32> }}
  return %r#0, %r#1 : tensor<i32>, tensor<f32> }} }}"""
BEFORE = {
    "LT": lambda i, n: i < n,
    "LE": lambda i, n: i <= n,
    "GT": lambda i, n: i > n,
    "GE": lambda i, n: i >= n,
    "NE": lambda i, n: i != n,
}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(BEFORE)),
    st.booleans(),
    st.integers(-6, 6),
    st.integers(-6, 6),
    st.integers(-3, 3),
    st.booleans(),
)
def test_loops_are_counted_or_kept(direction, mirrored, start, end, step, subtracts):
    """Against a Python loop; a loop that would not end stays a loop."""
    forward = -step if subtracts else step
    i, steps = start, 0
    while BEFORE[direction](i, end) and steps < 50:
        i, steps = i + forward, steps + 1
    mirror = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}
    test = f"{mirror[direction]}, %n, %i" if mirrored else f"{direction}, %i, %n"
    text = LOOP.format(
        start=start,
        end=end,
        step=step,
        test=test,
        sum="subtract %i, %s" if subtracts else "add %s, %i",
    )
    jaxpr = import_program(parse(text)).jaxpr
    (loop,) = [e for e in jaxpr.eqns if e.primitive.name in ("scan", "while")]
    assert (loop.primitive.name == "scan") == (steps < 50)
    if steps < 50:
        assert loop.params["length"] == steps


TWO_COUNTERS = """module {{ func.func @main(%a: tensor<i32>) -> (tensor<i32>, tensor<i32>, tensor<i32>) {{
  %z = stablehlo.constant dense<0> : tensor<i32>
  %r:3 = stablehlo.while(%i = %z, %j = %z, %x = %a) : tensor<i32>, tensor<i32>, tensor<i32>
   cond {{ %n = stablehlo.constant dense<{first}> : tensor<i32>
     %m = stablehlo.constant dense<{second}> : tensor<i32>
     %t = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
     %u = stablehlo.compare GT, %m, {other} : (tensor<i32>, tensor<i32>) -> tensor<i1>
     %v = stablehlo.{both} %u, %t : tensor<i1>
     stablehlo.return %v : tensor<i1> }}
   do {{ %s = stablehlo.constant dense<1> : tensor<i32>
     %w = stablehlo.constant dense<2> : tensor<i32>
     %k = stablehlo.add %i, %s : tensor<i32>
     %l = stablehlo.add %j, %w : tensor<i32>
     %y = stablehlo.add %x, %l : tensor<i32>
     stablehlo.return %k, %l, %y : tensor<i32>, tensor<i32>, tensor<i32> }}
  return %r#0, %r#1, %r#2 : tensor<i32>, tensor<i32>, tensor<i32> }} }}"""


@pytest.mark.parametrize(("first", "second", "other", "both", "steps"), [
    (3, 9, "%j", "and", 3), (9, 7, "%j", "and", 4), (0, 5, "%j", "and", 0), (3, 9, "%x", "and", None), (3, 9, "%j", "or", None),
])  # fmt: skip
def test_loops_with_two_conditions_are_counted_where_both_must_hold(
    first, second, other, both, steps
):
    """As TensorFlow writes `for i in tf.range(n)`; a condition that depends on data leaves a loop of unknown length."""
    text = TWO_COUNTERS.format(first=first, second=second, other=other, both=both)
    (loop,) = [
        e for e in import_program(parse(text)).jaxpr.eqns if e.primitive.name in ("scan", "while")
    ]
    assert (loop.params["length"] if loop.primitive.name == "scan" else None) == steps
    i, j, x = 0, 0, 5
    while {"and": all, "or": any}[both]([i < first, second > (j if other == "%j" else x)]):
        i, j, x = i + 1, j + 2, x + j + 2
    assert tuple(map(int, run(text, np.int32(5)))) == (i, j, x)


def test_counted_loops_run_as_written():
    text = LOOP.format(start=9, end=-2, step=3, test="GE, %i, %n", sum="subtract %i, %s")
    n, x = run(text, np.float32(0.5))
    assert (int(n), float(x)) == (-3, 4.5)


SCATTER = """module {{ func.func @main(%a: tensor<4xf32>, %i: tensor<3x1xi32>, %u: tensor<3xf32>) -> tensor<4xf32> {{
  %r = "stablehlo.scatter"(%a, %i, %u) <{{scatter_dimension_numbers = #stablehlo.scatter<inserted_window_dims = [0],
      scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}}> ({{ ^bb0(%x: tensor<f32>, %y: tensor<f32>):
     {region} stablehlo.return %z : tensor<f32> }}) : (tensor<4xf32>, tensor<3x1xi32>, tensor<3xf32>) -> tensor<4xf32>
  return %r : tensor<4xf32> }} }}"""


@pytest.mark.parametrize(
    ("name", "f"),
    [
        ("add", np.add),
        ("subtract", np.subtract),
        ("maximum", np.maximum),
        ("multiply", np.multiply),
    ],
)
def test_scatters_leave_out_what_lies_outside(name, f):
    want, places, updates = X[1].copy(), [1, 9, 1], np.array([2, 3, 0.5], np.float32)
    for i, u in zip(places, updates):
        if i < 4:
            want[i] = f(want[i], u)
    got = run(
        SCATTER.format(region=f"%z = stablehlo.{name} %x, %y : tensor<f32>"),
        X[1],
        np.array(places, "i4")[:, None],
        updates,
    )
    np.testing.assert_array_equal(got, want)


def test_scatters_of_several_operations_are_refused():
    text = SCATTER.format(
        region="%n = stablehlo.abs %x : tensor<f32> %z = stablehlo.add %n, %y : tensor<f32>"
    )
    with pytest.raises(
        pbkern.errors.UnsupportedOp, match=r"stablehlo.scatter.*combined by more than one operation"
    ):
        pbkern.from_stablehlo(text)


def unary(name, x, dtype="f32", result=None):
    shape = "x".join(map(str, x.shape))
    types = (
        f"(tensor<{shape}x{dtype}>) -> tensor<{shape}x{result}>"
        if result
        else f"tensor<{shape}x{dtype}>"
    )
    return run(program([f"tensor<{shape}x{dtype}>"], f"tensor<{shape}x{result or dtype}>",
                       f"%r = {name} %a : {types}"), x)  # fmt: skip


def test_single_operations():
    halves = np.array([-2.5, -0.5, 0.5, 1.5, 2.5], np.float32)
    np.testing.assert_array_equal(unary("stablehlo.round_nearest_afz", halves), [-3, -1, 1, 2, 3])
    np.testing.assert_array_equal(unary("stablehlo.round_nearest_even", halves), [-2, 0, 0, 2, 2])
    np.testing.assert_array_equal(unary("stablehlo.convert", halves, "f32", "i1"), [True] * 5)
    np.testing.assert_array_equal(unary("stablehlo.real", halves), halves)
    np.testing.assert_array_equal(unary("stablehlo.imag", halves), halves * 0)
    np.testing.assert_array_equal(
        unary("stablehlo.bitcast_convert", halves, "f32", "i32"), halves.view("i4")
    )
    np.testing.assert_array_equal(
        unary("stablehlo.popcnt", np.arange(9, dtype="i4"), "i32"),
        [bin(n).count("1") for n in range(9)],
    )
    truth = np.array([True, False])
    for name, f in (
        ("add", np.logical_or),
        ("multiply", np.logical_and),
        ("maximum", np.logical_or),
        ("xor", np.logical_xor),
    ):
        text = program(
            ["tensor<2xi1>"] * 2, "tensor<2xi1>", f"%r = stablehlo.{name} %a, %b : tensor<2xi1>"
        )
        for x, y in itertools.product([truth, ~truth], repeat=2):
            np.testing.assert_array_equal(run(text, x, y), f(x, y))


def test_operations_of_other_front_ends():
    einsum = program(["tensor<3x4xf32>", "tensor<3x4xf32>"], "tensor<3x3xf32>",
                     '%r = "stablehlo.einsum"(%a, %b) <{einsum_config = "ij,kj->ik"}> : '
                     "(tensor<3x4xf32>, tensor<3x4xf32>) -> tensor<3x3xf32>")  # fmt: skip
    np.testing.assert_allclose(run(einsum, X, X), X @ X.T, rtol=1e-5)
    chosen = program(["tensor<3x4xf32>", "tensor<2xi32>"], "tensor<3x2xf32>",
                     '%r = "stablehlo.torch_index_select"(%a, %b) <{dim = 1 : i64, batch_dims = 0 : i64}> : '
                     "(tensor<3x4xf32>, tensor<2xi32>) -> tensor<3x2xf32>")  # fmt: skip
    np.testing.assert_array_equal(run(chosen, X, np.array([3, 0], "i4")), X[:, [3, 0]])
    across = program(["tensor<3x4xf32>", "tensor<4xf32>"], "tensor<3x4xf32>",
                     "%r = chlo.broadcast_subtract %a, %b : (tensor<3x4xf32>, tensor<4xf32>) -> tensor<3x4xf32>")  # fmt: skip
    np.testing.assert_array_equal(run(across, X, X[1]), X - X[1])
    like = program(["tensor<3x4xf32>"], "tensor<3x4xf32>",
                   '%r = "chlo.constant_like"(%a) <{value = 2.5 : f32}> : (tensor<3x4xf32>) -> tensor<3x4xf32>')  # fmt: skip
    np.testing.assert_array_equal(run(like, X), np.full((3, 4), 2.5))
    mapped = program(
        ["tensor<3x4xf32>"],
        "tensor<3x4xf32>",
        """
      %r = "stablehlo.map"(%a) <{dimensions = array<i64: 0, 1>}> ({ ^bb0(%x: tensor<f32>):
        %c = stablehlo.constant dense<2.0> : tensor<f32>
        %y = stablehlo.multiply %x, %c : tensor<f32>
        stablehlo.return %y : tensor<f32> }) : (tensor<3x4xf32>) -> tensor<3x4xf32>""",
    )
    np.testing.assert_array_equal(run(mapped, X), X * 2)
    size = program(
        ["tensor<3x4xf32>"],
        "tensor<i32>",
        "%r = stablehlo.get_dimension_size %a, dim = 1 : (tensor<3x4xf32>) -> tensor<i32>",
    )
    assert run(size, X) == 4


def test_batch_normalisation_and_its_gradient():
    types = [
        "tensor<5x3xf32>",
        "tensor<3xf32>",
        "tensor<3xf32>",
        "tensor<3xf32>",
        "tensor<5x3xf32>",
    ]
    grad = ('%g:3 = "stablehlo.batch_norm_grad"(%a, %b, %c, %d, %e) <{epsilon = 0.1 : f32, feature_index = 1 : i64}> : '
            f"({', '.join(types)}) -> (tensor<5x3xf32>, tensor<3xf32>, tensor<3xf32>)\n"
            "%r = stablehlo.add %g#0, %g#0 : tensor<5x3xf32>")  # fmt: skip
    rng = np.random.default_rng(1)
    x, g, scale = rng.standard_normal((5, 3)), rng.standard_normal((5, 3)), rng.standard_normal(3)

    def loss(x):
        return (((x - x.mean(0)) * jax.lax.rsqrt(x.var(0) + 0.1) * scale) * g).sum()

    with jax.enable_x64(True):
        want = np.asarray(jax.grad(loss)(jax.numpy.asarray(x)))
    args = [a.astype("f4") for a in (x, scale, x.mean(0), x.var(0), g)]
    np.testing.assert_allclose(
        run(program(types, "tensor<5x3xf32>", grad), *args), 2 * want, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(("compare", "want"), [
    ("GE", lambda x: (x.max(1), x.argmax(1))), ("LE", lambda x: (x.min(1), x.argmin(1)))])  # fmt: skip
def test_places_of_extremes_as_tensorflow_writes_them(compare, want):
    text = f"""module {{ func.func @main(%a: tensor<3x4xf32>) -> (tensor<3xf32>, tensor<3xi32>) {{
      %i = stablehlo.iota dim = 1 : tensor<3x4xi32>
      %s = stablehlo.constant dense<{"0xFF800000" if compare == "GE" else "0x7F800000"}> : tensor<f32>
      %z = stablehlo.constant dense<0> : tensor<i32>
      %r:2 = stablehlo.reduce(%a init: %s), (%i init: %z) across dimensions = [1] :
          (tensor<3x4xf32>, tensor<3x4xi32>, tensor<f32>, tensor<i32>) -> (tensor<3xf32>, tensor<3xi32>)
       reducer(%x: tensor<f32>, %u: tensor<f32>) (%y: tensor<i32>, %v: tensor<i32>) {{
        %p = stablehlo.compare {compare}, %x, %u : (tensor<f32>, tensor<f32>) -> tensor<i1>
        %q = stablehlo.select %p, %x, %u : tensor<i1>, tensor<f32>
        %e = stablehlo.compare EQ, %x, %u : (tensor<f32>, tensor<f32>) -> tensor<i1>
        %m = stablehlo.minimum %y, %v : tensor<i32>
        %n = stablehlo.select %p, %y, %v : tensor<i1>, tensor<i32>
        %o = stablehlo.select %e, %m, %n : tensor<i1>, tensor<i32>
        stablehlo.return %q, %o : tensor<f32>, tensor<i32> }}
      return %r#0, %r#1 : tensor<3xf32>, tensor<3xi32> }} }}"""
    got = run(text, X)
    for g, w in zip(got, want(X), strict=True):
        np.testing.assert_array_equal(g, w)
    assert "argm" in pbkern.from_stablehlo(text).as_text(X, stage="jaxpr")


def test_the_table_is_whole():
    assert len(RULES._rules) >= 130
    assert set(CHECKS) <= set(RULES)
