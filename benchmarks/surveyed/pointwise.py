"""Elementwise chains, layouts, and optimisers."""

import jax
import jax.numpy as jnp
import numpy as np

N = "f32[2000000]"
UNARY = "exp log log1p expm1 tanh sin cos tan sqrt sinh cosh arcsinh arctan abs sign floor round square cbrt exp2 log2".split()
NN = "relu gelu silu softplus elu selu leaky_relu sigmoid hard_tanh relu6 log_sigmoid mish".split()


def adam(p, g, m, v):
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return p - 1e-3 * (m / 0.1) / (jnp.sqrt(v / 0.001) + 1e-8), m, v


def black_scholes(s, k, t):
    d1 = (jnp.log(s / k) + (0.03 + 0.02) * t) / (0.2 * jnp.sqrt(t))
    n = jax.scipy.stats.norm.cdf
    return s * n(d1) - k * jnp.exp(-0.03 * t) * n(d1 - 0.2 * jnp.sqrt(t))


def mandelbrot(x, y):
    def step(_, c):
        a, b, n = c
        a, b = a * a - b * b + x, 2 * a * b + y
        return a, b, n + (a * a + b * b < 4)

    return jax.lax.fori_loop(0, 20, step, (x * 0, y * 0, jnp.zeros(x.shape, jnp.int32)))[2]


def horner(x):
    y = jnp.zeros_like(x)
    for c in range(12):
        y = y * x + 1.0 / (c + 1)
    return y


def rgb_to_hsv(x):
    r, g, b = x[..., 0], x[..., 1], x[..., 2]
    hi, lo = jnp.maximum(r, jnp.maximum(g, b)), jnp.minimum(r, jnp.minimum(g, b))
    d = hi - lo + 1e-6
    h = jnp.where(hi == r, (g - b) / d, jnp.where(hi == g, 2 + (b - r) / d, 4 + (r - g) / d))
    return jnp.stack([h / 6 % 1, d / (hi + 1e-6), hi], -1)


def quaternion(p, q):
    a, b, c, d = (p[:, i] for i in range(4))
    e, f, g, h = (q[:, i] for i in range(4))
    return jnp.stack(
        [
            a * e - b * f - c * g - d * h,
            a * f + b * e + c * h - d * g,
            a * g - b * h + c * e + d * f,
            a * h + b * g - c * f + d * e,
        ],
        1,
    )


def fake_quantise(x):
    s = jnp.abs(x).max(-1, keepdims=True) / 127
    return jnp.clip(jnp.round(x / s), -127, 127).astype(jnp.int8), s


def haversine(a, b):
    la, lb = jnp.deg2rad(a), jnp.deg2rad(b)
    d = lb - la
    h = (
        jnp.sin(d[:, 0] / 2) ** 2
        + jnp.cos(la[:, 0]) * jnp.cos(lb[:, 0]) * jnp.sin(d[:, 1] / 2) ** 2
    )
    return 2 * 6371 * jnp.arcsin(jnp.sqrt(jnp.clip(h, 0, 1)))


