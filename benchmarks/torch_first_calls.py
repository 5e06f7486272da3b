"""First calls of models of Torch, forward and backward, beside torch.compile with its default backend.

    python -m benchmarks.torch_models --first-call [--rounds 2] [--write] [word ...]

Every number is of a process of its own with empty folders for all caches, after imports, the making of the model and one
eager step: processor seconds of all threads and child processes until the first forward pass has a result, and until the first
backward pass has left gradients. Other work on the machine disturbs them less than it disturbs the clock.
`--write` puts the table into docs/benchmarks/torch-first-calls.md, in the section of this machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional

from .report import CHECKOUT, as_markdown, replace_section, versions

PAGE = CHECKOUT / "docs" / "benchmarks" / "torch-first-calls.md"
BACKENDS = ("pbkern", "inductor")
# Seconds until a process counts as hung.
PATIENCE = 1800
CACHES = ("XDG_CACHE_HOME", "PBKERN_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
HEADING = """# First calls of models of Torch

Written by `python -m benchmarks.torch_models --first-call --write`. Processor seconds, of all threads and child processes,
until the first forward pass has its result, and until the first backward pass behind it has left gradients; the least of
processes of their own, with empty caches, after imports and one eager step. torch.compile has its default backend and compiles
in one process. Models have random weights and small configurations (`benchmarks/torch_first_calls.py`).
"""


class Loss(nn.Module):
    """A model of transformers as a function of one tensor, with a scalar result."""

    def __init__(self, model: nn.Module, takes: str, result: str, **others: object):
        super().__init__()
        self.model, self.takes, self.result, self.others = model, takes, result, others

    def forward(self, x):
        y = getattr(self.model(**{self.takes: x}, **self.others), self.result).float()
        # The mean of squares alone is the same behind every layer norm, with gradients of rounding errors.
        return (y * torch.linspace(-1, 1, y.shape[-1])).pow(2).mean()


def tokens(count: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(0, 500, (batch, count))


def mamba() -> tuple[nn.Module, torch.Tensor]:
    from transformers.models.mamba import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=500, hidden_size=128, num_hidden_layers=4, state_size=8)
    return Loss(MambaForCausalLM(config), "input_ids", "logits", use_cache=False), tokens(32)


def rwkv() -> tuple[nn.Module, torch.Tensor]:
    from transformers.models.rwkv import RwkvConfig, RwkvForCausalLM

    config = RwkvConfig(vocab_size=500, hidden_size=128, num_hidden_layers=4, context_length=64)
    return Loss(RwkvForCausalLM(config), "input_ids", "logits", use_cache=False), tokens(32)


def swin() -> tuple[nn.Module, torch.Tensor]:
    from transformers.models.swin import SwinConfig, SwinModel

    config = SwinConfig(
        image_size=64,
        patch_size=4,
        embed_dim=32,
        depths=[2, 2, 2],
        num_heads=[2, 4, 8],
        window_size=4,
    )
    return Loss(SwinModel(config), "pixel_values", "last_hidden_state"), torch.rand(2, 3, 64, 64)


def whisper() -> tuple[nn.Module, torch.Tensor]:
    from transformers.models.whisper import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(vocab_size=500, d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                           decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, max_source_positions=100,
                           pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)  # fmt: skip
    others = {"use_cache": False, "decoder_input_ids": tokens(12)}
    model = WhisperForConditionalGeneration(config)
    return Loss(model, "input_features", "logits", **others), torch.rand(2, 80, 200)


def gpt2() -> tuple[nn.Module, torch.Tensor]:
    from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=500, n_embd=128, n_layer=4, n_head=4))
    return Loss(model, "input_ids", "logits", use_cache=False), tokens(32)


class _Residual(nn.Module):
    """Two convolutions with group norm, shifted by an embedding of the step."""

    def __init__(self, inside: int, out: int, step: int):
        super().__init__()
        self.first, self.second = nn.GroupNorm(8, inside), nn.GroupNorm(8, out)
        self.near, self.far = (
            nn.Conv2d(inside, out, 3, padding=1),
            nn.Conv2d(out, out, 3, padding=1),
        )
        self.step, self.skip = nn.Linear(step, out), nn.Conv2d(inside, out, 1)

    def forward(self, x, t):
        y = self.near(functional.silu(self.first(x))) + self.step(t)[:, :, None, None]
        return self.skip(x) + self.far(functional.silu(self.second(y)))


class _Pixels(nn.Module):
    """Attention of all pixels."""

    def __init__(self, channels: int, heads: int = 4):
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(8, channels), heads
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = (
            self.qkv(self.norm(x))
            .view(b, 3, self.heads, c // self.heads, h * w)
            .transpose(-1, -2)
            .unbind(1)
        )
        y = functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(-1, -2).reshape(b, c, h, w))


class DiffusionUNet(nn.Module):
    """Noise of an image at a step: three sizes, attention at the smallest, joined on the way up."""

    def __init__(self, channels: int = 32):
        super().__init__()
        widths = [channels, 2 * channels, 4 * channels]
        self.step = nn.Sequential(nn.Linear(32, 128), nn.SiLU(), nn.Linear(128, 128))
        self.enter, self.leave = (
            nn.Conv2d(3, channels, 3, padding=1),
            nn.Conv2d(channels, 3, 3, padding=1),
        )
        self.down = nn.ModuleList(
            _Residual(widths[max(k - 1, 0)], n, 128) for k, n in enumerate(widths)
        )
        self.middle, self.pixels = _Residual(widths[-1], widths[-1], 128), _Pixels(widths[-1])
        self.up = nn.ModuleList(
            _Residual(widths[min(k + 1, 2)] + widths[k], widths[k], 128) for k in reversed(range(3))
        )
        self.register_buffer("steps", torch.tensor([3.0, 70.0]))

    def forward(self, x):
        waves = self.steps[:, None] * torch.exp(-torch.arange(16, dtype=x.dtype) / 4)
        t = self.step(torch.cat([waves.sin(), waves.cos()], 1))
        y, joined = self.enter(x), []
        for block in self.down:
            y = block(y, t)
            joined.append(y)
            y = functional.avg_pool2d(y, 2)
        y = self.pixels(self.middle(y, t))
        for block in self.up:
            y = functional.interpolate(y, scale_factor=2.0, mode="nearest")
            y = block(torch.cat([y, joined.pop()], 1), t)
        return (self.leave(y) - x).pow(2).mean()


def unet() -> tuple[nn.Module, torch.Tensor]:
    return DiffusionUNet(), torch.rand(2, 3, 32, 32)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "mamba": mamba,
    "rwkv": rwkv,
    "unet": unet,
    "swin": swin,
    "whisper": whisper,
    "gpt2": gpt2,
}


def processor_seconds() -> float:
    """Of this process, all its threads and the children that have ended."""
    return sum(os.times()[:4])


def first_call(name: str, backend: str) -> tuple[float, float]:
    """Seconds of the first forward and of the first backward pass in this process; gradients agree with eager ones."""
    import pbkern

    torch.manual_seed(0)
    module, x = MODELS[name]()
    module.eval()  # dropout draws other numbers in each of them
    parameters = [p for p in module.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(module(x), parameters, allow_unused=True)
    fast = pbkern.polyblocks_jit_torch(module) if backend == "pbkern" else torch.compile(module)
    start = processor_seconds()
    loss = fast(x)
    between = processor_seconds()
    got = torch.autograd.grad(loss, parameters, allow_unused=True)
    end = processor_seconds()
    for ours, eager in zip(got, wanted, strict=True):
        if eager is not None:
            bound = 1e-3 * float(eager.abs().max()) + 1e-6
            torch.testing.assert_close(ours, eager, rtol=1e-2, atol=bound)
    return between - start, end - between


def in_process(name: str, backend: str) -> tuple[float, float]:
    """first_call in a process of its own, with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {cache: str(pathlib.Path(folder) / cache.lower()) for cache in CACHES}
        caches["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a pool of processes would not be counted
        command = [sys.executable, "-m", "benchmarks.torch_first_calls", name, backend]
        ran = subprocess.run(
            command, env={**os.environ, **caches}, capture_output=True, text=True, timeout=PATIENCE
        )
    if ran.returncode:
        raise RuntimeError(f"{name} by {backend} failed:\n{ran.stderr[-2000:]}")
    forward, backward = json.loads(ran.stdout.splitlines()[-1])
    return forward, backward


def compare(words: Sequence[str], rounds: int, write: bool) -> None:
    """Prints a row per model; with `write`, the section of this machine as well."""
    rows, ratios = (
        [["model", *(f"{b}, {p}" for b in BACKENDS for p in ("forward", "backward")), "ratio"]],
        [],
    )
    for name in MODELS:
        if words and not any(word in name for word in words):
            continue
        times = {
            backend: min((in_process(name, backend) for _ in range(rounds)), key=sum)
            for backend in BACKENDS
        }
        ratios.append(sum(times["pbkern"]) / sum(times["inductor"]))
        seconds = [f"{t:.1f}" for backend in BACKENDS for t in times[backend]]
        rows.append([name, *seconds, f"{ratios[-1]:.2f}"])
        print("  ".join(rows[-1]), flush=True)
    print(f"geometric mean {statistics.geometric_mean(ratios):.2f}, greatest {max(ratios):.2f}")
    if write:
        here = versions()
        machine = f"{here['cpu']}, {here['cores']} cores"
        used = ", ".join(
            f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers")
        )
        section = f"{here['date']}, {used}.\n\n{as_markdown(rows)}"
        text = PAGE.read_text() if PAGE.exists() else HEADING
        PAGE.write_text(replace_section(text, f"## {machine}", section))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("backend", choices=BACKENDS)
    options = parser.parse_args()
    print(json.dumps(first_call(options.model, options.backend)))


if __name__ == "__main__":
    main()
