"""Instructions that compute, each against Python's integers and NumPy's float64, lane by lane, at edges of its types."""

import ml_dtypes
import numpy as np
import pytest

import pbkern
from pbkern.errors import InternalError

from .registers import run, text

RNG = np.random.default_rng(0)
EDGES = {
    n: np.array([0, 1, 2, (1 << n - 1) - 1, 1 << n - 1, (1 << n) - 1, (1 << n) - 2], f"u{n // 8}")
    for n in (16, 32, 64)
}


def bits(n: int, turn: int) -> np.ndarray:
    """97 lanes, of which the first meet all pairs of edges."""
    edges = EDGES[n]
    pairs = np.repeat(edges, len(edges)) if turn == 0 else np.tile(edges, len(edges))
    return np.concatenate([pairs, RNG.integers(0, 1 << n, 97 - len(pairs), f"u{n // 8}")])


A32, B32, C32 = bits(32, 0), bits(32, 1), RNG.integers(0, 1 << 32, 97, "u4")
A64, B64 = bits(64, 0), bits(64, 1)
START, LENGTH = (
    np.tile(np.array([0, 5, 31, 32, 40, 63, 64, 70], "u4"), 13)[:97],
    RNG.permutation(97).astype("u4"),
)
WHOLE = {"%r1": A32, "%r2": B32, "%r3": C32, "%r4": START, "%r5": LENGTH, "%d1": A64, "%d2": B64}


def signed(v: int, n: int) -> int:
    v &= (1 << n) - 1
    return v - (1 << n) if v >> n - 1 else v


def quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def extracted(a: int, start: int, length: int, n: int, sign: bool) -> int:
    """As the PTX ISA writes bfe, bit by bit."""
    start, length = start & 255, length & 255
    fill = a >> min(start + length - 1, n - 1) & 1 if sign and length else 0
    return sum(
        (a >> start + k & 1 if k < length and start + k < n else fill) << k for k in range(n)
    )


def inserted(a: int, b: int, start: int, length: int, n: int) -> int:
    for k in range(min(length & 255, max(n - (start & 255), 0))):
        at = (start & 255) + k
        b = b & ~(1 << at) | (a >> k & 1) << at
    return b


def chosen(a: int, b: int, c: int, table: int) -> int:
    return sum(
        (table >> ((a >> k & 1) * 4 + (b >> k & 1) * 2 + (c >> k & 1)) & 1) << k for k in range(32)
    )


def picked(a: int, b: int, selector: int) -> int:
    found = 0
    for k in range(4):
        which = selector >> 4 * k & 15
        byte = (b << 32 | a) >> 8 * (which & 7) & 255
        found |= (255 * (byte >> 7) if which & 8 else byte) << 8 * k
    return found


def both_signs(name, n, f, *registers):
    """An instruction of signed and of unsigned numbers."""
    for kind in "su":
        as_is = (lambda v: signed(v, n)) if kind == "s" else (lambda v: v)
        yield f"{name}.{kind}{n}", registers, n, lambda *v, as_is=as_is: f(*map(as_is, v))


