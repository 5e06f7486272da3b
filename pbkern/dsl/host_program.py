"""HostProgram: kernels in launch order over buffers with lifetimes.

One native function, one call from XLA.

Buffers are whole contiguous arrays; a View is a buffer from an element offset that is affine in
loop counters. Fusion builds these (fuse/emit/group_kernel.py), `targets/host/program_text.py`
compiles them; the AOT library's entry point is one of them.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Iterator

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass

from .kernel import ArrayType, Kernel


class BufferKind(enum.Enum):
    INPUT = "input"
    OUTPUT = "output"
    TEMP = "temp"


@dataclass(frozen=True, slots=True)
class Buffer:
    """One array.

    `position` is its place among inputs or outputs; `slot` the temporary storage it shares
    (fuse/emit/buffer_reuse.py).
    """

    name: str
    type: ArrayType
    kind: BufferKind
    position: int = -1
    slot: int = -1


@dataclass(frozen=True, slots=True)
class BufferView:
    """`type.shape` contiguous elements of `buffer` from element `offset` (affine in loop counter names).

    Elements are those of the view: of a buffer of complex numbers, there are views of their parts.
    """

    buffer: str
    type: ArrayType
    offset: Affine = Affine()


@dataclass(frozen=True, slots=True)
class Launch:
    """Runs a kernel over its grid, then its last stage: operands in the order of its in_types, results of its out_types."""

    kernel: Kernel
    operands: tuple[BufferView, ...]
    results: tuple[BufferView, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies source's elements to destination, of the same type, unless both are one array; they do not overlap otherwise.

    Attributes:
      shares: whether a caller may pass one array for both, where they are an input and an output.
    """

    source: BufferView
    destination: BufferView
    shares: bool = False


@dataclass(frozen=True, slots=True)
class Loop:
    """Runs `steps` for counter = 0 .. trip_count - 1."""

    counter: str
    trip_count: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class HostWhile:
    """Runs `condition`, then `steps` and `condition` again as long as the bool scalar `predicate` is true."""

    condition: tuple[Step, ...]
    predicate: BufferView
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Cond:
    """Runs branches[clamp(index, 0, len - 1)]; `index` is an int32 scalar or a bool."""

    index: BufferView
    branches: tuple[tuple[Step, ...], ...]


Step = Launch | Copy | Loop | HostWhile | Cond


@dataclass(frozen=True, slots=True)
class ProgramSignature:
    """The part of a program that its callers see.

    Attributes:
      inputs, outputs: types of its arrays, by position.
      shared: (input, output) pairs that share one array.
      in_place: whether kernels write to arrays that they read.
      label: the name that profiles show: that of its kernel, where it has one alone.
    """

    name: str
    inputs: tuple[ArrayType, ...]
    outputs: tuple[ArrayType, ...]
    shared: tuple[tuple[int, int], ...] = ()
    in_place: bool = False
    label: str = ""


def steps_inside(steps: Iterable[Step]) -> Iterator[Step]:
    """Steps and those inside of them in program order, each loop and branch before the steps inside it."""
    for step in steps:
        yield step
        match step:
            case Loop(steps=inner):
                yield from steps_inside(inner)
            case HostWhile(condition=condition, steps=inner):
                yield from steps_inside((*condition, *inner))
            case Cond(branches=branches):
                for branch in branches:
                    yield from steps_inside(branch)


