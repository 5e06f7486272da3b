"""Functions and models of PyTorch: eager, torch.compile and pbkern, called in turns in one process.

    python -m benchmarks.torch_functions [--threads 1] [--seconds 3] [word ...]

Every row is checked against eager Torch in float64. Times are milliseconds, least and median; in brackets the first call, which
compiles. Caches of torch.compile are off; set XDG_CACHE_HOME to an empty folder to compile ours anew as well. torch.compile
needs a C++ compiler; without one its column is empty.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import pbkern

BINOMIAL = torch.tensor([0.0625, 0.25, 0.375, 0.25, 0.0625])


def blur(image):
    k = BINOMIAL.to(image.dtype)
    return F.conv2d(F.conv2d(image[:, None], k.view(1, 1, 1, 5)), k.view(1, 1, 5, 1))


def unsharp(image):
    k, x = BINOMIAL.to(image.dtype), image[:, None]
    blurred = F.conv2d(
        F.conv2d(x, k.view(1, 1, 1, 5), padding=(0, 2)), k.view(1, 1, 5, 1), padding=(2, 0)
    )
    return torch.where((x - blurred).abs() < 0.001, x, 4 * x - 3 * blurred)


def attention(q, k, v):
    return (q @ k.transpose(-1, -2) * 0.125).softmax(-1) @ v


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Mlp(nn.Module):
    def __init__(self, d=768):
        super().__init__()
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class AddNorm(nn.Module):
    def __init__(self, d=1024):
        super().__init__()
        self.norm = nn.LayerNorm(d)

    def forward(self, x, y):
        return self.norm(x + y)


class Block(nn.Module):
    """A block of a transformer: attention and an MLP, each behind a layer norm."""

    def __init__(self, d=768, heads=12):
        super().__init__()
        self.a, self.b, self.mlp = nn.LayerNorm(d), nn.LayerNorm(d), Mlp(d)
        self.qkv, self.out, self.heads = nn.Linear(d, 3 * d), nn.Linear(d, d), heads

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(self.a(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.b(x))


def cases() -> dict[str, tuple[Callable, tuple, bool]]:
    """name -> (function, arguments, whether its gradient is measured as well)."""
    torch.manual_seed(0)
    heads = tuple(torch.randn(16, 1024, 64) for _ in range(3))
    image, tokens = torch.rand(3, 1080, 1920), torch.rand(1, 512, 768)
    small = torch.rand(16, 16), torch.rand(16, 16)
    return {
        "blur, 3 x 1080 x 1920": (blur, (image,), False),
        "unsharp mask, 3 x 1080 x 1920": (unsharp, (image,), False),
        "softmax 4096 x 1024": (lambda x: x.softmax(-1), (torch.rand(4096, 1024),), False),
        "attention written out, 16 x 1024 x 64": (attention, heads, False),
        "causal sdpa, 16 x 1024 x 64": (causal, tuple(t[None] for t in heads), False),
        "gelu MLP, 512 x 768 x 3072": (Mlp(), (tokens[0],), False),
        "add + layer norm 4096 x 1024": (
            AddNorm(),
            (torch.rand(4096, 1024), torch.rand(4096, 1024)),
            False,
        ),
        "transformer block, 512 tokens": (Block(), (tokens,), False),
        "transformer block, forward and backward": (Block(), (tokens,), True),
        "cross entropy 2048 x 8000, both": (
            F.cross_entropy,
            (torch.rand(2048, 8000), torch.randint(0, 8000, (2048,))),
            True,
        ),
        "call of x * y + 1, 16 x 16": (lambda x, y: x * y + 1, small, False),
    }


def caller(f: Callable, args: tuple, both: bool) -> Callable[[], torch.Tensor]:
    if not both:
        return torch.no_grad()(lambda: f(*args))
    args = tuple(a.detach().requires_grad_(a.is_floating_point()) for a in args)

    def step():
        result = f(*args)
        result.sum().backward()
        return args[0].grad

    def fresh():
        for t in (*args, *(f.parameters() if isinstance(f, nn.Module) else ())):
            t.grad = None
        return step()

    return fresh


def check(f: Callable, args: tuple, both: bool, ours: Callable) -> None:
    wide = copy.deepcopy(f).double() if isinstance(f, nn.Module) else f
    exact = caller(wide, tuple(a.double() if a.is_floating_point() else a for a in args), both)()
    torch.testing.assert_close(
        ours().double(), exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max())
    )


def measured(calls: dict[str, Callable], seconds: float) -> dict[str, tuple[float, float, float]]:
    """name -> (least, median, first) milliseconds of calls in turns."""
    first, times = {}, {name: [] for name in calls}
    for name, call in list(calls.items()):
        start = time.perf_counter()
        try:
            call()
        except Exception as e:
            print(f"  {name}: {str(e).splitlines()[0][:90]}")
            del calls[name], times[name]
            continue
        first[name] = (time.perf_counter() - start) * 1e3
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {n: (min(t), statistics.median(t), first[n]) for n, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("words", nargs="*", help="only rows with one of these words")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.compiler.config.force_disable_caches = True
    print(f"torch {torch.__version__}, {options.threads} thread(s); ms: least, median (first call)")
    ratios = []
    for name, (f, args, both) in cases().items():
        if options.words and not any(w in name for w in options.words):
            continue
        torch._dynamo.reset()
        fast, compiled = pbkern.polyblocks_jit_torch(f), torch.compile(f)
        versions = {"pbkern": fast, "eager": f, "torch.compile": compiled}
        calls = {n: caller(g, args, both) for n, g in versions.items()}
        found = measured(calls, options.seconds)
        check(f, args, both, calls["pbkern"])
        ratio = min(t[0] for n, t in found.items() if n != "pbkern") / found["pbkern"][0]
        ratios += (
            [] if name.startswith("call") else [ratio]
        )  # eager Torch has no call of a compiled function to pay for
        row = "  ".join(f"{n} {a:.3f} {b:.3f} ({c:.0f})" for n, (a, b, c) in found.items())
        print(f"{name:42} {ratio:6.2f} times the faster of the others; {row}", flush=True)
    print(f"geometric mean {statistics.geometric_mean(ratios):.2f}")


if __name__ == "__main__":
    main()
