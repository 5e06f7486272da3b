"""Gathers, scatters, sorts, cumulative sums, histograms."""

import jax
import jax.numpy as jnp
from jax import lax


def crop(images, starts):
    return jax.vmap(lambda a, i: lax.dynamic_slice(a, (i[0], i[1], 0), (56, 56, 3)))(images, starts)


CASES = {
    "embedding": (lambda t, i: t[i], "f32[10000,256]", "i32[2048]<10000"),
    "embedding_scale": (lambda t, i: t[i] * 16 + 1, "f32[10000,64]", "i32[32,128]<10000"),
    "embedding_gradient": (
        jax.grad(lambda t, i: (t[i] ** 2).sum()),
        "f32[5000,64]",
        "i32[2048]<5000",
    ),
    "embedding_bag": (lambda t, i: t[i].mean(1), "f32[10000,64]", "i32[1024,20]<10000"),
    "take_1d": (lambda x, i: x[i], "f32[100000]", "i32[500000]<100000"),
    "take_axis_1": (lambda x, i: x[:, i], "f32[1000,1000]", "i32[300]<1000"),
    "take_2d": (lambda x, i, j: x[i, j], "f32[1000,1000]", "i32[200000]<1000", "i32[200000]<1000"),
    "take_along_1": (
        lambda x, i: jnp.take_along_axis(x, i, 1),
        "f32[2000,500]",
        "i32[2000,100]<500",
    ),
    "take_along_0": (
        lambda x, i: jnp.take_along_axis(x, i, 0),
        "f32[500,1000]",
        "i32[200,1000]<500",
    ),
    "lookup_256": (lambda t, x: t[x], "f32[256]", "i32[1000000]<256"),
    "lookup_u8": (lambda t, x: t[x.astype(jnp.int32)], "u8[256]", "u8[1000000]<255"),
    "random_crop": (crop, "f32[16,64,64,3]", "i32[16,2]<8"),
    "random_crop_u8": (crop, "u8[16,64,64,3]", "i32[16,2]<8"),
    "permute_rows": (lambda x, i: x[i], "f32[2000,500]", "i32[2000]<2000"),
    "dynamic_slice": (
        lambda x, i: lax.dynamic_slice(x, (i[0], 0), (100, 1000)) * 2,
        "f32[1000,1000]",
        "i32[1]<900",
    ),
    "kv_update": (
        lambda c, k, i: lax.dynamic_update_slice(c, k, (0, i[0], 0)),
        "f32[8,1024,64]",
        "f32[8,1,64]",
        "i32[1]<1000",
    ),
    "scatter_add": (
        lambda x, i, v: x.at[i].add(v),
        "f32[10000]",
        "i32[500000]<10000",
        "f32[500000]",
    ),
    "scatter_add_rows": (
        lambda x, i, v: x.at[i].add(v),
        "f32[1000,64]",
        "i32[5000]<1000",
        "f32[5000,64]",
    ),
    "scatter_set": (lambda x, i, v: x.at[i].set(v), "f32[100000]", "i32[1000]<100000", "f32[1000]"),
    "scatter_max": (lambda x, i, v: x.at[i].max(v), "f32[1000]", "i32[100000]<1000", "f32[100000]"),
    "segment_sum": (lambda v, i: jax.ops.segment_sum(v, i, 100), "f32[200000]", "i32[200000]<100"),
    "segment_sum_rows": (
        lambda v, i: jax.ops.segment_sum(v, i, 500),
        "f32[20000,32]",
        "i32[20000]<500",
    ),
    "segment_max": (lambda v, i: jax.ops.segment_max(v, i, 100), "f32[200000]", "i32[200000]<100"),
    "segment_softmax": (
        lambda v, i: (lambda e: e / jax.ops.segment_sum(e, i, 100)[i])(
            jnp.exp(v - jax.ops.segment_max(v, i, 100)[i])
        ),
        "f32[100000]",
        "i32[100000]<100",
    ),
    "bincount": (lambda x: jnp.bincount(x, length=256), "i32[1000000]<256"),
    "histogram": (lambda x: jnp.histogram(x, 50, (-3, 3))[0], "f32[200000]"),
    "graph_conv": (
        lambda x, s, d, w: jax.ops.segment_sum((x @ w)[s], d, 2000),
        "f32[2000,32]",
        "i32[10000]<2000",
        "i32[10000]<2000",
        "f32[32,32]",
    ),
    "page_rank": (
        lambda r, s, d: lax.fori_loop(
            0, 10, lambda _, r: 0.15 / 2000 + 0.85 * jax.ops.segment_sum(r[s], d, 2000), r
        ),
        "f32[2000]",
        "i32[10000]<2000",
        "i32[10000]<2000",
    ),
    "one_hot": (lambda i: jax.nn.one_hot(i, 1000), "i32[2000]<1000"),
    "one_hot_product": (lambda i, t: jax.nn.one_hot(i, 1000) @ t, "i32[500]<1000", "f32[1000,64]"),
    "searchsorted": (lambda x, v: jnp.searchsorted(jnp.sort(x), v), "f32[1000]", "f32[100000]"),
    "interp": (
        lambda x, a, b: jnp.interp(x, jnp.sort(a), b),
        "f32[200000]",
        "f32[100]",
        "f32[100]",
    ),
    "digitize": (lambda x: jnp.digitize(x, jnp.linspace(-2, 2, 20)), "f32[300000]"),
    "bilinear_sample": (
        lambda img, y, x: (
            lambda i, j, a, b: (
                img[i, j] * (1 - a) * (1 - b)
                + img[i + 1, j] * a * (1 - b)
                + img[i, j + 1] * (1 - a) * b
                + img[i + 1, j + 1] * a * b
            )
        )(
            jnp.clip(jnp.floor(y * 50), 0, 498).astype(int),
            jnp.clip(jnp.floor(x * 50), 0, 498).astype(int),
            y * 50 % 1,
            x * 50 % 1,
        ),
        "f32[500,500]",
        "f32[100000]>0",
        "f32[100000]>0",
    ),
    "cumsum": (jnp.cumsum, "f32[1000000]"),
    "cumsum_rows": (lambda x: x.cumsum(1), "f32[1000,1000]"),
    "cumsum_columns": (lambda x: x.cumsum(0), "f32[1000,1000]"),
    "cumsum_short": (lambda x: x.cumsum(1), "f32[50000,12]"),
    "cumprod": (lambda x: (1 + 0.01 * x).cumprod(1), "f32[1000,300]"),
    "cummax": (lambda x: lax.cummax(x, 1), "f32[1000,1000]"),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 1), "f32[500,500]"),
    "cumsum_int": (jnp.cumsum, "i32[1000000]"),
    "cumsum_reverse": (lambda x: lax.cumsum(x, 1, reverse=True), "f32[1000,500]"),
    "returns": (
        lambda r: lax.scan(lambda c, x: ((c := x + 0.99 * c), c), jnp.zeros(64), r, reverse=True)[
            1
        ],
        "f32[500,64]",
    ),
    "ema": (
        lambda x: lax.scan(lambda c, y: ((c := 0.9 * c + 0.1 * y), c), x[0], x)[1],
        "f32[1000,100]",
    ),
    "linear_scan": (
        lambda a, b: lax.associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (a, b))[
            1
        ],
        "f32[256,64]",
        "f32[256,64]",
    ),
    "sort_1d": (jnp.sort, "f32[100000]"),
    "sort_rows": (lambda x: jnp.sort(x, 1), "f32[1000,100]"),
    "sort_columns": (lambda x: jnp.sort(x, 0), "f32[100,1000]"),
    "sort_long_rows": (lambda x: jnp.sort(x, 1), "f32[20,10000]"),
    "argsort": (lambda x: jnp.argsort(x, 1), "f32[500,200]"),
    "argsort_1d": (jnp.argsort, "f32[50000]"),
    "sort_ints": (jnp.sort, "i32[200000]<1000000"),
    "sort_u8": (jnp.sort, "u8[200000]<255"),
    "sort_f64": (jnp.sort, "f64[50000]"),
    "sort_pairs": (lambda k, v: lax.sort((k, v), num_keys=1), "f32[50000]", "i32[50000]"),
    "sort_short": (lambda x: jnp.sort(x, 1), "f32[20000,8]"),
    "rank": (lambda x: jnp.argsort(jnp.argsort(x)), "f32[20000]"),
    "median": (lambda x: jnp.median(x, 1), "f32[1000,101]"),
    "quantile": (lambda x: jnp.quantile(x, jnp.array([0.1, 0.5, 0.9]), axis=1), "f32[500,400]"),
    "top_k": (lambda x: lax.top_k(x, 10), "f32[1000,1000]"),
    "top_k_50": (lambda x: lax.top_k(x, 50), "f32[100,32000]"),
    "top_k_1": (lambda x: lax.top_k(x, 1), "f32[2000,100]"),
    "top_k_moe": (lambda x: lax.top_k(jax.nn.softmax(x), 2), "f32[4096,64]"),
    "unique_flags": (
        lambda x: (lambda s: jnp.concatenate([jnp.ones(1, bool), s[1:] != s[:-1]]).sum())(
            jnp.sort(x)
        ),
        "i32[50000]<1000",
    ),
    "trimmed_mean": (lambda x: jnp.sort(x, 1)[:, 10:-10].mean(1), "f32[1000,100]"),
    "nms_matrix": (
        lambda b: (
            lambda lo, hi: (
                lambda w: (
                    (i := w[..., 0] * w[..., 1])
                    / (
                        1e-6
                        + (a := (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1]))[:, None]
                        + a[None]
                        - i
                    )
                )
            )(jnp.maximum(hi - lo, 0))
        )(jnp.maximum(b[:, None, :2], b[None, :, :2]), jnp.minimum(b[:, None, 2:], b[None, :, 2:])),
        "f32[500,4]",
    ),
    "nucleus": (
        lambda x: (lambda s: jnp.where(jnp.cumsum(s, 1) - s < 0.9, s, 0))(
            -jnp.sort(-jax.nn.softmax(x), 1)
        ),
        "f32[64,5000]",
    ),
    "diagonal": (jnp.diagonal, "f32[2000,2000]"),
    "triu_indices": (lambda x: x[jnp.triu_indices(300)], "f32[300,300]"),
    "mask_rows": (lambda x, m: jnp.where(m[:, None], x, 0), "f32[2000,1000]", "bool[2000]"),
    "nonzero_count": (lambda x: jnp.count_nonzero(x > 1, axis=0), "f32[2000,500]"),
    "gather_batch": (
        lambda x, i: jax.vmap(lambda a, j: a[j])(x, i),
        "f32[64,500,32]",
        "i32[64,20]<500",
    ),
    "ragged_positions": (lambda n: jnp.cumsum(n) - n, "i32[100000]<50"),
    "windows": (
        lambda x: jax.vmap(lambda i: lax.dynamic_slice(x, (i,), (16,)))(jnp.arange(10000) * 3).mean(
            1
        ),
        "f32[40000]",
    ),
    "kmeans_step": (
        lambda x, c: (
            lambda a: (
                jax.ops.segment_sum(x, a, 20)
                / jnp.maximum(jax.ops.segment_sum(jnp.ones(x.shape[0]), a, 20), 1)[:, None]
            )
        )(jnp.argmin(((x[:, None] - c[None]) ** 2).sum(-1), 1)),
        "f32[10000,8]",
        "f32[20,8]",
    ),
    "viterbi": (
        lambda t, e: lax.scan(
            lambda v, o: ((s := v[:, None] + t), ((s.max(0) + o), s.argmax(0)))[1], e[0], e[1:]
        )[0],
        "f32[30,30]",
        "f32[200,30]",
    ),
    "edit_distance_row": (
        lambda a, b: lax.associative_scan(jnp.minimum, (a[:, None] != b[None]).sum(0) * 1.0),
        "i32[200]<5",
        "i32[1000]<5",
    ),
}
