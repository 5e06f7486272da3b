"""Weighted minimax polynomials (Remez exchange in mpmath): where the coefficients of vector_math come from.

Run as a script to print every table with its error in bits: those of coefficients.py, then those of lookup_values.py.
"""

from __future__ import annotations

import itertools
import sys

import mpmath as mp
import numpy as np

from pbkern.lower.math.erf import ERF_ROOT_MIDDLE
from pbkern.targets.cpu.math.lookup_values import LOG_GRID, PIECES

mp.mp.dps = 40


def minimax(f, low, high, degree, weight=lambda x: 1, rounds=12):
    """Coefficients, constant first, of the polynomial with the least max |p - f| weight, and that."""
    n = degree + 2
    low, high = mp.mpf(low), mp.mpf(high)
    middle, half = (low + high) / 2, (high - low) / 2
    nodes = [-mp.cos(mp.pi * (2 * i + 1) / (2 * n)) for i in range(n)]
    count = 24 * n
    grid = [
        -mp.cos(mp.pi * i / count) for i in range(count + 1)
    ]  # in [-1, 1], where powers are well conditioned
    values = [(f(middle + half * t), abs(weight(middle + half * t))) for t in grid]
    floor = max(w for _, w in values) / 10**6  # where the weight vanishes any value would do
    for _ in range(rounds):
        a, rhs = mp.matrix(n, n), mp.matrix(n, 1)
        for i, t in enumerate(nodes):
            x = middle + half * t
            for k in range(n - 1):
                a[i, k] = t**k
            a[i, n - 1] = (-1) ** i / max(abs(weight(x)), floor)
            rhs[i] = f(x)
        solution = mp.lu_solve(a, rhs)
        c = [solution[k] for k in range(n - 1)]
        error = [(mp.polyval(c[::-1], t) - v) * w for t, (v, w) in zip(grid, values)]
        nodes, best = [], []
        for t, e in zip(grid, error):  # the largest error of each run of one sign
            if best and (e > 0) == (best[-1] > 0):
                if abs(e) > abs(best[-1]):
                    nodes[-1], best[-1] = t, e
            else:
                nodes.append(t)
                best.append(e)
        while len(nodes) > n:
            drop = 0 if abs(best[0]) < abs(best[-1]) else -1
            del nodes[drop], best[drop]
        if len(nodes) < n or max(map(abs, best)) < mp.mpf("1.01") * min(map(abs, best)):
            break
    worst = max(map(abs, error))
    # p(t), t = (x - middle) / half, expanded in x
    out, power = [mp.mpf(0)] * (degree + 1), [mp.mpf(1)]
    for k in range(degree + 1):
        for i, q in enumerate(power):
            out[i] += c[k] * q
        shifted = [mp.mpf(0), *power]
        power = [s / half for s in shifted]
        for i in range(len(shifted) - 1):
            power[i] -= shifted[i + 1] * middle / half
    return out, worst


def exp_q(x):
    return mp.mpf(1) / 2 + x / 6 if abs(x) < 1e-15 else (mp.expm1(x) - x) / x**2


def exp2_p(x):
    return mp.log(2) if abs(x) < 1e-25 else mp.expm1(x * mp.log(2)) / x


def log_p(x):
    return mp.mpf(1) / 3 - x / 4 if abs(x) < 1e-11 else (mp.log1p(x) - x + x**2 / 2) / x**3


def log_q(x):
    return -mp.mpf(1) / 2 + x / 3 if abs(x) < 1e-12 else (mp.log1p(x) - x) / x**2


def odd(f, third):
    """(f(x) - x) / x**3 as a function of z = x**2, with its value at zero."""

    def g(z):
        x = mp.sqrt(z)
        return third if z < 1e-22 else (f(x) - x) / x**3

    return g


def cos_q(z):
    return mp.mpf(1) / 24 if z < 1e-15 else (mp.cos(mp.sqrt(z)) - 1 + z / 2) / z**2


def atanh_p(z):
    """(atanh(s) / s - 1) / z, z = s**2."""
    s = mp.sqrt(z)
    return mp.mpf(1) / 3 if z < 1e-22 else (mp.atanh(s) / s - 1) / z


