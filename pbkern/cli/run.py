"""pbkern run: a function on each backend, compared and timed; or a shared library, by the metadata that it holds."""

from __future__ import annotations

import argparse
import contextlib
import functools
import pathlib
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pbkern.core.errors import OptionError, TargetError
from pbkern.core.options import CompileOptions

from . import functions, option_flags

# Most seconds of one backend's calls: keeps a run short.
MOST_BACKEND_SECONDS = 2.0
# Calls of one backend, where the command line gives no number.
DEFAULT_CALLS = 20
# Seed of the random operands: any number, but always the same.
OPERANDS_SEED = 0
# Largest difference between backends, relative to the largest result, that rounding explains.
TOLERANCES = {
    "float16": 2e-2,
    "bfloat16": 5e-2,
    "float32": 1e-3,
    "complex64": 1e-3,
    "float64": 1e-9,
    "complex128": 1e-9,
}


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    parser.add_argument(
        "arrays",
        nargs="*",
        metavar="ARRAY.npy",
        help="inputs of a library; random ones where there are none",
    )
    parser.add_argument("--skip-std", action="store_true", help="without plain JAX, op by op")
    parser.add_argument("--skip-xla", action="store_true", help="without jax.jit")


def run(parsed: argparse.Namespace) -> None:
    """Runs a function on each backend, or a shared library."""
    if parsed.function.endswith(".so"):
        _run_library(parsed)
    else:
        _run_function(parsed)


# --- functions
# ------------------------------------------------------------------------------------------------------


def _run_function(parsed: argparse.Namespace) -> None:
    import jax

    if parsed.arrays:
        raise OptionError(
            "arrays are inputs of libraries",
            why=" ".join(parsed.arrays),
            hint="--args TYPES, or example_args",
        )
    options = option_flags.given(parsed)
    calls = _calls(options)
    fn, args = functions.load(parsed.function, parsed.args, functions.parse_sizes(parsed.sizes))
    args = jax.tree.map(_drawn, args)
    ours = functions.decorated(fn, options)
    jitted = getattr(ours, "jitted", ours)  # of a StableHLO program
    plain, types_kept = jitted.__wrapped__, getattr(ours, "types_kept", contextlib.nullcontext)
    static = {
        k: value for k, value in jitted.options.differing().items() if k.startswith("static_")
    }
    backends: dict[str, Callable] = {"polyblocks": ours}
    backends |= {} if parsed.skip_xla else {"xla": jax.jit(plain, **static)}
    backends |= {} if parsed.skip_std else {"std": plain}
    expected = None
    for name, backend in reversed(backends.items()):
        with (
            types_kept(),
            functions.explained(parsed.function, f"`{parsed.function}` failed on backend `{name}`"),
        ):
            start = time.perf_counter()
            results = _awaited(backend, args)
            first = time.perf_counter() - start
            times = _timed(functools.partial(_awaited, backend, args), calls)
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(results)]
        said = "" if expected is None else f"  {_compared(leaves, expected)}"
        print(f"{name:10}  first call {first * 1e3:9.2f} ms  then {_shown(times)}{said}")
        expected = leaves if expected is None else expected


def _awaited(backend: Callable, args: Sequence) -> Any:
    import jax

    return jax.block_until_ready(backend(*args))


def _drawn(x: Any) -> Any:
    """A random array of a type; others as they are."""
    import jax

    return (
        jax.numpy.asarray(_random(x.shape, np.dtype(x.dtype)))
        if isinstance(x, jax.ShapeDtypeStruct)
        else x
    )


def _random(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    rng = np.random.default_rng(OPERANDS_SEED)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        return rng.integers(0, 100, shape).astype(dtype)
    x = rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape) if dtype.kind == "c" else x).astype(dtype)


def _calls(options: dict[str, Any]) -> int | None:
    """Takes num_iters out of options: how often a backend is timed. Raises OptionError for no calls."""
    calls = options.pop("num_iters", None)
    if calls is not None:
        CompileOptions(num_iters=calls)
    return calls


