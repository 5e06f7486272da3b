"""`pbkern demo`: image filters on a photograph, a transformer block and a hand-written matmul, each beside jax.jit.

Everything is checked against jax.jit and timed in turn with it; the pictures go to demo_output/.
The exit status is 1 if any result disagrees.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pbkern
from pbkern.errors import TargetError

FOLDER = pathlib.Path("demo_output")
# Rows of the photograph, pixels: full HD.
PHOTO_HEIGHT = 1080
# Columns of the photograph, pixels: full HD.
PHOTO_WIDTH = 1920
# Most timed calls of each function, so that the demo ends soon.
MOST_TIMED_CALLS = 25
# Most seconds of timed calls of one function, so that the demo ends soon.
MOST_TIMED_SECONDS = 2.5
BINOMIAL = np.array([1, 4, 6, 4, 1], np.float32) / 16

# --- what is compiled
# -----------------------------------------------------------------------------------------------


def blur_x_blur_y(planes):
    """float32[3, h, w] -> float32[3, h - 4, w - 4]: two convolutions, one per direction."""
    x = lax.conv_general_dilated(planes[:, None], BINOMIAL.reshape(1, 1, 1, 5), (1, 1), "VALID")
    return lax.conv_general_dilated(x, BINOMIAL.reshape(1, 1, 5, 1), (1, 1), "VALID")[:, 0]


def unsharp_mask(image):
    """float32[h, w, 3] -> float32[h - 4, w - 4, 3]: adds the difference to a blur where it is not noise."""
    height, width, _ = image.shape
    rows = sum(BINOMIAL[i] * image[i : height - 4 + i] for i in range(5))
    blurred = sum(BINOMIAL[i] * rows[:, i : width - 4 + i] for i in range(5))
    centre = image[2:-2, 2:-2]
    return jnp.where(jnp.abs(centre - blurred) < 0.01, centre, 3 * centre - 2 * blurred)


def harris_corners(image):
    """float32[h, w] -> float32[h - 4, w - 4]: large at corners, negative on edges."""

    def box(plane):
        height, width = plane.shape
        return sum(plane[i : height - 2 + i, j : width - 2 + j] for i in range(3) for j in range(3))

    def sobel(plane):
        height, _ = plane.shape
        return (
            sum(
                weight * (plane[i : height - 2 + i, 2:] - plane[i : height - 2 + i, :-2])
                for i, weight in enumerate((1, 2, 1))
            )
            / 12
        )

    ix, iy = sobel(image), sobel(image.T).T
    xx, yy, xy = box(ix * ix), box(iy * iy), box(ix * iy)
    return xx * yy - xy * xy - 0.04 * (xx + yy) ** 2


def layer_norm(x, scale, shift):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * scale + shift


def attention(q, k, v):
    """float32[heads, tokens, width] three times -> the same shape."""
    scores = jnp.einsum("hqd,hkd->hqk", q, k) / np.sqrt(q.shape[-1])
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores, -1), v)


def transformer_block(params, x, heads=8):
    """float32[tokens, width] -> the same: layer norm, attention and MLP, each with a residual."""
    tokens, width = x.shape
    q, k, v = (
        (layer_norm(x, *params["norm1"]) @ params["qkv"])
        .reshape(tokens, 3, heads, width // heads)
        .transpose(1, 2, 0, 3)
    )
    x = x + attention(q, k, v).transpose(1, 0, 2).reshape(tokens, width) @ params["out"]
    hidden = jax.nn.gelu(layer_norm(x, *params["norm2"]) @ params["up"] + params["up_bias"])
    return x + hidden @ params["down"] + params["down_bias"]


def transformer_parameters(key, width=512):
    names = {"qkv": 3 * width, "out": width, "up": 4 * width}
    keys = dict(zip([*names, "down"], jax.random.split(key, 4)))
    params = {
        n: jax.random.normal(keys[n], (width, size)) / np.sqrt(width) for n, size in names.items()
    }
    params["down"] = jax.random.normal(keys["down"], (4 * width, width)) / np.sqrt(4 * width)
    ones, zeros = jnp.ones(width), jnp.zeros(width)
    return params | {
        "norm1": (ones, zeros),
        "norm2": (ones, zeros),
        "up_bias": jnp.zeros(4 * width),
        "down_bias": zeros,
    }


# Rows and columns of the product's operands, elements: an example's choice.
PRODUCT_SIZE = 1024
# Rows and columns of one program's blocks, elements: an example's choice.
PRODUCT_TILE = 256


@pbkern.kernel(
    grid=(PRODUCT_SIZE // PRODUCT_TILE, PRODUCT_SIZE // PRODUCT_TILE, PRODUCT_SIZE // PRODUCT_TILE),
    in_specs=[
        pbkern.BlockSpec((PRODUCT_TILE, PRODUCT_TILE), lambda i, j, k: (i, k)),
        pbkern.BlockSpec((PRODUCT_TILE, PRODUCT_TILE), lambda i, j, k: (k, j)),
    ],
    out_specs=pbkern.BlockSpec((PRODUCT_TILE, PRODUCT_TILE), lambda i, j, k: (i, j)),
    out_shape=jax.ShapeDtypeStruct((PRODUCT_SIZE, PRODUCT_SIZE), jnp.float32),
    scratch_shapes=[pbkern.Scratch((PRODUCT_TILE, PRODUCT_TILE), jnp.float32)],
    compiler_params=pbkern.cpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary")
    ),
)
def tiled_matmul(a, b, out, accumulator):
    """A block of `out` gathers its products over the last grid dimension in scratch memory."""

    @pbkern.when(pbkern.program_id(2) == 0)
    def _():
        accumulator[...] = jnp.zeros_like(accumulator)

    accumulator[...] += a[...] @ b[...]

    @pbkern.when(pbkern.program_id(2) == pbkern.num_programs(2) - 1)
    def _():
        out[...] = accumulator[...]


# --- the photograph
# -------------------------------------------------------------------------------------------------


def photograph() -> np.ndarray:
    """float32[1080, 1920, 3] in 0..1: scikit-image's picture of a cup of coffee, enlarged and cropped."""
    data, transform = (_skimage(name) for name in ("data", "transform"))
    image = data.coffee()  # inside the package; nothing is downloaded
    scale = max(PHOTO_HEIGHT / image.shape[0], PHOTO_WIDTH / image.shape[1])
    size = tuple(int(np.ceil(extent * scale)) for extent in image.shape[:2])
    large = transform.resize(image, size, order=3, anti_aliasing=False).astype(np.float32)
    top, left = (size[0] - PHOTO_HEIGHT) // 2, (size[1] - PHOTO_WIDTH) // 2
    return np.clip(large[top : top + PHOTO_HEIGHT, left : left + PHOTO_WIDTH], 0, 1)


