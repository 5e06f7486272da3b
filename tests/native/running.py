"""Runs Kernels and plans as machine code, for comparison with the interpreter and with plain JAX.

`pytest --engine nests` runs the same tests with the interpreter of nests in place of machine code (tests/targets/stub.py),
`--engine library` and `--engine library:x86-64-v3` with C libraries, `--engine tiles` with products of tiles (AMX) on any
x86-64.
"""

import functools
import pathlib
import tempfile

import jax.numpy as jnp
import numpy as np

from pbkern.dsl.host_program import Buffer, BufferKind, BufferView, HostProgram, Launch
from pbkern.dsl.kernel import Kernel
from pbkern.targets.cpu.codegen.compile import compile_program
from pbkern.targets.cpu.lower_options import LowerOptions
from tests.targets import stub

engine = ["native"]  # set by tests/conftest.py


def semantics(kernel: Kernel) -> LowerOptions:
    params = kernel.compiler_params.get("cpu")
    tiles = engine[0] == "tiles"
    return LowerOptions(
        semantics=getattr(params, "dimension_semantics", None), amx_bf16=tiles, amx_int8=tiles
    )


def native_program(program, inputs):
    """Results of a HostProgram, compiled."""
    if engine[0] == "nests":
        return [jnp.asarray(o) for o in stub.run(program, *inputs)]
    if engine[0].startswith("library"):
        return [jnp.asarray(o) for o in library(program)(*inputs)]
    compiled = compile_program(program, options_of=semantics)
    return [jnp.asarray(o) for o in compiled(*[np.asarray(i) for i in inputs])]


def compiled(kernel: Kernel):
    """One Kernel as machine code: a function of its operands."""
    if engine[0] == "nests":
        return functools.partial(stub.run, kernel)
    ins = [Buffer(f"in{n}", t, BufferKind.INPUT, n) for n, t in enumerate(kernel.in_types)]
    outs = [Buffer(f"out{n}", t, BufferKind.OUTPUT, n) for n, t in enumerate(kernel.out_types)]
    launch = Launch(
        kernel,
        tuple(BufferView(b.name, b.type) for b in ins),
        tuple(BufferView(b.name, b.type) for b in outs),
    )
    program = HostProgram(kernel.name, (*ins, *outs), (launch,))
    return (
        library(program)
        if engine[0].startswith("library")
        else compile_program(program, options_of=semantics)
    )


def native(kernel: Kernel, *arrays):
    """Results of one Kernel, compiled."""
    return compiled(kernel)(*arrays)


def library(program: HostProgram):
    """A program as a C library: a function of its operands."""
    from pbkern.aot.build import build_library
    from pbkern.aot.files import Wanted
    from pbkern.aot.function import ArraySource, LibraryFunction
    from pbkern.aot.interface.arguments import Argument
    from pbkern.core.options import CompileOptions

    device = engine[0].partition(":")[2] or None
    inputs, outputs = (tuple(Argument(f"{stem}{n}", stem, b.type) for n, b in enumerate(side))
                       for stem, side in (("in", program.inputs), ("out", program.outputs)))  # fmt: skip
    buffers = (
        *(ArraySource("input", n) for n in range(len(inputs))),
        *(ArraySource("output", n) for n in range(len(outputs))),
    )
    function = LibraryFunction(program.name, inputs, outputs, (), program, buffers, (), (), None)
    with tempfile.TemporaryDirectory() as folder:
        files = {"shared": pathlib.Path(folder) / "program.so"}
        made = build_library(
            Wanted("program", files), CompileOptions(device=device), lambda options: function
        ).load()

    def call(*operands) -> list:
        arrays = [np.ascontiguousarray(x).reshape(np.shape(x)) for x in operands]
        found = made(*arrays)
        return list(found) if isinstance(found, tuple) else [found]

    return call
