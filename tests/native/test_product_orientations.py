"""Products of operands that are stored either way: copies as the register tile reads them, runs of deep ones, few rows."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from tests.arrays import array
from tests.lowered import lowered

TOLERANCES = {"float32": 2e-6, "float64": 1e-14, "bfloat16": 8e-3, "float16": 1e-3, "int32": 0}
FORMS = ("mk,kn->mn", "mk,nk->mn", "km,kn->mn", "km,nk->mn")


def operands(form, m, k, n, dtype="float32"):
    rng = np.random.default_rng(m + k + n)
    sizes, drawn = {"m": m, "k": k, "n": n}, []
    for letters in form.split("->")[0].split(","):
        shape = [sizes[d] for d in letters]
        values = rng.integers(-9, 9, shape) if dtype == "int32" else rng.standard_normal(shape)
        drawn.append(array(values, dtype))
    return drawn


def shapes_of(form, m, k, n):
    sizes = {"m": m, "k": k, "n": n}
    return [
        jax.ShapeDtypeStruct(tuple(sizes[d] for d in letters), "float32")
        for letters in form.split("->")[0].split(",")
    ]


def einsum(form):
    return lambda *arrays: jnp.einsum(form, *arrays)


# Part of the tolerances that holds where deep sums are those of partial sums; tests of other targets set it.
IN_PARTS = 1.0


def check(f, args, tolerance):
    """Against the same function in float64, relative to the largest result."""
    got = np.asarray(pbkern.jit(f)(*args), np.float64)
    with jax.enable_x64(True):
        want = np.asarray(f(*(jnp.asarray(np.asarray(a, np.float64)) for a in args)), np.float64)
    atol = IN_PARTS * tolerance * np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def products(nests: str) -> list[str]:
    return [line for line in nests.splitlines() if "dot=" in line]


@pytest.mark.sampled(14)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("m", "k", "n"), [
    (67, 515, 131), (130, 77, 300), (512, 512, 64), (33, 2600, 50), (7, 1100, 1031), (5, 70, 9),
])  # fmt: skip
def test_numbers(form, m, k, n, dtype):
    with jax.enable_x64(dtype == "float64"):
        check(einsum(form), operands(form, m, k, n, dtype), TOLERANCES[dtype])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
def test_deep_and_odd(form):
    """19,997 is a prime: the last run is shorter."""
    check(einsum(form), operands(form, 37, 19_997, 53), 2e-6)
    check(
        lambda x, w: jnp.tanh(jnp.einsum(form, x, w) / 50) + 1, operands(form, 37, 19_997, 53), 2e-6
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["mk,kn->mn", "km,kn->mn"])
@pytest.mark.parametrize(("m", "k", "n"), [(7, 4211, 1030), (3, 9973, 517)])
def test_few_rows_of_a_far_operand(form, m, k, n):
    """Sums of thousands of positive numbers, a few at a time, stay as exact as those of panels."""
    x, w = (jnp.abs(a) for a in operands(form, m, k, n))
    check(einsum(form), (x, w), 2e-6)
    check(lambda x, w: jax.nn.relu(jnp.einsum(form, x, w) - 1), (x, w), 2e-6)


def test_what_comes_before_and_after():
    x, w = operands("km,kn->mn", 150, 700, 90)
    check(lambda x, w: jax.nn.relu(x).T @ w, (x, w), 2e-6)
    check(lambda x, w: jnp.tanh(x.T @ jnp.sin(w) / 40 + 1), (x, w), 2e-6)
    check(lambda x, w: jax.nn.softmax((x / 20).T @ w, 0), (x, w), 4e-6)


def test_batches():
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((3, 530, 70), (3, 530, 66)))
    for form in ("bkm,bkn->bmn", "bkm,bkn->mbn", "bkm,bkn->nbm"):
        check(einsum(form), (x, w), 2e-6)


def test_gradients_of_a_last_layer():
    """Cross-entropy of x @ w over 3,001 words, with respect to both."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((40, 24), (24, 3001)))
    labels = rng.integers(0, 3001, 40)

    def loss(x, w):
        return (jax.nn.logsumexp(x @ w, -1) - (x @ w)[jnp.arange(40), labels]).mean()

    got = pbkern.jit(jax.grad(loss, argnums=(0, 1)))(x, w)
    a, b = np.asarray(x, np.float64), np.asarray(w, np.float64)
    p = np.exp(a @ b - (a @ b).max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    p[np.arange(40), labels] -= 1
    for g, want in zip(got, (p @ b.T / 40, a.T @ p / 40), strict=True):
        np.testing.assert_allclose(np.asarray(g), want, rtol=0, atol=2e-6 * np.abs(want).max())


# --- choices ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_large_operands_are_both_read_from_copies_along_the_reduction(form):
    for line in products(lowered(einsum(form), *shapes_of(form, 1024, 1024, 1024))):
        assert re.search(r"dot= %[at]\d+\[d\d+, k2\], %t\d+\[", line), line
        assert form[0] == "m" or "%a" not in line


@pytest.mark.parametrize("form", ["mk,kn->mn", "km,kn->mn"])
@pytest.mark.parametrize("rows", [20, 61])
def test_the_first_rows_pack_a_far_operand(form, rows):
    """Columns are not a multiple of panels, nor rows of tiles; 900 elements are summed in runs."""
    shapes = shapes_of(form, rows, 900, 1100)
    assert re.search(r"dot= .*, %a1\[", lowered(einsum(form), *shapes))
    x, w = operands(form, rows, 900, 1100)
    check(einsum(form), (x, w), 2e-6)
    check(lambda x, w: jax.nn.gelu(jnp.einsum(form, x, w) + w[0]), (x, w), 2e-6)


def test_far_operands_of_many_rows_are_packed_by_copies():
    nests = lowered(einsum("mk,kn->mn"), *shapes_of("mk,kn->mn", 4096, 900, 1100))
    assert products(nests)
    assert not re.search(r"dot= .*, %a1\[", nests)


def test_columns_that_stay_near_are_read_where_they_are():
    """77 rows of 520 bytes: the lines of a tile of columns do not evict one another."""
    found = products(lowered(einsum("km,kn->mn"), *shapes_of("km,kn->mn", 130, 77, 1000)))
    assert found
    assert all("dot= %a0[k2, " in line for line in found)


@pytest.mark.parametrize("form", FORMS)
def test_sums_of_runs_are_in_the_result_itself(form):
    nests = lowered(einsum(form), *shapes_of(form, 256, 9000, 192))
    depths = [int(n) for n in re.findall(r"k\d+<(\d+)\*", nests)]
    assert depths
    assert max(depths) <= 1024
    assert re.search(r"%a2\[.*\] = add\(%a2\[.*\], acc0\)", nests)


def test_blocks_that_overlap_do_not_hold_sums():
    """Of 4,100 columns the last block is moved back: two programs write some results, and may not see each other's parts."""
    nests = lowered(einsum("mk,kn->mn"), *shapes_of("mk,kn->mn", 6, 20_001, 4100))
    assert "%h" in nests
    assert "acc0)" in nests
    assert "add(%a2" not in nests


def test_a_result_in_place_of_an_operand_holds_no_sums():
    """Rows of the operand are read until the last part of the reduction."""

    def body(x, w, o):
        o[...] = x[...] @ w[...]

    x, w = operands("mk,kn->mn", 5, 1033, 1033)
    kernel = pbkern.kernel(
        body, out_shape=jax.ShapeDtypeStruct(x.shape, "float32"), input_output_aliases={0: 0}
    )
    got = np.asarray(pbkern.call_kernel(kernel.trace(x, w), x, w)[0], np.float64)
    want = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


@pytest.mark.parametrize("form", ["mk,kn->mn", "km,kn->mn"])
def test_products_of_few_rows_read_rows_of_the_other_operand_in_turn(form):
    """Rows that wait for it take fewer at a time than those whose multiply-adds take longer."""
    for rows, at_once in ((4, 8), (8, 32)):
        nests = lowered(einsum(form), *shapes_of(form, rows, 4096, 4096))
        assert re.search(rf"k2<{at_once}\*\] prefetch %a1", nests)
        assert "add(%a2" in nests


@pytest.mark.parametrize("form", ["mk,nk->mn", "km,nk->mn"])
def test_products_of_few_rows_run_along_contiguous_reductions(form):
    (line,) = products(lowered(einsum(form), *shapes_of(form, 8, 4096, 4096)))
    assert re.search(r"%a1\[.*d1, k2\]", line)
    assert re.search(r"%t\d+\[d0, k2\]", line)


@pytest.mark.parametrize("form", ["mk,nk->mn", "km,nk->mn"])
def test_transposing_copies_prefetch_the_next_columns(form):
    """A panel's copy goes along all of a vector of columns, 16 here, whose lines the columns before have prefetched."""
    nests = lowered(einsum(form), *shapes_of(form, 200, 4000, 704))
    assert re.search(
        rf"nest \[d\d+<\d+, k2<\d+, d\d+<16\] prefetch %a1 \+ {16 * 4000} .*transpose='k2'", nests
    )
    near = lowered(einsum(form), *shapes_of(form, 200, 500, 704))
    assert "prefetch" not in near


def test_few_rows_read_a_near_operand_from_panels():
    """Panels of 12 rows pay where the operand is near; far rows of it are taken a few at a time."""
    (line,) = products(lowered(einsum("mk,kn->mn"), *shapes_of("mk,kn->mn", 12, 1024, 384)))
    assert re.search(r"dot= .*, %t\d+\[", line)
    far = lowered(einsum("mk,kn->mn"), *shapes_of("mk,kn->mn", 12, 4096, 4096))
    assert re.search(r"k2<32\*\] prefetch %a1", far)


@pytest.mark.parametrize("depth", [32, 100])
def test_shallow_products_read_conflicting_rows_where_they_are(depth):
    """Columns of 1,024 rows fall into one set of the first cache; the second gives a few rows soon enough."""
    lines = products(lowered(einsum("mk,kn->mn"), *shapes_of("mk,kn->mn", 512, depth, 1024)))
    assert lines
    is_copied = depth > 64
    assert all(bool(re.search(r"dot= .*, %t\d+\[", line)) == is_copied for line in lines)
    x, w = operands("mk,kn->mn", 512, depth, 1024)
    check(einsum("mk,kn->mn"), (x, w), 2e-6)


def test_columns_that_fill_the_first_cache_are_copied():
    """700 lines, 220 bytes apart, would fit 48 KB by themselves, but not beside the vectors of the other operand."""
    lines = products(lowered(einsum("km,kn->mn"), *shapes_of("km,kn->mn", 55, 700, 517)))
    assert lines
    assert all(re.search(r"dot= %t\d+\[d\d+, k2\]", line) for line in lines)