def _timed(call: Callable[[], Any], calls: int | None) -> list[float]:
    """Seconds of each call."""
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < (calls or DEFAULT_CALLS) and (
        calls or time.perf_counter() - began < MOST_BACKEND_SECONDS or not times
    ):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def _shown(times: Sequence[float]) -> str:
    return f"{min(times) * 1e3:9.3f} ms at best, {float(np.median(times)) * 1e3:9.3f} ms median of {len(times)}"


def _compared(results: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> str:
    """Says how far results are from the first backend's.

    Raises TargetError where rounding does not explain it.
    """
    worst = 0.0
    for k, (result, reference) in enumerate(zip(results, expected, strict=True)):
        if result.size == 0 or np.array_equal(
            result, reference, equal_nan=result.dtype.kind in "fc"
        ):
            continue
        wide = np.complex128 if result.dtype.kind == "c" else np.float64
        x, y = result.astype(wide), reference.astype(wide)
        scale = max(float(np.nanmax(np.abs(y), initial=0.0)), 1e-30)
        error = float(np.nanmax(np.abs(x - y), initial=0.0)) / scale
        if not error <= TOLERANCES.get(result.dtype.name, 0.0) or not np.array_equal(
            np.isnan(x), np.isnan(y)
        ):
            raise TargetError(
                f"result {k} differs between backends",
                why=f"by {error:.3g} of its largest element",
                hint="--mlir-disable-fast-math rounds as XLA does",
            )
        worst = max(worst, error)
    return f"differs by {worst:.1e} of the largest element" if worst else "equal"


# --- libraries
# ------------------------------------------------------------------------------------------------------


def _run_library(parsed: argparse.Namespace) -> None:
    from pbkern.aot.loaded import LoadedLibrary, dtype_of

    path = pathlib.Path(parsed.function)
    if not path.is_file():
        raise OptionError(f"there is no file {path}", why=f"in {pathlib.Path.cwd()}")
    other_flags = option_flags.given(parsed)
    calls = _calls(other_flags)
    if other_flags or parsed.args:
        name = next(iter(other_flags), "args")
        raise OptionError(
            f"`{name}` concerns functions", why=f"{path} is compiled already", hint="pbkern compile"
        )
    metadata = read_metadata(path)
    loaded = LoadedLibrary(path.resolve(), metadata)
    inputs = metadata["inputs"]
    if parsed.arrays and len(parsed.arrays) != len(inputs):
        raise OptionError(
            f"{path} takes {len(inputs)} arrays",
            why=f"given {len(parsed.arrays)}",
            hint=", ".join(f"{operand['name']} {operand['memref']}" for operand in inputs),
        )
    arrays = [_read(array) for array in parsed.arrays] or [
        _random(operand["shape"], dtype_of(operand["dtype"])) for operand in inputs
    ]
    results = loaded(*arrays)
    results = results if isinstance(results, tuple) else (results,)
    times = _timed(lambda: loaded(*arrays, out=results), calls)
    print(f"{metadata['name']}  {_shown(times)}")
    for output, result in zip(metadata["outputs"], results):
        print(f"{output['name']} {output['memref']}  checksum {zlib.crc32(result.tobytes()):08x}")


def read_metadata(path: pathlib.Path) -> Mapping[str, Any]:
    """Reads a shared library's metadata. Raises OptionError for libraries of others."""
    from pbkern.aot.loaded import metadata_in

    metadata = metadata_in(path.read_bytes())
    if metadata is None:
        raise OptionError(
            f"{path} is no library of pbkern's",
            why="it holds no metadata",
            hint="pbkern compile -o NAME.so",
        )
    return metadata


def _read(path: str) -> np.ndarray:
    try:
        return np.load(path)
    except (OSError, ValueError) as e:
        raise OptionError(
            f"{path} cannot be read", why=str(e), hint="an array that numpy.save wrote"
        ) from None