def atanh_rest(z):
    """atanh(s) / s = 1 + z / 3 + z**2 times this."""
    return mp.mpf(1) / 5 + z / 7 if z < 1e-12 else (atanh_p(z) - mp.mpf(1) / 3) / z


def log2_atanh(z):
    s = mp.sqrt(z)
    return 2 / mp.log(2) * (1 if z < 1e-30 else mp.atanh(s) / s)


def erf_p(z):
    x = mp.sqrt(z)
    return 2 / mp.sqrt(mp.pi) - 1 if z < 1e-30 else mp.erf(x) / x - 1


def erfcx(x):
    return mp.exp(x * x) * mp.erfc(x)


def erfc_root(x):
    return mp.root(mp.erfc(x), 4)


def erfcx_t(t):
    """(1 + 2 x) * erfcx(x) with x = 2 (1 + t) / (1 - t), t in [-1, 1)."""
    if t > 1 - mp.mpf(10) ** -30:
        return 2 / mp.sqrt(mp.pi)
    x = 2 * (1 + t) / (1 - t)
    if x > 30:
        inverse = 1 / (2 * x * x)
        total, term = mp.mpf(1), mp.mpf(1)
        for k in range(1, 14):
            term *= -(2 * k - 1) * inverse
            total += term
        return (1 + 2 * x) * total / (x * mp.sqrt(mp.pi))
    return (1 + 2 * x) * erfcx(x)


def erfinv_w(w):
    """erf_inv(x) / x with w = -log(1 - x**2)."""
    if w < 1e-20:
        return mp.sqrt(mp.pi) / 2
    x = mp.sqrt(-mp.expm1(-w))
    c = -mp.expm1(mp.log1p(-mp.exp(-w)) / 2)  # 1 - x without cancellation
    # Newton on log erfc from an asymptotic start
    y = mp.sqrt(w) * mp.mpf("0.9") if w > 1 else x * mp.sqrt(mp.pi) / 2
    for _ in range(60):
        e = mp.erfc(y)
        step = (mp.log(e) - mp.log(c)) * e / (2 / mp.sqrt(mp.pi) * mp.exp(-y * y))
        y += step
        if abs(step) < mp.mpf(10) ** -34 * y:
            break
    return y / x


def lgamma_2(d):
    """lgamma(2 + d) / d."""
    return mp.digamma(2) + d * mp.psi(1, 2) / 2 if abs(d) < 1e-18 else mp.loggamma(2 + d) / d


def by_bernoulli(z, coefficient):
    """The asymptotic series sum of coefficient(k) z**(k - 1), k = 1 .. 19: Stirling's for large x = z**(-1/2)."""
    return mp.fsum(coefficient(k) * z ** (k - 1) for k in range(1, 20))


def stirling(z):
    """x (lgamma(x) - ((x - 1/2) log(x) - x + log(2 pi) / 2)) with z = x**-2."""
    if z < 1e-3:
        return by_bernoulli(z, lambda k: mp.bernoulli(2 * k) / (2 * k * (2 * k - 1)))
    x = 1 / mp.sqrt(z)
    return x * (mp.loggamma(x) - ((x - 0.5) * mp.log(x) - x + mp.log(2 * mp.pi) / 2))


DIGAMMA_ZERO = mp.findroot(mp.digamma, mp.mpf("1.4616321449683623"))


def digamma_near_zero(t):
    """digamma(r + t) / t, r its positive zero."""
    return mp.psi(1, DIGAMMA_ZERO) if abs(t) < 1e-20 else mp.digamma(DIGAMMA_ZERO + t) / t


def digamma_tail(z):
    """x**2 (log(x) - 1 / (2 x) - digamma(x)) with z = x**-2."""
    if z < 1e-3:
        return by_bernoulli(z, lambda k: mp.bernoulli(2 * k) / (2 * k))
    x = 1 / mp.sqrt(z)
    return x * x * (mp.log(x) - 1 / (2 * x) - mp.digamma(x))


