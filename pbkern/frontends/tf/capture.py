"""Python function of tensors -> Captured: its StableHLO, variables that it reads and assigns, the structure of its results."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pbkern import _jax
from pbkern._user_lines import UserLine, raise_at
from pbkern.core.errors import UnsupportedOp
from pbkern.core.lazy_dataclass import dataclass
from pbkern.frontends.stablehlo.places import LIBRARIES

from .arguments import DTYPES, Arguments, check_numbers

STAGE = "stablehlo"
# A constant of truth values that is printed as bytes, and its sizes.
PACKED_TRUTHS = re.compile(r'dense<"0x([0-9A-Fa-f]+)"> : tensor<((?:\d+x)*)i1>')
# TensorFlow's operations of tf.cond, tf.case and tf.switch_case.
CONDITIONALS = ("If", "StatelessIf", "Case", "StatelessCase")
# Operations that TensorFlow's error text names, and the element types of those that XLA has of other types.
MISSING = re.compile(r"(\w+) \(No registered")
MISSING_TYPE = re.compile(
    r"(\w+) \(No registered [^{]*\{\{node [^}]*\}\}\s*\(OpKernel was found, but attributes didn't match\)"
    r"[^{]*\bT=DT_(\w+)"
)
# Functions of TensorFlow that compute the same by operations that XLA has.
IN_PLACE_OF = {
    "MatrixDeterminant": "the diagonal of tf.linalg.qr's r has the determinant as its product, but for the sign; "
    "tf.linalg.logdet is that of a positive definite matrix",
    "LogMatrixDeterminant": "tf.linalg.logdet is that of a positive definite matrix",
    "Lu": "tf.linalg.solve and tf.linalg.qr are compiled",
    "MatrixSolveLs": "tf.linalg.lstsq(..., fast=True)",
    "MatrixSquareRoot": "tf.linalg.eigh gives that of a symmetric matrix",
    "MatrixLogarithm": "tf.linalg.eigh gives that of a symmetric matrix",
    "Eig": "tf.linalg.eigh is compiled, for symmetric matrices",
}
ALIAS = re.compile(r"parameter_number = (\d+) : i64\}, output_index = array<i64(?:: (\d+))?>")


@dataclass(frozen=True)
class TracedFunction:
    """A traced function.

    Attributes:
      program: StableHLO text; its parameters are the call's tensors, then `captures`.
      captures: what the function reads of its scope: tensors, and variables, which are read at each
        call.
      assigned: (number of a result of the program, the variable that gets it).
      results: the structure of the function's results, with None where it returns None.
      count: how many results of the program are the function's; they come first.
      places: the user's lines by names of TensorFlow's operations.
      concrete: the function in TensorFlow's own form, of which gradients are traced.
      tensors: types of the call's tensors.
      returned: types of the function's results.
    """

    program: str
    captures: tuple[Any, ...]
    assigned: tuple[tuple[int, tf.Variable], ...]
    results: Any
    count: int
    places: dict[str, UserLine]
    concrete: Any
    tensors: tuple[tf.TensorSpec, ...]
    returned: tuple[tf.TensorSpec, ...]

    @functools.cached_property
    def values(self) -> Callable[[], list[tf.Tensor]]:
        """Gives values of the captures, now.

        One function of TensorFlow's reads them all: read_value costs 30 us a variable.
        """
        captures = self.captures
        if not any(isinstance(source, tf.Variable) for source in captures):
            return lambda: list(captures)
        read = tf.function(
            lambda: [
                source.read_value() if isinstance(source, tf.Variable) else source
                for source in captures
            ]
        )
        concrete = read.get_concrete_function()

        def values() -> list[tf.Tensor]:
            tensors = concrete()
            check_numbers("a decorated function", tensors[:1])  # all have them, or none
            return tensors

        return values

    def packed(self, results: Sequence[tf.Tensor]) -> Any:
        """The function's results in their structure. IndexedSlices, SparseTensor and their like are several results each."""
        remaining = iter(results)
        leaves = [
            None if leaf is None else next(remaining)
            for leaf in tf.nest.flatten(self.results, expand_composites=True)
        ]
        return tf.nest.pack_sequence_as(self.results, leaves, expand_composites=True)


