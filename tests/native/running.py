"""Runs Kernels and plans as machine code, for comparison with the interpreter and with plain JAX.

`pytest --engine nests` runs the same tests with the interpreter of nests in place of machine code (tests/targets/stub.py).
"""

import functools

import jax.numpy as jnp
import numpy as np

from pbkern.dsl.host_program import Buffer, BufferKind, HostProgram, Launch, View
from pbkern.dsl.kernel import Kernel
from pbkern.targets.cpu.codegen.compile import compile_program
from pbkern.targets.cpu.lower_options import LowerOptions

from ..targets import stub

engine = ["native"]  # set by tests/conftest.py


def semantics(kernel: Kernel) -> LowerOptions:
    params = kernel.compiler_params.get("cpu")
    return LowerOptions(semantics=getattr(params, "dimension_semantics", None))


def native_program(program, inputs):
    """Results of a HostProgram, compiled."""
    if engine[0] == "nests":
        return [jnp.asarray(o) for o in stub.run(program, *inputs)]
    compiled = compile_program(program, options_of=semantics)
    return [jnp.asarray(o) for o in compiled(*[np.asarray(i) for i in inputs])]


def compiled(kernel: Kernel):
    """One Kernel as machine code: a function of its operands."""
    if engine[0] == "nests":
        return functools.partial(stub.run, kernel)
    ins = [Buffer(f"in{n}", t, BufferKind.INPUT, n) for n, t in enumerate(kernel.in_types)]
    outs = [Buffer(f"out{n}", t, BufferKind.OUTPUT, n) for n, t in enumerate(kernel.out_types)]
    launch = Launch(kernel, tuple(View(b.name, b.type) for b in ins), tuple(View(b.name, b.type) for b in outs))
    return compile_program(HostProgram(kernel.name, (*ins, *outs), (launch,)), options_of=semantics)


def native(kernel: Kernel, *arrays):
    """Results of one Kernel, compiled."""
    return compiled(kernel)(*arrays)
