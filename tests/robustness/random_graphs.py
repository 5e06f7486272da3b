"""Random functions of small odd arrays whose results are exact, so that any difference from jax.jit is a defect.

Values are small integers, also as floats, and are clipped after each operation that makes them grow: sums, products and
comparisons are exact in every dtype, whatever the order. Functions that round (exp, division, ...) come last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

DTYPES = ("float32", "bfloat16", "float16", "int32", "int8", "uint8", "int16", "uint32")
LIMIT = 3  # of values: a sum of 33 products is below 2^9, which bfloat16 still has


@dataclass(frozen=True)
class Graph:
    """A function, its arguments, and what it does, a line per operation."""

    function: Callable
    args: tuple[np.ndarray, ...]
    lines: tuple[str, ...]
    rounds: bool


def small(x: jax.Array) -> jax.Array:
    """Values within LIMIT; of unsigned integers those from 0."""
    if x.dtype == bool:
        return x
    return jnp.clip(
        x, jnp.asarray(0 if x.dtype.kind == "u" else -LIMIT, x.dtype), jnp.asarray(LIMIT, x.dtype)
    )


def _columns(r, x):
    k = int(r.integers(x.shape[-1]))
    return (lambda x: x[..., k]), f"[..., {k}]"


def _slice(r, x):
    axis, step = int(r.integers(x.ndim)), int(r.integers(1, 4))
    low = int(r.integers(x.shape[axis]))
    cut = (slice(None),) * axis + (slice(low, None, step),)
    return (lambda x: x[cut]), f"[{low}::{step}] along {axis}"


def _reduction(r, x):
    name, axis, keep = (
        str(r.choice(["sum", "max", "min", "argmax", "argmin"])),
        int(r.integers(x.ndim)),
        bool(r.integers(2)),
    )
    return (
        lambda x: getattr(jnp, name)(x, axis=axis, keepdims=keep).astype(x.dtype)
    ), f"{name}(axis={axis}, keepdims={keep})"


def _median(r, x):
    axis = int(r.integers(x.ndim))
    return (
        lambda x: jnp.sort(x, axis=axis).take(x.shape[axis] // 2, axis=axis)
    ), f"median along {axis}"


def _along(name, f):
    def made(r, x):
        axis = int(r.integers(x.ndim))
        return (lambda x: f(x, axis)), f"{name} along {axis}"

    return made


def _pad(r, x):
    widths = tuple((int(a), int(b)) for a, b in r.integers(0, 3, (x.ndim, 2)))
    return (lambda x: jnp.pad(x, widths)), f"pad {widths}"


def _reshape(r, x):
    shape = (x.size,) if r.integers(2) else (1, *x.shape)
    return (lambda x: x.reshape(shape)), f"reshape {shape}"


UNARY = (
    _columns, _slice, _reduction, _reduction, _median, _pad, _reshape,
    _along("sort", lambda x, a: jnp.sort(x, axis=a)), _along("flip", lambda x, a: jnp.flip(x, a)),
    _along("cumsum", lambda x, a: jnp.cumsum(x, axis=a, dtype=x.dtype)), _along("roll", lambda x, a: jnp.roll(x, 1, a)),
    _along("cummax", lambda x, a: lax.cummax(x, axis=a)), _along("repeat", lambda x, a: jnp.repeat(x, 2, axis=a)),
    _along("centred", lambda x, a: x - x.max(axis=a, keepdims=True)), _along("diff", lambda x, a: jnp.diff(x, axis=a)),
    lambda r, x: (lambda x: x.T, "T"), lambda r, x: (lambda x: -x, "negated"), lambda r, x: (lambda x: x * x, "square"),
)  # fmt: skip
BINARY = {
    "add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "max": jnp.maximum, "min": jnp.minimum,
    "where": lambda a, b: jnp.where(a > b, a, -b), "equal": lambda a, b: (a == b).astype(a.dtype),
}  # fmt: skip
ROUNDING = {
    "exp": jnp.exp, "tanh": jnp.tanh, "div": lambda x: x / 3, "rsqrt": lambda x: lax.rsqrt(jnp.abs(x) + 1),
    "logistic": jax.nn.sigmoid, "softmax": lambda x: jax.nn.softmax(x, -1), "mean": lambda x: x.mean(-1),
}  # fmt: skip


def _broadcasts(a, b) -> bool:
    try:
        shape = np.broadcast_shapes(a.shape, b.shape)
    except ValueError:
        return False
    return np.prod(shape) <= 20000


def draw(seed: int) -> Graph:
    """The graph of a seed: two to four arguments of one dtype, four to ten operations, one to three results."""
    r = np.random.default_rng(seed)
    dtype = jnp.dtype(str(r.choice(DTYPES)))
    rows, columns = int(r.choice([1, 2, 3, 5, 7, 16, 17, 40, 100])), int(r.integers(2, 34))
    shapes = [(rows, columns), (columns, int(r.integers(1, 18))), (rows, 1), (columns,)][
        : int(r.integers(2, 5))
    ]
    low = 0 if dtype.kind == "u" else -LIMIT
    args = tuple(r.integers(low, LIMIT + 1, s).astype("f4").astype(dtype) for s in shapes)
    steps: list[Callable] = []
    lines: list[str] = []
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]

    def add(f: Callable, line: str) -> None:
        try:
            out = jax.eval_shape(lambda *values: f(list(values)), *types)
        except (TypeError, ValueError):
            return
        if 0 < out.size <= 20000 and out.ndim <= 4:
            steps.append(f)
            types.append(out)
            lines.append(f"v{len(types) - 1} = {line}: {out.dtype}{list(out.shape)}")

    for _ in range(int(r.integers(4, 11))):
        i, j = (int(k) for k in r.integers(0, len(types), 2))
        a, b = types[i], types[j]
        if r.random() < 0.25 and a.ndim == 2 and b.ndim == 2 and a.shape[1] == b.shape[0]:
            add(lambda v, i=i, j=j: small(v[i] @ v[j]), f"v{i} @ v{j}")
        elif r.random() < 0.4 and _broadcasts(a, b):
            name = str(r.choice(list(BINARY)))
            add(lambda v, i=i, j=j, f=BINARY[name]: small(f(v[i], v[j])), f"{name}(v{i}, v{j})")
        elif a.ndim:
            f, line = UNARY[int(r.integers(len(UNARY)))](r, a)
            add(lambda v, i=i, f=f: small(f(v[i])), f"v{i} {line}")
    rounds = bool(r.integers(2)) and dtype == np.float32
    if rounds and types[-1].ndim:
        name = str(r.choice(list(ROUNDING)))
        last = len(types) - 1
        add(lambda v, f=ROUNDING[name]: f(v[last]), f"{name}(v{last})")
    more = r.integers(len(args), max(len(types), len(args) + 1), 2)
    wanted = sorted({len(types) - 1, *map(int, more)} & {*range(len(types))})

    def function(*args):
        values = list(args)
        for f in steps:
            values.append(f(values))
        return [values[k] for k in wanted]

    head = [f"v{n}: {a.dtype}{list(a.shape)}" for n, a in enumerate(args)]
    return Graph(
        function, args, (*head, *lines, f"return {', '.join(f'v{k}' for k in wanted)}"), rounds
    )
