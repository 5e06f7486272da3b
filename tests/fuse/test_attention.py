"""Attention in every dress is one kernel and equals JAX, NaN of silent rows included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pbkern.dsl.printer import source

from .attention_forms import FORMS, attend, operands
from .checking import check, check_blocks, planned

TOLERANCE = {"bfloat16": 3e-2, "float16": 4e-3}
# Small extents that stand for large ones: batch, heads, length, width.
FULL = {2: 2, 3: 12, 6: 8, 17: 1024, 100: 2048, 7: 512, 8: 64, 16: 64}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMS)
def test_is_one_kernel(name):
    f, args = FORMS[name]
    check(f, *args, kernels=1, tolerance=TOLERANCE.get(str(args[0].dtype), 1e-5))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [n for n in FORMS if "129" not in n])
def test_is_one_kernel_at_full_size(name):
    f, args = FORMS[name]
    types = [jax.ShapeDtypeStruct(tuple(FULL.get(n, n) for n in x.shape), x.dtype) for x in args]
    if "lengths" in name or "everything" in name:
        types = [*types[:-2], *(jax.ShapeDtypeStruct((2,), jnp.int32),) * 2]
    plan = planned(f, *types)
    assert len(plan.kernels()) == 1, str(plan.explanation)
    assert not plan.left_to_xla(), str(plan.explanation)


@pytest.mark.parametrize("form", ["dot_product_attention", "bias", "mask", "causal", "dropout off"])
def test_flax(form):
    nn = pytest.importorskip("flax.linen")
    q, k, v = operands(layout="bshd")
    further = {
        "bias": {"bias": jnp.linspace(-1, 1, 17 * 17).reshape(1, 1, 17, 17)},
        "mask": {"mask": (jnp.arange(17) < 12)[None, None, None]},
        "causal": {"mask": nn.make_causal_mask(jnp.ones((2, 17)))},
        "dropout off": {"dropout_rate": 0.1, "deterministic": True},
    }.get(form, {})
    check(
        lambda q, k, v: nn.dot_product_attention(q, k, v, **further),
        q,
        k,
        v,
        kernels=1,
        tolerance=1e-5,
    )


def test_flax_module_core():
    nn = pytest.importorskip("flax.linen")
    module = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=16, deterministic=True)
    x = operands(heads=1, width=16)[0][:, 0]
    weights = module.init(jax.random.key(0), x)
    # Four projections beside the core: no score is stored.
    plan = check(lambda x: module.apply(weights, x), x, tolerance=1e-5)
    assert len(plan.kernels()) <= 5


def test_error_is_that_of_single_precision():
    q, k, v = operands(100, 129, width=32)
    want = np.asarray(_float64(q, k, v))
    ours = np.asarray(check(attend, q, k, v).evaluate([q, k, v], _run)[0])
    theirs = np.asarray(jax.jit(attend)(q, k, v))
    limit = max(2 * np.abs(theirs - want).max(), 2 * np.spacing(np.float32(np.abs(want).max())))
    assert np.abs(ours - want).max() <= limit


def _run(program, inputs):
    from .oracle import run_program

    return run_program(program, inputs)


def _float64(q, k, v):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    s = np.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1])
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("bhqk,bhkd->bhqd", p / p.sum(-1, keepdims=True), v)


@pytest.mark.parametrize(
    "name",
    ["repeated heads", "broadcast heads", "grouped heads, bhsd", "segments", "log-sum-exp, bshd"],
)
def test_equals_jax_at_odd_blocks(name, monkeypatch):
    f, args = FORMS[name]
    check_blocks(monkeypatch, f, *args, tolerance=1e-5)


def test_blocks_of_repeated_heads_hold_whole_groups():
    f, _ = FORMS["repeated heads"]
    plan = planned(f, *operands(1024, 1024, heads=8, key_heads=2, width=64))
    (kernel,) = plan.kernels()
    assert "BlockSpec((1, 4, " in source(kernel).split("out_specs")[1]


SHORT = [(1, 1, 64, 64), (2, 8, 128, 64), (1, 8, 256, 128), (1, 2, 512, 16), (1, 8, 100, 32)]


@pytest.mark.parametrize("shape", SHORT, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_short_sequences_are_one_kernel(shape, masked):
    def attention(q, k, v):
        scores = q @ k.swapaxes(-1, -2) / shape[-1] ** 0.5
        scores = (
            jnp.where(jnp.tril(jnp.ones(shape[2:3] * 2, bool)), scores, -jnp.inf)
            if masked
            else scores
        )
        return jax.nn.softmax(scores) @ v

    assert len(planned(attention, *[jax.ShapeDtypeStruct(shape, jnp.float32)] * 3).kernels()) == 1
