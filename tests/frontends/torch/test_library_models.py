"""Models of transformers and torchvision with random weights, forward and backward, beside themselves in float64."""

import pytest

torch = pytest.importorskip("torch")

import pbkern  # noqa: E402
from benchmarks.torch_models import Whole  # noqa: E402

from .comparing import check_gradients  # noqa: E402

pytestmark = pytest.mark.slow


def tokens():
    return torch.randint(0, 50, (2, 9))


def transformers_model(name):
    t = pytest.importorskip("transformers", reason="transformers is not installed")
    small = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 50,
    }
    match name:
        case "bert":
            plain = t.BertConfig(**small, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
            return Whole(t.BertModel(plain), "last_hidden_state"), tokens()
        case "gpt2":
            plain = t.GPT2Config(
                n_embd=32,
                n_layer=2,
                n_head=4,
                vocab_size=50,
                resid_pdrop=0,
                embd_pdrop=0,
                attn_pdrop=0,
            )
            return Whole(t.GPT2LMHeadModel(plain), "logits", use_cache=False), tokens()
        case "llama":
            return Whole(
                t.LlamaForCausalLM(t.LlamaConfig(**small, num_key_value_heads=2)),
                "logits",
                use_cache=False,
            ), tokens()
        case "t5":
            plain = t.T5Config(
                d_model=32,
                d_kv=8,
                d_ff=64,
                num_layers=2,
                num_heads=4,
                vocab_size=50,
                dropout_rate=0,
            )
            model = t.T5ForConditionalGeneration(plain)
            return Whole(model, "logits", use_cache=False, decoder_input_ids=tokens()), tokens()
        case "whisper":
            plain = t.WhisperConfig(d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, vocab_size=50,
                                    decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8,
                                    max_source_positions=20, max_target_positions=20, pad_token_id=0, dropout=0)  # fmt: skip
            model = t.WhisperForConditionalGeneration(plain)
            kept = {"use_cache": False, "decoder_input_ids": tokens()}
            return Whole(model, "logits", "input_features", **kept), torch.rand(2, 8, 40)
    raise AssertionError(name)


VISION = {"resnet18": 64, "resnet50": 64, "vit_b_16": 224, "convnext_tiny": 64, "swin_t": 64, "efficientnet_b0": 64,
          "mobilenet_v3_small": 64}  # fmt: skip


def check(module, x, deterministic=True):
    fast = pbkern.polyblocks_jit_torch(module)
    check_gradients(fast, module.eval(), x)
    graphs = fast.explain(x.requires_grad_() if x.is_floating_point() else x).graphs
    assert {g.kind for g in graphs} == {"forward", "backward"}, str(fast.explain(x))
    assert not any(g.in_torch for g in graphs), str(fast.explain(x))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "whisper"])
def test_transformers(name):
    module, x = transformers_model(name)
    check(module.eval(), x)


@pytest.mark.parametrize("name", VISION)
def test_torchvision(name):
    try:
        from torchvision import models
    except Exception as e:  # its own versions of Torch alone let it be imported
        pytest.skip(f"torchvision cannot be imported: {e}")
    check(getattr(models, name)().eval(), torch.rand(1, 3, VISION[name], VISION[name]))
