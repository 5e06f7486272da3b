"""Run-time checks in bodies: `check` and `fail`, and how a failed one reaches the caller.

The interpreter raises CheckError on the spot. Native code cannot stop: the program that fails reports, the others go on, and
`after`, which follows the call wherever a kernel with checks is called, raises once the results are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from .. import _jax
from ..errors import CheckError, KernelError
from ..jaxprs import inner_jaxprs
from . import primitives
from .kernel import Kernel
from .repro import attach

fail_p = jex.Primitive("check_failed")  # *values ->; params: message, names (None for those that the message numbers)
fail_p.multiple_results = True


@fail_p.def_effectful_abstract_eval
def _fail_type(*_, message, names):
    return [], {_jax.debug_effect}


def check(condition, message: str, *values, **named) -> None:
    """Makes the call fail with CheckError unless `condition` (bool scalar) holds.

    Args:
      message: format string, e.g. "{} rows of {n}".
      values, named: arrays or numbers that it shows.

    Interpreted, the call ends there. Compiled, every program runs to its end and the error is raised after the call: as
    CheckError where the kernel is called by itself; a jitted function raises what JAX makes of it, with the same text.
    A failed kernel leaves a file that fails the same way, unless it is one of several in a `pbkern.jit`.
    """
    if np.shape(condition) != ():
        raise KernelError(
            "a check takes one condition", why=f"its shape is {np.shape(condition)}", hint="jnp.all(condition)"
        )
    if not isinstance(condition, jax.core.Tracer):
        condition = jnp.asarray(condition, bool)
    primitives.when(~condition)(lambda: fail(message, *values, **named))


def fail(message: str, *values, **named) -> None:
    """Makes the call fail with CheckError; see `check`. For use under `when`."""
    arrays = [jnp.asarray(v) for v in (*values, *named.values())]
    fail_p.bind(*arrays, message=message, names=(*[None] * len(values), *named))


def error(eqn, kernel: str, program: Sequence[int], values: Sequence) -> CheckError:
    """What a failed check says: its message with values, its line, the kernel's name and the program of the grid."""
    p = eqn.params
    shown = [np.asarray(v)[()] for v in values]
    numbered = [v for v, n in zip(shown, p["names"]) if n is None]
    named = {n: v for v, n in zip(shown, p["names"]) if n is not None}
    try:
        what = p["message"].format(*numbered, **named)
    except (IndexError, KeyError, ValueError) as e:
        what = f"{p['message']} (cannot be formatted: {e!r})"
    where = f"program {tuple(map(int, program))} of kernel `{kernel}`"
    failed = CheckError(what, at=_jax.user_line(eqn), why=f"a check failed in {where}")
    failed.check, failed.kernel = p["message"], kernel
    return failed


def messages(jaxpr: jex.Jaxpr) -> frozenset[str]:
    """Messages of all checks in a body."""
    found = {e.params["message"] for e in jaxpr.eqns if e.primitive is fail_p}
    return frozenset(found).union(*(messages(j.jaxpr) for e in jaxpr.eqns for j in inner_jaxprs(e)))


# --- native code ---------------------------------------------------------------------------------------------------

ALONE = "jax.jit in place of pbkern.jit: kernels then run one by one, and the error names a file that fails the same way"

_reported: deque[CheckError] = deque(maxlen=1000)
_last: deque[CheckError] = deque(maxlen=1)  # what a call raised through XLA


def report(failed: CheckError) -> None:
    """Called while a kernel runs, on any thread."""
    _reported.append(failed)


def after(kernels: Iterable[Kernel], results: Sequence, operands: Sequence | None = None) -> list:
    """The results of a call that ran these kernels. If one of their checks failed, the call raises once they are there.

    Traceable; costs nothing unless a kernel has checks.

    Args:
      operands: of the call, if there is one kernel; they become part of the file that fails the same way. The operands of
        one kernel among several are gone by then: the error says how to get the file.
    """
    kernels = list(kernels)
    known = frozenset((k.name, message) for k in kernels for message in messages(k.body.jaxpr))
    if not known:
        return list(results)
    parts = [jnp.ravel(r)[:1] for r in results]  # what the callback waits for

    def finish(_, arrays) -> None:
        _raise_first(known, kernels[0] if operands is not None else None, arrays)

    jax.experimental.io_callback(finish, None, parts, list(operands or ()))
    return list(results)


def _raise_first(known: frozenset[tuple[str, str]], kernel: Kernel | None, arrays: Sequence) -> None:
    of_this = [e for e in list(_reported) if (e.kernel, e.check) in known]
    if not of_this:
        return
    for e in of_this:
        _reported.remove(e)
    failed = of_this[0]
    if kernel is not None:
        attach(failed, kernel, [np.asarray(a) for a in arrays])
    else:
        failed.args = (f"{failed.args[0]}\n  try  {ALONE}",)
    _last.append(failed)
    raise failed


def called(kernel: Kernel, call: Callable[[], list]) -> list:
    """call(), waited for if it is eager and the kernel has checks. Raises CheckError if one of them failed."""
    if not messages(kernel.body.jaxpr):
        return call()
    _last.clear()
    try:
        results = call()
        return results if any(isinstance(r, jax.core.Tracer) for r in results) else jax.block_until_ready(results)
    except Exception:  # XLA's, a JaxRuntimeError or a ValueError
        if not _last:
            raise
    raise _last.pop()
