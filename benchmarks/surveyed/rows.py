"""Reductions, normalisations and losses over rows and columns."""

import jax
import jax.numpy as jnp
from jax import lax

softmax, log_softmax, lse = jax.nn.softmax, jax.nn.log_softmax, jax.nn.logsumexp


def layer_norm(x, g, b):
    m = x.mean(-1, keepdims=True)
    v = ((x - m) ** 2).mean(-1, keepdims=True)
    return (x - m) * lax.rsqrt(v + 1e-5) * g + b


def rms_norm(x, g):
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g


def group_norm(x, g, b):
    y = x.reshape(*x.shape[:-1], 8, -1)
    y = (y - y.mean((1, 2, 4), keepdims=True)) * lax.rsqrt(y.var((1, 2, 4), keepdims=True) + 1e-5)
    return y.reshape(x.shape) * g + b


def batch_norm(x, g, b):
    return (x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-5) * g + b


def instance_norm(x):
    return (x - x.mean((1, 2), keepdims=True)) / jnp.sqrt(x.var((1, 2), keepdims=True) + 1e-5)


def cross_entropy(x, y):
    return -jnp.take_along_axis(log_softmax(x), y[:, None], 1).mean()


def one_hot_entropy(x, y):
    return -(jax.nn.one_hot(y, x.shape[1]) * log_softmax(x)).sum(-1).mean()


def smoothed(x, y):
    t = jax.nn.one_hot(y, x.shape[1]) * 0.9 + 0.1 / x.shape[1]
    return -(t * log_softmax(x)).sum(-1).mean()


def z_loss(x, y):
    z = lse(x, -1)
    return (z - jnp.take_along_axis(x, y[:, None], 1)[:, 0]).mean() + 1e-4 * (z**2).mean()


def accuracy(x, y):
    return (x.argmax(1) == y).mean()


def kl(p, q):
    return (softmax(p) * (log_softmax(p) - log_softmax(q))).sum(-1).mean()


def contrastive(x, y):
    x, y = (a / jnp.linalg.norm(a, axis=1, keepdims=True) for a in (x, y))
    s = x @ y.T / 0.07
    return (lse(s, 1) + lse(s, 0) - 2 * jnp.diagonal(s)).mean()


def focal(x, y):
    p = jax.nn.sigmoid(x)
    t = jnp.where(y > 0, p, 1 - p)
    return (-((1 - t) ** 2) * jnp.log(t + 1e-6)).mean()


def moments(x):
    c = x - x.mean(0)
    s = jnp.sqrt((c**2).mean(0))
    return x.mean(0), s, (c**3).mean(0) / s**3, (c**4).mean(0) / s**4


def entropy(x):
    p = softmax(x)
    return -(p * jnp.log(p + 1e-9)).sum(-1)


def sparsemax_like(x):
    return jnp.maximum(x - x.max(-1, keepdims=True) + 1, 0)


def correlation(x, y):
    x, y = x - x.mean(0), y - y.mean(0)
    return (x * y).sum(0) / jnp.sqrt((x * x).sum(0) * (y * y).sum(0))


def gradient(f, n=1):
    return jax.grad(lambda *a: (f(*a) ** 2).sum(), argnums=tuple(range(n)))


