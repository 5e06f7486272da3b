"""Operations that programs of other compilers than JAX have, many in one program, against NumPy; and what they cannot say."""

import itertools

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scipy.linalg
import scipy.special

import pbkern
from pbkern.errors import UnsupportedOp

X = np.array([[3, -1, 2.5, 0.25], [-0.0, 7, -2.5, 1], [0.5, 0.5, 9, -9]], np.float32)
M, V, F = "tensor<3x4xf32>", "tensor<4xf32>", "tensor<f32>"


def main(arguments, results, body, more=""):
    """A module of one function; its lines name arguments %a, %b, .., and results as `results` does: name -> type."""
    given = ", ".join(f"%{n}: {t}" for n, t in zip("abcdef", arguments))
    types = ", ".join(results.values())
    return (f"module {{ func.func @main({given}) -> ({types}) {{\n{body}\n"
            f"return {', '.join('%' + n for n in results)} : {types} }}\n{more} }}")  # fmt: skip


def check(text, args, want, rtol=2e-6):
    got = pbkern.from_stablehlo(text)(*args)
    got = got if isinstance(got, tuple | list) else [got]
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        w = np.asarray(w)
        assert np.shape(g) == w.shape, k
        np.testing.assert_allclose(
            np.asarray(g).astype(w.dtype), w, rtol=rtol, atol=rtol, err_msg=str(k)
        )


def refused(text, why):
    with pytest.raises(UnsupportedOp, match=why):
        pbkern.from_stablehlo(text)


def test_operations_of_single_elements():
    body = f"""
      %cmp = chlo.broadcast_compare %a, %b {{comparison_direction = #chlo<comparison_direction GT>}}
        : ({M}, {V}) -> tensor<3x4xi1>
      %sel = chlo.broadcast_select %cmp, %a, %b : (tensor<3x4xi1>, {M}, {V}) -> {M}
      %sub = chlo.broadcast_subtract %a, %d {{broadcast_dimensions = array<i64: 0>}} : ({M}, tensor<3xf32>) -> {M}
      %tot = stablehlo.compare LT, %a, %e, TOTALORDER : ({M}, {M}) -> tensor<3x4xi1>
      %cut = stablehlo.reduce_precision %a, format = e5m2 : {M}
      %real = stablehlo.convert %c : (tensor<4xcomplex<f32>>) -> {V}
      %one = "chlo.constant_like"(%a) <{{value = 3.5 : f32}}> : ({M}) -> {M}
      %bar:2 = stablehlo.optimization_barrier %a, %b : {M}, {V}
      %wide = stablehlo.broadcast %b, sizes = [2] : ({V}) -> tensor<2x4xf32>
      %gone = "stablehlo.unary_einsum"(%a) <{{einsum_config = "ij->j"}}> : ({M}) -> {V}
      %part = stablehlo.custom_call @Sharding(%a) : ({M}) -> {M}
      %erf = stablehlo.custom_call @mhlo.erf(%a) : ({M}) -> {M}
      %best:2 = stablehlo.custom_call @mhlo.topk(%a) : ({M}) -> (tensor<3x2xf32>, tensor<3x2xi32>)
      %top:2 = chlo.top_k(%a, k = 1) : {M} -> (tensor<3x1xf32>, tensor<3x1xi32>)
      %low = stablehlo.constant dense<-2> : tensor<1xi64>
      %pair = stablehlo.tuple %b, %a : tuple<{V}, {M}>
      %second = stablehlo.get_tuple_element %pair[1] : (tuple<{V}, {M}>) -> {M}
      %t = stablehlo.create_token : !stablehlo.token
      %u = stablehlo.after_all %t, %t : !stablehlo.token
      %hex = stablehlo.constant dense<"0x000020400000A0C0000000000000803F"> : {V}
      %flags = stablehlo.constant dense<[true, false, true, true]> : tensor<4xi1>
      %bits = stablehlo.constant dense<[0x7F80, 1.5]> : tensor<2xbf16>"""
    results = {
        "cmp": "tensor<3x4xi1>", "sel": M, "sub": M, "tot": "tensor<3x4xi1>", "cut": M, "real": V, "one": M, "bar#0": M,
        "bar#1": V, "wide": "tensor<2x4xf32>", "gone": V, "part": M, "erf": M, "best#0": "tensor<3x2xf32>",
        "best#1": "tensor<3x2xi32>", "top#0": "tensor<3x1xf32>", "top#1": "tensor<3x1xi32>", "second": M, "hex": V,
        "flags": "tensor<4xi1>", "bits": "tensor<2xbf16>",
    }  # fmt: skip
    b, c, d = (
        X[0][::-1].copy(),
        (X[0] + 2j).astype(np.complex64),
        np.array([1, -2, 0.5], np.float32),
    )
    e = np.where(X == 0, 0.0, X[::-1]).astype(np.float32)
    order = np.argsort(-X, 1, kind="stable")
    key = lambda x: np.where(x.view("i4") < 0, x.view("i4") ^ 0x7FFFFFFF, x.view("i4"))
    want = [
        b < X, np.where(b < X, X, b), X - d[:, None], key(X) < key(e), X.astype(ml_dtypes.float8_e5m2), c.real,
        np.full((3, 4), 3.5), X, b, np.stack([b, b]), X.sum(0), X, scipy.special.erf(X.astype("f8")),
        np.take_along_axis(X, order[:, :2], 1), order[:, :2], X.max(1, keepdims=True), X.argmax(1)[:, None], X, [2.5, -5, 0, 1],
        [True, False, True, True], [np.inf, 1.5],
    ]  # fmt: skip
    check(
        main([M, V, "tensor<4xcomplex<f32>>", "tensor<3xf32>", M], results, body),
        [X, b, c, d, e],
        want,
    )