CASES = {
    **{
        f: (getattr(jnp, f), N + (">0.1" if f in ("log", "log2", "sqrt", "log1p") else ""))
        for f in UNARY
    },
    **{f"nn_{f}": (getattr(jax.nn, f), N) for f in NN},
    "erf": (jax.lax.erf, N),
    "lgamma": (jax.lax.lgamma, "f32[300000]>0.1"),
    "digamma": (jax.lax.digamma, "f32[300000]>0.1"),
    "rsqrt": (jax.lax.rsqrt, N + ">0.1"),
    "exp_f64": (jnp.exp, "f64[500000]"),
    "tanh_f64": (jnp.tanh, "f64[500000]"),
    "sin_f64": (jnp.sin, "f64[500000]"),
    "log_f64": (jnp.log, "f64[500000]>0.1"),
    "exp_bf16": (jnp.exp, "bf16[2000000]"),
    "gelu_bf16": (jax.nn.gelu, "bf16[2000000]"),
    "gelu_f16": (jax.nn.gelu, "f16[1000000]"),
    "exp_c64": (jnp.exp, "c64[300000]"),
    "add": (jnp.add, N, N),
    "axpy": (lambda x, y: 2.5 * x + y, N, N),
    "multiply_4": (lambda a, b, c, d: a * b + c * d, N, N, N, N),
    "power": (jnp.power, N + ">0.1", N),
    "atan2": (jnp.arctan2, N, N),
    "hypot": (jnp.hypot, N, N),
    "mod": (lambda x: x % 0.7, N),
    "floor_divide": (lambda x, y: x // (y + 1), "i32[1000000]", "i32[1000000]"),
    "logaddexp": (jnp.logaddexp, N, N),
    "where": (lambda x, y: jnp.where(x > 0, x, y), N, N),
    "clip": (lambda x: jnp.clip(x, -1, 1), N),
    "cast": (lambda x: x.astype(jnp.bfloat16), N),
    "cast_u8": (lambda x: (x * 255).astype(jnp.uint8), "f32[2000000]>0"),
    "bits": (lambda x: (x ^ (x >> 13)) * 5 & 0xFFFF, "u32[2000000]"),
    "popcount": (jax.lax.population_count, "u32[2000000]"),
    "ten_operations": (
        lambda x, y: jnp.tanh(x * y + 1) * jnp.exp(-x * x) + jnp.sin(y) / (1 + y * y) - jnp.abs(x),
        N,
        N,
    ),
    "polynomial": (lambda x: ((x * 0.3 + 0.2) * x - 0.7) * x + 1.1, N),
    "horner_12": (horner, N),
    "power_int": (lambda x: x**7 + x**3, N),
    "sqrt_power": (lambda x: x**1.5, N + ">0.1"),
    "adam": (adam, N, N, N, N + ">0.1"),
    "sgd_momentum": (lambda p, g, m: ((n := 0.9 * m + g), p - 0.01 * n), N, N, N),
    "lion": (lambda p, g, m: p - 1e-3 * jnp.sign(0.9 * m + 0.1 * g), N, N, N),
    "adam_small": (adam, "f32[300]", "f32[300]", "f32[300]", "f32[300]>0.1"),
    "weight_decay": (lambda p, g: p * 0.99 - 0.1 * g, N, N),
    "black_scholes": (black_scholes, "f32[1000000]>1", "f32[1000000]>1", "f32[1000000]>0.1"),
    "mandelbrot": (mandelbrot, "f32[500,500]", "f32[500,500]"),
    "rgb_to_hsv": (rgb_to_hsv, "f32[500,500,3]>0"),
    "quaternion": (quaternion, "f32[200000,4]", "f32[200000,4]"),
    "fake_quantise": (fake_quantise, "f32[2000,1000]"),
    "haversine": (haversine, "f32[200000,2]", "f32[200000,2]"),
    "normal_pdf": (lambda x: jnp.exp(-0.5 * x * x) * 0.3989423, N),
    "logit": (lambda x: jnp.log(x) - jnp.log1p(-x), "f32[1000000]"),
    "log_exp": (lambda x: jnp.log(jnp.exp(x)), N),
    "tiny": (lambda x: x * 2 + 1, "f32[10]"),
    "scalar": (lambda x: jnp.sin(x) + 1, "f32[]"),
    "small_2d": (lambda x, y: x * y + x, "f32[30,30]", "f32[30,30]"),
    "one": (jnp.exp, "f32[1]"),
    "transpose": (lambda x: x.T, "f32[2000,1500]"),
    "transpose_add": (lambda x: x + x.T, "f32[1500,1500]"),
    "transpose_3d": (lambda x: x.transpose(2, 0, 1), "f32[100,200,150]"),
    "transpose_scale": (lambda x: (x * 2).T, "f32[1000,1000]"),
    "swap_heads": (lambda x: x.reshape(4, 256, 8, 64).transpose(0, 2, 1, 3), "f32[4,256,512]"),
    "nchw_to_nhwc": (lambda x: x.transpose(0, 2, 3, 1), "f32[8,64,56,56]"),
    "transpose_u8": (lambda x: x.T, "u8[1000,1000]"),
    "transpose_f64": (lambda x: x.T, "f64[1000,1000]"),
    "rev": (lambda x: x[::-1], N),
    "rev_2d": (lambda x: x[:, ::-1], "f32[1000,1000]"),
    "roll": (lambda x: jnp.roll(x, 100), N),
    "concatenate": (lambda x, y: jnp.concatenate([x, y], 1), "f32[1000,500]", "f32[1000,700]"),
    "stack": (lambda x, y: jnp.stack([x, y], -1), "f32[500000]", "f32[500000]"),
    "split_halves": (lambda x: jax.nn.silu(x[:, :512]) * x[:, 512:], "f32[2000,1024]"),
    "pad": (lambda x: jnp.pad(x, ((3, 4), (5, 6))), "f32[1000,1000]"),
    "tile": (lambda x: jnp.tile(x, (3, 4)), "f32[300,300]"),
    "repeat": (lambda x: jnp.repeat(x, 3, 1), "f32[500,500]"),
    "broadcast": (lambda x, y: x[:, None] + y[None], "f32[1500]", "f32[1500]"),
    "outer_exp": (lambda x, y: jnp.exp(-((x[:, None] - y[None]) ** 2)), "f32[1000]", "f32[1000]"),
    "strided": (lambda x: x[::3] * 2, N),
    "even_odd": (lambda x: x[0::2] + x[1::2], N),
    "diff": (jnp.diff, N),
    "arange": (lambda x: x + jnp.arange(x.shape[0]) * 0.1, N),
    "linspace": (lambda x: x * jnp.linspace(0, 1, x.shape[1]), "f32[1000,1000]"),
    "positional": (
        lambda x: (
            x
            + jnp.sin(
                jnp.arange(x.shape[0])[:, None] / 10000 ** (jnp.arange(x.shape[1]) / x.shape[1])
            )
        ),
        "f32[1024,512]",
    ),
    "dropout": (
        lambda x, k: jnp.where(
            jax.random.bernoulli(jax.random.key(k[0]), 0.9, x.shape), x / 0.9, 0
        ),
        "f32[1000,500]",
        "i32[1]<5",
    ),
    "uniform": (lambda k: jax.random.uniform(jax.random.key(k[0]), (500000,)), "i32[1]<5"),
    "normal": (lambda k: jax.random.normal(jax.random.key(k[0]), (500000,)), "i32[1]<5"),
    "tril": (jnp.tril, "f32[1500,1500]"),
    "eye_add": (lambda x: x + 0.1 * jnp.eye(x.shape[0]), "f32[1500,1500]"),
    "isnan": (lambda x: jnp.nan_to_num(x), N),
    "bias_gradient": (
        jax.grad(lambda b, x: (jax.nn.gelu(x + b) ** 2).sum()),
        "f32[512]",
        "f32[2000,512]",
    ),
    "gelu_gradient": (jax.grad(lambda x: jax.nn.gelu(x).sum()), N),
    "tanh_gradient": (jax.grad(lambda x: (jnp.tanh(x) ** 2).sum()), N),
    "softplus_gradient": (jax.grad(lambda x: jax.nn.softplus(x).sum()), N),
    "complex_multiply": (lambda x, y: x * y, "c64[500000]", "c64[500000]"),
    "complex_abs": (jnp.abs, "c64[500000]"),
    "select_n": (
        lambda i, a, b, c: jnp.choose(i, [a, b, c], mode="clip"),
        "i32[500000]<3",
        *("f32[500000]",) * 3,
    ),
    "choose_5": (
        lambda i, *a: jnp.choose(i, list(a), mode="clip"),
        "i32[200000]<5",
        *("f32[200000]",) * 5,
    ),
    "one_of_two": (lambda i, a, b: jnp.where(i[0] > 0, a, b), "i32[1]<2", N, N),
    "one_of_four": (lambda i, *a: jnp.stack(a)[i[0]], "i32[1]<4", *(N,) * 4),
    "poisson": (
        lambda k, r: (k * jnp.log(r) - r - jax.lax.lgamma(k + 1)).sum(),
        "f32[500000]>0.1",
        "f32[500000]>0.1",
    ),
    "flip_u8": (lambda x: x[:, :, ::-1], "u8[8,256,256,3]"),
    "piecewise": (lambda x: jnp.select([x < -1, x < 0, x < 1], [-x, x * x, jnp.sin(x)], 1.0), N),
    "bool_logic": (lambda x, y: ((x > 0) & (y > 0)) | (x + y > 2), N, N),
    "int8_add": (lambda x, y: x + y, "i8[3000000]", "i8[3000000]"),
    "u8_blend": (
        lambda x, y: ((x.astype(jnp.uint16) * 3 + y.astype(jnp.uint16)) >> 2).astype(jnp.uint8),
        "u8[3000000]",
        "u8[3000000]",
    ),
    "i64_hash": (lambda x: (x * 2654435761) >> 7, "i64[1000000]"),
    "constant_table": (lambda x: x * np.hanning(1000).astype(np.float32), "f32[1000,1000]"),
    "dus": (
        lambda x, y: jax.lax.dynamic_update_slice(x, y, (10, 20)),
        "f32[1000,1000]",
        "f32[100,100]",
    ),
    "at_set": (lambda x: x.at[1:-1, 1:-1].set(0), "f32[1000,1000]"),
    "at_add_row": (lambda x, y: x.at[3].add(y), "f32[1000,1000]", "f32[1000]"),
}