@dataclass(frozen=True)
class HostProgram:
    """`name(inputs) -> outputs`: buffers by name and the steps to run."""

    name: str
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]

    def of_kind(self, kind: BufferKind) -> tuple[Buffer, ...]:
        """Buffers of one kind, inputs and outputs by position."""
        return tuple(
            sorted(
                (buffer for buffer in self.buffers if buffer.kind is kind),
                key=lambda buf: buf.position,
            )
        )

    @property
    def inputs(self) -> tuple[Buffer, ...]:
        return self.of_kind(BufferKind.INPUT)

    @property
    def outputs(self) -> tuple[Buffer, ...]:
        return self.of_kind(BufferKind.OUTPUT)

    @functools.cached_property
    def label(self) -> str:
        kernels = self.kernels()
        return kernels[0].name if len(kernels) == 1 else self.name

    @functools.cached_property
    def signature(self) -> ProgramSignature:
        return ProgramSignature(
            self.name,
            tuple(buffer.type for buffer in self.inputs),
            tuple(buffer.type for buffer in self.outputs),
            tuple(self.shared_arrays().items()),
            any(kernel.shared for kernel in self.kernels()),
            self.label,
        )

    def shared_arrays(self) -> dict[int, int]:
        """{input: output} that may be one array, as kernels alias them or loops update them: results take operands' places."""
        inputs, outputs = (
            {buffer.name: buffer.position for buffer in buffers}
            for buffers in (self.inputs, self.outputs)
        )
        pairs = [
            (launch.operands[i].buffer, launch.results[output].buffer)
            for launch in self.launches
            for i, output in launch.kernel.aliases
        ]
        pairs += [
            (step.source.buffer, step.destination.buffer)
            for step in self.all_steps()
            if isinstance(step, Copy) and step.shares
        ]
        return {
            inputs[operand]: outputs[result]
            for operand, result in pairs
            if operand in inputs and result in outputs
        }

    def all_steps(self) -> Iterator[Step]:
        """Steps in program order, each loop and branch before the steps inside it."""
        return steps_inside(self.steps)

    @functools.cached_property
    def launches(self) -> tuple[Launch, ...]:
        """Launches in program order, those inside loops and branches once."""
        return tuple(step for step in self.all_steps() if isinstance(step, Launch))

    @functools.cached_property
    def placed_kernels(self) -> frozenset[Kernel]:
        """Kernels with results that begin inside a buffer."""
        return frozenset(
            launch.kernel
            for launch in self.launches
            if any(result.offset != Affine() for result in launch.results)
        )

    def launch_counts(self) -> dict[str, int | None]:
        """Kernel's name -> how often one call launches it, where all branches are taken; None if a value decides."""
        counts: dict[str, int | None] = {}

        def visit(steps: tuple[Step, ...], times: int | None) -> None:
            for step in steps:
                match step:
                    case Launch(kernel=k):
                        before = counts.get(k.name, 0)
                        counts[k.name] = None if times is None or before is None else before + times
                    case Loop(trip_count=n, steps=inner):
                        visit(inner, None if times is None else times * n)
                    case HostWhile(condition=c, steps=inner):
                        visit((*c, *inner), None)
                    case Cond(branches=branches):
                        for branch in branches:
                            visit(branch, times)

        visit(self.steps, 1)
        return counts

    def kernels(self) -> list[Kernel]:
        """Kernels in program order, each once."""
        return list(dict.fromkeys(launch.kernel for launch in self.launches))

    def __str__(self) -> str:
        return f"program {self.name}\n{self.text(lambda kernel: kernel.name)}"

    def text(self, called: Callable[[Kernel], str]) -> str:
        """Buffers and steps; `called`: the name of each kernel."""
        lines = [
            f"  {buffer.kind.value:8} {buffer.name}: {buffer.type}"
            + (f" slot {buffer.slot}" if buffer.slot >= 0 else "")
            for buffer in self.buffers
        ]

        def view(buffer_view: BufferView) -> str:
            return (
                buffer_view.buffer
                if buffer_view.offset == Affine()
                else f"{buffer_view.buffer}[{buffer_view.offset}]"
            )

        def visit(steps: tuple[Step, ...], indent: str) -> None:
            for step in steps:
                match step:
                    case Launch(kernel=k, operands=o, results=r):
                        lines.append(
                            f"{indent}{', '.join(map(view, r))} = {called(k)}{list(k.grid)}({', '.join(map(view, o))})"
                        )
                    case Copy(source=s, destination=d, shares=shares):
                        where = ", unless they are one array" if shares else ""
                        lines.append(f"{indent}{view(d)} = copy {view(s)}: {s.type}{where}")
                    case Loop(counter=c, trip_count=n, steps=inner):
                        lines.append(f"{indent}for {c} in range({n}):")
                        visit(inner, indent + "  ")
                    case HostWhile(condition=c, predicate=p, steps=inner):
                        lines.append(f"{indent}while {view(p)}, after:")
                        visit(c, indent + "    ")
                        lines.append(f"{indent}do:")
                        visit(inner, indent + "  ")
                    case Cond(index=i, branches=branches):
                        for n, branch in enumerate(branches):
                            lines.append(f"{indent}case {view(i)} == {n}:")
                            visit(branch, indent + "  ")

        visit(self.steps, "  ")
        return "\n".join(lines)
