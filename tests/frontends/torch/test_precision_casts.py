"""emulate_precision_casts: fused operators on 16-bit floats beside eager Torch, bit for bit."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

import pbkern  # noqa: E402

jit = pbkern.polyblocks_jit_torch
OPTIONS = {"emulate_precision_casts": True}


def check_bits(made, expected) -> None:
    for m, e in zip(made, expected, strict=True):
        assert m.dtype == e.dtype
        assert torch.equal(m.isnan(), e.isnan())
        assert torch.equal(m.nan_to_num(0).view(torch.int16), e.nan_to_num(0).view(torch.int16))


def chain(x, y):
    """Products beyond float16's range, and sums that cancel."""
    z = x * y
    w = (z + x) - z
    return (
        z / y,
        w * 3,
        torch.exp(-w.abs()) + x,
        (z * 0.5).abs().sqrt(),
        torch.addcmul(x, y, y, value=0.5),
        x.relu() - z,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_chain(dtype):
    x, y = ((torch.randn(33, 65) * scale).to(dtype) for scale in (300, 40))
    expected = chain(x, y)
    fast = jit(chain, compile_options=OPTIONS)
    check_bits(fast(x, y), expected)
    assert str(fast.explain(x, y)).count("kernel graph") == 1
    torch._dynamo.reset()
    assert any((m != e).any() for m, e in zip(jit(chain)(x, y), expected))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_operators_of_several_steps_round_once(dtype):
    def f(x, y):
        return (
            F.silu(x) + torch.sigmoid(y),
            F.softplus(x) * y,
            F.leaky_relu(x, 0.3) - y,
            torch.lerp(x, y, 0.25) * 3,
        )

    x, y = (torch.randn(2, 20, 33) * 4).to(dtype)
    check_bits(jit(f, compile_options=OPTIONS)(x, y), f(x, y))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_gradient(dtype):
    found = []
    for f in (chain, jit(chain, compile_options=OPTIONS)):
        x, y = ((torch.linspace(-3, 3, 700) * s).to(dtype).requires_grad_() for s in (9, 2))
        made = [m for k, m in enumerate(f(x, y)) if k in (0, 1, 4, 5)]
        found.append(torch.autograd.grad(made, (x, y), [torch.ones_like(m) for m in made]))
    check_bits(found[1], found[0])


def test_the_backend_of_torch_compile():
    from pbkern.api.torch_functions import compile_fx

    x, y = ((torch.randn(50) * 300).half() for _ in range(2))
    check_bits(torch.compile(chain, backend=compile_fx, options=OPTIONS)(x, y), chain(x, y))
