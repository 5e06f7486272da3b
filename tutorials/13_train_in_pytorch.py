"""Training a PyTorch model: one decorated function is the whole of a step's arithmetic, forward and backward.

TorchDynamo captures what the function does, AOTAutograd derives its gradient, and pbkern fuses both into kernels. The loop, the
data and the optimiser stay ordinary PyTorch. Needs `pip install 'pbkern[torch]'`.
"""

import pbkern

try:
    import torch
    import torch.nn.functional as F
    from torch import nn
except ImportError as error:
    raise SystemExit(f"{error}: this tutorial needs PyTorch, pip install 'pbkern[torch]'") from None

torch.manual_seed(0)


class Net(nn.Module):
    """float32[n, 1, 16, 16] -> logits float32[n, 3]: two convolutions, a normalisation, a head."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
        )
        self.norm, self.head = nn.GroupNorm(4, 16), nn.Linear(16, 3)

    def forward(self, x):
        x = F.gelu(self.a(x))
        x = F.gelu(self.norm(self.b(x)))
        return self.head(x.mean((2, 3)))


def pictures(n):
    """Stripes that lie, stand or lean, with noise, and which of them each picture shows."""
    kind = torch.randint(0, 3, (n,))
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    along = torch.stack([rows, columns, (rows + columns) / 2**0.5])
    waves = torch.sin(along[kind] + 6.28 * torch.rand(n, 1, 1))
    return waves[:, None] + 0.5 * torch.randn(n, 1, 16, 16), kind


net = Net()


@pbkern.polyblocks_jit_torch
def loss_of(x, kind):
    """Parameters of the module are inputs of the kernels: the optimiser changes them, and nothing compiles anew."""
    return F.cross_entropy(net(x), kind)


# Before training: what became of the function. A forward graph is there at once; the kernels of the backward graph are made
# when a gradient is asked for. "left to XLA" and "run in Torch" are what fusion did not take.

optimiser = torch.optim.AdamW(net.parameters(), lr=5e-3)
loss_of(*pictures(64)).backward()
print(loss_of.explain(*pictures(64)))
graphs = loss_of.explain(*pictures(64)).graphs
assert [(g.number, g.kind) for g in graphs] == [(0, "forward"), (0, "backward")]
assert not any(g.in_torch for g in graphs)

# The gradient is that of eager PyTorch.

x, kind = pictures(64)
eager = torch.autograd.grad(F.cross_entropy(net(x), kind), net.parameters())
ours = torch.autograd.grad(loss_of(x, kind), net.parameters())
for a, b in zip(ours, eager):
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)

for step in range(101):
    optimiser.zero_grad()
    loss = loss_of(*pictures(64))
    loss.backward()
    optimiser.step()
    if step % 25 == 0:
        print(f"step {step:3}: loss {loss.item():.3f}")

# A module can be decorated as well; it shares its parameters with the one that was trained. In inference the graph is another
# one, which keeps nothing for a gradient.

classify = pbkern.polyblocks_jit_torch(net.eval())
x, kind = pictures(300)
with torch.no_grad():
    right = (classify(x).argmax(1) == kind).double().mean().item()
print(f"{right:.0%} of new pictures are recognised")
assert right > 0.9