def test_matrices_normalisation_and_random_numbers():
    S, L, C = "tensor<3x3xf32>", "tensor<3x2xf32>", "tensor<3x3xcomplex<f32>>"
    solve = "left_side = true, lower = {0}, unit_diagonal = {1}, transpose_a = #stablehlo<transpose {2}>"
    solved = lambda name, *how: (
        f'%{name} = "stablehlo.triangular_solve"(%b, %c) <{{{solve.format(*how)}}}> : ({S}, {L}) -> {L}\n')  # fmt: skip
    body = f"""
      %low = stablehlo.cholesky %a, lower = true : {S}
      %up = stablehlo.cholesky %a : {S}
      {solved("s", "true", "false", "NO_TRANSPOSE")}{solved("t", "false", "false", "TRANSPOSE")}
      {solved("u", "true", "true", "NO_TRANSPOSE")}
      %z = "stablehlo.triangular_solve"(%d, %d) <{{{solve.format("true", "false", "ADJOINT")}}}> : ({C}, {C}) -> {C}
      %k = stablehlo.constant dense<[50, 3]> : tensor<2xi64>
      %from = stablehlo.constant dense<-2.0> : {F}
      %to = stablehlo.constant dense<5.0> : {F}
      %r = stablehlo.rng %from, %to, %k, distribution = UNIFORM : ({F}, {F}, tensor<2xi64>) -> tensor<50x3xf32>
      %inf = "stablehlo.batch_norm_inference"(%e, %f, %f, %f, %f) <{{epsilon = 0.1 : f32, feature_index = 1 : i64}}>
        : (tensor<5x3xf32>, tensor<3xf32>, tensor<3xf32>, tensor<3xf32>, tensor<3xf32>) -> tensor<5x3xf32>
      %n:3 = "stablehlo.batch_norm_training"(%e, %f, %f) <{{epsilon = 0.1 : f32, feature_index = 1 : i64}}>
        : (tensor<5x3xf32>, tensor<3xf32>, tensor<3xf32>) -> (tensor<5x3xf32>, tensor<3xf32>, tensor<3xf32>)"""
    types = {"s": L, "t": L, "u": L, "z": C, "inf": "tensor<5x3xf32>", "n#0": "tensor<5x3xf32>", "n#1": "tensor<3xf32>",
             "n#2": "tensor<3xf32>", "low": S, "up": S, "r": "tensor<50x3xf32>"}  # fmt: skip
    rng = np.random.default_rng(3)
    w = rng.standard_normal((3, 3)).astype("f4")
    a, b, c = (
        w @ w.T + 3 * np.eye(3, dtype="f4"),
        w + 3 * np.eye(3, dtype="f4"),
        rng.standard_normal((3, 2)).astype("f4"),
    )
    d = (b + 1j * w).astype("c8")
    e, f = rng.standard_normal((5, 3)).astype("f4"), np.array([0.5, 1.5, 2.0], "f4")
    solved = lambda *how, **more: scipy.linalg.solve_triangular(
        b.astype("f8"), c.astype("f8"), *how, **more
    )
    wide, scale = e.astype("f8"), f.astype("f8")
    norm = lambda mean, var: (wide - mean) / np.sqrt(var + 0.1) * scale + scale
    program = pbkern.from_stablehlo(
        main([S, S, L, C, "tensor<5x3xf32>", "tensor<3xf32>"], types, body)
    )
    *got, low, up, drawn = program(a, b, c, d, e, f)
    want = [
        solved(lower=True), solved("T", lower=False), solved(lower=True, unit_diagonal=True),
        scipy.linalg.solve_triangular(d, d, "C", lower=True), norm(scale, scale), norm(wide.mean(0), wide.var(0)),
        wide.mean(0), wide.var(0),
    ]  # fmt: skip
    for g, x in zip(got, want, strict=True):
        np.testing.assert_allclose(g, x, rtol=2e-5, atol=2e-6)
    exact = np.linalg.cholesky(a.astype("f8"))
    np.testing.assert_allclose(np.tril(low), exact, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.triu(up), exact.T, rtol=1e-5, atol=1e-6)
    drawn = np.asarray(drawn)
    assert drawn.shape == (50, 3)
    assert -2 <= drawn.min() < -1.5
    assert 4.5 < drawn.max() < 5
    assert len(np.unique(drawn)) > 140