def sinc_p(z):
    """(sin(pi f) / (pi f) - 1) / z, z = f**2."""
    f = mp.sqrt(z)
    return -(mp.pi**2) / 6 if z < 1e-20 else (mp.sincpi(f) - 1) / z


def cotangent_q(z):
    """(1 / d - pi cot(pi d)) / d, z = d**2."""
    d = mp.sqrt(z)
    return (
        2 * (mp.zeta(2) + mp.zeta(4) * z)
        if z < 1e-15
        else (1 / d - mp.pi * mp.cospi(d) / mp.sinpi(d)) / d
    )


def tangent_p(z):
    """pi tan(pi h) / h, z = h**2."""
    h = mp.sqrt(z)
    return mp.pi**2 if z < 1e-30 else mp.pi * mp.tan(mp.pi * h) / h


def at_root(f):
    """f(x) as a weight in z = x**-2."""
    return lambda z: f(1 / mp.sqrt(z)) if z else mp.mpf(0)


R = mp.log(2) / 2 * mp.mpf("1.0001")
SQ = mp.sqrt(2)
S2 = ((SQ - 1) / (SQ + 1)) ** 2 * mp.mpf("1.0001")
T8 = (mp.sqrt(2) - 1) ** 2 * mp.mpf("1.0001")
P4 = (mp.pi / 4) ** 2 * mp.mpf("1.0001")

# name -> (function, low, high, weight, degree f32, degree f64)
FITS = {
    "exp": (exp_q, -R, R, lambda x: x * x / mp.exp(x), 4, 9),
    "exp_approx": (exp_q, -R, R, lambda x: x * x / mp.exp(x), 2, 5),
    "exp2": (exp2_p, -0.50001, 0.50001, lambda x: x / 2**x, 5, 10),
    "exp_by_table_f32": (exp_q, -R / 16, R / 16, lambda x: x * x / mp.exp(x), 1, None),
    "exp_by_table_f64": (exp_q, -R / 8, R / 8, lambda x: x * x / mp.exp(x), None, 5),
    "exp2_by_table_f32": (exp2_p, -mp.mpf("0.0313"), mp.mpf("0.0313"), lambda x: x / 2**x, 2, None),
    "exp2_by_table_f64": (exp2_p, -mp.mpf("0.0626"), mp.mpf("0.0626"), lambda x: x / 2**x, None, 6),
    "log": (
        log_p,
        1 / SQ - 1,
        SQ - 1,
        lambda x: x**3 / mp.log1p(x) if abs(x) > 1e-9 else x * x,
        7,
        None,
    ),
    "log_by_table_f32": (
        log_q,
        -mp.mpf(1) / 16,
        mp.mpf(1) / 8,
        lambda x: x * x / mp.log1p(x) if x else x,
        4,
        None,
    ),
    "atanh": (atanh_p, 0, S2, lambda z: z, None, 6),
    "atanh_rest": (atanh_rest, 0, S2, lambda z: z * z, None, 7),
    "log2": (log2_atanh, 0, S2, lambda z: 1, None, 5),  # for pow in f32, which computes in f64
    "sin": (odd(mp.sin, -mp.mpf(1) / 6), 0, P4, lambda z: z, 2, 5),
    "cos": (cos_q, 0, P4, lambda z: z * z, 2, 5),
    "atan": (odd(mp.atan, -mp.mpf(1) / 3), 0, T8, lambda z: z, 4, 10),
    "asin": (odd(mp.asin, mp.mpf(1) / 6), 0, 0.25, lambda z: z, 4, 12),
    "sinh": (odd(mp.sinh, mp.mpf(1) / 6), 0, 1, lambda z: z, 3, 6),
    "erf_f32": (erf_p, 0, mp.mpf("0.99") ** 2, lambda z: 1, 5, None),
    "erf_f64": (erf_p, 0, 1, lambda z: 1, None, 11),
    # the weight is that of an error of the fourth power; the least one keeps the root at 4 below 2**-6.25
    "erf_root": (
        lambda t: erfc_root(t + ERF_ROOT_MIDDLE),
        mp.mpf("0.99") - ERF_ROOT_MIDDLE,
        4 - ERF_ROOT_MIDDLE,
        lambda t: max(4 * erfc_root(t + ERF_ROOT_MIDDLE) ** 3, mp.mpf(2) ** -14),
        7,
        None,
    ),
    "erfcx": (erfcx_t, -1, 0.8645, lambda t: 1, None, 24),  # erfc(x) > 0 up to x = 27.3
    "erfcx_short": (erfcx_t, -1, 0.672, lambda t: 1, 10, None),  # up to x = 10.1
    "erf_inv": (lambda v: erfinv_w(v + 2.5), -2.5, 2.5, lambda w: 1, 9, None),
    "erf_inv_tail": (lambda v: erfinv_w((v + 3) ** 2), mp.sqrt(5) - 3, 1.01, lambda w: 1, 9, None),
    "erf_inv_0": (lambda v: erfinv_w(v + 3.125), -3.125, 3.125, lambda w: 1, None, 24),
    "erf_inv_1": (lambda v: erfinv_w((v + 3.25) ** 2), -0.75, 0.75, lambda w: 1, None, 20),
    "erf_inv_2": (lambda v: erfinv_w((v + 5) ** 2), -1, 1.01, lambda w: 1, None, 19),
    "lgamma": (lgamma_2, -0.72, 0.28, lambda d: 1 / lgamma_2(d), 9, 19),
    "stirling": (
        stirling,
        0,
        mp.mpf("3.27") ** -2,
        at_root(lambda x: 1 / (x * mp.loggamma(x))),
        2,
        9,
    ),
    "digamma": (
        digamma_near_zero,
        0.99 - DIGAMMA_ZERO,
        2.01 - DIGAMMA_ZERO,
        lambda t: 1 / digamma_near_zero(t),
        10,
        22,
    ),
    "digamma_tail": (
        digamma_tail,
        0,
        mp.mpf(1) / 9,
        at_root(lambda x: 1 / (x * x * mp.digamma(x))),
        2,
        10,
    ),
    "cotangent": (cotangent_q, 0, 0.0626, lambda z: z, 3, 8),
    "tangent": (tangent_p, 0, 0.0626, lambda z: 1 / tangent_p(z), 7, 15),
    "sinc": (sinc_p, 0, 0.25, lambda z: z / mp.sincpi(mp.sqrt(z)), 3, 7),
}


