"""Weights of a function: which inputs they are, and where a library has them: arguments, arrays of its object, or a file."""

from __future__ import annotations

import dataclasses

import numpy as np

from pbkern.core.errors import OptionError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.options import CompileOptions

from .function import CONSTANT_BYTES, ArraySource, LibraryFunction


@dataclass(frozen=True)
class Weights:
    """Which inputs of a function are weights.

    Attributes:
      hint: how such a function gets weights.
      numbers: of the inputs.
      values: an array for each; None where only its type is known.
    """

    hint: str
    numbers: tuple[int, ...] = ()
    values: tuple[np.ndarray | None, ...] = ()

    @property
    def known(self) -> list[np.ndarray]:
        return [value for value in self.values if value is not None]


def placed(function: LibraryFunction, weights: Weights, options: CompileOptions) -> LibraryFunction:
    """The function with its weights where the options ask for them.

    Raises OptionError for a function without weights, for weights without values, for those that a
    result may replace, and for more than an object can hold.
    """
    marked = tuple(
        dataclasses.replace(argument, is_weight=n in weights.numbers)
        for n, argument in enumerate(function.inputs)
    )
    if options.weights == "arguments":
        return dataclasses.replace(function, inputs=marked)
    _check(function, weights, options.weights)
    constants = list(function.constants)
    further = [n for n, argument in enumerate(marked) if not argument.is_weight]
    sources = {n: ArraySource("input", k) for k, n in enumerate(further)}
    for k, (number, value) in enumerate(zip(weights.numbers, weights.values)):
        sources[number] = ArraySource("weight", k)
        if options.weights == "embed" and marked[number].is_used:
            assert value is not None
            sources[number] = ArraySource("constant", len(constants))
            constants.append(value)
    source_of = lambda source: sources[source.n] if source.kind == "input" else source
    return dataclasses.replace(
        function,
        inputs=tuple(marked[n] for n in further),
        weights=tuple(marked[n] for n in weights.numbers),
        constants=tuple(constants),
        buffers=tuple(map(source_of, function.buffers)),
        copies=tuple((k, source_of(source)) for k, source in function.copies),
        shared=tuple((sources[number].n, output) for number, output in function.shared),
    )


def _check(function: LibraryFunction, weights: Weights, place: str) -> None:
    asked, total = f"weights={place!r}", 0
    if not weights.numbers:
        raise OptionError(f"`{function.name}` has no weights", why=asked, hint=weights.hint)
    donated = {number for number, _ in function.shared}
    for number, value in zip(weights.numbers, weights.values):
        path = function.inputs[number].path
        if value is None:
            raise OptionError(
                f"the values of `{path}` are not known",
                why=f"{asked}; it is given as a type",
                hint="give the array",
            )
        if number in donated:
            raise OptionError(
                f"`{path}` is donated, and a weight that cannot be written",
                why=asked,
                hint="leave it out of donate_argnums, or weights='arguments'",
            )
        total += value.nbytes
    if place == "embed" and total > CONSTANT_BYTES:
        raise OptionError(
            f"{total >> 20} MB of weights are too many for an object",
            why=f"it holds {CONSTANT_BYTES >> 20} MB at most",
            hint="weights='file'",
        )