# (instruction, registers of its operands, bits of the result, function of Python integers)
INTEGERS = [
    *both_signs("mul.hi", 32, lambda a, b: a * b >> 32, "%r1", "%r2"),
    *both_signs("mul.hi", 64, lambda a, b: a * b >> 64, "%d1", "%d2"),
    *both_signs("mad.hi", 32, lambda a, b, c: (a * b >> 32) + c, "%r1", "%r2", "%r3"),
    *both_signs("div", 32, lambda a, b: quotient(a, b) if b else None, "%r1", "%r2"),
    *both_signs("div", 64, lambda a, b: quotient(a, b) if b else None, "%d1", "%d2"),
    *both_signs("rem", 32, lambda a, b: a - quotient(a, b) * b if b else None, "%r1", "%r2"),
    *both_signs("rem", 64, lambda a, b: a - quotient(a, b) * b if b else None, "%d1", "%d2"),
    *both_signs("sad", 32, lambda a, b, c: abs(a - b) + c, "%r1", "%r2", "%r3"),
    *both_signs("max", 64, max, "%d1", "%d2"),
    (
        "shf.l.wrap.b32",
        ("%r1", "%r2", "%r4"),
        32,
        lambda a, b, n: ((b << 32 | a) << (n & 31)) >> 32,
    ),
    ("shf.r.wrap.b32", ("%r1", "%r2", "%r4"), 32, lambda a, b, n: (b << 32 | a) >> (n & 31)),
    (
        "shf.l.clamp.b32",
        ("%r1", "%r2", "%r4"),
        32,
        lambda a, b, n: ((b << 32 | a) << min(n, 32)) >> 32,
    ),
    ("shf.r.clamp.b32", ("%r1", "%r2", "%r4"), 32, lambda a, b, n: (b << 32 | a) >> min(n, 32)),
    ("popc.b32", ("%r1",), 32, int.bit_count),
    ("popc.b64", ("%d1",), 32, int.bit_count),
    ("clz.b32", ("%r1",), 32, lambda a: 32 - a.bit_length()),
    ("clz.b64", ("%d1",), 32, lambda a: 64 - a.bit_length()),
    ("brev.b32", ("%r1",), 32, lambda a: int(f"{a:032b}"[::-1], 2)),
    ("brev.b64", ("%d1",), 64, lambda a: int(f"{a:064b}"[::-1], 2)),
    ("cnot.b32", ("%r1",), 32, lambda a: int(a == 0)),
    ("bfe.u32", ("%r1", "%r4", "%r5"), 32, lambda a, s, n: extracted(a, s, n, 32, False)),
    ("bfe.s32", ("%r1", "%r4", "%r5"), 32, lambda a, s, n: extracted(a, s, n, 32, True)),
    ("bfe.u64", ("%d1", "%r4", "%r5"), 64, lambda a, s, n: extracted(a, s, n, 64, False)),
    ("bfe.s64", ("%d1", "%r4", "%r5"), 64, lambda a, s, n: extracted(a, s, n, 64, True)),
    ("bfi.b32", ("%r1", "%r2", "%r4", "%r5"), 32, lambda a, b, s, n: inserted(a, b, s, n, 32)),
    ("bfi.b64", ("%d1", "%d2", "%r4", "%r5"), 64, lambda a, b, s, n: inserted(a, b, s, n, 64)),
    ("prmt.b32", ("%r1", "%r2", "%r3"), 32, picked),
    *(
        (f"lop3.b32 {t}", ("%r1", "%r2", "%r3"), 32, lambda a, b, c, t=t: chosen(a, b, c, t))
        for t in (0x96, 0xE8, 0x1B)
    ),
    ("cvt.sat.s8.s32", ("%r1",), 32, lambda a: min(max(signed(a, 32), -128), 127)),
    ("cvt.sat.u16.s32", ("%r1",), 32, lambda a: min(max(signed(a, 32), 0), 65535)),
    ("cvt.sat.s32.u64", ("%d1",), 32, lambda a: min(a, (1 << 31) - 1)),
]


def test_integers():
    """Undefined lanes, such as quotients by zero, are left out."""
    lines, results = [], {}
    for k, (name, registers, width, _) in enumerate(INTEGERS):
        (op, *table), to = name.split(), f"%{'r' if width == 32 else 'd'}o{k}"
        lines.append(f"{op} {', '.join([to, *registers, *table])};")
        results[to] = f"u{width // 8}"
    found = run("\n".join(lines), WHOLE, results)
    for (name, registers, width, f), got in zip(INTEGERS, found.values()):
        want = [f(*v) for v in zip(*(WHOLE[r].tolist() for r in registers))]
        wrong = [
            (k, int(g), w)
            for k, (g, w) in enumerate(zip(got, want))
            if w is not None and int(g) != w % (1 << width)
        ]
        assert not wrong, (name, wrong[0], [hex(WHOLE[r][wrong[0][0]]) for r in registers])


TINY = np.finfo(np.float32).tiny
X = np.array(
    [
        0.0,
        -0.0,
        1.5,
        -2.25,
        TINY,
        -TINY / 2,
        TINY / 4,
        3e38,
        -3e38,
        np.inf,
        -np.inf,
        np.nan,
        0.75,
        1e-3,
        65519,
        0.1,
    ],
    "f4",
)
Y = np.array(
    [-0.0, 3.0, np.nan, 0.5, 0.5, 2.0, 1.0, 3.0, -1.0, -np.inf, 1.0, 0.0, 0.5, 1e-40, 1e-8, -7.3],
    "f4",
)
Z = np.roll(Y, 3)


def flushed(x):
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


def near(f):
    """Of arguments without subnormals the result without them, rounded once."""
    return lambda *x: flushed(f(*(flushed(v).astype("f8") for v in x)).astype("f4"))


def limited(x):
    return np.where(np.isnan(x), 0, np.clip(x, 0, 1))


def toward_zero(x, dtype):
    y = x.astype(dtype)
    return np.where(np.abs(y.astype("f8")) > np.abs(x), np.nextafter(y, dtype(0)), y)


H = np.concatenate([np.linspace(-3, 3, 12), [1e-7, 60000, np.inf, np.nan]])
FLOATS = {
    "%r1": X,
    "%r2": Y,
    "%r3": Z,
    "%d1": X.astype("f8") * 1.1,
    "%h1": H.astype("f2"),
    "%h2": H[::-1].astype("f2"),
    "%h3": np.roll(H, 5).astype("f2"),
    "%h4": H.astype(ml_dtypes.bfloat16),
    "%h5": H[::-1].astype(ml_dtypes.bfloat16),
}
REALS = [
    ("add.rn.ftz.f32 %ra, %r1, %r2", "f4", near(np.add), "%r1", "%r2"),
    (
        "mul.rn.ftz.sat.f32 %rb, %r1, %r2",
        "f4",
        lambda x, y: limited(near(np.multiply)(x, y)),
        "%r1",
        "%r2",
    ),
    (
        "fma.rn.ftz.f32 %rc, %r1, %r2, %r3",
        "f4",
        near(lambda x, y, z: x * y + z),
        "%r1",
        "%r2",
        "%r3",
    ),
    ("add.sat.f32 %rd, %r1, %r2", "f4", lambda x, y: limited(x + y), "%r1", "%r2"),
    (
        "fma.rn.f16 %ha, %h1, %h2, %h3",
        "f2",
        lambda x, y, z: (x * y + z).astype("f2"),
        "%h1",
        "%h2",
        "%h3",
    ),
    (
        "fma.rn.bf16 %hb, %h4, %h5, %h4",
        ml_dtypes.bfloat16,
        lambda x, y: (x * y + x).astype(ml_dtypes.bfloat16),
        "%h4",
        "%h5",
    ),
    ("cvt.rz.f32.f64 %re, %d1", "f4", lambda x: toward_zero(x, np.float32), "%d1"),
    ("cvt.rz.f16.f32 %hc, %r1", "f2", lambda x: toward_zero(x, np.float16), "%r1"),
    ("cvt.rn.sat.f16.f32 %hd, %r1", "f2", lambda x: limited(x).astype("f2"), "%r1"),
    ("copysign.f32 %rf, %r1, %r2", "f4", lambda sign, x: np.copysign(x, sign), "%r1", "%r2"),
    (
        "setp.num.f32 %p1, %r1, %r2; selp.b32 %rg, 1, 0, %p1",
        "u4",
        lambda x, y: ~(np.isnan(x) | np.isnan(y)),
        "%r1",
        "%r2",
    ),
    (
        "setp.nan.f32 %p2, %r1, %r2; selp.b32 %rh, 1, 0, %p2",
        "u4",
        lambda x, y: np.isnan(x) | np.isnan(y),
        "%r1",
        "%r2",
    ),
]