# --- lookup_values.py ------------------------------------------------------------------------------------------------------


def bits(x):
    return int(np.float32(x).view(np.int32))


def from_bits(n):
    return mp.mpf(float(np.int32(n).view(np.float32)))


def rounded(x):
    return mp.mpf(float(np.float32(float(x))))


def exact_point(f, x):
    """The float near x whose value is nearest to a float, so that the table's value has hardly any error.

    S. Gal, "Computing elementary functions: a new approach for achieving high accuracy and good performance", LNCS 235, 1986.
    """

    def error(n):
        y = f(from_bits(n))
        return abs(rounded(y) / y - 1)

    return from_bits(min(range(bits(x) - 2000, bits(x) + 2000), key=error))


def piece(f, low, high, degree):
    """(point, coefficients, error) of the polynomial in x - point for f in low .. high; it begins with f(point), a float."""
    point = exact_point(f, (low + high) / 2)
    value, pad = f(point), (high - low) / 10**4  # an interval's end is rounded

    def rest(t):
        return mp.diff(f, point) if abs(t) < 1e-15 else (f(point + t) - value) / t

    c, worst = minimax(
        rest, low - point - pad, high - point + pad, degree - 1, lambda t: t / f(point + t)
    )
    return point, [value, *c], worst


def first_piece(f, high, degree, slope, is_linear):
    """The same from 0, where f is odd: of f(x) - x if `is_linear`, else of f, whose slope is 1."""

    def weight(x):
        return x / f(x) if x else 1 / slope

    if is_linear:
        c, worst = minimax(
            lambda x: f(x) / x - 1 if x > 1e-20 else slope - 1, 0, high, degree - 1, weight
        )
        return 0, [0, *c], worst
    c, worst = minimax(
        lambda x: (f(x) - x) / x**2 if x > 1e-12 else 0,
        0,
        high,
        degree - 2,
        lambda x: x * weight(x),
    )
    return 0, [0, 1, *c], worst