def capture(fn: Callable, given: Arguments) -> TracedFunction:
    """Traces a function for arguments like these.

    Raises UnsupportedOp for operations that XLA does not have.
    """
    rebuilt = tf.autograph.experimental.do_not_convert(given.rebuilt)

    def flat(*tensors: Any) -> Any:  # AutoGraph converts fn, which it calls
        args, kwargs = rebuilt(tensors)
        return fn(*args, **kwargs)

    return traced_function(flat, given.specs(), getattr(fn, "__name__", type(fn).__name__))


def traced_function(
    fn: Callable, specs: Sequence[tf.TensorSpec], name: str, hint: str | None = None
) -> TracedFunction:
    """Traces a function of tensors alone.

    Raises UnsupportedOp, with the hint, for operations that XLA does not have.
    """
    traced = tf.function(fn, jit_compile=True)
    concrete = traced.get_concrete_function(*specs)
    variables = {id(variable.handle): variable for variable in concrete.graph.variables}
    captures = tuple(_captured(operand, variables, name) for operand in concrete.captured_inputs)
    for output in concrete.outputs:
        if output.dtype not in DTYPES:
            raise UnsupportedOp(
                f"`{name}` returns a {output.dtype.name}",
                why="kernels write arrays of numbers",
                hint="return numbers; `stack()` of a TensorArray",
            )
    lines = _places(concrete.graph)
    _refuse_arrays_that_grow(concrete.graph, name, lines)
    text = _stablehlo(
        traced, specs, name, hint, lambda kinds: _line_of(kinds, concrete.graph, lines)
    )
    if "stablehlo.bounds<" in text:
        _refuse_branches_of_unlike_shapes(concrete.graph, name, lines)
    assigned = tuple((k, captures[n - len(specs)]) for n, k in _aliases(text))
    return TracedFunction(
        text,
        captures,
        assigned,
        concrete.structured_outputs,
        len(concrete.outputs),
        lines,
        concrete,
        tuple(specs),
        # Now: a gradient's trace appends to the outputs what it needs of the function.
        tuple(tf.TensorSpec(output.shape, output.dtype) for output in concrete.outputs),
    )


def _places(graph: Any) -> dict[str, UserLine]:
    """The innermost line of the user's for each operation of a graph."""
    places = {}
    for op in graph.get_operations():
        users = (
            entry
            for entry in reversed(op.traceback)
            if _jax.is_user_file(entry.filename) and not LIBRARIES.search(entry.filename)
        )
        frame = next(users, None)
        if frame is not None:
            places[op.name] = UserLine(frame.filename, frame.lineno, 0, frame.name)
    return places


def _refuse_arrays_that_grow(graph: Any, name: str, lines: dict[str, UserLine]) -> None:
    """Raises UnsupportedOp for writes that may make a TensorArray longer: XLA stores them over its last element, or nowhere."""
    definition = graph.as_graph_def()
    inner = (node for function in definition.library.function for node in function.node_def)
    for node in (*definition.node, *inner):
        if node.op == "TensorListSetItem" and node.attr["resize_if_index_out_of_bounds"].b:
            error = UnsupportedOp(
                f"`{name}` writes to a TensorArray with `dynamic_size`",
                why="a kernel's arrays have sizes that are known before it runs",
                hint="tf.TensorArray(dtype, size=n), with the number of elements that are written, and no dynamic_size=True",
            )
            raise_at(error, lines.get(node.name))


