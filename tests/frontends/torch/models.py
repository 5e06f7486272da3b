"""Small models, written out: each a module and the arguments of one call."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm, and a shortcut of another shape."""

    def __init__(self, ins=3, outs=8):
        super().__init__()
        self.a, self.b = nn.Conv2d(ins, outs, 3, 2, 1, bias=False), nn.Conv2d(outs, outs, 3, 1, 1, bias=False)
        self.na, self.nb, self.shortcut = nn.BatchNorm2d(outs), nn.BatchNorm2d(outs), nn.Conv2d(ins, outs, 1, 2)
        self.head = nn.Linear(outs, 5)

    def forward(self, x):
        y = self.nb(self.b(F.relu(self.na(self.a(x)))))
        y = F.max_pool2d(F.relu(y + self.shortcut(x)), 3, 2, 1)
        return self.head(F.adaptive_avg_pool2d(y, 1).flatten(1))


class Encoder(nn.Module):
    """nn.TransformerEncoderLayer with a mask of padding."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, activation="gelu")

    def forward(self, x):
        padding = torch.arange(x.shape[1]) >= x.shape[1] - 2
        return self.layer(x, src_key_padding_mask=padding.expand(x.shape[:2]))


class Gpt(nn.Module):
    """One block with causal attention, between embeddings and tied logits; the loss of predicting the next token."""

    def __init__(self, words=37, d=16, heads=2, length=9):
        super().__init__()
        self.words, self.places, self.heads = nn.Embedding(words, d), nn.Embedding(length, d), heads
        self.na, self.nb, self.nc = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.na(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.nb(x)), approximate="tanh"))
        logits = self.nc(x) @ self.words.weight.t()
        return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Llama(nn.Module):
    """RMS norm, rotary places, four queries to a key, a gated MLP."""

    def __init__(self, d=16, heads=4, keys=2):
        super().__init__()
        self.heads, self.keys, self.size = heads, keys, d // heads
        self.scale = nn.Parameter(torch.rand(d) + 0.5)
        self.q, self.k, self.v = (nn.Linear(d, n * self.size, bias=False) for n in (heads, keys, keys))
        self.out, self.gate, self.up = (nn.Linear(d, n, bias=False) for n in (d, 40, 40))
        self.down = nn.Linear(40, d, bias=False)

    def norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale

    def rotated(self, x):
        half = self.size // 2
        angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
        cos, sin, (a, b) = angles.cos(), angles.sin(), x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(self.heads // self.keys, 1) for t in (self.rotated(k), v))
        scores = self.rotated(q) @ k.transpose(-1, -2) / math.sqrt(self.size)
        mask = torch.full(scores.shape[-2:], float("-inf"), dtype=x.dtype).triu(1)
        x = x + self.out(((scores + mask).softmax(-1) @ v).transpose(1, 2).flatten(2))
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class ConvNext(nn.Module):
    """A depthwise convolution of 7 x 7, layer norm over channels that come last, a scale per layer."""

    def __init__(self, d=8):
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(d, d, 7, padding=3, groups=d), nn.LayerNorm(d, eps=1e-6)
        self.up, self.down, self.scale = nn.Linear(d, 4 * d), nn.Linear(4 * d, d), nn.Parameter(torch.full((d,), 0.1))

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class Bags(nn.Module):
    """Features that are bags of rows, and their products with dense ones."""

    def __init__(self):
        super().__init__()
        self.bags, self.dense, self.top = nn.EmbeddingBag(23, 6, mode="sum"), nn.Linear(4, 6), nn.Linear(7, 1)

    def forward(self, x, rows, offsets):
        a, b = self.dense(x).relu(), self.bags(rows, offsets)
        return torch.sigmoid(self.top(torch.cat([a, (a * b).sum(1, keepdim=True)], 1)))


class UNet(nn.Module):
    """Down by pooling, up by a transposed convolution and by resizing, joined."""

    def __init__(self, d=4):
        super().__init__()
        self.a, self.b = nn.Conv2d(1, d, 3, padding=1), nn.Conv2d(d, 2 * d, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(2 * d, d, 2, 2), nn.Conv2d(2 * d + 1, 2, 3, padding=1)

    def forward(self, x):
        a = F.relu(self.a(x))
        b = F.relu(self.b(F.avg_pool2d(a, 2)))
        small = F.interpolate(F.interpolate(x, scale_factor=0.5), size=x.shape[2:], mode="bilinear", align_corners=False)
        return self.out(torch.cat([a, self.up(b), small], 1))


class Diffusion(nn.Module):
    """Group norm, a step's embedding, attention over the pixels."""

    def __init__(self, d=8):
        super().__init__()
        self.na, self.nb = nn.GroupNorm(4, d), nn.GroupNorm(2, d)
        self.conv, self.step = nn.Conv2d(d, d, 3, padding=1), nn.Linear(6, d)
        self.qkv, self.out = nn.Conv1d(d, 3 * d, 1), nn.Conv1d(d, d, 1)

    def forward(self, x, t):
        waves = t[:, None] * torch.exp(-torch.arange(3, dtype=x.dtype))
        step = self.step(torch.cat([waves.sin(), waves.cos()], 1))
        x = x + self.conv(F.silu(self.na(x))) + step[:, :, None, None]
        q, k, v = self.qkv(self.nb(x).flatten(2)).chunk(3, 1)
        weights = torch.einsum("bcq,bck->bqk", q, k).mul(q.shape[1] ** -0.5).softmax(-1)
        return x + self.out(torch.einsum("bqk,bck->bcq", weights, v)).view_as(x)


class Recurrent(nn.Module):
    """A network of several layers in both directions, and a head of its last state."""

    def __init__(self, kind, **config):
        super().__init__()
        self.layers = kind(5, 7, **config)
        self.head = nn.Linear(7, 3)

    def forward(self, x):
        y, state = self.layers(x)
        last = state[0] if isinstance(state, tuple) else state
        return y, self.head(last[-1])


def models():
    """Name -> (module, arguments)."""
    torch.manual_seed(1)
    return {
        "resnet": (ResidualBlock(), (torch.rand(2, 3, 17, 15),)),
        "encoder": (Encoder(), (torch.rand(2, 7, 16),)),
        "gpt": (Gpt(), (torch.randint(0, 37, (2, 9)),)),
        "llama": (Llama(), (torch.rand(2, 5, 16),)),
        "convnext": (ConvNext(), (torch.rand(1, 8, 9, 10),)),
        "bags": (Bags(), (torch.rand(3, 4), torch.tensor([1, 5, 5, 22, 0, 7]), torch.tensor([0, 2, 2]))),
        "unet": (UNet(), (torch.rand(1, 1, 12, 8),)),
        "diffusion": (Diffusion(), (torch.rand(2, 8, 5, 6), torch.rand(2))),
    }
