"""Run-time checks in bodies: `check` and `fail`, and how a failed one reaches the caller.

The interpreter raises CheckError on the spot. Native code cannot stop: the program that fails
reports, the others go on, and `after`, which follows the call wherever a kernel with checks is
called, raises once the results are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.errors import CheckError, KernelError
from pbkern.core.jaxprs.walks import inner_jaxprs
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.primitives import grid
from pbkern.dsl.text.repro import attach

from .kernel import Kernel

fail_p = jex.Primitive(
    "check_failed"
)  # *values ->; params: message, names (None for those that the message numbers)
fail_p.multiple_results = True


@fail_p.def_effectful_abstract_eval
def _fail_type(*_, message, names):
    return [], {_jax.debug_effect}


def check(condition, message: str, *values, **named) -> None:
    """Makes the call fail with CheckError unless `condition` holds.

    Args:
      condition: bool scalar.
      message: format string, e.g. "{} rows of {n}".
      *values: arrays or numbers that it shows by position.
      **named: arrays or numbers that it shows by name.

    Interpreted, the call ends there. Compiled, every program runs to its end and the error is
    raised after the call: as CheckError where the kernel is called by itself; a jitted function
    raises what JAX makes of it, with the same text. The error names a file in which the kernel,
    with the operands that it had, fails the same way; for its sake, a compiled kernel with checks
    copies operands that it updates in place before it starts.

    Examples:
      >>> @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((4,), "float32"))
      ... def root(x, o):
      ...     pbkern.check((x[...] >= 0).all(), "{} is negative", x[...].min())
      ...     o[...] = jnp.sqrt(x[...])
      >>> try:
      ...     root(jnp.array([1.0, -4.0, 9.0, 16.0]))
      ... except pbkern.errors.CheckError as e:
      ...     print(e.kernel, "-4.0 is negative" in str(e))
      root True
    """
    if np.shape(condition) != ():
        raise KernelError(
            "a check takes one condition",
            why=f"its shape is {np.shape(condition)}",
            hint="jnp.all(condition)",
        )
    if not isinstance(condition, jax.core.Tracer):
        condition = jnp.asarray(condition, bool)
    grid.when(~condition)(lambda: fail(message, *values, **named))


def fail(message: str, *values, **named) -> None:
    """Makes the call fail with CheckError; see `check`. For use under `when`.

    Examples:
      >>> @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((), "int32"))
      ... def first(n, o):
      ...     @pbkern.when(n[...] == 0)
      ...     def _():
      ...         pbkern.fail("no elements")
      ...     o[...] = n[...]
      >>> int(first(jnp.int32(3)))
      3
    """
    arrays = [jnp.asarray(value) for value in (*values, *named.values())]
    fail_p.bind(*arrays, message=message, names=(*[None] * len(values), *named))


def error(eqn, kernel: str, program: Sequence[int], values: Sequence) -> CheckError:
    """Makes the error of a failed check: its message with values, its line, the kernel's name and the program of the grid."""
    params = eqn.params
    shown = [np.asarray(value)[()] for value in values]
    numbered = [value for value, name in zip(shown, params["names"]) if name is None]
    named = {name: value for value, name in zip(shown, params["names"]) if name is not None}
    try:
        what = params["message"].format(*numbered, **named)
    except (IndexError, KeyError, ValueError) as e:
        what = f"{params['message']} (cannot be formatted: {e!r})"
    where = f"program {tuple(map(int, program))} of kernel `{kernel}`"
    failed = CheckError(what, at=_jax.user_line(eqn), why=f"a check failed in {where}")
    failed.check, failed.kernel = params["message"], kernel
    return failed


@_jax.cached_by_jaxpr_alone
def messages(jaxpr: jex.Jaxpr) -> frozenset[str]:
    """Messages of all checks in a body."""
    texts = {eqn.params["message"] for eqn in jaxpr.eqns if eqn.primitive is fail_p}
    return frozenset(texts).union(
        *(messages(j.jaxpr) for eqn in jaxpr.eqns for j in inner_jaxprs(eqn))
    )


def can_fail(kernel: Kernel) -> bool:
    """Whether a kernel has checks."""
    return any(messages(stage.body.jaxpr) for stage in kernel.stages)


# --- native code
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckReport:
    """The first failed check of a kernel that ran, and its operands; none if they are too large for a file."""

    error: CheckError
    kernel: Kernel
    operands: list


_reported: deque[CheckReport] = deque(maxlen=1000)
_last: deque[CheckError] = deque(maxlen=1)  # what a call raised through XLA


def report(failed: CheckError, kernel: Kernel, operands: Callable[[], list]) -> None:
    """Called while a kernel runs, on any thread; `operands` reads them.

    The first failure of a kernel is the one to raise.
    """
    if not any(record.kernel is kernel for record in list(_reported)):
        _reported.append(CheckReport(failed, kernel, operands()))


def after(kernels: Iterable[Kernel], results: Sequence) -> list:
    """The results of a call that ran these kernels.

    If one of their checks failed, the call raises once they are there.

    Traceable; costs nothing unless a kernel has checks.
    """
    known = _known(kernels)
    if not known:
        return list(results)
    parts = [jnp.ravel(result)[:1] for result in results]  # what the callback waits for

    jax.experimental.io_callback(lambda _: _raise_first(known), None, parts)
    return list(results)


def raise_failed(kernels: Iterable[Kernel]) -> None:
    """Raises CheckError if a check of these kernels, which have run, has failed."""
    _raise_first(_known(kernels))


def _known(kernels: Iterable[Kernel]) -> frozenset[tuple[str, str]]:
    return frozenset(
        (stage.name, message)
        for kernel in kernels
        for stage in kernel.stages
        for message in messages(stage.body.jaxpr)
    )


def _raise_first(known: frozenset[tuple[str, str]]) -> None:
    of_this = [
        entry for entry in list(_reported) if (entry.kernel.name, entry.error.check) in known
    ]
    if not of_this:
        return
    for record in of_this:
        _reported.remove(record)
    first = of_this[0]
    attach(first.error, first.kernel, first.operands)
    _last.append(first.error)
    raise first.error


def called(kernel: Kernel, call: Callable[[], list]) -> list:
    """call(), waited for if it is eager and the kernel has checks.

    Raises CheckError if one of them failed.
    """
    if not can_fail(kernel):
        return call()
    _last.clear()
    try:
        results = call()
        return (
            results
            if any(isinstance(result, jax.core.Tracer) for result in results)
            else jax.block_until_ready(results)
        )
    except Exception:  # XLA's, a JaxRuntimeError or a ValueError
        if not _last:
            raise
    raise _last.pop()