PAIR = """%{name}:2 = "stablehlo.reduce_window"(%a, %b, %z, %z) <{{window_dimensions = array<i64: {window}>,
    padding = dense<{pads}> : tensor<2x2xi64>}}> ({{ ^bb0(%x: tensor<{t}>, %y: tensor<{t}>, %u: tensor<{t}>, %v: tensor<{t}>):
      %p = stablehlo.add %x, %u : tensor<{t}>
      %m = stablehlo.maximum %y, %v : tensor<{t}>
      stablehlo.return %p, %m : tensor<{t}>, tensor<{t}> }})
    : (tensor<3x4x{t}>, tensor<3x4x{t}>, tensor<{t}>, tensor<{t}>) -> (tensor<{shape}x{t}>, tensor<{shape}x{t}>)
"""


def windows(x, combine, rows, columns):
    """Of each window of a matrix that begins with zeros in front."""
    return np.array([[combine(x[i : i + rows, j : j + columns]) for j in range(x.shape[1] - columns + 1)]
                     for i in range(x.shape[0] - rows + 1)])  # fmt: skip


@pytest.mark.parametrize("t", ["f32", "i32"])
def test_windows_of_two_arrays(t):
    """Of floats by what a region does with some numbers: a running one where its start changes nothing."""
    cases = {
        "r": ("2, 1", "0", "2x4"),
        "s": ("2, 2", "0", "2x3"),
        "w": ("1, 4", "[[0, 0], [3, 0]]", "3x4"),
    }
    body = f"%z = stablehlo.constant dense<0{'' if t == 'i32' else '.0'}> : tensor<{t}>\n"
    types = {}
    for name, (window, pads, shape) in cases.items():
        body += PAIR.format(name=name, window=window, pads=pads, shape=shape, t=t)
        types |= {f"{name}#{k}": f"tensor<{shape}x{t}>" for k in (0, 1)}
    a, b = (np.random.default_rng(k).integers(-9, 9, (3, 4)).astype(t[0] + "4") for k in (1, 2))
    padded = lambda x: np.pad(x, ((0, 0), (3, 0)))
    most = lambda w: max(w.max(), 0)
    want = [windows(a, np.sum, 2, 1), windows(b, most, 2, 1), windows(a, np.sum, 2, 2), windows(b, most, 2, 2),
            a.cumsum(1), windows(padded(b), most, 1, 4)]  # fmt: skip
    check(main([f"tensor<3x4x{t}>"] * 2, types, body), (a, b), want)