def _refuse_branches_of_unlike_shapes(graph: Any, name: str, lines: dict[str, UserLine]) -> None:
    """Raises UnsupportedOp at the first conditional whose result has a shape that its condition decides."""
    for op in graph.get_operations():
        if op.type in CONDITIONALS and not all(out.shape.is_fully_defined() for out in op.outputs):
            line = lines.get(op.name)
            place = f", line {line.line}" if line else ""
            error = UnsupportedOp(
                f"branches of `{op.name}` in `{name}`{place} give results of different shapes",
                why="a kernel's shapes are known before it runs, whatever the condition is",
                hint="choose the branch by a number of Python (`if`), before tracing",
            )
            raise_at(error, line)


def _captured(tensor: tf.Tensor, variables: dict[int, tf.Variable], name: str) -> Any:
    if tensor.dtype == tf.resource and id(tensor) in variables:
        return variables[id(tensor)]
    if tensor.dtype not in DTYPES:
        raise UnsupportedOp(
            f"`{name}` reads a {tensor.dtype.name} of its scope",
            why="kernels read arrays of numbers",
            hint="pass what it looks up as an argument",
        )
    return tensor


def _line_of(kinds: Sequence[str], graph: Any, lines: dict[str, UserLine]) -> UserLine | None:
    """The user's line of the first operation of one of these kinds; None of those within branches and loops."""
    named = (op.name for op in graph.get_operations() if op.type in kinds)
    return next((lines[operation] for operation in named if operation in lines), None)


def _stablehlo(
    traced: Any,
    specs: Sequence[tf.TensorSpec],
    name: str,
    hint: str | None,
    line_of: Callable[[Sequence[str]], UserLine | None],
) -> str:
    try:
        text = traced.experimental_get_compiler_ir(*specs)(stage=STAGE, platform_name="CPU")
        return PACKED_TRUTHS.sub(_unpacked_truths, text)
    except (ValueError, tf.errors.OpError) as e:
        text = str(e)
        if "compile-time constant" in text:
            raise UnsupportedOp(
                f"shapes in `{name}` depend on numbers that it is called with",
                why=_first(text),
                hint=hint or "pass these as numbers of Python, which are constants",
            ) from None
        missing = list(dict.fromkeys(MISSING.findall(text)))
        line = line_of(missing)
        ways = [IN_PLACE_OF[kind] for kind in missing if kind in IN_PLACE_OF]
        error = UnsupportedOp(
            f"`{name}` has operations that XLA does not have",
            at=None if line is None else str(line),
            why=_missing(missing, text),
            hint=hint or "; ".join([*ways, "leave these to TensorFlow, outside of the function"]),
        )
        raise_at(error, line)


def _unpacked_truths(constant: re.Match) -> str:
    """A constant of truth values with a byte for each: TensorFlow's MLIR prints eight in a byte, jaxlib's reads one in each."""
    digits, sizes = constant.groups()
    count = math.prod(int(size) for size in sizes.split("x") if size)
    packed = np.frombuffer(bytes.fromhex(digits), np.uint8)
    if packed.size == count:
        return constant[0]
    truths = np.unpackbits(packed, count=count, bitorder="little")
    return f'dense<"0x{truths.tobytes().hex()}"> : tensor<{sizes}i1>'


def _missing(missing: Sequence[str], text: str) -> str:
    """The missing operations, with the type where XLA has them of other types; without any, the text's first sentence."""
    if not missing:
        return _first(text)
    types = dict(MISSING_TYPE.findall(text))
    return ", ".join(
        f"{kind} of {types[kind].lower()}" if kind in types else kind for kind in missing
    )


def _first(text: str) -> str:
    """The first sentence of an error text of TensorFlow's."""
    text = text.removeprefix("Failed getting HLO text: ").strip("'\" ")
    return text.split(". ")[0].splitlines()[0]


def _aliases(text: str) -> list[tuple[int, int]]:
    """(parameter, result) of the variables that a program assigns."""
    header = text[: text.find("func.func")]
    return [(int(parameter), int(result or 0)) for parameter, result in ALIAS.findall(header)]