CASES = {
    **{
        f"softmax_{m}x{n}": (softmax, f"f32[{m},{n}]")
        for m, n in (
            (1, 100000),
            (100, 1000),
            (1000, 10),
            (5000, 33),
            (10000, 128),
            (4096, 4096),
            (3, 7),
            (64, 50257),
            (777, 999),
        )
    },
    "softmax_axis_0": (lambda x: softmax(x, 0), "f32[1000,1000]"),
    "softmax_middle": (lambda x: softmax(x, 1), "f32[50,100,60]"),
    "softmax_bf16": (softmax, "bf16[1000,1000]"),
    "softmax_f64": (softmax, "f64[500,1000]"),
    "softmax_f16": (softmax, "f16[500,1000]"),
    "softmax_4d": (softmax, "f32[4,8,128,128]"),
    "softmax_temperature": (lambda x: softmax(x / 0.7), "f32[1000,512]"),
    "softmax_masked": (
        lambda x, m: softmax(jnp.where(m, x, -jnp.inf)),
        "f32[1000,500]",
        "bool[1000,500]",
    ),
    "log_softmax": (log_softmax, "f32[2000,1000]"),
    "lse": (lambda x: lse(x, 1), "f32[3000,2000]"),
    "lse_0": (lambda x: lse(x, 0), "f32[2000,1000]"),
    "lse_all": (lse, "f32[3000,1000]"),
    "softmax_gradient": (gradient(softmax), "f32[1000,1000]"),
    **{
        f"layer_norm_{m}x{n}": (layer_norm, f"f32[{m},{n}]", f"f32[{n}]", f"f32[{n}]")
        for m, n in (
            (4096, 1024),
            (512, 768),
            (10000, 64),
            (100, 10000),
            (3001, 300),
            (50000, 16),
            (8, 512),
        )
    },
    "layer_norm_bf16": (layer_norm, "bf16[2048,1024]", "bf16[1024]", "bf16[1024]"),
    "layer_norm_3d": (layer_norm, "f32[8,128,512]", "f32[512]", "f32[512]"),
    "layer_norm_gradient": (gradient(layer_norm, 3), "f32[1000,512]", "f32[512]", "f32[512]"),
    "rms_norm": (rms_norm, "f32[2048,2048]", "f32[2048]"),
    "rms_norm_odd": (rms_norm, "f32[1001,333]", "f32[333]"),
    "rms_norm_gradient": (gradient(rms_norm, 2), "f32[1000,512]", "f32[512]"),
    "rms_norm_residual": (
        lambda x, y, g: ((z := x + y), rms_norm(z, g)),
        "f32[2048,1024]",
        "f32[2048,1024]",
        "f32[1024]",
    ),
    "group_norm": (group_norm, "f32[4,32,32,64]", "f32[64]", "f32[64]"),
    "batch_norm": (batch_norm, "f32[10000,128]", "f32[128]", "f32[128]"),
    "batch_norm_gradient": (
        gradient(lambda *a: jnp.tanh(batch_norm(*a)), 3),
        "f32[4000,64]",
        "f32[64]",
        "f32[64]",
    ),
    "instance_norm": (instance_norm, "f32[8,56,56,32]"),
    "standardise": (lambda x: (x - x.mean()) / x.std(), "f32[2000,1000]"),
    "standardise_0": (lambda x: (x - x.mean(0)) / x.std(0), "f32[20000,30]"),
    "l2_normalise": (lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True), "f32[5000,256]"),
    "min_max": (lambda x: (x - x.min(0)) / (x.max(0) - x.min(0)), "f32[10000,50]"),
    "cross_entropy_10": (cross_entropy, "f32[10000,10]", "i32[10000]<10"),
    "cross_entropy_1000": (cross_entropy, "f32[2048,1000]", "i32[2048]<1000"),
    "cross_entropy_32000": (cross_entropy, "f32[512,32000]", "i32[512]<32000"),
    "cross_entropy_odd": (cross_entropy, "f32[999,12345]", "i32[999]<12345"),
    "cross_entropy_bf16": (cross_entropy, "bf16[1024,8000]", "i32[1024]<8000"),
    "cross_entropy_gradient": (jax.grad(cross_entropy), "f32[1024,4000]", "i32[1024]<4000"),
    "cross_entropy_value_gradient": (
        jax.value_and_grad(cross_entropy),
        "f32[256,10000]",
        "i32[256]<10000",
    ),
    "one_hot_entropy": (one_hot_entropy, "f32[2048,1000]", "i32[2048]<1000"),
    "smoothed": (smoothed, "f32[2048,1000]", "i32[2048]<1000"),
    "z_loss": (z_loss, "f32[1024,8000]", "i32[1024]<8000"),
    "accuracy": (accuracy, "f32[4096,1000]", "i32[4096]<1000"),
    "kl": (kl, "f32[1000,1000]", "f32[1000,1000]"),
    "contrastive": (contrastive, "f32[512,128]", "f32[512,128]"),
    "focal": (focal, "f32[1000000]", "i32[1000000]<2"),
    "moments": (moments, "f32[20000,40]"),
    "entropy": (entropy, "f32[2000,1000]"),
    "sparsemax_like": (sparsemax_like, "f32[2000,1000]"),
    "correlation": (correlation, "f32[20000,40]", "f32[20000,40]"),
    "mse": (lambda x, y: ((x - y) ** 2).mean(), "f32[2000000]", "f32[2000000]"),
    "huber": (
        lambda x, y: jnp.where(jnp.abs(x - y) < 1, 0.5 * (x - y) ** 2, jnp.abs(x - y) - 0.5).mean(),
        "f32[1000000]",
        "f32[1000000]",
    ),
    "bce": (
        lambda x, y: (jnp.maximum(x, 0) - x * y + jnp.log1p(jnp.exp(-jnp.abs(x)))).mean(),
        "f32[1000000]",
        "f32[1000000]",
    ),
    "hinge": (lambda x, y: jnp.maximum(0, 1 - x * y).mean(), "f32[1000000]", "f32[1000000]"),
    "gaussian_nll": (
        lambda m, s, x: (0.5 * ((x - m) / jnp.exp(s)) ** 2 + s).mean(),
        "f32[1000000]",
        "f32[1000000]",
        "f32[1000000]",
    ),
    **{
        f"sum_{'_'.join(map(str, s))}_{a}": (
            lambda x, a=a: x.sum(a),
            f"f32[{','.join(map(str, s))}]",
        )
        for s, a in (
            ((5000000,), 0),
            ((2000, 2000), 0),
            ((2000, 2000), 1),
            ((100000, 5), 0),
            ((100000, 5), 1),
            ((5, 100000), 0),
            ((100, 100, 100), 1),
            ((40, 50, 60, 10), (1, 3)),
            ((300, 7, 301), (0, 2)),
            ((1000,), 0),
            ((20, 20), (0, 1)),
        )
    },
    "max_0": (lambda x: x.max(0), "f32[3000,1000]"),
    "max_short": (lambda x: x.max(1), "f32[50000,20]"),
    "min_all": (jnp.min, "f32[3000000]"),
    "prod": (lambda x: x.prod(1), "f32[10000,20]"),
    "any": (lambda x: (x > 3).any(1), "f32[3000,1000]"),
    "count": (lambda x: (x > 0).sum(), "f32[3000000]"),
    "argmax": (lambda x: x.argmax(1), "f32[2000,2000]"),
    "argmax_0": (lambda x: x.argmax(0), "f32[2000,1000]"),
    "argmin_all": (jnp.argmin, "f32[3000000]"),
    "argmin_ints": (lambda x: x.argmin(0), "i32[100000,2]<1000"),
    "max_and_argmax": (lambda x: (x.max(1), x.argmax(1)), "f32[2000,1000]"),
    "sum_int": (jnp.sum, "i32[3000000]"),
    "sum_u8": (lambda x: x.astype(jnp.int32).sum(), "u8[3000000]<200"),
    "sum_bf16": (lambda x: x.sum(1), "bf16[2000,2000]"),
    "mean_f16": (jnp.mean, "f16[2000000]"),
    "sum_f64": (jnp.sum, "f64[2000000]"),
    "sum_c64": (jnp.sum, "c64[1000000]"),
    "mean_var": (lambda x: (x.mean(1), x.var(1)), "f32[4000,1000]"),
    "var_0": (lambda x: x.var(0), "f32[5000,400]"),
    "std_all": (jnp.std, "f32[3000000]"),
    "norms": (
        lambda x: (jnp.abs(x).sum(1), jnp.sqrt((x * x).sum(1)), jnp.abs(x).max(1)),
        "f32[3000,1000]",
    ),
    "global_norm": (
        lambda *a: jnp.sqrt(sum((x * x).sum() for x in a)),
        "f32[1000,1000]",
        "f32[1000]",
        "f32[1000,500]",
        "f32[300,700]",
    ),
    "weighted_mean": (
        lambda x, w: (x * w[:, None]).sum(0) / w.sum(),
        "f32[20000,30]",
        "f32[20000]>0.1",
    ),
    "nanmean": (jnp.nanmean, "f32[2000000]"),
    "trace": (jnp.trace, "f32[2000,2000]"),
    "frobenius": (jnp.linalg.norm, "f32[2000,2000]"),
    "top_2_gap": (lambda x: (lambda t: t[:, 0] - t[:, 1])(lax.top_k(x, 2)[0]), "f32[2000,500]"),
}
