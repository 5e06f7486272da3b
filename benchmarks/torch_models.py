"""Whole models of torchvision and transformers, random weights: speed beside eager Torch and torch.compile, seconds to compile.

    python -m benchmarks.torch_models [--threads 1] [--seconds 10] [word ...]
    python -m benchmarks.torch_models --compile [word ...]
    python -m benchmarks.torch_models --first-call [--rounds 2] [--write] [word ...]

The first calls four models without gradients, at batch 1 and ordinary sizes, in turns. The second makes one step of training of
every model and prints, graph by graph, the seconds to plan and to compile it. Set XDG_CACHE_HOME to an empty folder for true
first calls; caches of torch.compile are off. The third compares first calls with those of torch.compile.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

import pbkern

from . import torch_first_calls
from .torch_functions import measured


class Whole(nn.Module):
    """A model of transformers as a function of one tensor: `takes` names it, `result` what comes back, `kept` the rest."""

    def __init__(self, model, result, takes="input_ids", **kept):
        super().__init__()
        self.model, self.result, self.takes, self.kept = model, result, takes, kept

    def forward(self, x):
        return getattr(self.model(**{self.takes: x}, **self.kept), self.result)


def vision(name: str, size: int) -> Callable:
    def make():
        from torchvision import models

        return getattr(models, name)().eval(), torch.rand(1, 3, size, size)

    return make


def tokens(count: int, words: int = 1000) -> torch.Tensor:
    return torch.randint(0, words, (1, count))


def bert(count: int, **config) -> tuple:
    from transformers import BertConfig, BertModel

    return Whole(BertModel(BertConfig(**config)), "last_hidden_state").eval(), tokens(count)


def gpt2(count: int, **config) -> tuple:
    from transformers import GPT2Config, GPT2LMHeadModel

    return Whole(GPT2LMHeadModel(GPT2Config(**config)), "logits", use_cache=False).eval(), tokens(
        count
    )


def llama() -> tuple:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
                         intermediate_size=688, vocab_size=1000)  # fmt: skip
    return Whole(LlamaForCausalLM(config), "logits", use_cache=False).eval(), tokens(32)


def t5() -> tuple:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config())  # the sizes of t5-small
    return Whole(model, "logits", use_cache=False, decoder_input_ids=tokens(9)).eval(), tokens(16)


def whisper() -> tuple:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration(
        WhisperConfig(max_source_positions=100)
    )  # otherwise the sizes of whisper-tiny
    kept = {"use_cache": False, "decoder_input_ids": tokens(9)}
    return Whole(model, "logits", "input_features", **kept).eval(), torch.rand(1, 80, 200)


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.LSTM(64, 128, 2, batch_first=True)

    def forward(self, x):
        return self.layers(x)[0]


def lstm() -> tuple:
    return Last(), torch.rand(4, 50, 64)


def dlrm() -> tuple:
    class Dlrm(nn.Module):
        def __init__(self, rows=10000, d=64, features=8):
            super().__init__()
            self.bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, d), nn.ReLU())
            self.bags = nn.ModuleList(nn.EmbeddingBag(rows, d, mode="sum") for _ in range(features))
            pairs = (features + 1) * features // 2
            self.top = nn.Sequential(
                nn.Linear(d + pairs, 256), nn.ReLU(), nn.Linear(256, 1), nn.Sigmoid()
            )
            self.register_buffer("rows", torch.randint(0, rows, (features, 128)))
            self.register_buffer("offsets", torch.arange(0, 128, 4))

        def forward(self, x):
            dense = self.bottom(x)
            vectors = torch.stack(
                [dense, *(bag(r, self.offsets) for bag, r in zip(self.bags, self.rows))], 1
            )
            i, j = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1)
            return self.top(torch.cat([dense, (vectors @ vectors.transpose(1, 2))[:, i, j]], 1))

    return Dlrm(), torch.rand(32, 13)


SPEED: dict[str, Callable] = {
    "resnet18": vision("resnet18", 224),
    "bert-base": lambda: bert(128),
    "gpt2": lambda: gpt2(128),
    "vit_b_16": vision("vit_b_16", 224),
}

ALL: dict[str, Callable] = {
    "resnet18": vision("resnet18", 64),
    "resnet50": vision("resnet50", 64),
    "vit_b_16": vision("vit_b_16", 224),
    "convnext_tiny": vision("convnext_tiny", 64),
    "swin_t": vision("swin_t", 64),
    "efficientnet_b0": vision("efficientnet_b0", 64),
    "mobilenet_v3_small": vision("mobilenet_v3_small", 64),
    "squeezenet1_1": vision("squeezenet1_1", 64),
    "bert": lambda: bert(16),
    "gpt2": lambda: gpt2(16),
    "llama": llama,
    "t5": t5,
    "whisper": whisper,
    "lstm": lstm,
    "dlrm": dlrm,
}


def speed(name: str, seconds: float) -> None:
    module, x = SPEED[name]()
    versions = {
        "pbkern": pbkern.polyblocks_jit_torch(module),
        "eager": module,
        "torch.compile": torch.compile(module),
    }
    calls = {n: torch.no_grad()(lambda f=f: f(x)) for n, f in versions.items()}
    found = measured(calls, seconds)
    torch.testing.assert_close(calls["pbkern"](), calls["eager"](), rtol=1e-3, atol=1e-3)
    ratio = min(t[0] for n, t in found.items() if n != "pbkern") / found["pbkern"][0]
    row = "  ".join(f"{n} {a:.1f} {b:.1f} ({c / 1e3:.1f} s)" for n, (a, b, c) in found.items())
    print(f"{name:20} {ratio:5.2f} times the faster of the others; {row}", flush=True)


def compiling(name: str) -> None:
    module, x = ALL[name]()
    x.requires_grad_(x.is_floating_point())
    fast = pbkern.polyblocks_jit_torch(module)
    start = time.perf_counter()
    fast(x).pow(2).mean().backward()
    print(f"{name:20} first step {time.perf_counter() - start:6.1f} s", flush=True)
    for g in fast.explain(x).graphs:
        for c in g.compiled:
            whole, parts = stages(c.build.record.milliseconds)
            print(f"    {g.kind:10} {whole:5.1f} s: {parts}; {len(g.kernels())} kernels, {len(g.left_to_xla())} left to XLA, "
                  f"{len(g.in_torch)} run in Torch", flush=True)  # fmt: skip


def stages(ms: dict[str, float]) -> tuple[float, str]:
    """(seconds to compile a graph, those of its stages); stages of several threads take their sum."""
    found = {"plan": ms["plan"]}
    for k, t in ms.items():
        if k.startswith(" "):
            stage = k.strip().split(" of ")[0]
            found[stage] = found.get(stage, 0.0) + t
    whole = sum(t for k, t in ms.items() if not k.startswith(" "))
    return whole / 1e3, ", ".join(f"{k} {t / 1e3:.1f}" for k, t in found.items() if t >= 50)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument(
        "--compile", action="store_true", help="seconds to compile every graph of a training step"
    )
    parser.add_argument(
        "--first-call", action="store_true", help="first calls beside torch.compile"
    )
    parser.add_argument("--rounds", type=int, default=2, help="processes per first call")
    parser.add_argument("--write", action="store_true", help="first calls into their document")
    parser.add_argument("words", nargs="*", help="only models with one of these words")
    options = parser.parse_args()
    if options.first_call:
        torch_first_calls.compare(options.words, options.rounds, options.write)
        return
    torch.set_num_threads(options.threads)
    torch.compiler.config.force_disable_caches = True
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {options.threads} thread(s); ms: least, median (first call)")
    for name in ALL if options.compile else SPEED:
        if not options.words or any(w in name for w in options.words):
            torch._dynamo.reset()
            try:
                compiling(name) if options.compile else speed(name, options.seconds)
            except ImportError as e:
                print(f"{name:20} not measured: {e}")


if __name__ == "__main__":
    main()
