"""Convolutions, pooling, and images through chains of small filters."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

relu = jax.nn.relu
NHWC = ("NHWC", "HWIO", "NHWC")
BOX = np.ones(3, np.float32) / 3


def conv(strides=(1, 1), padding="SAME", groups=1, dilation=(1, 1), layout=NHWC):
    return lambda x, w: lax.conv_general_dilated(
        x,
        w,
        strides,
        padding,
        dimension_numbers=layout,
        feature_group_count=groups,
        rhs_dilation=dilation,
    )


def pool(kind, size, stride):
    init, f = {"max": (-jnp.inf, lax.max), "sum": (0.0, lax.add), "min": (jnp.inf, lax.min)}[kind]
    return lambda x: lax.reduce_window(
        x, init, f, (1, size, size, 1), (1, stride, stride, 1), "VALID"
    )


def block(x, w1, w2):
    f = conv()
    return relu(x + f(relu(f(x, w1)), w2))


def batch_norm(x, w, g, b):
    y = conv()(x, w)
    m, v = y.mean((0, 1, 2)), y.var((0, 1, 2))
    return relu((y - m) * lax.rsqrt(v + 1e-5) * g + b)


def box_blur(x):
    x = (x[:-2] + x[1:-1] + x[2:]) / 3
    return (x[:, :-2] + x[:, 1:-1] + x[:, 2:]) / 3


def sobel_magnitude(x):
    p = jnp.pad(x, 1, mode="edge")
    gx = p[:-2, 2:] + 2 * p[1:-1, 2:] + p[2:, 2:] - p[:-2, :-2] - 2 * p[1:-1, :-2] - p[2:, :-2]
    gy = p[2:, :-2] + 2 * p[2:, 1:-1] + p[2:, 2:] - p[:-2, :-2] - 2 * p[:-2, 1:-1] - p[:-2, 2:]
    return jnp.sqrt(gx * gx + gy * gy)


def laplacian_roll(x):
    return sum(jnp.roll(x, s, a) for s in (1, -1) for a in (0, 1)) - 4 * x


def median_3(x):
    return jnp.median(jnp.stack([x[:-2], x[1:-1], x[2:]]), axis=0)


def downsample(x):
    return x.reshape(x.shape[0] // 2, 2, x.shape[1] // 2, 2).mean((1, 3))


def pyramid(x):
    a = downsample(x)
    b = downsample(a)
    return x - jnp.repeat(jnp.repeat(a, 2, 0), 2, 1), a - jnp.repeat(jnp.repeat(b, 2, 0), 2, 1), b


def bilateral(x):
    p = jnp.pad(x, 2, mode="reflect")
    total = weight = jnp.zeros_like(x)
    for i in range(5):
        for j in range(5):
            y = p[i : i + x.shape[0], j : j + x.shape[1]]
            w = jnp.exp(-((y - x) ** 2) - 0.1 * ((i - 2) ** 2 + (j - 2) ** 2))
            total, weight = total + w * y, weight + w
    return total / weight


def grey_and_gamma(x):
    return (x @ jnp.array([0.299, 0.587, 0.114])) ** (1 / 2.2)


def gaussian_separable(x):
    k = jnp.exp(-0.5 * (jnp.arange(-4.0, 5) / 1.5) ** 2)
    k = k / k.sum()
    x = jax.vmap(lambda r: jnp.convolve(r, k, mode="same"))(x)
    return jax.vmap(lambda r: jnp.convolve(r, k, mode="same"))(x.T).T


def harris(x):
    gx, gy = (x[1:-1, 2:] - x[1:-1, :-2]) / 2, (x[2:, 1:-1] - x[:-2, 1:-1]) / 2

    def box(a):
        return sum(
            a[i : a.shape[0] - 2 + i, j : a.shape[1] - 2 + j] for i in range(3) for j in range(3)
        )

    a, b, c = box(gx * gx), box(gx * gy), box(gy * gy)
    return a * c - b * b - 0.05 * (a + c) ** 2


def unsharp(x):
    b = gaussian_separable(x)
    return jnp.clip(x + 1.5 * (x - b), 0, 1)


CASES = {
    "3x3_64": (conv(), "f32[4,32,32,64]", "f32[3,3,64,64]"),
    "3x3_odd": (conv(), "f32[3,29,31,17]", "f32[3,3,17,23]"),
    "3x3_rgb": (conv(), "f32[1,224,224,3]", "f32[3,3,3,32]"),
    "3x3_valid": (conv(padding="VALID"), "f32[2,56,56,32]", "f32[3,3,32,32]"),
    "1x1": (conv(), "f32[4,28,28,256]", "f32[1,1,256,64]"),
    "1x1_stride": (conv(strides=(2, 2)), "f32[4,28,28,128]", "f32[1,1,128,256]"),
    "5x5_grey": (conv(), "f32[1,500,500,1]", "f32[5,5,1,1]"),
    "5x5_lenet": (conv(padding="VALID"), "f32[64,28,28,1]", "f32[5,5,1,6]"),
    "7x7_stem": (conv(strides=(2, 2)), "f32[4,112,112,3]", "f32[7,7,3,64]"),
    "stride_2": (conv(strides=(2, 2)), "f32[4,56,56,64]", "f32[3,3,64,128]"),
    "dilated": (conv(dilation=(2, 2)), "f32[2,64,64,32]", "f32[3,3,32,32]"),
    "depthwise": (conv(groups=64), "f32[4,56,56,64]", "f32[3,3,1,64]"),
    "depthwise_7": (conv(groups=96), "f32[2,56,56,96]", "f32[7,7,1,96]"),
    "grouped": (conv(groups=4), "f32[4,28,28,64]", "f32[3,3,16,64]"),
    "nchw": (conv(layout=("NCHW", "OIHW", "NCHW")), "f32[4,64,28,28]", "f32[64,64,3,3]"),
    "nchw_stem": (
        conv(strides=(2, 2), layout=("NCHW", "OIHW", "NCHW")),
        "f32[2,3,112,112]",
        "f32[32,3,3,3]",
    ),
    "bf16": (conv(), "bf16[4,32,32,64]", "bf16[3,3,64,64]"),
    "1d": (
        lambda x, w: lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        ),
        "f32[8,1000,32]",
        "f32[5,32,64]",
    ),
    "1d_causal": (
        lambda x, w: lax.conv_general_dilated(
            x, w, (1,), [(3, 0)], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=128
        ),
        "f32[4,512,128]",
        "f32[4,1,128]",
    ),
    "3d": (
        lambda x, w: lax.conv_general_dilated(
            x, w, (1, 1, 1), "SAME", dimension_numbers=("NDHWC", "DHWIO", "NDHWC")
        ),
        "f32[1,16,32,32,8]",
        "f32[3,3,3,8,16]",
    ),
    "transposed": (
        lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=NHWC),
        "f32[2,28,28,64]",
        "f32[3,3,64,32]",
    ),
    "block": (block, "f32[2,28,28,64]", "f32[3,3,64,64]", "f32[3,3,64,64]"),
    "batch_norm": (batch_norm, "f32[4,32,32,32]", "f32[3,3,32,32]", "f32[32]", "f32[32]"),
    "gradient": (
        jax.grad(lambda w, x: (conv()(x, w) ** 2).sum()),
        "f32[3,3,32,32]",
        "f32[4,28,28,32]",
    ),
    "gradient_input": (
        jax.grad(lambda x, w: (conv()(x, w) ** 2).sum()),
        "f32[4,28,28,32]",
        "f32[3,3,32,32]",
    ),
    "max_pool": (pool("max", 2, 2), "f32[8,112,112,32]"),
    "max_pool_3": (pool("max", 3, 2), "f32[4,112,112,64]"),
    "avg_pool": (pool("sum", 2, 2), "f32[8,112,112,32]"),
    "min_pool_5": (pool("min", 5, 1), "f32[4,64,64,16]"),
    "max_pool_gradient": (jax.grad(lambda x: (pool("max", 2, 2)(x) ** 2).sum()), "f32[4,56,56,32]"),
    "global_pool": (lambda x: x.mean((1, 2)), "f32[16,28,28,256]"),
    "conv_relu_pool": (
        lambda x, w, b: pool("max", 2, 2)(relu(conv()(x, w) + b)),
        "f32[16,28,28,8]",
        "f32[3,3,8,16]",
        "f32[16]",
    ),
    "box_blur": (box_blur, "f32[1500,1000]"),
    "box_blur_rgb": (box_blur, "f32[700,700,3]"),
    "sobel": (sobel_magnitude, "f32[1000,1500]"),
    "laplacian_roll": (laplacian_roll, "f32[1000,1000]"),
    "median_3": (median_3, "f32[1000,1000]"),
    "downsample": (downsample, "f32[2000,2000]"),
    "pyramid": (pyramid, "f32[1024,1024]"),
    "bilateral": (bilateral, "f32[400,400]"),
    "grey_and_gamma": (grey_and_gamma, "f32[1080,1920,3]>0"),
    "gaussian_separable": (gaussian_separable, "f32[500,700]"),
    "harris": (harris, "f32[1000,1000]"),
    "harris_odd": (harris, "f32[777,1333]"),
    "unsharp": (unsharp, "f32[600,800]>0"),
    "upsample": (lambda x: jnp.repeat(jnp.repeat(x, 2, 0), 2, 1), "f32[500,500]"),
    "resize": (lambda x: jax.image.resize(x, (300, 400), "bilinear"), "f32[200,300]"),
    "resize_rgb": (lambda x: jax.image.resize(x, (224, 224, 3), "bilinear"), "f32[256,320,3]"),
    "patches": (
        lambda x, w: (
            x.reshape(4, 14, 16, 14, 16, 3).transpose(0, 1, 3, 2, 4, 5).reshape(4, 196, 768) @ w
        ),
        "f32[4,224,224,3]",
        "f32[768,192]",
    ),
    "convolve_1d": (lambda x, k: jnp.convolve(x, k), "f32[100000]", "f32[31]"),
    "moving_mean": (lambda x: jnp.convolve(x, jnp.ones(10) / 10, mode="valid"), "f32[500000]"),
    "integral_image": (lambda x: x.cumsum(0).cumsum(1), "f32[1000,1000]"),
    "histogram_equal": (
        lambda x: jnp.interp(x, jnp.linspace(-3, 3, 64), jnp.linspace(0, 1, 64)),
        "f32[500,500]",
    ),
    "erosion": (
        lambda x: lax.reduce_window(x, jnp.inf, lax.min, (3, 3), (1, 1), "SAME"),
        "f32[1000,1000]",
    ),
    "blur_channels_first": (lambda x: jax.vmap(box_blur)(x), "f32[3,700,900]"),
    "flip_and_crop": (lambda x: x[:, 16:240, 16:240][:, :, ::-1], "f32[8,256,256,3]"),
    "normalise_u8": (
        lambda x: (
            (x.astype(jnp.float32) / 255 - jnp.array([0.485, 0.456, 0.406]))
            / jnp.array([0.229, 0.224, 0.225])
        ),
        "u8[8,224,224,3]<255",
    ),
}
