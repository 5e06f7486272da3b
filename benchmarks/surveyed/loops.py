"""Stencils in time, solvers, simulations, and whole small models."""

import jax
import jax.numpy as jnp
from jax import lax

from . import attention, rows


def repeat(n, f):
    return lambda *a: lax.fori_loop(0, n, lambda _, c: f(*c), a)


def jacobi(u):
    return (u.at[1:-1, 1:-1].set((u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]) / 4),)


def heat_1d(u):
    return (jnp.concatenate([u[:1], u[1:-1] + 0.1 * (u[2:] - 2 * u[1:-1] + u[:-2]), u[-1:]]),)


def heat_3d(u):
    c = u[1:-1, 1:-1, 1:-1]
    lap = (
        u[2:, 1:-1, 1:-1]
        + u[:-2, 1:-1, 1:-1]
        + u[1:-1, 2:, 1:-1]
        + u[1:-1, :-2, 1:-1]
        + u[1:-1, 1:-1, 2:]
        + u[1:-1, 1:-1, :-2]
        - 6 * c
    )
    return (u.at[1:-1, 1:-1, 1:-1].add(0.1 * lap),)


def periodic(u):
    return (u + 0.1 * (sum(jnp.roll(u, s, a) for s in (1, -1) for a in (0, 1)) - 4 * u),)


def wave(u, v):
    lap = sum(jnp.roll(u, s, a) for s in (1, -1) for a in (0, 1)) - 4 * u
    return 2 * u - v + 0.1 * lap, u


def gray_scott(u, v):
    def lap(a):
        return sum(jnp.roll(a, s, x) for s in (1, -1) for x in (0, 1)) - 4 * a

    r = u * v * v
    return u + 0.16 * lap(u) - r + 0.035 * (1 - u), v + 0.08 * lap(v) + r - 0.1 * v


def life(b):
    n = sum(jnp.roll(jnp.roll(b, i, 0), j, 1) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j)
    return (((n == 3) | ((b == 1) & (n == 2))).astype(b.dtype),)


def blur_9(u):
    p = jnp.pad(u, 1)
    return (sum(p[i : i + u.shape[0], j : j + u.shape[1]] for i in range(3) for j in range(3)) / 9,)


def variable_heat(u, k):
    p, c = jnp.pad(u, 1, mode="edge"), u
    return u + 0.1 * k * (p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:] - 4 * c), k


def advect(u):
    return (u - 0.3 * jnp.where(u > 0, u * (u - jnp.roll(u, 1)), u * (jnp.roll(u, -1) - u)),)


def residual_norm(u):
    v = lax.fori_loop(0, 20, lambda _, u: jacobi(u)[0], u)
    return v, jnp.abs(v - u).max()


def gradient_descent(steps):
    def f(x, d):
        return lax.fori_loop(
            0, steps, lambda _, w: w - 0.1 / x.shape[0] * (x.T @ (x @ w - d)), jnp.zeros(x.shape[1])
        )

    return f


def logistic_descent(x, y):
    def step(_, w):
        return w + 0.1 / x.shape[0] * (x.T @ (y - jax.nn.sigmoid(x @ w)))

    return lax.fori_loop(0, 20, step, jnp.zeros(x.shape[1]))


def ridge_momentum(x, d):
    def step(_, c):
        w, m = c
        m = 0.9 * m + x.T @ (x @ w - d) / x.shape[0] + 1e-3 * w
        return w - 0.1 * m, m

    return lax.fori_loop(0, 20, step, (jnp.zeros(x.shape[1]),) * 2)[0]


def conjugate_gradient(a, b):
    def step(_, c):
        x, r, p, s = c
        q = a @ p
        t = s / (p @ q)
        x, r = x + t * p, r - t * q
        n = r @ r
        return x, r, r + n / s * p, n

    a = a @ a.T / a.shape[0] + jnp.eye(a.shape[0])
    return lax.fori_loop(0, 10, step, (b * 0, b, b, b @ b))[0]


def n_body(x, v):
    d = x[None] - x[:, None]
    a = (d / ((d * d).sum(-1, keepdims=True) + 0.01) ** 1.5).sum(1)
    return x + 0.01 * v, v + 0.01 * a


def lorenz(p):
    def step(c, _):
        x, y, z = c
        return (
            x + 0.01 * 10 * (y - x),
            y + 0.01 * (x * (28 - z) - y),
            z + 0.01 * (x * y - 8 / 3 * z),
        ), None

    return lax.scan(step, (p[0], p[1], p[2]), None, length=200)[0]