def reduced(name, of, start, region, result, t, dims="1"):
    types = ", ".join(f"tensor<{k}>" for k in t)
    arrays = ", ".join(f"tensor<3x4x{k}>" for k in t)
    params = "".join(f" (%x{n}: tensor<{k}>, %y{n}: tensor<{k}>)" for n, k in enumerate(t))
    pairs = ", ".join(f"(%{x} init: %{s})" for x, s in zip(of, start))
    return (f"%{name} = stablehlo.reduce{pairs}"
            f" across dimensions = [{dims}] : ({arrays}, {types}) -> {result}\n reducer{params} {{ {region} }}\n")  # fmt: skip


def test_reductions_of_products_truth_and_windows_of_matrices():
    one = lambda name, k: (
        f"%z = stablehlo.{name} %x0, %y0 : tensor<{k}> stablehlo.return %z : tensor<{k}>"
    )
    body = """
      %one = stablehlo.constant dense<1.0> : tensor<f32>
      %true = stablehlo.constant dense<true> : tensor<i1>
      %false = stablehlo.constant dense<false> : tensor<i1>
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %m = "stablehlo.reduce_window"(%a, %zero) <{window_dimensions = array<i64: 2, 2>}> ({
        ^bb0(%x: tensor<f32>, %y: tensor<f32>):
          %z = stablehlo.add %x, %y : tensor<f32>
          stablehlo.return %z : tensor<f32> }) : (tensor<3x4xf32>, tensor<f32>) -> tensor<2x3xf32>
      %n = "stablehlo.reduce_window"(%a, %zero) <{window_dimensions = array<i64: 2, 1>}> ({
        ^bb0(%x: tensor<f32>, %y: tensor<f32>):
          %z = stablehlo.add %x, %y : tensor<f32>
          stablehlo.return %z : tensor<f32> }) : (tensor<3x4xf32>, tensor<f32>) -> tensor<2x4xf32>
    """
    body += reduced("p", "a", ["one"], one("multiply", "f32"), "tensor<3xf32>", ["f32"])
    body += reduced("q", "b", ["true"], one("minimum", "i1"), "tensor<3xi1>", ["i1"])
    body += reduced("r", "b", ["false"], one("maximum", "i1"), "tensor<3xi1>", ["i1"])
    types = {
        "m": "tensor<2x3xf32>",
        "n": "tensor<2x4xf32>",
        "p": "tensor<3xf32>",
        "q": "tensor<3xi1>",
        "r": "tensor<3xi1>",
    }
    truth = X > 0.25
    truth[0] = True
    want = [
        windows(X, np.sum, 2, 2),
        windows(X, np.sum, 2, 1),
        X.prod(1),
        truth.all(1),
        truth.any(1),
    ]
    check(main([M, "tensor<3x4xi1>"], types, body), (X, truth), want)


