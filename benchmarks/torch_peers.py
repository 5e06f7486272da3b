"""The workloads in PyTorch, where it is installed: name -> function of torch tensors. Not required by anything.

PyTorch's OpenMP threads are told to sleep between calls: by default they spin, and slow whatever is called next.
"""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch
import torch.nn.functional as F

from .matrix_products import PRODUCTS

BINOMIAL = torch.tensor([1.0, 4, 6, 4, 1]) / 16


def blur(image):
    x = F.conv2d(image[:, None], BINOMIAL.view(1, 1, 1, 5))
    return F.conv2d(x, BINOMIAL.view(1, 1, 5, 1))[:, 0]


def unsharp(image):
    h, w, _ = image.shape
    k = [1 / 16, 4 / 16, 6 / 16, 4 / 16, 1 / 16]
    rows = sum(k[i] * image[i : h - 4 + i] for i in range(5))
    blurred = sum(k[i] * rows[:, i : w - 4 + i] for i in range(5))
    centre = image[2:-2, 2:-2]
    return torch.where((centre - blurred).abs() < 0.01, centre, 1.5 * centre - 0.5 * blurred)


def harris(image):
    def box(a):
        h, w = a.shape
        return sum(a[i : h - 2 + i, j : w - 2 + j] for i in range(3) for j in range(3))

    def sobel(a):
        h, _ = a.shape
        return (
            sum(k * (a[i : h - 2 + i, 2:] - a[i : h - 2 + i, :-2]) for i, k in enumerate((1, 2, 1)))
            / 12
        )

    ix, iy = sobel(image), sobel(image.T).T
    xx, yy, xy = box(ix * ix), box(iy * iy), box(ix * iy)
    return xx * yy - xy * xy - 0.04 * (xx + yy) ** 2


def conv(x, w, stride=1):
    """NHWC and HWIO in, NHWC out; PyTorch's own layout is channels_last memory with NCHW shapes."""
    x, w = x.permute(0, 3, 1, 2), w.permute(3, 2, 0, 1)
    around = []
    for size, k in zip(x.shape[2:], w.shape[2:]):
        p = max((-(-size // stride) - 1) * stride + k - size, 0)
        around = [p // 2, p - p // 2, *around]
    return F.conv2d(F.pad(x, around), w, stride=stride).permute(0, 2, 3, 1)


def gelu(x):
    return F.gelu(x, approximate="tanh")


def layer_norm(x, g, b):
    return F.layer_norm(x, x.shape[-1:], g, b)


def attention(q, k, v, causal=False):
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=causal)[0]


def causal_attention(q, k, v):
    return attention(q, k, v, causal=True)


def mlp_gradient(*arguments):
    leaves = [a.detach().requires_grad_() for a in arguments]
    x, w1, b1, w2, b2 = leaves
    loss = 0.5 * ((gelu(x @ w1 + b1) @ w2 + b2) ** 2).sum()
    return (loss, *torch.autograd.grad(loss, leaves))


def last_layer_gradient(x, w, labels):
    leaves = [a.detach().requires_grad_() for a in (x, w)]
    return torch.autograd.grad(F.cross_entropy(leaves[0] @ leaves[1], labels.long()), leaves)


def transformer_block(x, qkv, projection, g1, b1, g2, b2, w1, c1, w2, c2):
    tokens, width = x.shape
    q, k, v = (layer_norm(x, g1, b1) @ qkv).view(tokens, 3, 8, width // 8).permute(1, 2, 0, 3)
    x = x + attention(q, k, v).transpose(0, 1).reshape(tokens, width) @ projection
    return x + gelu(layer_norm(x, g2, b2) @ w1 + c1) @ w2 + c2


def elementwise(x):
    y = torch.exp(-x * x) * 0.5 + x
    return torch.tanh(y) * y + torch.sqrt(torch.abs(x)) - 1.0


def gradient_descent(x, d):
    w = torch.zeros(x.shape[1])
    for _ in range(100):
        w = w - 0.1 / x.shape[0] * (x.T @ (x @ w - d))
    return w


def jacobi(x):
    for _ in range(50):
        p = F.pad(x, (1, 1, 1, 1))
        x = 0.25 * (p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:])
    return x


def jacobi_at(x):
    for _ in range(50):
        y = x.clone()
        y[1:-1, 1:-1] = 0.25 * (x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:])
        x = y
    return x


PEERS: dict[str, Callable] = {
    "blur": blur,
    "unsharp": unsharp,
    "harris": harris,
    "conv_stem": lambda x, w: conv(x, w, 2),
    "conv_bias_relu": lambda x, w, b: F.relu(conv(x, w) + b),
    "conv_residual_relu": lambda x, w, b, r: F.relu(conv(x, w) + b + r),
    "matmul_512": torch.matmul,
    "matmul_1024": torch.matmul,
    "matmul_2048": torch.matmul,
    "matmul_bf16_1024": torch.matmul,
    **{
        w.name: w.function if w.name.startswith("matmul") else last_layer_gradient for w in PRODUCTS
    },
    "matmul_bias_gelu": lambda x, w, b: gelu(x @ w + b),
    "softmax": lambda x: torch.softmax(x, -1),
    "layer_norm": layer_norm,
    "rms_norm": lambda x, g: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * g,
    "attention_1024": attention,
    "attention_1024_causal": causal_attention,
    "attention_2048": attention,
    "attention_2048_causal": causal_attention,
    "elementwise": elementwise,
    "sum_of_squares": lambda x: (x * x).sum(),
    "gradient_descent": gradient_descent,
    "mlp_gradient": mlp_gradient,
    "transformer_block": transformer_block,
    "cross_entropy": lambda logits, labels: F.cross_entropy(
        logits, labels.long(), reduction="none"
    ),
    "jacobi": jacobi,
    "jacobi_at": jacobi_at,
}


def tensor(x) -> torch.Tensor:
    """A torch tensor with the values of a JAX array."""
    import numpy as np

    if x.dtype.name == "bfloat16":
        return torch.from_numpy(np.asarray(x, np.float32)).bfloat16()
    return torch.from_numpy(np.array(x))


def eager(name: str) -> Callable | None:
    return PEERS.get(name)


def compiled(name: str) -> Callable | None:
    return torch.compile(PEERS[name]) if name in PEERS else None
