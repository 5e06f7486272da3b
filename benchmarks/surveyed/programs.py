"""Whole programs: decoding with a cache of keys and values, scans, small linear algebra in loops, waves and sides of grids."""

import jax
import jax.numpy as jnp
from jax import lax

LAYERS, HEADS, SIZE = 4, 8, 64
WIDTH = HEADS * SIZE
TOKENS = 64


# ---------------------------------------------------------------- decoding


def attend(q, keys, values, position):
    """q[heads, size]; keys and values[heads, positions, size], of which those up to `position` count."""
    scores = jnp.einsum("hd,htd->ht", q, keys) / SIZE**0.5
    scores = jnp.where(jnp.arange(keys.shape[1]) <= position, scores, -jnp.inf)
    return jnp.einsum("ht,htd->hd", jax.nn.softmax(scores), values).reshape(WIDTH)


def layer_step(x, qkv, out, up, down, write):
    """One layer for one token; write: (key, value) -> the layer's caches with it, and its position."""
    q, k, v = (normed(x) @ qkv).reshape(3, HEADS, SIZE)
    x = x + attend(q, *write(k, v)) @ out
    return x + jax.nn.gelu(normed(x) @ up) @ down


def normed(x):
    return x * lax.rsqrt((x * x).mean() + 1e-5)


def one_cache(x, position, qkv, out, up, down, keys, values):
    """A step of one token with one array for all layers."""
    for i in range(LAYERS):

        def write(k, v, i=i):
            nonlocal keys, values
            place = (i, 0, position, 0)
            keys = lax.dynamic_update_slice(keys, k[None, :, None], place)
            values = lax.dynamic_update_slice(values, v[None, :, None], place)
            return keys[i], values[i], position

        x = layer_step(x, qkv[i], out[i], up[i], down[i], write)
    return x, keys, values


def cache_per_layer(x, position, qkv, out, up, down, *caches):
    """A step of one token with two arrays per layer: keys of all, then values of all."""
    caches = list(caches)
    for i in range(LAYERS):

        def write(k, v, i=i):
            for at, new in ((i, k), (LAYERS + i, v)):
                caches[at] = caches[at].at[:, position].set(new)
            return caches[i], caches[LAYERS + i], position

        x = layer_step(x, qkv[i], out[i], up[i], down[i], write)
    return x, *caches


def scan_of_layers(x, position, qkv, out, up, down, keys, values):
    """A step of one token, the layers in a scan that takes slices of the caches and returns them."""

    def step(x, layer):
        *weights, keys, values = layer

        def write(k, v):
            nonlocal keys, values
            keys = lax.dynamic_update_slice(keys, k[:, None], (0, position, 0))
            values = lax.dynamic_update_slice(values, v[:, None], (0, position, 0))
            return keys, values, position

        x = layer_step(x, *weights, write)
        return x, (keys, values)

    x, (keys, values) = lax.scan(step, x, (qkv, out, up, down, keys, values))
    return x, keys, values


def decode(step):
    """TOKENS steps, each of which begins with what the last one returned."""

    def f(x, qkv, out, up, down, *caches):
        def body(carry, position):
            x, *caches = carry
            x, *caches = step(x, position, qkv, out, up, down, *caches)
            return (x, *caches), x

        return lax.scan(body, (x, *caches), jnp.arange(TOKENS) + 17)[1]

    return f


WEIGHTS = [
    f"f32[{LAYERS},{a},{b}]"
    for a, b in ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
]


def _decoding():
    for positions in (1024, 8192):
        layer = f"f32[{HEADS},{positions},{SIZE}]"
        layers = [f"f32[{LAYERS},{HEADS},{positions},{SIZE}]"] * 2
        for name, step, caches in (
            ("one_cache", one_cache, layers),
            ("cache_per_layer", cache_per_layer, [layer] * (2 * LAYERS)),
            ("scan_of_layers", scan_of_layers, layers),
        ):
            yield f"decode_{name}_{positions}", (decode(step), f"f32[{WIDTH}]", *WEIGHTS, *caches)


# ---------------------------------------------------------------- associative scans


def linear(p, q):
    """h = a h + b, of pairs (a, b)."""
    return p[0] * q[0], q[0] * p[1] + q[1]


def max_plus(p, q):
    return p[0] + q[0], jnp.maximum(q[0] + p[1], q[1])


def matrices(p, q):
    """Products of 2 x 2 matrices, q after p, in four arrays."""
    a, b, c, d = p
    e, f, g, h = q
    return e * a + f * c, e * b + f * d, g * a + h * c, g * b + h * d


def scanned(combine, reverse=False, axis=0):
    return lambda *xs: lax.associative_scan(combine, xs, reverse=reverse, axis=axis)


def gradient(f):
    """Of a sum of all results, in all arguments."""

    def loss(xs):
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(f(*xs)))

    return lambda *xs: jax.grad(loss)(xs)


def _scans():
    """Few: jax.jit takes up to 24 s for the first call of one (Zen 3)."""
    combines = {
        "sum": (lambda p, q: (p[0] + q[0],), 1),
        "linear": (linear, 2),
        "max_plus": (max_plus, 2),
        "matrices": (matrices, 4),
    }
    chosen = [("65536", name) for name in combines]
    chosen += [("4096,256", "sum"), ("4096,256", "linear"), ("1000000", "linear")]
    for shape, name in chosen:
        combine, count = combines[name]
        specs = [f"f32[{shape}]"] * count
        scan = scaled_arguments(name, combine)
        label = f"scan_{name}_{shape.replace(',', 'x')}"
        yield label, (scan(False), *specs)
        if (shape, name) == ("65536", "linear"):
            yield f"{label}_reverse", (scan(True), *specs)
            yield f"{label}_gradient", (gradient(scan(False)), *specs)


