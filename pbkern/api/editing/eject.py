"""Decorated function, arguments -> one Python module of its kernels and of the host program that calls them.

The module imports pbkern, jax and numpy alone. Its function is the decorated one for arguments of
these types; its kernels can be edited, and go back by `adopt`.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.errors import ArgumentError
from pbkern.core.jaxprs.retracing import retrace
from pbkern.core.jaxprs.walks import equations
from pbkern.dsl.call import kernel_p
from pbkern.dsl.kernel import Kernel
from pbkern.dsl.primitives.prng_keys import is_key
from pbkern.dsl.text.identifiers import unused
from pbkern.dsl.trace import identifier

from .host_function import call_kernel, host_function
from .module_source import Signature, module_source

# Most bytes of the arrays that a function closes over: they are written out as numbers.
LARGEST_CONSTANTS = 1 << 20


@_jax.hides_own_frames
def eject(function: Any, *args: Any, path: str | os.PathLike | None = None, **kwargs: Any) -> str:
    """Writes what a function runs as a Python module: its kernels, and a function that calls them.

    Block sizes are constants of the module; so are static arguments, which its function does not
    take. Each kernel can be edited; `pbkern.adopt(f, module)` takes the kernels back into the
    function.

    Args:
      function: a function decorated with pbkern.jit.
      *args: its arguments, or types in place of arrays.
      path: a file that is written; None: none.
      **kwargs: its named arguments, in the same way.
    Returns the module's text. Raises ArgumentError for arguments and results that a module of JAX
    and NumPy cannot name, UnsupportedOp for operations that have no source.

    Examples:
      >>> text = pbkern.eject(pbkern.jit(lambda x: x * 2), jax.ShapeDtypeStruct((8,), "float32"))
      >>> "@pbkern.kernel" in text and "def kernel_lambda(" in text
      True
    """
    host = host_function(function, args, kwargs)
    if any(is_key(leaf.dtype) for leaf in host.leaves):
        raise ArgumentError(
            f"`{host.name}` takes typed random keys, which a module's text cannot name",
            hint="keys as words: jax.random.PRNGKey(0), jax.random.key_data(key)",
        )
    closed = host.jaxpr
    if sum(np.asarray(const).nbytes for const in closed.consts) > LARGEST_CONSTANTS:
        raise ArgumentError(
            f"`{host.name}` closes over arrays that are too large for a module's text",
            why=f"more than {LARGEST_CONSTANTS} bytes",
            hint="pass them as arguments",
        )
    closed, kernels = _named_apart(closed)
    signature = Signature(
        host.traced.in_tree,
        host.traced.jaxpr.jaxpr.debug_info.arg_names,
        host.leaves,
        jax.tree.structure(host.traced.out_info),
    )
    name, taken = identifier(host.name), {kernel.name for kernel in kernels}
    name = unused(f"{name}_function", taken) if name in taken else name
    text = module_source(name, closed, kernels, signature)
    if path is not None:
        pathlib.Path(path).write_text(text)
    return text


def _named_apart(closed: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, list[Kernel]]:
    """(the function, its kernels), with another name for each kernel that is another one of the same name."""
    named: dict[str, Kernel] = {}
    renamed: dict[Kernel, Kernel] = {}
    for eqn in equations(closed.jaxpr):
        if eqn.primitive is not kernel_p or eqn.params["kernel"] in renamed:
            continue
        kernel = eqn.params["kernel"]
        names = (kernel.name + (f"_{n}" if n else "") for n in itertools.count())
        name = next(name for name in names if name not in named)
        called = kernel if name == kernel.name else dataclasses.replace(kernel, name=name)
        named[name] = renamed[kernel] = called

    def rename(eqn, *operands) -> list | None:
        if eqn.primitive is not kernel_p:
            return None
        return call_kernel(renamed[eqn.params["kernel"]], list(operands))

    return retrace(closed, rename), list(named.values())
