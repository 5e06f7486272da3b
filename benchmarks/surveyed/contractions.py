"""Products of matrices of many shapes, layouts and dtypes, with what comes before and after."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.matrix_products import last_layer_gradient
from benchmarks.products import ORIENTATIONS, Case

gelu, relu, silu = jax.nn.gelu, jax.nn.relu, jax.nn.silu


def einsum(text):
    return lambda *a: jnp.einsum(text, *a)


def product(m, k, n, dtype="f32"):
    return (lambda x, w: x @ w, f"{dtype}[{m},{k}]", f"{dtype}[{k},{n}]")


def oriented():
    """Square, deep, tall, thin and odd products of operands that are stored either way."""
    shapes = {"square": (640, 640, 640), "deep": (256, 9000, 192), "tall": (9000, 300, 64), "thin": (6, 2048, 3000),
              "odd": (131, 77, 1001)}  # fmt: skip
    found = {f"{kind}_{o}": Case(*shape, o) for kind, shape in shapes.items() for o in ORIENTATIONS}
    return {
        name: (c.function, *(f"f32[{rows},{columns}]" for rows, columns in c.shapes))
        for name, c in found.items()
    }


def int8(x, w):
    return lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)


def swiglu(x, wg, wu, wd):
    return (silu(x @ wg) * (x @ wu)) @ wd


def lora(x, w, a, b):
    return x @ w + (x @ a) @ b * 0.5


def norm_project(x, s, w):
    return (x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * s) @ w


def quantised(x, w, s):
    return (x @ w.astype(jnp.float32)) * s


def moe(x, gate, w):
    p = jax.nn.softmax(x @ gate)
    return jnp.einsum("te,tef->tf", p, relu(jnp.einsum("td,edf->tef", x, w)))


def distances(x, y):
    return jnp.sqrt(jnp.maximum((x * x).sum(1)[:, None] + (y * y).sum(1) - 2 * x @ y.T, 0))


def gram_centred(x):
    x = x - x.mean(0)
    return x.T @ x / (x.shape[0] - 1)


def mlp_loss(params, x, y):
    for w, b in params[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = params[-1]
    return ((x @ w + b - y) ** 2).mean()


def mlp_step(w1, b1, w2, b2, x, y):
    g = jax.grad(mlp_loss)([(w1, b1), (w2, b2)], x, y)
    return jax.tree.map(lambda p, d: p - 0.1 * d, [(w1, b1), (w2, b2)], g)


CASES = {
    **{
        f"square_{n}": product(n, n, n)
        for n in (32, 64, 100, 128, 200, 256, 384, 500, 768, 1000, 1500)
    },
    **{
        f"{m}x{k}x{n}": product(m, k, n)
        for m, k, n in (
            (1, 512, 512),
            (1, 4096, 4096),
            (4, 1024, 4096),
            (7, 300, 50),
            (16, 768, 3072),
            (32, 8192, 512),
            (64, 64, 4096),
            (100, 10000, 100),
            (1000, 17, 1000),
            (2000, 3, 2000),
            (10000, 64, 64),
            (50000, 20, 10),
            (3000, 3000, 8),
            (333, 777, 555),
            (128, 4096, 128),
            (2048, 32, 2048),
            (8192, 128, 10),
            (20, 20, 20000),
            (1025, 1025, 1025),
            (5, 5, 100000),
        )
    },
    **oriented(),
    "f64_256": product(256, 256, 256, "f64"),
    "f64_odd": product(301, 199, 403, "f64"),
    "bf16_512": product(512, 512, 512, "bf16"),
    "bf16_odd": product(301, 199, 403, "bf16"),
    "bf16_tall": product(4096, 64, 64, "bf16"),
    "f16_256": product(256, 256, 256, "f16"),
    "bf16_f32": (
        lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.float32),
        "bf16[512,768]",
        "bf16[768,512]",
    ),
    "int8_512": (int8, "i8[512,512]", "i8[512,512]"),
    "int8_odd": (int8, "i8[301,199]", "i8[199,403]"),
    "i32_200": (lambda x, w: x @ w, "i32[200,200]", "i32[200,200]"),
    "c64_200": (lambda x, w: x @ w, "c64[200,200]", "c64[200,200]"),
    "vector_matrix": (lambda x, w: x @ w, "f32[3000]", "f32[3000,2000]"),
    "matrix_vector": (lambda x, w: x @ w, "f32[2000,3000]", "f32[3000]"),
    "transposed_left": (lambda x, w: x.T @ w, "f32[500,300]", "f32[500,400]"),
    "transposed_right": (lambda x, w: x @ w.T, "f32[300,500]", "f32[400,500]"),
    "transposed_both": (lambda x, w: x.T @ w.T, "f32[500,300]", "f32[400,500]"),
    "transposed_result": (lambda x, w: (x @ w).T, "f32[300,500]", "f32[500,400]"),
    "transposed_narrow": (lambda x, w: x @ w.T, "f32[500,500]", "f32[32,500]"),
    "gram": (lambda x: x.T @ x, "f32[5000,100]"),
    "gram_centred": (gram_centred, "f32[3000,150]"),
    "outer": (jnp.outer, "f32[2000]", "f32[1500]"),
    "inner": (jnp.dot, "f32[1000000]", "f32[1000000]"),
    "batched": (lambda x, w: x @ w, "f32[64,48,48]", "f32[64,48,48]"),
    "batched_tiny": (lambda x, w: x @ w, "f32[5000,4,4]", "f32[5000,4,4]"),
    "batched_3": (lambda x, w: x @ w, "f32[20000,3,3]", "f32[20000,3,3]"),
    "batched_vectors": (einsum("bij,bj->bi"), "f32[2000,16,16]", "f32[2000,16]"),
    "batched_shared": (lambda x, w: x @ w, "f32[16,100,200]", "f32[200,150]"),
    "batched_f64": (lambda x, w: x @ w, "f64[100,16,16]", "f64[100,16,16]"),
    "bilinear": (einsum("bi,ijk,bj->bk"), "f32[64,32]", "f32[32,48,40]", "f32[64,48]"),
    "tucker": (einsum("abc,ai,bj,ck->ijk"), "f32[30,40,50]", "f32[30,8]", "f32[40,8]", "f32[50,8]"),
    "trace": (einsum("ij,ji->"), "f32[700,700]", "f32[700,700]"),
    "diagonal_turned": (einsum("ij,ji->i"), "f32[700,700]", "f32[700,700]"),
    "asymmetry": (lambda a: jnp.abs(a - a.T).max(), "f32[900,900]"),
    "short_rows_vector": (lambda x, v: x @ v, "f32[32000,16]", "f32[16]"),
    "diagonal": (einsum("ij,ij->i"), "f32[3000,300]", "f32[3000,300]"),
    "khatri_rao": (einsum("ik,jk->ijk"), "f32[100,30]", "f32[120,30]"),
    "tensor_4": (einsum("abcd,cdef->abef"), "f32[8,9,10,11]", "f32[10,11,12,13]"),
    "hadamard_sum": (einsum("bhqd,bhkd->bqk"), "f32[2,8,128,32]", "f32[2,8,128,32]"),
    "heads": (einsum("btd,dhk->bhtk"), "f32[4,128,256]", "f32[256,8,32]"),
    "heads_back": (einsum("bhtk,hkd->btd"), "f32[4,8,128,32]", "f32[8,32,256]"),
    "bias_relu": (lambda x, w, b: relu(x @ w + b), "f32[256,512]", "f32[512,1024]", "f32[1024]"),
    "bias_gelu": (lambda x, w, b: gelu(x @ w + b), "f32[128,768]", "f32[768,3072]", "f32[3072]"),
    "bias_softmax": (
        lambda x, w, b: jax.nn.softmax(x @ w + b),
        "f32[1000,64]",
        "f32[64,10]",
        "f32[10]",
    ),
    "gelu_before": (lambda x, w: gelu(x) @ w, "f32[512,512]", "f32[512,512]"),
    "residual": (lambda x, w: x + x @ w, "f32[512,512]", "f32[512,512]"),
    "swiglu": (swiglu, "f32[128,512]", "f32[512,1408]", "f32[512,1408]", "f32[1408,512]"),
    "lora": (lora, "f32[256,1024]", "f32[1024,1024]", "f32[1024,8]", "f32[8,1024]"),
    "norm_project": (norm_project, "f32[512,768]", "f32[768]", "f32[768,768]"),
    "quantised": (quantised, "f32[64,1024]", "i8[1024,1024]", "f32[1024]"),
    "quantised_one": (quantised, "f32[1,2048]", "i8[2048,2048]", "f32[2048]"),
    "moe": (moe, "f32[256,128]", "f32[128,8]", "f32[8,128,256]"),
    "distances": (distances, "f32[1000,32]", "f32[800,32]"),
    "nearest": (lambda x, y: jnp.argmin(distances(x, y), 1), "f32[2000,16]", "f32[100,16]"),
    "rbf": (lambda x, y: jnp.exp(-0.5 * distances(x, y) ** 2), "f32[1000,8]", "f32[1000,8]"),
    "rbf_apply": (
        lambda x, y, a: jnp.exp(-0.5 * distances(x, y) ** 2) @ a,
        "f32[2000,8]",
        "f32[1000,8]",
        "f32[1000]",
    ),
    "broadcast_distances": (
        lambda x, y: ((x[:, None] - y[None]) ** 2).sum(-1),
        "f32[500,24]",
        "f32[400,24]",
    ),
    "manhattan": (lambda x, y: jnp.abs(x[:, None] - y[None]).sum(-1), "f32[500,24]", "f32[400,24]"),
    "cosine": (
        lambda x, y: (
            (x / jnp.linalg.norm(x, axis=1, keepdims=True))
            @ (y / jnp.linalg.norm(y, axis=1, keepdims=True)).T
        ),
        "f32[500,128]",
        "f32[600,128]",
    ),
    "chain": (lambda a, b, c: a @ b @ c, "f32[200,300]", "f32[300,250]", "f32[250,100]"),
    "power": (lambda a: a @ a @ a @ a, "f32[128,128]"),
    "quadratic": (einsum("bi,ij,bj->b"), "f32[1000,64]", "f32[64,64]", "f32[1000,64]"),
    "mlp_3": (
        lambda x, a, b, c: relu(relu(x @ a) @ b) @ c,
        "f32[256,784]",
        "f32[784,256]",
        "f32[256,128]",
        "f32[128,10]",
    ),
    "mlp_step": (
        mlp_step,
        "f32[64,256]",
        "f32[256]",
        "f32[256,10]",
        "f32[10]",
        "f32[512,64]",
        "f32[512,10]",
    ),
    "gradient": (jax.grad(lambda w, x: (relu(x @ w) ** 2).sum()), "f32[300,200]", "f32[500,300]"),
    "jacobian": (jax.jacrev(lambda x, w: jnp.tanh(w @ x)), "f32[100]", "f32[80,100]"),
    "hessian": (jax.hessian(lambda x, a: (jnp.tanh(a @ x) ** 2).sum()), "f32[30]", "f32[50,30]"),
    "embedding_logits": (lambda x, e: (x @ e.T).max(-1), "f32[64,256]", "f32[8000,256]"),
    "logits_lse": (lambda x, e: jax.nn.logsumexp(x @ e.T, -1), "f32[128,128]", "f32[8000,128]"),
    "last_layer_gradient": (last_layer_gradient, "f32[100,96]", "f32[96,32000]", "i32[100]<32000"),
    "f64_left_transposed": (lambda x, w: x.T @ w, "f64[512,512]", "f64[512,384]"),
    "f64_deep": (lambda x, w: x.T @ w, "f64[9001,128]", "f64[9001,128]"),
    "bf16_left_transposed": (lambda x, w: x.T @ w, "bf16[512,512]", "bf16[512,384]"),
    "f16_deep": (lambda x, w: x @ w, "f16[128,9001]", "f16[9001,128]"),
    "logistic_gradient": (
        jax.grad(lambda w, x, y: jnp.logaddexp(0.0, -y * (x @ w)).mean()),
        "f32[50]",
        "f32[20000,50]",
        "f32[20000]",
    ),
    "power_iteration": (
        lambda a, v: lax.fori_loop(0, 20, lambda _, v: (w := a @ v) / jnp.linalg.norm(w), v),
        "f32[500,500]",
        "f32[500]",
    ),
    "recurrence": (
        lambda w, u, xs: lax.scan(
            lambda h, x: ((y := jnp.tanh(h @ w * 0.05 + x @ u)), y), jnp.zeros((16, 64)), xs
        )[1],
        "f32[64,64]",
        "f32[32,64]",
        "f32[50,16,32]",
    ),
    "kron": (jnp.kron, "f32[30,40]", "f32[20,25]"),
    "tril": (lambda a, b: jnp.tril(a) @ b, "f32[400,400]", "f32[400,100]"),
    "masked": (
        lambda a, m, b: jnp.where(m, a, 0.0) @ b,
        "f32[400,400]",
        "bool[400,400]",
        "f32[400,100]",
    ),
    "sum_after": (lambda a, b: (a @ b).sum(0), "f32[800,300]", "f32[300,500]"),
    "gathered": (lambda a, i, b: a[i] @ b, "f32[1000,64]", "i32[500]<1000", "f32[64,64]"),
    "spd_inverse_free": (
        lambda a, b: lax.fori_loop(0, 10, lambda _, x: x + 0.01 * (b - a @ x), b),
        "f32[300,300]",
        "f32[300,4]",
    ),
}