def lstm(x, w, u):
    def step(c, a):
        h, s = c
        i, f, g, o = jnp.split(a @ w + h @ u, 4, -1)
        s = jax.nn.sigmoid(f) * s + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(s)
        return (h, s), h

    z = jnp.zeros((x.shape[1], u.shape[0]))
    return lax.scan(step, (z, z), x)[1]


def ssm(x, a, b, c):
    def step(h, t):
        h = jnp.exp(-jnp.abs(a)) * h + b * t[:, None]
        return h, (h * c).sum(-1)

    return lax.scan(step, jnp.zeros((x.shape[1], a.shape[-1])), x)[1]


def gpt_block(x, g1, b1, wq, wk, wv, wo, g2, b2, w1, w2):
    h = rows.layer_norm(x, g1, b1)
    q, k, v = ((h @ w).reshape(x.shape[0], 4, -1).transpose(1, 0, 2) for w in (wq, wk, wv))
    x = x + attention.causal(q, k, v).transpose(1, 0, 2).reshape(x.shape) @ wo
    return x + jax.nn.gelu(rows.layer_norm(x, g2, b2) @ w1) @ w2


def llama_block(x, g1, wq, wk, wv, wo, g2, wg, wu, wd):
    h = rows.rms_norm(x, g1)
    q, k, v = ((h @ w).reshape(x.shape[0], -1, 32).transpose(1, 0, 2) for w in (wq, wk, wv))
    q, k = attention.rotary(q), attention.rotary(k)
    k, v = (jnp.repeat(a, q.shape[0] // a.shape[0], 0) for a in (k, v))
    x = x + attention.causal(q, k, v).transpose(1, 0, 2).reshape(x.shape[0], -1) @ wo
    h = rows.rms_norm(x, g2)
    return x + (jax.nn.silu(h @ wg) * (h @ wu)) @ wd


def vit_pool(x, w, g, b, c):
    y = rows.layer_norm(x @ w, g, b).mean(1)
    return y @ c


def vae_loss(x, w1, wm, ws, w2):
    h = jax.nn.relu(x @ w1)
    m, s = h @ wm, h @ ws
    y = jax.nn.sigmoid((m + jnp.exp(0.5 * s) * 0.3) @ w2)
    return ((x - y) ** 2).sum(-1).mean() - 0.5 * (1 + s - m**2 - jnp.exp(s)).sum(-1).mean()


D = 128
BLOCK = (
    f"f32[{D}]",
    f"f32[{D}]",
    *(f"f32[{D},{D}]",) * 4,
    f"f32[{D}]",
    f"f32[{D}]",
    f"f32[{D},512]",
    f"f32[512,{D}]",
)
LLAMA = (
    f"f32[{D}]",
    f"f32[{D},{D}]",
    f"f32[{D},64]",
    f"f32[{D},64]",
    f"f32[{D},{D}]",
    f"f32[{D}]",
    *(f"f32[{D},344]",) * 2,
    f"f32[344,{D}]",
)
CASES = {
    "jacobi_1000": (repeat(20, jacobi), "f32[1000,1000]"),
    "jacobi_small": (repeat(100, jacobi), "f32[128,128]"),
    "jacobi_odd": (repeat(33, jacobi), "f32[301,1777]"),
    "jacobi_tiny": (repeat(50, jacobi), "f32[20,20]"),
    "jacobi_f64": (repeat(20, jacobi), "f64[500,500]"),
    "jacobi_3000": (repeat(10, jacobi), "f32[3000,3000]"),
    "heat_1d": (repeat(100, heat_1d), "f32[100000]"),
    "heat_1d_small": (repeat(100, heat_1d), "f32[1000]"),
    "heat_3d": (repeat(10, heat_3d), "f32[100,100,100]"),
    "heat_3d_large": (repeat(10, heat_3d), "f32[200,200,200]"),
    "periodic": (repeat(20, periodic), "f32[1000,1000]"),
    "wave": (repeat(20, wave), "f32[700,700]", "f32[700,700]"),
    "gray_scott": (repeat(20, gray_scott), "f32[500,500]", "f32[500,500]"),
    "life": (repeat(20, life), "i32[500,500]<2"),
    "blur_9": (repeat(10, blur_9), "f32[800,800]"),
    "variable_heat": (repeat(10, variable_heat), "f32[800,800]", "f32[800,800]"),
    "advect": (repeat(50, advect), "f32[50000]"),
    "residual_norm": (residual_norm, "f32[800,800]"),
    "scan_jacobi": (
        lambda u: lax.scan(lambda c, _: (jacobi(c)[0], None), u, None, length=20)[0],
        "f32[600,600]",
    ),
    "one_step": (jacobi, "f32[2000,2000]"),
    "jacobi_batch": (jax.vmap(repeat(10, jacobi)), "f32[8,200,200]"),
    "descent_10000x200": (gradient_descent(20), "f32[10000,200]", "f32[10000]"),
    "descent_500x20": (gradient_descent(100), "f32[500,20]", "f32[500]"),
    "descent_2000x1000": (gradient_descent(10), "f32[2000,1000]", "f32[2000]"),
    "descent_100000x30": (gradient_descent(10), "f32[100000,30]", "f32[100000]"),
    "descent_odd": (gradient_descent(20), "f32[3333,77]", "f32[3333]"),
    "descent_f64": (gradient_descent(20), "f64[2000,100]", "f64[2000]"),
    "logistic_descent": (logistic_descent, "f32[5000,100]", "f32[5000]"),
    "ridge_momentum": (ridge_momentum, "f32[5000,100]", "f32[5000]"),
    "conjugate_gradient": (conjugate_gradient, "f32[300,300]", "f32[300]"),
    "n_body": (repeat(5, n_body), "f32[300,3]", "f32[300,3]"),
    "lorenz": (lorenz, "f32[3,10000]"),
    "lstm": (lstm, "f32[30,16,32]", "f32[32,256]", "f32[64,256]"),
    "ssm": (ssm, "f32[200,64]", "f32[64,16]", "f32[64,16]", "f32[64,16]"),
    "gpt_block": (gpt_block, f"f32[256,{D}]", *BLOCK),
    "gpt_block_gradient": (
        jax.grad(lambda *a: (gpt_block(*a) ** 2).mean(), argnums=tuple(range(11))),
        f"f32[128,{D}]",
        *BLOCK,
    ),
    "llama_block": (llama_block, f"f32[256,{D}]", *LLAMA),
    "vit_pool": (
        vit_pool,
        "f32[16,196,192]",
        "f32[192,192]",
        "f32[192]",
        "f32[192]",
        "f32[192,10]",
    ),
    "vae_gradient": (
        jax.grad(vae_loss, argnums=(1, 2, 3, 4)),
        "f32[128,784]",
        "f32[784,256]",
        "f32[256,20]",
        "f32[256,20]",
        "f32[20,784]",
    ),
    "newton_roots": (
        repeat(10, lambda x: (x - (x**3 - 2 * x - 5) / (3 * x * x - 2),)),
        "f32[500000]>2",
    ),
    "sinkhorn": (
        lambda c: lax.fori_loop(
            0,
            10,
            lambda _, f: (lambda g: 0 - jax.nn.logsumexp(g[None] - c, 1))(
                0 - jax.nn.logsumexp(f[:, None] - c, 0)
            ),
            jnp.zeros(300),
        ),
        "f32[300,300]>0",
    ),
    "monte_carlo_pi": (
        lambda k: (lambda p: ((p**2).sum(-1) < 1).mean())(
            jax.random.uniform(jax.random.key(k[0]), (200000, 2))
        ),
        "i32[1]<9",
    ),
    "random_walk": (
        lambda k: jax.random.normal(jax.random.key(k[0]), (100, 1000)).cumsum(1).max(1),
        "i32[1]<9",
    ),
    "power_spectrum": (lambda x: jnp.abs(jnp.fft.rfft(x)) ** 2, "f32[100,1024]"),
    "runge_kutta": (
        lambda x: lax.fori_loop(
            0,
            20,
            lambda _, x: (
                lambda f: (
                    lambda a: (
                        lambda b: (lambda c: x + 0.01 / 6 * (a + 2 * b + 2 * c + f(x + 0.01 * c)))(
                            f(x + 0.005 * b)
                        )
                    )(f(x + 0.005 * a))
                )(f(x))
            )(lambda y: jnp.sin(y) - 0.1 * y),
            x,
        ),
        "f32[200000]",
    ),
    "cholesky_solve": (
        lambda a, b: jax.scipy.linalg.solve(a @ a.T + 100 * jnp.eye(100), b, assume_a="pos"),
        "f32[100,100]",
        "f32[100,3]",
    ),
    "svd_free_pca": (
        lambda x: (
            lambda c: lax.fori_loop(
                0, 10, lambda _, v: (w := c @ v) / jnp.linalg.norm(w), jnp.ones(x.shape[1])
            )
        )(((y := x - x.mean(0)).T @ y) / x.shape[0]),
        "f32[2000,50]",
    ),
}