def _skimage(module: str) -> Any:
    """A module of scikit-image. Raises TargetError where it is not installed."""
    try:
        return importlib.import_module(f"skimage.{module}")
    except ImportError as e:
        raise TargetError(
            "scikit-image is not installed",
            why=f"the demo filters one of its photographs ({e})",
            hint="pip install 'pbkern[demo]'",
        ) from None


def save(name: str, image: np.ndarray) -> None:
    io = _skimage("io")
    pixels = (np.clip(np.asarray(image), 0, 1) * 255).round().astype(np.uint8)
    io.imsave(FOLDER / f"{name}.png", pixels, check_contrast=False)


def mark_corners(image: np.ndarray, response: np.ndarray, count: int = 250) -> np.ndarray:
    """The picture, darkened, with a square around each of the strongest corners."""
    marked = np.array(image) * 0.6
    cells = response[: response.shape[0] // 24 * 24, : response.shape[1] // 24 * 24]
    blocks = (
        cells.reshape(cells.shape[0] // 24, 24, -1, 24).transpose(0, 2, 1, 3).reshape(-1, 24 * 24)
    )
    across = cells.shape[1] // 24
    for block in np.argsort(blocks.max(1))[-count:]:
        row, column = divmod(int(blocks[block].argmax()), 24)
        y, x = block // across * 24 + row + 2, block % across * 24 + column + 2
        y, x = np.clip(y, 7, PHOTO_HEIGHT - 8), np.clip(x, 7, PHOTO_WIDTH - 8)
        window = marked[y - 7 : y + 8, x - 7 : x + 8]
        inner = window[2:-2, 2:-2].copy()
        window[...] = (1.0, 0.8, 0.1)
        window[2:-2, 2:-2] = inner
    return marked


# --- measuring
# ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DemoCase:
    """One line of the demo: `ours` and `theirs` are called with `arguments` and must agree to `tolerance`."""

    title: str
    ours: Callable
    theirs: Callable
    arguments: tuple
    tolerance: float
    kernels: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Seconds of calls in turn, and the largest difference relative to the largest element."""

    result: jax.Array
    first_call: float
    ours: list[float]
    theirs: list[float]
    error: float


def run(case: DemoCase) -> Outcome:
    start = time.perf_counter()
    result = jax.block_until_ready(case.ours(*case.arguments))
    first_call = time.perf_counter() - start
    expected = jax.block_until_ready(case.theirs(*case.arguments))
    scale = float(jnp.abs(expected).max())
    error = float(jnp.abs(result - expected).max()) / scale
    times: tuple[list[float], list[float]] = ([], [])
    begin = time.perf_counter()
    while len(times[0]) < 3 or (
        len(times[0]) < MOST_TIMED_CALLS and time.perf_counter() - begin < MOST_TIMED_SECONDS
    ):
        for function, seconds in zip((case.ours, case.theirs), times):
            start = time.perf_counter()
            jax.block_until_ready(function(*case.arguments))
            seconds.append(time.perf_counter() - start)
    return Outcome(result, first_call, *times, error if error == error else float("inf"))


def fused(title: str, function: Callable, arguments: tuple, tolerance: float) -> DemoCase:
    ours = pbkern.jit(function)
    return DemoCase(
        title, ours, jax.jit(function), arguments, tolerance, len(ours.kernels(*arguments))
    )


def cases(image: np.ndarray) -> Iterator[DemoCase]:
    pixels = jax.device_put(image)
    grey = jax.device_put(image @ np.array([0.299, 0.587, 0.114], np.float32))
    yield fused(
        "blur_x, blur_y", blur_x_blur_y, (jax.device_put(image.transpose(2, 0, 1).copy()),), 1e-5
    )
    yield fused("unsharp mask", unsharp_mask, (pixels,), 1e-5)
    yield fused("Harris corners", harris_corners, (grey,), 1e-4)
    key = jax.random.key(0)
    x = jax.random.normal(key, (512, 512))
    yield fused("transformer block", transformer_block, (transformer_parameters(key), x), 1e-4)
    a, b = jax.random.normal(key, (2, PRODUCT_SIZE, PRODUCT_SIZE))
    yield DemoCase("matmul by hand", jax.jit(tiled_matmul), jax.jit(jnp.matmul), (a, b), 1e-4, 1)


# --- the terminal
# ---------------------------------------------------------------------------------------------------

COLOUR = sys.stdout.isatty() and "NO_COLOR" not in os.environ


def styled(text: str, code: str) -> str:
    return f"\033[{code}m{text}\033[0m" if COLOUR else text


def heading(text: str) -> None:
    print(f"\n{styled(text, '1')}\n{styled('-' * len(text), '2')}")


COLUMNS = f"{'':19}{'kernels':>8}{'compile':>10}{'pbkern':>18}{'jax.jit':>18}{'faster':>9}{'max error':>12}"


def line(case: DemoCase, outcome: Outcome) -> str:
    def pair(seconds: list[float]) -> str:
        return f"{min(seconds) * 1e3:.2f} / {statistics.median(seconds) * 1e3:.2f}"

    ratio = statistics.median(outcome.theirs) / statistics.median(outcome.ours)
    faster = styled(f"{ratio:8.1f}x", "32" if ratio >= 1 else "33")
    verdict = styled(f"{outcome.error:12.0e}", "0" if outcome.error <= case.tolerance else "1;31")
    first = f"{outcome.first_call:.2f} s"
    return f"{case.title:19}{case.kernels:8}{first:>10}{pair(outcome.ours):>18}{pair(outcome.theirs):>18}{faster}{verdict}"


def show_progress(text: str) -> None:
    """Shows a line of progress, which the finished line overwrites; on terminals only."""
    if COLOUR:
        print(f"\r\033[K{styled(text, '2')}", end="", flush=True)


def main() -> int:
    machine = pbkern.cpu.machine()
    print(
        f"{styled('pbkern', '1')} on {machine.source.split(';')[0]}, {machine.cores} cores, "
        f"{machine.vector_bits}-bit vectors; jax {jax.__version__}"
    )
    FOLDER.mkdir(exist_ok=True)
    image = photograph()
    heading(
        f"Photograph {PHOTO_HEIGHT} x {PHOTO_WIDTH} x 3, transformer block 512 x 512 with 8 heads, "
        f"matmul {PRODUCT_SIZE} x {PRODUCT_SIZE}"
    )
    print(styled(COLUMNS, "2"))
    print(styled(f"{'':37}{'min / median ms':>18}{'min / median ms':>18}", "2"))
    results, wrong = {}, []
    for case in cases(image):
        show_progress(f"{case.title}: compiling and measuring ...")
        outcome = run(case)
        show_progress("")
        print(line(case, outcome), flush=True)
        results[case.title] = np.asarray(outcome.result)
        if outcome.error > case.tolerance:
            wrong.append(case.title)

    heading("What unsharp mask became: one kernel, as source that rebuilds it")
    print(pbkern.jit(unsharp_mask).kernels(jax.device_put(image))[0].source().rstrip())

    save("0_photograph", image)
    save("1_blur", results["blur_x, blur_y"].transpose(1, 2, 0))
    save("2_unsharp", results["unsharp mask"])
    save("3_corners", mark_corners(image, results["Harris corners"]))
    heading("Pictures")
    for path in sorted(FOLDER.glob("*.png")):
        print(path)
    for title in wrong:
        print(styled(f"{title}: pbkern and jax.jit disagree", "1;31"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