def test_floats():
    with np.errstate(all="ignore"):
        outputs = [
            "%ra",
            "%rb",
            "%rc",
            "%rd",
            "%ha",
            "%hb",
            "%re",
            "%hc",
            "%hd",
            "%rf",
            "%rg",
            "%rh",
        ]
        found = run(
            "".join(f"{r[0]};\n" for r in REALS), FLOATS, dict(zip(outputs, (r[1] for r in REALS)))
        )
        for (name, dtype, f, *registers), got in zip(REALS, found.values()):
            exact = "ftz" not in name
            want = f(*(FLOATS[r].astype("f8") if exact else FLOATS[r] for r in registers)).astype(
                dtype
            )
            np.testing.assert_array_equal(got.astype("f8"), want.astype("f8"), name)
            zero = (want == 0) & (".sat" not in name)  # what sign a saturated zero has is not said
            np.testing.assert_array_equal(np.signbit(got)[zero], np.signbit(want)[zero], name)


@pytest.mark.parametrize(("source", "width"), [("f16", 2), ("bf16", 2), ("f32", 4), ("f64", 8)])
def test_integers_of_nan_and_of_what_is_out_of_range(source, width):
    """NaN is zero only where neither side has 64 bits. Source: PTX ISA, cvt."""
    dtype = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}.get(source, f"f{width}")
    x = np.array([np.nan, -np.nan, np.inf, -np.inf, 3.5, -3.5, 300.0, 0.0], "f4").astype(dtype)
    letters = {2: "h", 4: "r", 8: "d"}
    register = f"%{letters[width]}1"
    kinds = [f"{sign}{bits}" for sign in "su" for bits in (16, 32, 64)]
    sizes = [int(k[1:]) // 8 for k in kinds]
    results = {
        f"%{letters[n]}o{k}": f"{'i' if k[0] == 's' else 'u'}{n}" for k, n in zip(kinds, sizes)
    }
    body = "\n".join(f"cvt.rzi.{k}.{source} {name}, {register};" for k, name in zip(kinds, results))
    for kind, got in zip(kinds, run(body, {register: x}, results).values()):
        bits, low = int(kind[1:]), -(1 << int(kind[1:]) - 1) if kind[0] == "s" else 0
        high = low + (1 << bits) - 1
        nan = 0 if bits < 64 and source != "f64" else low if kind[0] == "s" else 1 << bits - 1
        assert got.tolist() == [nan, nan, high, low, 3, max(-3, low), 300, 0], kind


def test_subnormal_numbers_are_flushed_before_they_become_integers():
    x = np.array([TINY / 2, -TINY / 2, TINY, 0.25], "f4")
    body = "cvt.rpi.ftz.s32.f32 %ra, %r1;\ncvt.rpi.s32.f32 %rb, %r1;\ncvt.rmi.ftz.s32.f32 %rc, %r1;"
    found = run(body, {"%r1": x}, {"%ra": "i4", "%rb": "i4", "%rc": "i4"})
    assert [v.tolist() for v in found.values()] == [[0, 0, 1, 1], [1, 0, 1, 1], [0, 0, 0, 0]]


NANS = np.array([0x7F81, 0xFF93, 0x7FC1, 0x3F80], np.uint16)  # of bf16; the last is 1


def test_results_of_16_bits_hold_one_nan():
    """Whatever the operands hold. Moves and signs change no other bit."""
    half = np.array([0x7C01, 0xFE13, 0x7FFE, 0x3C00], np.uint16)
    pairs = NANS.astype("u4") << 16 | NANS[::-1].astype("u4")
    singles = np.array([0x7F800001, 0xFFC00123, 0x7FFFFFFF, 0x3F800000], "u4")
    found = run(
        """add.rn.f16 %ha, %h1, %h1; mul.rn.bf16 %hb, %h2, %h2; fma.rn.bf16x2 %ra, %r1, %r1, %r1;
        max.bf16x2 %rb, %r1, %r1; min.NaN.f16 %hc, %h1, %h1; cvt.rn.bf16.f32 %hd, %r2; cvt.rn.f16.f32 %he, %r2;
        cvt.rn.bf16x2.f32 %rc, %r2, %r2; neg.bf16x2 %rd, %r1; abs.f16 %hf, %h1; fma.rn.relu.bf16x2 %re, %r1, %r1, %r3;""",
        {
            "%h1": half,
            "%h2": NANS,
            "%r1": pairs,
            "%r2": singles,
            "%r3": np.full(4, 0xC000C000, "u4"),
        },
        dict.fromkeys(("%ha", "%hb", "%hc", "%hd", "%he", "%hf"), "u2")
        | dict.fromkeys(("%ra", "%rb", "%rc", "%rd", "%re"), "u4"),
    )
    nan, same = [0x7FFF] * 3, lambda one: np.array([0x7FFF, 0x7FFF, 0x7FFF, one])
    assert found["%ha"].tolist() == [*nan, 0x4000]
    assert found["%hb"].tolist() == [*nan, 0x3F80]
    assert found["%hc"].tolist() == [*nan, 0x3C00]
    assert found["%hd"].tolist() == [*nan, 0x3F80]
    assert found["%he"].tolist() == [*nan, 0x3C00]
    assert found["%hf"].tolist() == [
        0x7C01,
        0x7E13,
        0x7FFE,
        0x3C00,
    ]
    for name, one in {
        "%ra": 0x4000,
        "%rb": 0x3F80,
        "%re": 0,
    }.items():  # 1 * 1 + 1, 1, 1 - 2 without what is negative
        np.testing.assert_array_equal(found[name] >> 16, same(one), name)
        np.testing.assert_array_equal(found[name] & 0xFFFF, same(one)[::-1], name)
    np.testing.assert_array_equal(found["%rc"] >> 16, same(0x3F80))
    np.testing.assert_array_equal(found["%rd"], pairs ^ 0x80008000)


def test_comparisons_with_two_results_or_joined_to_a_predicate():
    joins = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
    body, results = ["setp.gt.f32 %p0, %r3, 0f00000000;", "setp.lt.f32 %p1|%p2, %r1, %r2;"], {}
    for k, (name, negated) in enumerate((j, n) for j in joins for n in ("", "!")):
        body.append(f"setp.lt.{name}.f32 %pa{k}|%pb{k}, %r1, %r2, {negated}%p0;")
    for name in ("1", "2", *(f"{side}{k}" for k in range(6) for side in "ab")):
        body.append(f"selp.b32 %ro{name}, 1, 0, %p{name};")
        results[f"%ro{name}"] = "u4"
    first, *found = run("\n".join(body), FLOATS, results).values()
    second, *found = found
    less, third = X < Y, Z > 0
    np.testing.assert_array_equal([first, second], [less, ~less])
    for k, (join, p) in enumerate((joins[j], q) for j in joins for q in (third, ~third)):
        np.testing.assert_array_equal(found[2 * k : 2 * k + 2], [join(less, p), join(~less, p)])


@pytest.mark.parametrize(("instruction", "why"), [
    ("add.cc.u32 %r2, %r1, %r1", "carries"), ("addc.u32 %r2, %r1, %r1", "addc"), ("add.sat.s32 %r2, %r1, %r1", "saturation"),
    ("add.rz.f32 %r2, %r1, %r1", "rounding"), ("cvt.rm.f32.f64 %r2, %d1", "rounding"), ("cvt.rz.f32.s32 %r2, %r1", "rounding"),
    ("shl.b16x2 %r2, %r1, %r1", "b16x2"), ("cvt.rn.f16.f32 %h1, %r1, %r1", "two operands"),
    ("setp.maybe.f32 %p1, %r1, %r1", "setp.maybe"), ("prmt.b32.f4e %r2, %r1, %r1, %r1", "f4e"),
    ("prmt.b64 %d2, %d1, %d1, %d1", "prmt.b64"), ("atom.global.inc.u32 %r2, [%d1], %r1", "operation"),
    ("ld.global.b32 %r2, [%d1-4]", r"address \[%d1-4\]"), ("ld.param.b32 %r2, [p0+4]", "a part of a parameter"),
    ("add.s32 %r2, %r1, nowhere", "operand nowhere"),
])  # fmt: skip
def test_what_the_table_does_not_do_is_said(instruction, why):
    x = np.zeros(32, "u4")
    with pytest.raises(
        InternalError, match=f"`{instruction.split()[0]}` is not simulated.*\n?.*{why}"
    ):
        pbkern.simulate_ptx(text(instruction + ";", {"%r1": x}, {}), 1, 32, [x])
