"""Gradients of decorated functions, for tf.GradientTape and tf.autodiff.ForwardAccumulator.

TensorFlow sees no operation of a compiled call, so the call is recorded as one operation. Its gradient is the one that
TensorFlow derives from the traced function, compiled like the function itself: stop_gradient, custom gradients and values at
kinks are TensorFlow's. It computes again what it needs of the function, from the numbers that the call had.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from jax.extend import core as jex
from tensorflow.python import pywrap_tfe

from pbkern.core.errors import UnsupportedOp
from pbkern.core.jaxprs.walks import equations
from pbkern.core.lazy_dataclass import dataclass

from .arguments import check_numbers
from .capture import TracedFunction, traced_function

# Truthy where a GradientTape or a ForwardAccumulator of the calling thread watches one of a list of tensors, or a tensor that
# it was computed of. TensorFlow's public interface cannot tell; its own calls of functions ask this. It takes 0.1 us without
# a tape. Nothing else of pbkern uses TensorFlow's private interface.
is_watched: Callable[[list[tf.Tensor]], int] = pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes

# Within a function XLA sees the whole of a loop and its gradient, and can compile more of them.
WITHIN_HINT = "take the gradient within the decorated function"

Run = Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]


@dataclass(frozen=True)
class TracedGradient:
    """The gradient of a traced function with respect to some of its operands.

    Attributes:
      traced: a function of the tensors and of gradients of the floating-point results, to gradients of the operands; None
        where no result depends on one of them.
      captures: numbers of the function's captures that `traced` reads, in its order.
    """

    traced: TracedFunction | None
    captures: tuple[int, ...]


def trace_gradient(function: TracedFunction, wanted: Sequence[int], name: str) -> TracedGradient:
    """Traces the gradient with respect to operands with these numbers: tensors come first, then captures.

    Raises UnsupportedOp for gradients whose operations XLA does not have.
    """
    tensors, returned = function.tensors, function.returned
    differentiable = [k for k, result in enumerate(returned) if is_differentiable(result)]
    upstream = [returned[k] for k in differentiable]

    def backward(*arrays: Any) -> list[Any]:
        sources = [*arrays[: len(tensors)], *function.captures]
        sources = [sources[k] for k in wanted]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            structure = function.concrete(*arrays[: len(tensors)])
        leaves = tf.nest.flatten(structure, expand_composites=True)
        results = [leaf for leaf in leaves if leaf is not None]
        results = [results[k] for k in differentiable]
        gradients = tape.gradient(results, sources, list(arrays[len(tensors) :]))
        return [
            None if gradient is None else _dense(gradient, source.shape)
            for gradient, source in zip(gradients, sources)
        ]

    # In a thread of its own, so that the caller's tapes record nothing of it.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        undecorated = tf.autograph.experimental.do_not_convert(backward)
        specs = [*tensors, *upstream]
        traced = thread.submit(
            traced_function, undecorated, specs, f"{name}_gradient", WITHIN_HINT
        ).result()
    numbers = {id(capture): k for k, capture in enumerate(function.captures)}
    captures = tuple(numbers[id(capture)] for capture in traced.captures)
    return TracedGradient(traced if traced.count else None, captures)


def check_deterministic(gradient: jex.ClosedJaxpr, name: str) -> None:
    """Raises UnsupportedOp for a gradient that draws random numbers: they would not be the numbers that the call drew."""
    if any(eqn.primitive.name == "rng_uniform" for eqn in equations(gradient.jaxpr)):
        raise UnsupportedOp(
            f"`{name}` needs random numbers that a call drew",
            why="it computes again what it needs of the function, and would draw others",
            hint="tf.nn.experimental.stateless_dropout, a tf.random.Generator, keras.layers.Dropout",
        )


def recorded(run: Run, operands: Sequence[tf.Tensor], gradient: Callable, count: int) -> list:
    """Results of `run`, recorded by the tapes that watch its operands.

    Args:
      run: a function of operands.
      operands: of the call.
      gradient: numbers of operands -> a function of the operands and of gradients of those of the first results that are
        floating-point numbers, to gradients of these operands.
      count: how many results have gradients; later ones are values for variables.
    """
    results = run(operands)
    wanted: tuple[int, ...] = ()
    if is_watched(list(operands)):
        wanted = tuple(k for k, operand in enumerate(operands) if is_watched([operand]))
    places = [k for k in range(count) if is_differentiable(results[k])]
    if not wanted or not places:
        return results

    def backward(*upstream: Any) -> list[Any]:
        dense = [tf.convert_to_tensor(given) for given in upstream]
        check_numbers("a gradient", dense)
        return gradient(wanted)(operands, dense)

    def forward(*_: tf.Tensor) -> tuple[list[tf.Tensor], Callable]:
        return [results[k] for k in places], backward

    differentiable = tf.custom_gradient(forward)(*[operands[k] for k in wanted])
    for k, result in zip(places, differentiable):
        results[k] = result
    return results


def _dense(gradient: Any, shape: tf.TensorShape) -> tf.Tensor:
    """A gradient, which may be IndexedSlices of unknown shape, as a tensor."""
    tensor = tf.convert_to_tensor(gradient)
    tensor.set_shape(shape)
    return tensor


def is_differentiable(tensor: tf.Tensor | tf.TensorSpec) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex
