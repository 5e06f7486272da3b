"""The writer of the host's programs with hooks of no target: machine code calls kernels in the NumPy interpreter."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.dsl.build_programs import in_stages, kernel_program
from pbkern.dsl.host_program import (
    Buffer,
    BufferKind,
    BufferView,
    Cond,
    HostProgram,
    HostWhile,
    Launch,
    Loop,
)
from pbkern.dsl.kernel import ArrayType
from pbkern.lower.nest.scratch import BUFFER_ALIGNMENT
from pbkern.targets import mlir
from pbkern.targets.host.objects import object_files
from pbkern.targets.host.objects.elf_loader import Image
from pbkern.targets.host.program_text import HostText, Temporaries
from tests.fuse.checking import loops_stay_outside, planned

ENTRY = """
func.func @entry(%buffers: !llvm.ptr, %arena: !llvm.ptr) {
  %null = llvm.mlir.zero : !llvm.ptr
  func.call @pbk_main(%null, %buffers, %arena) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> ()
  return
}
"""


class InterpretedSteps:
    """StepHooks of kernels that are interpreted.

    Attributes:
      launched: names of kernels, in the order in which they ran.
      copied: bytes of each copy that ran.
    """

    def __init__(self, program):
        self.steps = program.launches
        self.launched, self.copied, self.errors = [], [], []
        kind = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p)
        self.run = kind(self._run)
        self.note = ctypes.CFUNCTYPE(None, ctypes.c_int64)(self.copied.append)

    def _run(self, number, addresses):
        try:
            kernel = self.steps[number].kernel
            types = (*kernel.in_types, *kernel.out_types)
            pointers = (ctypes.c_void_p * len(types)).from_address(addresses)
            arrays = [
                np.frombuffer((ctypes.c_char * t.nbytes).from_address(p), t.dtype).reshape(t.shape)
                for p, t in zip(pointers, types)
            ]
            split = len(kernel.in_types)
            values = pbkern.interpret(kernel, *[a.copy() for a in arrays[:split]])
            for array, value in zip(arrays[split:], values):
                array[...] = value
            self.launched.append(kernel.name)
        except Exception as e:  # cannot pass through machine code
            self.errors.append(e)

    @staticmethod
    def _called(text, function, arguments, types):
        address = text.const(ctypes.cast(function, ctypes.c_void_p).value)
        pointer = text.put(f"llvm.inttoptr {address} : i64 to !llvm.ptr")
        text.lines.append(f"llvm.call {pointer}({arguments}) : !llvm.ptr, ({types}) -> ()")

    def copy(self, text, destination, source, size):
        number = text.const(size)
        self._called(text, self.note, number, "i64")
        text.lines.append(
            f'"llvm.intr.memcpy"({destination}, {source}, {number}) '
            "<{isVolatile = false}> : (!llvm.ptr, !llvm.ptr, i64) -> ()"
        )

    def load(self, text, view, kind):
        return text.put(f"llvm.load {text.pointer(view)} : !llvm.ptr -> {kind}")

    def launch(self, text, step):
        operands = text.operands(step)
        copies = text.copies(step, operands)
        pointers = [copies.get(i) or text.pointer(view) for i, view in enumerate(operands)]
        pointers += map(text.pointer, step.results)
        array = text.alloca(f"!llvm.array<{len(pointers)} x ptr>")
        text.stored(pointers, array)
        number = next(n for n, other in enumerate(self.steps) if other is step)
        self._called(text, self.run, f"{text.const(number)}, {array}", "i64, !llvm.ptr")


def run(program, *arrays, copied=lambda kernel: ()):
    """(results, hooks) of a program on arrays."""
    program = in_stages(program)
    hooks, memory = InterpretedSteps(program), Temporaries.of(program, copied)
    text = HostText(program, memory, hooks)
    text.steps(program.steps)
    module = object_files.host_module(text.text() + ENTRY)
    mlir.check_lowered(module)
    image = Image(mlir.object_code(module, 0, "entry", {}), {})
    buffers = [np.ascontiguousarray(a) for a in arrays]
    buffers += [np.empty(b.type.shape, b.type.dtype) for b in program.outputs]
    pointers = (ctypes.c_void_p * len(buffers))(*(b.ctypes.data for b in buffers))
    arena = np.full(max(memory.nbytes, 1), 0xAA, np.uint8)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(image.address("entry"))
    call(ctypes.addressof(pointers), arena.ctypes.data)
    assert not hooks.errors
    return buffers[len(arrays) :], hooks


def counted(x):
    return jax.lax.fori_loop(0, 5, lambda k, y: jnp.cumsum(y, 0)[::-1] * 0.25, x)


def until(x):
    return jax.lax.while_loop(
        lambda y: jnp.sum(y) < 1e3, lambda y: jnp.cumsum(y, 1) + jnp.abs(y).sum(0), x
    )


def branches(x):
    k = (x[0, 0] > 0).astype(jnp.int32)
    return jax.lax.cond(k, lambda y: jnp.cumsum(y, 0), lambda y: jnp.cumsum(y, 1) - 1, x)


@pytest.mark.parametrize(("f", "kind"), [(counted, Loop), (until, HostWhile), (branches, Cond)])
@pytest.mark.parametrize("sign", [1, -1])
def test_steps_of_any_kernels(f, kind, sign):
    x = np.random.default_rng(0).uniform(0.1, 1, size=(6, 9)).astype("f")
    x[0, 0] *= sign
    with loops_stay_outside():
        (program,) = planned(f, x).programs()
    assert any(isinstance(step, kind) for step in program.steps)
    (got,), hooks = run(program, x)
    np.testing.assert_allclose(got, f(x), rtol=1e-5)
    assert hooks.launched


def doubled(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


def test_kernels_read_the_copies_that_a_launch_keeps():
    x = np.arange(30, dtype="f").reshape(5, 6)
    kernel = pbkern.kernel(doubled, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype)).trace(x)
    program = kernel_program(kernel)
    for copied, sizes in ((lambda kernel: (), []), (lambda kernel: (0,), [x.nbytes])):
        (got,), hooks = run(program, x, copied=copied)
        np.testing.assert_array_equal(got, 2 * x)
        assert hooks.copied == sizes


def test_places_of_temporaries():
    """Buffers of one slot share its place, as large as the largest; copies of all launches begin behind them."""
    x = np.zeros(30, "f")
    kernel = pbkern.kernel(doubled, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype)).trace(x)
    other = pbkern.kernel(doubled, out_shape=jax.ShapeDtypeStruct((100,), "f")).trace(
        np.zeros(100, "f")
    )
    small, large = ArrayType((30,), np.dtype("f4")), ArrayType((100,), np.dtype("f4"))
    buffers = (
        Buffer("a", small, BufferKind.TEMP, slot=0),
        Buffer("b", large, BufferKind.TEMP, slot=0),
        Buffer("c", small, BufferKind.TEMP, slot=1),
        Buffer("d", small, BufferKind.TEMP),
    )
    steps = (
        Launch(kernel, (BufferView("a", small),), (BufferView("c", small),)),
        Launch(other, (BufferView("b", large),), (BufferView("b", large),)),
    )
    made = Temporaries.of(HostProgram("p", buffers, steps), lambda kernel: (0,))
    assert made.offsets["a"] == made.offsets["b"] == 0
    starts = [made.offsets[name] for name in "bcd"]
    assert starts == [0, 448, 576]  # 400 and 120 bytes, in cache lines
    assert all(start % BUFFER_ALIGNMENT == 0 for start in starts)
    assert made.copies == {id(kernel): {0: 704}, id(other): {0: 704}}
    assert made.nbytes == 704 + 448