def scaled_arguments(name, combine):
    """(reverse) -> the scan of normal arguments that are made factors of about 1, or rotations, first.

    Products of a million steps neither vanish nor overflow so.
    """

    def arguments(xs):
        if name == "linear":
            return jax.nn.sigmoid(xs[0] + 2), xs[1]
        if name == "matrices":
            c, s = jnp.cos(xs[0]), jnp.sin(xs[0])
            return c, s + 1e-3 * xs[1], -s + 1e-3 * xs[2], c
        return xs

    return lambda reverse: lambda *xs: scanned(combine, reverse)(*arguments(xs))


# ---------------------------------------------------------------- small linear algebra in loops


def kalman(observed, a, c):
    """Means of a filter with four states and two observations over all steps."""
    states, seen = jnp.eye(4), jnp.eye(2)
    a, c = 0.3 * a + 0.5 * states, c

    def step(carry, y):
        mean, cov = carry
        mean, cov = a @ mean, a @ cov @ a.T + 0.1 * states
        s = c @ cov @ c.T + 0.5 * seen
        gain = jnp.linalg.solve(s, c @ cov).T
        mean = mean + gain @ (y - c @ mean)
        cov = (states - gain @ c) @ cov
        return (mean, cov), mean

    return lax.scan(step, (jnp.zeros(4), states), observed)[1]


def mixture(x, means):
    """Ten steps of expectation maximisation of a Gaussian mixture with full covariances, by Cholesky factors."""
    count, size = means.shape

    def log_density(x, mean, cov):
        factor = jnp.linalg.cholesky(cov)
        z = jax.scipy.linalg.solve_triangular(factor, (x - mean).T, lower=True)
        return -0.5 * (z * z).sum(0) - jnp.log(jnp.diagonal(factor)).sum()

    def step(_, carry):
        weights, means, covs = carry
        logs = jax.vmap(log_density, (None, 0, 0), 1)(x, means, covs) + jnp.log(weights)
        r = jax.nn.softmax(logs)
        total = r.sum(0) + 1e-6
        means = r.T @ x / total[:, None]
        apart = x[:, None] - means
        covs = jnp.einsum("nk,nki,nkj->kij", r, apart, apart) / total[:, None, None]
        return total / total.sum(), means, covs + 1e-2 * jnp.eye(size)

    first = jnp.full(count, 1 / count), means, jnp.tile(jnp.eye(size), (count, 1, 1))
    return lax.fori_loop(0, 10, step, first)


def lqr(a, b):
    """Gains of a linear quadratic regulator with eight states and three controls, backwards over 200 steps."""
    a, states, controls = 0.2 * a, jnp.eye(8), jnp.eye(3)

    def step(p, _):
        s = controls + b.T @ p @ b
        gain = jnp.linalg.solve(s, b.T @ p @ a)
        return states + a.T @ p @ (a - b @ gain), gain

    return lax.scan(step, states, None, length=200)


def ridge(x, y):
    """One regression per batch."""
    gram = jnp.einsum("bni,bnj->bij", x, x) + 0.1 * jnp.eye(x.shape[-1])
    return jnp.linalg.solve(gram, jnp.einsum("bni,bn->bi", x, y)[..., None])[..., 0]


# ---------------------------------------------------------------- grids in time


def laplacian(u):
    return u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1]


def wave(recorded):
    """50 steps of a wave equation; recorded: the height of one point after each step is a result."""

    def f(u, v):
        def step(carry, _):
            u, v = carry
            v = v.at[1:-1, 1:-1].add(0.1 * laplacian(u))
            u = u + 0.1 * v
            return (u, v), u[100, 100] if recorded else None

        return lax.scan(step, (u, v), None, length=50)

    return f


def jacobi(with_neumann_sides):
    """50 steps; the sides take their neighbours' values, or stay."""

    def f(u):
        def step(_, u):
            u = u.at[1:-1, 1:-1].add(0.25 * laplacian(u))
            if not with_neumann_sides:
                return u
            u = u.at[0].set(u[1]).at[-1].set(u[-2])
            return u.at[:, 0].set(u[:, 1]).at[:, -1].set(u[:, -2])

        return lax.fori_loop(0, 50, step, u)

    return f


CASES = {
    **dict(_decoding()),
    **dict(_scans()),
    "kalman": (kalman, "f32[1000,2]", "f32[4,4]", "f32[2,4]"),
    "kalman_batch": (jax.vmap(kalman, (0, None, None)), "f32[64,500,2]", "f32[4,4]", "f32[2,4]"),
    "mixture": (mixture, "f32[5000,4]", "f32[6,4]"),
    "lqr": (lqr, "f32[8,8]", "f32[8,3]"),
    "ridge": (ridge, "f32[500,40,8]", "f32[500,40]"),
    "wave": (wave(False), "f32[1024,1024]", "f32[1024,1024]"),
    "wave_recorded": (wave(True), "f32[1024,1024]", "f32[1024,1024]"),
    "jacobi_sides": (jacobi(False), "f32[1024,1024]"),
    "jacobi_neumann_sides": (jacobi(True), "f32[1024,1024]"),
}
