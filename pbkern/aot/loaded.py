"""A library's metadata and its shared object -> a callable on NumPy arrays, by ctypes. Nothing is converted or copied."""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pbkern.core.errors import KernelError, TargetError

from .files import WEIGHTS_END
from .interface.arguments import CODES, FILE_CODES

# How the metadata begins, in a library's file as well.
MARK = b'{"pbkern": "library", '


def metadata_in(content: bytes) -> dict[str, Any] | None:
    """Reads a library's metadata from its file, which is not loaded for that; None for other files."""
    at = content.find(MARK)
    return None if at < 0 else json.loads(content[at : content.index(b"\0", at)])


def dtype_of(name: str) -> np.dtype:
    """NumPy's dtype of a name such as "float32" or "bfloat16"."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def _shape(argument: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """An argument's shape for sizes that the caller says."""
    if "dimensions" not in argument:
        return tuple(argument["shape"])
    return tuple(
        dimension["constant"] + sum(part * sizes[name] for name, part in dimension["sizes"].items())
        for dimension in argument["dimensions"]
    )


def _symbols(argument: Mapping[str, Any]) -> list[str]:
    """Names of the sizes that an argument's shape depends on."""
    return sorted({name for d in argument.get("dimensions", ()) for name in d["sizes"]})


class LoadedLibrary:
    """A library in this process.

        results = loaded(x, y)         new arrays: one, or a tuple of several
        loaded(x, y, out=(a, b))       into given ones

    Attributes:
      metadata: of the library. path: of its file.

    A file of weights is loaded from `weights`, by default NAME.weights beside the library.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        metadata: Mapping[str, Any],
        weights: str | os.PathLike | None = None,
    ):
        self.path, self.metadata = pathlib.Path(path), metadata
        try:
            self._library = ctypes.CDLL(os.fspath(self.path))
            self._call = getattr(self._library, f"{metadata['name']}_try")
        except (OSError, AttributeError) as e:
            raise TargetError(
                f"{self.path} cannot be loaded",
                why=str(e),
                hint="a shared library that pbkern made for this computer",
            ) from None
        self._call.restype = ctypes.c_int
        if metadata.get("weights_file"):
            stem = self.path.stem.removeprefix("lib")
            self._load(weights or self.path.with_name(f"{stem}{WEIGHTS_END}"))
        self._pool: np.ndarray | None = None

    def _load(self, weights: str | os.PathLike) -> None:
        load = getattr(self._library, f"{self.metadata['name']}_load")
        code = load(os.fsencode(weights))
        if code:
            raise TargetError(
                f"weights of `{self.metadata['name']}` were not loaded",
                why=f"{os.fspath(weights)}: {self._words(code)}",
            )

    def _words(self, code: int) -> str:
        return dict((CODES | FILE_CODES).values()).get(code, f"code {code}")

    def __call__(
        self, *arrays: np.ndarray, out: np.ndarray | Sequence[np.ndarray] | None = None
    ) -> Any:
        """Calls the function; returns its results.

        Raises KernelError for arrays of other types, shapes or layouts, and for results that overlap other arrays;
        TargetError for what the library refuses.
        """
        inputs, outputs = self.metadata["inputs"], self.metadata["outputs"]
        if len(arrays) != len(inputs):
            names = ", ".join(operand["name"] for operand in inputs)
            raise KernelError(
                f"`{self.metadata['name']}` takes {len(inputs)} arrays",
                why=f"given {len(arrays)}",
                hint=names,
            )
        sizes = self._sizes(arrays)
        if out is None:
            results = [
                np.empty(_shape(output, sizes), dtype_of(output["dtype"])) for output in outputs
            ]
        else:
            results = [out] if isinstance(out, np.ndarray) else list(out)
            if len(results) != len(outputs):
                raise KernelError(
                    f"`{self.metadata['name']}` has {len(outputs)} results",
                    why=f"out holds {len(results)}",
                )
        for argument, x in zip((*inputs, *outputs), (*arrays, *results)):
            self._check(argument, x, sizes)
        if any(not result.flags.writeable for result in results):
            raise KernelError("a result's array is read-only", why="out=...", hint="a copy of it")
        self._check_places(arrays, results)
        pointers = [ctypes.c_void_p(x.ctypes.data) for x in (*arrays, *results)]
        said = [ctypes.c_int64(sizes[symbol["name"]]) for symbol in self.metadata["sizes"]]
        code = self._call(*pointers, *said, *self._memory())
        if code:
            raise TargetError(
                f"`{self.metadata['name']}` did not run",
                why=self._words(code),
            )
        return results[0] if len(results) == 1 else tuple(results)

    def _sizes(self, arrays: Sequence[Any]) -> dict[str, int]:
        """The sizes that the arrays have. Raises KernelError for those that the library is not made for."""
        sizes: dict[str, int] = {}
        for argument, x in zip(self.metadata["inputs"], arrays):
            for axis, dimension in enumerate(argument.get("dimensions", ())):
                if len(dimension["sizes"]) == 1 and np.ndim(x) == len(argument["shape"]):
                    ((name, part),) = dimension["sizes"].items()
                    sizes.setdefault(name, (np.shape(x)[axis] - dimension["constant"]) // part)
        for symbol in self.metadata["sizes"]:
            name, low, high = symbol["name"], symbol["low"], symbol["high"]
            if not low <= sizes.setdefault(name, low) <= high:
                raise KernelError(
                    f"`{self.metadata['name']}` is not made for this size",
                    why=f"{name} is {sizes[name]}",
                    hint=f"{low} to {high}",
                )
        return sizes

    def _check(self, argument: Mapping[str, Any], x: Any, sizes: Mapping[str, int]) -> None:
        shape, dtype, name = _shape(argument, sizes), dtype_of(argument["dtype"]), argument["name"]
        wanted = f"{argument['dtype']}{list(shape)}"
        if not isinstance(x, np.ndarray):
            raise KernelError(
                f"`{name}` is not a NumPy array",
                why=f"{type(x).__name__}; it is {wanted}",
                hint="np.asarray(x)",
            )
        if x.dtype != dtype or x.shape != shape:
            symbols = _symbols(argument)
            said = " and ".join(f"{symbol} = {sizes[symbol]}" for symbol in symbols)
            raise KernelError(
                f"`{name}` has another type",
                why=f"{x.dtype}{list(x.shape)}; it is {wanted}" + (f" for {said}" if said else ""),
                hint="arguments of one call agree on their sizes"
                if symbols
                else "the library is made for one type of each argument",
            )
        if not x.flags.c_contiguous or not x.flags.aligned:
            raise KernelError(
                f"`{name}` is not contiguous",
                why=f"strides {x.strides} of {wanted}",
                hint="np.ascontiguousarray(x)",
            )

    def _check_places(self, arrays: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
        """Raises KernelError for results that lie where another array does, but for pairs that may be one array."""
        inputs, outputs = self.metadata["inputs"], self.metadata["outputs"]
        for number, result in enumerate(results):
            for other, x in enumerate((*arrays, *results[:number])):
                same = (
                    result.ctypes.data == x.ctypes.data
                    and [other, number] in self.metadata["shared"]
                )
                if np.may_share_memory(result, x) and not same:  # exact: both are contiguous
                    name = (*inputs, *outputs)[other]["name"]
                    raise KernelError(
                        f"`{outputs[number]['name']}` overlaps `{name}`",
                        why="the library reads arrays after it has stored results",
                        hint="an array of its own; the header says which two arrays may be one",
                    )

    def _memory(self) -> list:
        if not self.metadata["user_device_memory"]:
            return []
        pool = np.empty(
            self.metadata["memory_bytes"], np.uint8
        )  # one per call: calls may run at the same time
        self._pool = pool
        return [ctypes.c_void_p(pool.ctypes.data if pool.size else None), ctypes.c_void_p(None)]
