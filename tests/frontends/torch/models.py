"""Small models, written out: each a module and the arguments of one call."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm, and a shortcut of another shape."""

    def __init__(self, ins=3, outs=8):
        super().__init__()
        self.a, self.b = (
            nn.Conv2d(ins, outs, 3, 2, 1, bias=False),
            nn.Conv2d(outs, outs, 3, 1, 1, bias=False),
        )
        self.na, self.nb, self.shortcut = (
            nn.BatchNorm2d(outs),
            nn.BatchNorm2d(outs),
            nn.Conv2d(ins, outs, 1, 2),
        )
        self.head = nn.Linear(outs, 5)

    def forward(self, x):
        y = self.nb(self.b(F.relu(self.na(self.a(x)))))
        y = F.max_pool2d(F.relu(y + self.shortcut(x)), 3, 2, 1)
        return self.head(F.adaptive_avg_pool2d(y, 1).flatten(1))


class Encoder(nn.Module):
    """nn.TransformerEncoderLayer with a mask of padding."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.0, batch_first=True, activation="gelu"
        )

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
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(self.na(x)).chunk(3, -1)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        x = x + self.down(F.gelu(self.up(self.nb(x)), approximate="tanh"))
        logits = self.nc(x) @ self.words.weight.t()
        return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Llama(nn.Module):
    """RMS norm, rotary places, four queries to a key, a gated MLP."""

    def __init__(self, d=16, heads=4, keys=2):
        super().__init__()
        self.heads, self.keys, self.size = heads, keys, d // heads
        self.scale = nn.Parameter(torch.rand(d) + 0.5)
        self.q, self.k, self.v = (
            nn.Linear(d, n * self.size, bias=False) for n in (heads, keys, keys)
        )
        self.out, self.gate, self.up = (nn.Linear(d, n, bias=False) for n in (d, 40, 40))
        self.down = nn.Linear(40, d, bias=False)

    def norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale

    def rotated(self, x):
        half = self.size // 2
        angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * 10000.0 ** (
            -torch.arange(half, dtype=x.dtype) / half
        )
        cos, sin, (a, b) = angles.cos(), angles.sin(), x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (
            f(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
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
        self.depthwise, self.norm = (
            nn.Conv2d(d, d, 7, padding=3, groups=d),
            nn.LayerNorm(d, eps=1e-6),
        )
        self.up, self.down, self.scale = (
            nn.Linear(d, 4 * d),
            nn.Linear(4 * d, d),
            nn.Parameter(torch.full((d,), 0.1)),
        )

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class Bags(nn.Module):
    """Features that are bags of rows, and their products with dense ones."""

    def __init__(self):
        super().__init__()
        self.bags, self.dense, self.top = (
            nn.EmbeddingBag(23, 6, mode="sum"),
            nn.Linear(4, 6),
            nn.Linear(7, 1),
        )

    def forward(self, x, rows, offsets):
        a, b = self.dense(x).relu(), self.bags(rows, offsets)
        return torch.sigmoid(self.top(torch.cat([a, (a * b).sum(1, keepdim=True)], 1)))


class UNet(nn.Module):
    """Down by pooling, up by a transposed convolution and by resizing, joined."""

    def __init__(self, d=4):
        super().__init__()
        self.a, self.b = nn.Conv2d(1, d, 3, padding=1), nn.Conv2d(d, 2 * d, 3, padding=1)
        self.up, self.out = (
            nn.ConvTranspose2d(2 * d, d, 2, 2),
            nn.Conv2d(2 * d + 1, 2, 3, padding=1),
        )

    def forward(self, x):
        a = F.relu(self.a(x))
        b = F.relu(self.b(F.avg_pool2d(a, 2)))
        small = F.interpolate(
            F.interpolate(x, scale_factor=0.5),
            size=x.shape[2:],
            mode="bilinear",
            align_corners=False,
        )
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


class Bottleneck(nn.Module):
    """A block of resnet50: 1 x 1, 3 x 3 with a stride, 1 x 1, and a shortcut with that stride."""

    def __init__(self, ins=8, inner=4, outs=16):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(ins, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, inner, 3, 2, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, outs, 1, bias=False), nn.BatchNorm2d(outs),
        )  # fmt: skip
        self.shortcut = nn.Sequential(nn.Conv2d(ins, outs, 1, 2, bias=False), nn.BatchNorm2d(outs))

    def forward(self, x):
        return F.relu(self.layers(x) + self.shortcut(x))


class Inverted(nn.Module):
    """A block of efficientnet (SiLU) or mobilenet v3 (hardswish): a wide depthwise convolution, channels weighed by means."""

    def __init__(self, activation, ins=6, wide=18, window=5):
        super().__init__()
        self.activation = activation
        self.up, self.down = (
            nn.Conv2d(ins, wide, 1, bias=False),
            nn.Conv2d(wide, ins, 1, bias=False),
        )
        self.depthwise = nn.Conv2d(wide, wide, window, 1, window // 2, groups=wide, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (wide, wide, ins))
        self.squeeze, self.excite = nn.Conv2d(wide, 4, 1), nn.Conv2d(4, wide, 1)

    def forward(self, x):
        y = self.activation(self.norms[0](self.up(x)))
        y = self.activation(self.norms[1](self.depthwise(y)))
        weights = self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1))))
        gate = F.hardsigmoid if self.activation is F.hardswish else torch.sigmoid
        return x + self.norms[2](self.down(y * gate(weights)))


class Vit(nn.Module):
    """Patches, a class token before them, learnt places, nn.MultiheadAttention."""

    def __init__(self, d=12, patch=4, patches=12):
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, d, patch, patch), nn.Parameter(torch.zeros(1, 1, d))
        self.places, self.na, self.nb = (
            nn.Parameter(torch.randn(1, patches + 1, d) * 0.02),
            nn.LayerNorm(d),
            nn.LayerNorm(d),
        )
        self.attention = nn.MultiheadAttention(d, 3, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.head = nn.Linear(d, 5)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        y = self.na(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.head((x + self.mlp(self.nb(x)))[:, 0])


class Swin(nn.Module):
    """Attention in shifted windows with biases by relative place, and patches merged by four."""

    def __init__(self, d=8, heads=2, window=3):
        super().__init__()
        self.heads, self.window, self.norm = heads, window, nn.LayerNorm(d)
        self.qkv, self.out, self.merge = (
            nn.Linear(d, 3 * d),
            nn.Linear(d, d),
            nn.Linear(4 * d, 2 * d, bias=False),
        )
        self.bias = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.1)
        at = torch.stack(
            torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
        ).flatten(1)
        apart = at[:, :, None] - at[:, None, :] + window - 1
        self.register_buffer("relative", apart[0] * (2 * window - 1) + apart[1])

    def windows(self, x):
        n, h, w, c = x.shape
        x = x.view(n, h // self.window, self.window, w // self.window, self.window, c)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.window**2, c)

    def forward(self, x):
        n, h, w, c = x.shape
        shift = self.window // 2
        y = self.windows(self.norm(x).roll((-shift, -shift), (1, 2)))
        part = torch.zeros(1, h, w, 1, dtype=x.dtype)
        part[:, -shift:] += 1
        part[:, :, -shift:] += 2
        parts = self.windows(part)[..., 0]
        mask = (parts[:, :, None] != parts[:, None, :]).to(x.dtype) * -100.0
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * q.shape[-1] ** -0.5 + self.bias[self.relative].permute(2, 0, 1)
        scores = scores + mask.repeat(n, 1, 1)[:, None]
        y = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        y = y.view(n, h // self.window, w // self.window, self.window, self.window, c).permute(
            0, 1, 3, 2, 4, 5
        )
        x = x + y.reshape(n, h, w, c).roll((shift, shift), (1, 2))
        return self.merge(torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1))


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
        "bags": (
            Bags(),
            (torch.rand(3, 4), torch.tensor([1, 5, 5, 22, 0, 7]), torch.tensor([0, 2, 2])),
        ),
        "unet": (UNet(), (torch.rand(1, 1, 12, 8),)),
        "bottleneck": (Bottleneck(), (torch.rand(2, 8, 9, 10),)),
        "efficientnet": (Inverted(F.silu), (torch.rand(2, 6, 7, 8),)),
        "mobilenet": (Inverted(F.hardswish, window=3), (torch.rand(2, 6, 7, 8),)),
        "vit": (Vit(), (torch.rand(2, 3, 12, 16),)),
        "swin": (Swin(), (torch.rand(2, 6, 12, 8),)),
        "diffusion": (Diffusion(), (torch.rand(2, 8, 5, 6), torch.rand(2))),
    }