# How a region takes one of two numbers %x0 and %y0, and their places %x1 and %y1 -> what it finds in a row of numbers.
TAKES = {
    "the first place of the greatest": ("%p = stablehlo.compare GE, %x0, %y0 : ({t}, {t}) -> tensor<i1>", "i32", "argmax"),
    "numbers rather than NaN": (
        "%g = stablehlo.compare GT, %x0, %y0 : ({t}, {t}) -> tensor<i1> "
        "%h = stablehlo.compare NE, %y0, %y0 : ({t}, {t}) -> tensor<i1> %p = stablehlo.or %g, %h : tensor<i1>",
        "i32", "reduce"),
    "the other of equal ones": ("%p = stablehlo.compare GT, %x0, %y0 : ({t}, {t}) -> tensor<i1>", "i32", "reduce"),
    "places that are floats": ("%p = stablehlo.compare GE, %x0, %y0 : ({t}, {t}) -> tensor<i1>", "f32", "reduce"),
    "by a computation": ("%s = stablehlo.add %x0, %x0 : {t} %w = stablehlo.add %y0, %y0 : {t} "
                         "%p = stablehlo.compare GE, %s, %w : ({t}, {t}) -> tensor<i1>", "i32", "reduce"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKES)
def test_places_of_extremes_or_other_reductions(name):
    """Numbers of columns are a vector along the rows; what is no argmax of lax's stays a reduction of two arrays."""
    choice, k, primitive = TAKES[name]
    region = (choice.format(t=F) + f" %v = stablehlo.select %p, %x0, %y0 : tensor<i1>, {F}\n"
              f"%e = stablehlo.compare EQ, %x0, %y0 : ({F}, {F}) -> tensor<i1> "
              f"%l = stablehlo.minimum %x1, %y1 : tensor<{k}> %s1 = stablehlo.select %p, %x1, %y1 : tensor<i1>, tensor<{k}>\n"
              + (f"%i = stablehlo.select %e, %l, %s1 : tensor<i1>, tensor<{k}>" if name != "the other of equal ones" else
                 f"%i = stablehlo.select %p, %x1, %y1 : tensor<i1>, tensor<{k}>")
              + f" stablehlo.return %v, %i : {F}, tensor<{k}>")  # fmt: skip
    zero = "0" if k == "i32" else "0.0"
    body = f"""%low = stablehlo.constant dense<0xFF800000> : {F}
      %z = stablehlo.constant dense<{zero}> : tensor<{k}>
      %n = stablehlo.iota dim = 0 : tensor<4x{k}>
      %at = stablehlo.broadcast_in_dim %n, dims = [1] : (tensor<4x{k}>) -> tensor<3x4x{k}>
    """ + reduced(
        "r:2", ["a", "at"], ["low", "z"], region, f"(tensor<3xf32>, tensor<3x{k}>)", ["f32", k]
    )
    f = pbkern.from_stablehlo(main([M], {"r#0": "tensor<3xf32>", "r#1": f"tensor<3x{k}>"}, body))
    assert f" {primitive}[" in f.as_text(X, stage="jaxpr")
    x = X.copy()
    x[2, 0] = 8.5
    x[1, 0] = np.nan if "NaN" in name else 0
    value, place = f(x)
    np.testing.assert_array_equal(value, np.nanmax(x, 1))
    np.testing.assert_array_equal(place, np.nanargmax(x, 1))


def test_places_calls_and_orders():
    body = f"""
      %row = "stablehlo.torch_index_select"(%a, %b) <{{dim = 1 : i64, batch_dims = 1 : i64}}>
        : ({M}, tensor<3x2xi32>) -> tensor<3x2xf32>
      %from = stablehlo.constant dense<[1, 0]> : tensor<2xi64>
      %to = stablehlo.constant dense<[3, 4]> : tensor<2xi64>
      %by = stablehlo.constant dense<[1, 3]> : tensor<2xi64>
      %cut = stablehlo.real_dynamic_slice %a, %from, %to, %by
        : ({M}, tensor<2xi64>, tensor<2xi64>, tensor<2xi64>) -> tensor<2x2xf32>
      %made = stablehlo.composite "user.twice_and_one" %a {{decomposition = @outer}} : ({M}) -> {M}
      %true:2 = "stablehlo.sort"(%c, %a) <{{dimension = 1 : i64, is_stable = true}}> ({{
        ^bb0(%x: tensor<i1>, %y: tensor<i1>, %u: {F}, %v: {F}):
          %n = stablehlo.not %x : tensor<i1>
          %q = stablehlo.and %n, %y : tensor<i1>
          stablehlo.return %q : tensor<i1> }}) : (tensor<3x4xi1>, {M}) -> (tensor<3x4xi1>, {M})"""
    functions = f"""
      func.func private @outer(%x: {M}) -> {M} {{
        %y = func.call @inner(%x) : ({M}) -> {M}
        %z = stablehlo.add %y, %x : {M}
        return %z : {M} }}
      func.func private @inner(%x: {M}) -> {M} {{
        %one = stablehlo.constant dense<1.0> : {M}
        %y = stablehlo.add %x, %one : {M}
        return %y : {M} }}"""
    b, c = np.array([[3, 0], [1, 9], [2, 2]], "i4"), X > 0.5
    order = np.argsort(c, 1, kind="stable")
    want = [np.take_along_axis(X, b.clip(0, 3), 1), X[1:3, ::3], 2 * X + 1, np.take_along_axis(c, order, 1),
            np.take_along_axis(X, order, 1)]  # fmt: skip
    types = {
        "row": "tensor<3x2xf32>",
        "cut": "tensor<2x2xf32>",
        "made": M,
        "true#0": "tensor<3x4xi1>",
        "true#1": M,
    }
    check(main([M, "tensor<3x2xi32>", "tensor<3x4xi1>"], types, body, functions), (X, b, c), want)


# Conditions and steps of a loop that counts %i from 2, and %x from 2.0, up by the counter, and whether its length is known.
LOOP = """%start = stablehlo.constant dense<2> : tensor<i32>
  %first = stablehlo.constant dense<2.0> : tensor<f32>
  %r:2 = stablehlo.while(%i = %start, %x = %first) : tensor<i32>, tensor<f32>
   cond {{ {test}
     stablehlo.return %t : tensor<i1> }}
   do {{ %two = stablehlo.constant dense<2> : tensor<i32>
     %j = stablehlo.{step} %i, %two : tensor<i32>
     %f = stablehlo.convert %i : (tensor<i32>) -> tensor<f32>
     %y = stablehlo.add %x, %f : tensor<f32>
     stablehlo.return %j, %y : tensor<i32>, tensor<f32> }}"""
BOTH = "(tensor<i32>, tensor<i32>) -> tensor<i1>"
NINE = "%n = stablehlo.constant dense<9> : tensor<i32>"
LOOPS = {
    "a number that counts": (f"{NINE} %t = stablehlo.compare LT, %i, %n : {BOTH}", "add", True),
    "a float": ("%n = stablehlo.constant dense<9.0> : tensor<f32> "
                "%t = stablehlo.compare LT, %x, %n : (tensor<f32>, tensor<f32>) -> tensor<i1>", "add", False),
    "an argument": (f"%t = stablehlo.compare LT, %i, %b : {BOTH}", "add", False),
    "a constant": (f"{NINE} %t = stablehlo.compare LT, %b, %n : {BOTH}", "add", False),
    "a product": (f"{NINE} %t = stablehlo.compare LT, %i, %n : {BOTH}", "multiply", False),
    "a truth value": ("%t = stablehlo.and %c, %c : tensor<i1>", "add", False),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_loops_whose_length_is_known_or_not(name):
    test, step, counted = LOOPS[name]
    body = LOOP.format(test=test, step=step)
    f = pbkern.from_stablehlo(
        main([M, "tensor<i32>", "tensor<i1>"], {"r#0": "tensor<i32>", "r#1": F}, body)
    )
    args = X, np.int32(9), np.bool_(False)
    text = f.as_text(*args, stage="jaxpr")
    assert (" while[" in text) != counted, text
    i, x = 2, 2.0
    while {"a float": x < 9, "a constant": False, "a truth value": False}.get(name, i < 9):
        i, x = (i + 2 if step == "add" else i * 2), x + i
    assert tuple(map(float, f(*args))) == (i, x)


BITS = "%s, %r = stablehlo.rng_bit_generator %a, algorithm = {} : (tensor<{}>) -> (tensor<{}>, tensor<4x{}>)"
SCATTER = """%r = "stablehlo.scatter"(%a, %b, %c) <{scatter_dimension_numbers = #stablehlo.scatter<inserted_window_dims = [0],
      scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}> ({ ^bb0(%x: tensor<i32>, %y: tensor<i32>):
      %z = stablehlo.or %x, %y : tensor<i32>
      stablehlo.return %z : tensor<i32> }) : (tensor<4xi32>, tensor<3x1xi32>, tensor<3xi32>) -> tensor<4xi32>"""
SELECT = """%z = stablehlo.constant dense<0.0> : tensor<f32>
      %r = "stablehlo.select_and_scatter"(%a, %b, %z) <{window_dimensions = array<i64: 2, 2>,
      window_strides = array<i64: 2, 2>}> ({
        ^bb0(%x: tensor<f32>, %y: tensor<f32>): %n = stablehlo.abs %x : tensor<f32>
          %q = stablehlo.compare GE, %n, %y : (tensor<f32>, tensor<f32>) -> tensor<i1>
          stablehlo.return %q : tensor<i1> }, {
        ^bb0(%x: tensor<f32>, %y: tensor<f32>): %s = stablehlo.add %x, %y : tensor<f32>
          stablehlo.return %s : tensor<f32> }) : (tensor<4x4xf32>, tensor<2x2xf32>, tensor<f32>) -> tensor<4x4xf32>"""
SORT = """%r = "stablehlo.sort"(%a) <{{dimension = 0 : i64}}> ({{ ^bb0(%x: {0}, %y: {0}):
      %q = stablehlo.compare {1} : ({0}, {0}) -> tensor<i1>
      stablehlo.return %q : tensor<i1> }}) : ({2}) -> {2}"""


def test_what_has_no_rule_is_named_with_its_reason():
    bits = lambda algorithm, state, kind: main(
        [f"tensor<{state}>"], {"r": f"tensor<4x{kind}>"}, BITS.format(algorithm, state, state, kind)
    )
    refused(
        bits("PHILOX", "4xui32", "ui32"),
        r"rng_bit_generator.*a state of uint32\[4\]; Philox has one of two or three uint64",
    )
    refused(bits("DEFAULT", "3xui64", "ui32"), r"rng_bit_generator.*a state of uint64\[3\]")
    refused(bits("DEFAULT", "2xui64", "f32"), "bits of other numbers than integers")
    refused(
        main(
            ["tensor<4xi32>", "tensor<3x1xi32>", "tensor<3xi32>"], {"r": "tensor<4xi32>"}, SCATTER
        ),
        "bits of integers are combined",
    )
    refused(
        main(["tensor<4x4xf32>", "tensor<2x2xf32>"], {"r": "tensor<4x4xf32>"}, SELECT),
        "selected by more than one comparison",
    )
    f8 = "f8E4M3FN"
    refused(
        main(
            [f"tensor<9x{f8}>"],
            {"r": f"tensor<9x{f8}>"},
            SORT.format(f"tensor<{f8}>", "LT, %x, %y", f"tensor<9x{f8}>"),
        ),
        "its comparator is no order",
    )
    refused(
        main(
            ["tensor<9xf32>", F],
            {"r": "tensor<9xf32>"},
            SORT.format(F, "LT, %x, %b", "tensor<9xf32>"),
        ),
        "its comparator is no order",
    )
    refused(
        main([M], {"r": "tensor<ui32>"}, "%r = stablehlo.partition_id : tensor<ui32>"),
        "why  stablehlo.partition_id",
    )
    refused(
        main(["vector<3xf32>"], {"a": "vector<3xf32>"}, ""),
        "argument 0 of `main`: type vector<3xf32>",
    )


def test_rules_that_jax_refuses_name_the_operation():
    text = main(
        [M],
        {"r": "tensor<4xf32>"},
        f'%r = "stablehlo.unary_einsum"(%a) <{{einsum_config = "ijk->j"}}> : ({M}) -> {V}',
    )
    refused(text, r"stablehlo.unary_einsum at .* is not imported\n *why  ValueError: ")


def test_an_export_for_two_devices():
    mesh = jax.sharding.AbstractMesh((2,), ("x",))
    sharded = jax.ShapeDtypeStruct(
        (4, 3), "float32", sharding=jax.sharding.NamedSharding(mesh, jax.P("x"))
    )
    program = jax.export.export(jax.jit(jnp.sin))(sharded)
    refused(program, r"(?s)`sin` is for 2 devices.*kernels run on one")


@pytest.mark.parametrize(("dtype", "kind"), [("int8", "i8"), ("uint8", "ui8"), ("int32", "i32")])
def test_powers_of_integers(dtype, kind):
    """Modulo 2^bits; of negative exponents the integer part."""
    limits = np.iinfo(dtype)
    bases = [0, 1, 2, 3, 7, 100, limits.max, *((-1, -2, -3, limits.min) if limits.min else ())]
    exponents = [0, 1, 2, 3, 8, 31, 65, 127, *((-1, -2, -3, limits.min) if limits.min else ())]
    x, y = (np.array(v).astype(dtype) for v in zip(*itertools.product(bases, exponents)))
    array = f"tensor<{len(x)}x{kind}>"
    program = pbkern.from_stablehlo(
        f"""func.func @main(%x: {array}, %y: {array}) -> {array} {{
          %0 = stablehlo.power %x, %y : {array}
          return %0 : {array}
        }}"""
    )

    def power(x: int, y: int) -> int:
        return x**y if y >= 0 else x ** (y % 2) if abs(x) == 1 else 0

    want = np.array([power(int(a), int(b)) % 2**limits.bits for a, b in zip(x, y)], object)
    got = np.asarray(program(x, y)).astype(object) % 2**limits.bits
    np.testing.assert_array_equal(got, want)
