"""What only a device shows: CUDA tensors of Torch, streams, threads, large arrays, errors after which a process goes on."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern

from .simulated import ON_DEVICE

pytestmark = pytest.mark.skipif(not ON_DEVICE, reason="runs on a CUDA device (make gpu-check)")
# Results are compared with those of float32.
GPU = {"target": "nvgpu", "mm_conv_precision_mode": "fp32"}
RNG = np.random.default_rng(0)


def gpu_array(x):
    return jax.device_put(x, jax.devices("cuda")[0])


def normal(*sizes) -> np.ndarray:
    return RNG.standard_normal(sizes).astype(np.float32)


def close(got, want, tolerance=1e-5):
    np.testing.assert_allclose(
        np.asarray(got, "f8"), np.asarray(want, "f8"), rtol=tolerance, atol=tolerance
    )


def loop_of_kernels(x):
    y = jax.lax.fori_loop(0, 3, lambda k, y: jax.nn.softmax(y @ y.T, -1) * (k + 1.0), x)
    return jnp.sort(y, -1), y.sum(), jnp.cumsum(y, 0)


def model(x, w, v):
    h = jax.nn.gelu(x @ w)
    return ((jax.nn.softmax(h @ v, -1) - 0.5) ** 2).mean()


@pytest.mark.parametrize(
    "function",
    [
        loop_of_kernels,
        lambda x: jax.lax.while_loop(
            lambda c: c[1] < 50, lambda c: (c[0] * 1.5 + 1, c[0].sum()), (x * 0, x[0, 0] * 0)
        )[0],
        lambda x: jax.lax.cond(x.sum() > 0, lambda: jnp.sort(x), lambda: x @ x),
        lambda x: jax.lax.scan(lambda c, r: (c * 0.5 + r, c.sum()), x[0], x),
        lambda x: (x[:0] + 1, x[:1, :1] * 2, x.T[::2] + 0),
        lambda x: jnp.zeros(7).at[jnp.clip(x * 3, 0, 6).astype(int)].add(x),
        lambda x: jnp.linalg.inv(x @ x.T + 20 * jnp.eye(24)) @ x,
    ],
    ids=["loop", "while", "cond", "scan", "small", "scatter", "left to XLA"],
)
def test_whole_programs(function):
    x = normal(24, 24)
    want = jax.jit(function)(x)
    got = pbkern.jit(function, compile_options=GPU)(gpu_array(x))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert g.dtype == w.dtype
        assert next(iter(g.devices())).platform in ("gpu", "cuda")
        close(g, w, 1e-4)


def test_gradient_vmap_and_donation():
    x, w, v = normal(33, 40), normal(40, 70), normal(70, 9)
    gradient = jax.grad(model, (1, 2))
    fast = pbkern.jit(jax.grad(pbkern.jit(model, compile_options=GPU), (1, 2)), compile_options=GPU)
    for g, want in zip(fast(*map(gpu_array, (x, w, v))), gradient(x, w, v)):
        close(g, want, 1e-5)
    mapped = jax.vmap(pbkern.jit(lambda a: jnp.cumsum(a) * 2, compile_options=GPU))
    close(mapped(gpu_array(x)), np.cumsum(x, -1) * 2, 1e-4)
    step = pbkern.jit(lambda a: a * 2 + 1, donate_argnums=0, compile_options=GPU)
    held = gpu_array(normal(1000))
    before = np.asarray(held)
    close(step(held), before * 2 + 1)
    assert held.is_deleted()


def test_a_kernel_of_the_user_on_cuda_arrays():
    rows = pbkern.BlockSpec((4, 32), lambda i, j: (i, j))

    @pbkern.kernel(
        grid=(3, 3), in_specs=[rows], out_specs=rows, out_shape=jax.ShapeDtypeStruct((9, 77), "f4")
    )
    def kernel(x, o):
        o[...] = jnp.exp(x[...]) + 1

    x = normal(9, 77)
    close(kernel(gpu_array(x)), np.exp(x) + 1)


def test_more_than_two_to_the_31_elements():
    """Addresses have 64 bits."""
    size = (1 << 31) + 12345
    x = jax.jit(lambda: (jnp.arange(size, dtype=jnp.uint32) % 251).astype(jnp.uint8))()
    triple = pbkern.jit(lambda x: x * jnp.uint8(3) + jnp.uint8(1), compile_options=GPU)
    got = np.asarray(triple(gpu_array(x)))
    for start in (0, (1 << 31) - 7, size - 9):
        want = (np.arange(start, min(start + 9, size)) % 251).astype(np.uint8) * 3 + 1
        np.testing.assert_array_equal(got[start : start + 9], want.astype(np.uint8))


def test_threads_call_at_the_same_time():
    fast = pbkern.jit(lambda x: jax.nn.softmax(x * 2, -1).sum(0), compile_options=GPU)
    inputs = [normal(n, 100) for n in (3, 50, 700, 50) * 8]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda x: np.asarray(fast(gpu_array(x))), inputs))
    for x, got in zip(inputs, results):
        wide = x.astype("f8") * 2
        e = np.exp(wide - wide.max(-1, keepdims=True))
        close(got, (e / e.sum(-1, keepdims=True)).sum(0), 1e-4)


def test_a_check_raises_and_the_process_goes_on():
    @pbkern.kernel(
        grid=(1,), in_specs=[pbkern.BlockSpec((8,), lambda i: (i,))],
        out_specs=pbkern.BlockSpec((8,), lambda i: (i,)), out_shape=jax.ShapeDtypeStruct((8,), "f4"),
    )  # fmt: skip
    def kernel(x, o):
        pbkern.check(x[...].sum() > 0, "the sum is not positive")
        o[...] = x[...] * 2

    x = np.ones(8, "f4")
    with pytest.raises(Exception, match="the sum is not positive"):
        jax.block_until_ready(kernel(gpu_array(-x)))
    close(kernel(gpu_array(x)), x * 2)


class TestTorch:
    """Tensors of Torch on the device."""

    def setup_method(self):
        self.torch = pytest.importorskip("torch", minversion="2.13")

    def draw(self, *sizes):
        return self.torch.randn(*sizes, device="cuda")

    def test_a_model_and_its_gradients(self):
        torch = self.torch
        torch.manual_seed(0)
        torch.backends.cuda.matmul.allow_tf32 = False
        network = torch.nn.Sequential(
            torch.nn.Linear(12, 20), torch.nn.GELU(), torch.nn.Linear(20, 3), torch.nn.Softmax(-1)
        ).cuda()
        x, weights = self.draw(7, 12), self.draw(7, 3)
        fast = pbkern.polyblocks_jit_torch(network, compile_options=GPU)
        results = []
        for f in (fast, network):
            network.zero_grad()
            out = f(x)
            (out * weights).sum().backward()
            results.append([out.detach(), *(p.grad.clone() for p in network.parameters())])
        for got, want in zip(*results):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)

    def test_views_and_types(self):
        torch = self.torch
        f = lambda x: (x.T * 2).cumsum(0) + x[:, ::2].sum()
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32):
            x = (self.draw(30, 41) * 4).to(dtype)[1:]
            fast = pbkern.polyblocks_jit_torch(f, compile_options=GPU)
            torch.testing.assert_close(
                fast(x).double(), f(x.double()), rtol=3e-2 if dtype == torch.bfloat16 else 1e-4,
                atol=2 if dtype == torch.bfloat16 else 1e-2,
            )  # fmt: skip

    def test_the_current_stream(self):
        torch = self.torch
        fast = pbkern.polyblocks_jit_torch(lambda x: torch.sin(x) * 2, compile_options=GPU)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = self.draw(1 << 20)
            for _ in range(20):
                x = fast(x)
        stream.synchronize()
        y = x.clone()
        torch.testing.assert_close(fast(y), torch.sin(y) * 2, rtol=1e-5, atol=1e-6)

    def test_an_index_out_of_range(self):
        torch = self.torch
        fast = pbkern.polyblocks_jit_torch(
            lambda w, i: torch.nn.functional.embedding(i, w), compile_options=GPU
        )
        w = self.draw(10, 4)
        with pytest.raises(IndexError):
            fast(w, torch.tensor([1, 12], device="cuda"))
            torch.cuda.synchronize()
            fast(w, torch.tensor([1], device="cuda"))
        torch.testing.assert_close(fast(w, torch.tensor([3, 9], device="cuda")), w[[3, 9]])