# Floats of a table of AVX-512. Source: its registers.
AVX512_ENTRIES = 16


def pieces(name, f, degree, slope=None):
    """Rows of AVX512_ENTRIES numbers of a function's table: points, then coefficients, constants first. And the largest error.

    `slope`: at 0, where the function is odd.
    """
    p = PIECES[name]
    start, end = (bits(p.offset + x) >> p.shift for x in (0, p.last))
    edges = [
        0,
        *(from_bits(k << p.shift) - p.offset for k in range(start + 1, end + 1)),
        mp.mpf(p.last),
    ]
    columns, errors = [[0] * (degree + 2)] * AVX512_ENTRIES, []
    for k, (low, high) in enumerate(itertools.pairwise(edges)):
        point, c, worst = (
            first_piece(f, high, degree, slope, p.is_linear)
            if slope and not k
            else piece(f, low, high, degree)
        )
        columns[(start + k) % AVX512_ENTRIES] = [point, *c]
        errors.append(worst)
    assert len(errors) <= AVX512_ENTRIES
    return zip(*columns), max(errors)


def log_pieces():
    """Rows of log's table: inverses of points and the points' logarithms, which are multiples of the grid.

    Of all floats near a point, those are taken whose logarithm lies nearest to the grid. A point divides its interval so that
    what is left of an argument is smaller where the logarithm is. At 1 both are exact.
    """
    inverses, logs, errors = [], [], []
    for k in range(16):
        low, high = (1 + mp.mpf(k) / 16) / (1 + k // 8), (1 + mp.mpf(k + 1) / 16) / (1 + k // 8)
        inverse, value = (mp.mpf(1), mp.mpf(0)) if k in (0, 1, 14, 15) else _log_point(low, high)
        inverses.append(inverse)
        logs.append(value)
        errors.append(abs(value + mp.log(inverse)))
    return (inverses, logs), max(errors)


def _log_point(low, high):
    a, b = abs(mp.log(low)), abs(mp.log(high))
    middle, reach = mp.log((low * b + high * a) / (a + b)), (high - low) / 8
    grid = range(int((middle - reach) / LOG_GRID), int((middle + reach) / LOG_GRID) + 1)
    points = [(rounded(mp.exp(-k * mp.mpf(LOG_GRID))), k * mp.mpf(LOG_GRID)) for k in grid]
    return min(points, key=lambda p: abs(p[1] + mp.log(p[0])))


TABLES = {
    "erf": lambda: pieces("erf", mp.erf, 5, 2 / mp.sqrt(mp.pi)),
    "tanh": lambda: pieces("tanh", mp.tanh, 5, 1),
    "erfcx": lambda: pieces("erfcx", erfcx, 5),
    "log": log_pieces,
}


def print_table(name):
    rows, worst = TABLES[name]()
    print(f'    # {-float(mp.log(worst, 2)):.1f} bits\n    "{name}": (')
    for row in rows:
        numbers = [f"{float(x):.9g}" for x in row]
        lines = [", ".join(numbers[i : i + 6]) for i in range(0, len(numbers), 6)]
        print("        ({}),".format(",\n         ".join(lines)))
    print("    ),", flush=True)


def main(names):
    for name in names or [*FITS, *(f"{name}_table" for name in TABLES)]:
        if name not in FITS:
            print_table(name.removesuffix("_table"))
            continue
        f, low, high, weight, *degrees = FITS[name]
        for el, degree in zip(("f32", "f64"), degrees):
            if degree is None:
                continue
            c, worst = minimax(f, low, high, degree, weight)
            numbers = [repr(float(x)) if el == "f64" else f"{float(x):.9g}" for x in c]
            rows = [", ".join(numbers[i : i + 4]) for i in range(0, len(numbers), 4)]
            body = "".join(f"        {row},\n" for row in rows)
            print(
                f'    # {-float(mp.log(worst, 2)):.1f} bits\n    ("{name.removesuffix("_" + el)}", "{el}"): (\n{body}    ),',
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
