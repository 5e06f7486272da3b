"""Attention that Torch calls by name, forward and backward: masks, causality, grouped queries, dtypes."""

import itertools

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

import pbkern  # noqa: E402

from .comparing import check_gradients  # noqa: E402


class Attention(torch.nn.Module):
    def __init__(self, **config):
        super().__init__()
        self.config = config

    def forward(self, q, k, v):
        mask = self.config.get("attn_mask")
        mask = mask.to(q.dtype) if mask is not None and mask.is_floating_point() else mask
        return F.scaled_dot_product_attention(q, k, v, **{**self.config, "attn_mask": mask})


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "some": {
        "attn_mask": torch.tensor(
            [[True, False, True], [True, True, True], [False, True, False], [True, True, False]]
        )
    },
    "added": {"attn_mask": torch.linspace(-2, 2, 12).view(4, 3)},
    "scaled": {"scale": 0.7},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    q, k, v = torch.randn(2, 4, 4, 8), torch.randn(2, 4, 3, 8), torch.randn(2, 4, 3, 8)
    module = Attention(**MASKS[name])
    fast = pbkern.polyblocks_jit_torch(module)
    check_gradients(fast, module, q, k, v)
    assert not any(
        g.in_torch for g in fast.explain(*(t.requires_grad_() for t in (q, k, v))).graphs
    )


@pytest.mark.parametrize(
    ("queries", "keys"), [(290, 130), pytest.param(300, 300, marks=pytest.mark.slow)]
)
def test_gradient_of_long_causal_attention(queries, keys):
    """Its queries come in parts."""
    q, k, v = torch.randn(1, 2, queries, 8), torch.randn(1, 2, keys, 8), torch.randn(1, 2, keys, 8)
    module = Attention(is_causal=True)
    check_gradients(pbkern.polyblocks_jit_torch(module), module, q, k, v)


def test_groups_of_queries_share_keys():
    q, k, v = torch.randn(1, 6, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    module = Attention(enable_gqa=True, is_causal=True)
    check_gradients(pbkern.polyblocks_jit_torch(module), module, q, k, v)


def test_a_query_without_keys():
    q, k, v = (torch.randn(1, 1, 3, 8) for _ in range(3))
    mask = torch.tensor([[True, True, False], [False, False, False], [True, False, False]])
    f = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(pbkern.polyblocks_jit_torch(f)(q, k, v), f(q, k, v))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("dtype", "causal"),
    itertools.product([torch.bfloat16, torch.float16, torch.float64], [False, True]),
)
def test_dtypes(dtype, causal):
    q, k, v = (torch.randn(1, 2, 7, 16, dtype=dtype) for _ in range(3))
    f = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    made = pbkern.polyblocks_jit_torch(f)(q, k, v)
    assert made.dtype is dtype
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(
        made.double(), f(q.double(), k.double(), v.double()), rtol=tolerance, atol=tolerance
    )


def test_dropout_of_attention():
    """Torch takes it apart, and draws; with all probability it drops all."""
    q, k, v = (torch.randn(1, 2, 7, 16) for _ in range(3))
    fast = pbkern.polyblocks_jit_torch(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    )
    assert not torch.equal(fast(q, k, v), fast(q, k, v))
    assert fast(q, k, torch.ones_like(v)).mean().item() == pytest.approx(1, abs=0.5)
