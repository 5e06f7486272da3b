"""Nodes in order -> HostProgram: one launch per group, buffers for values, views for reshapes.

A value that only renames another (alias nodes) shares its buffer. Control flow becomes native steps
in control_flow.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field

from jax.extend import core as jex

from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.host_program import Buffer, BufferKind, BufferView, Copy, HostProgram, Launch, Step
from pbkern.dsl.kernel import ArrayType, Kernel
from pbkern.dsl.text import identifiers
from pbkern.fuse.graph import Node, overwritten
from pbkern.fuse.indexing.row_views import row_view_p
from pbkern.fuse.tiling.schedule import Schedule

from .block_sizes import block_sizes
from .buffer_reuse import assign_slots
from .group_kernel import array_type, emit_finish, emit_kernel
from .loop_kernel import emit_loop
from .online_kernel import emit_online
from .skewed_kernel import emit_wavefront


def identifier(text: str) -> str:
    """`text` as the name of a program, or the beginning of its kernels' names."""
    name = identifiers.identifier(text, "fused").strip("_") or "fused"
    return name if name.isidentifier() else f"k_{name}"


@dataclass
class HostProgramBuilder:
    """Collects the buffers and steps of one HostProgram.

    Attributes:
      views: value -> its place: a buffer and an offset.
      names: counter of buffer and kernel names.
      kernels: id of a node -> its kernel; a loop's steps may use one twice.
      shared: result -> the operand whose memory it takes.
      params_for: grid semantics, and fields of CompilerParams by name -> compiler_params of a fused kernel.
      arguments: the function's operands in their order, then views of their rows, with the names of the operands.
      places: see `argument_places`.
      read_later: values that are read behind the program.
    """

    name: str
    params_for: Callable
    arguments: dict[jex.Var, str] = field(default_factory=dict)
    views: dict = field(default_factory=dict)
    buffers: list[Buffer] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    kernels: dict[int, Kernel] = field(default_factory=dict)
    shared: dict = field(default_factory=dict)
    places: dict[jex.Var, int] = field(default_factory=dict)
    read_later: Collection = ()

    def fresh(self, stem: str) -> str:
        count = self.counts.get(stem, 0)
        self.counts[stem] = count + 1
        return f"{stem}{count}"

    def buffer(self, stem: str, aval, kind: BufferKind, position: int = -1) -> BufferView:
        buf = Buffer(self.fresh(stem), array_type(aval), kind, position)
        self.buffers.append(buf)
        return BufferView(buf.name, buf.type)

    def temporary(self, array: ArrayType) -> BufferView:
        buf = Buffer(self.fresh("t"), array, BufferKind.TEMP)
        self.buffers.append(buf)
        return BufferView(buf.name, buf.type)

    def place(self, var) -> BufferView:
        """The view of `var`; a new temporary if it has none yet."""
        if var not in self.views:
            self.views[var] = self.temporary(array_type(var.aval))
        return self.views[var]

    def typed(self, view: BufferView, aval) -> BufferView:
        return BufferView(view.buffer, array_type(aval), view.offset)

    # -- steps

    def steps(self, nodes: Sequence[Node]) -> list[Step]:
        shared = overwritten(nodes, self.read_later)
        for result, operand in reversed(shared.items()):
            if result in self.views and operand not in self.views:
                self.views[operand] = self.typed(self.views[result], operand.aval)
        self.shared |= shared
        computed = {output for node in nodes for output in node.outputs}
        steps = []
        for node in nodes:
            for result, operand in node.overwrites.items():
                if result in shared and operand in computed and result not in self.views:
                    self.views[result] = self.typed(self.place(operand), result.aval)
            steps += self.node_steps(node)
        return steps

    def node_steps(self, node: Node) -> list[Step]:
        if node.kind == "group":
            return self.launch(node)
        if node.kind == "alias":
            return self.alias(node.eqns[0])
        if node.kind == "kernel":
            return self.hand_written(node.eqns[0])
        from .control_flow import control_steps

        return control_steps(self, node)

    def hand_written(self, eqn) -> list[Step]:
        """A hand-written kernel. An operand that shares its array with a result is copied there first, if it is read later."""
        kernel = eqn.params["kernel"]
        operands, results = (
            [self.place(var) for var in eqn.invars],
            [self.place(var) for var in eqn.outvars],
        )
        copies: list[Step] = []
        for i, result_index in kernel.shared:
            result = results[result_index]
            shares = eqn.outvars[result_index] in self.shared
            if operands[i] != result:
                copies.append(Copy(operands[i], result, shares=shares))
            operands[i] = result
        return [*copies, Launch(kernel, tuple(operands), tuple(results))]

    def launch(self, node: Node) -> list[Step]:
        """The launch of a group; before it, a copy of an operand that it overwrites and others still read."""
        if id(node) not in self.kernels:
            self.kernels[id(node)] = self.emit(node)
        schedule = node.own_schedule
        reads, makes = (
            [var for var, _ in schedule.requests.inputs],
            [var for var, _ in schedule.outputs],
        )
        if node.finish is not None:
            last = node.finish.own_schedule
            reads += [var for var, _ in last.requests.inputs if var not in makes]
            makes = [*(var for var, _ in last.outputs), *kept_results(node)]
        operands, results = list(map(self.place, reads)), list(map(self.place, makes))
        copies: list[Step] = []
        for result, operand in node.overwrites.items():
            if result not in self.shared:
                copies.append(Copy(self.place(operand), self.place(result)))
                operands[reads.index(operand)] = self.place(result)
        return [*copies, Launch(self.kernels[id(node)], tuple(operands), tuple(results))]

    def argument_places(self) -> Mapping[jex.Var, int]:
        """Argument -> its place; arguments are only added."""
        if len(self.places) != len(self.arguments):
            self.places = {var: place for place, var in enumerate(self.arguments)}
        return self.places

    def emit(self, node: Node) -> Kernel:
        for stage in filter(None, (node, node.finish)):
            stage.schedule = stage.own_schedule.with_inputs_like(self.argument_places())
        schedule = node.own_schedule
        name = self.fresh(identifier(f"{self.name}_{kernel_stem(node)}_"))
        node.kernel = name
        finish = None if node.finish is None else self.last_stage(name, node, node.finish)
        names = [self.arguments.get(var) for var, _ in schedule.requests.inputs]

        def emitted(schedule: Schedule) -> Kernel:
            kernel = emit_scheduled(name, schedule, self.params(schedule))
            return dataclasses.replace(named_operands(kernel, names), finish=finish)

        return dataclasses.replace(
            emitted(schedule), sizes=block_sizes(node.eqns, schedule, emitted)
        )

    def last_stage(self, name: str, node: Node, finish: Node) -> Kernel:
        last, results = finish.own_schedule, [var for var, _ in node.own_schedule.outputs]
        return emit_finish(
            f"{name}_finish",
            last.requests,
            last.outputs,
            results,
            kept_results(node),
            self.params(last),
        )

    def params(self, schedule: Schedule) -> dict:
        return dict(self.params_for(schedule.semantics, **dict(schedule.params)))

    def alias(self, eqn) -> list[Step]:
        (source, *_), (var,) = eqn.invars, eqn.outvars
        view = self.typed(self.place(source), var.aval)
        if eqn.primitive is row_view_p:
            view = dataclasses.replace(view, offset=view.offset + eqn.params["start"])
            if source in self.arguments:
                self.arguments[var] = self.arguments[source]
        if var in self.views and self.views[var].buffer != view.buffer:  # a result of its own
            return [Copy(view, self.views[var])]
        self.views.setdefault(var, view)
        return []


def emit_scheduled(name: str, schedule: Schedule, compiler_params: dict) -> Kernel:
    """The kernel of a group."""
    if schedule.wave is not None:
        return emit_wavefront(name, schedule.wave, compiler_params)
    if schedule.loop is not None:
        return emit_loop(name, schedule, schedule.loop, compiler_params)
    if schedule.online is not None:
        return emit_online(
            name,
            schedule.grid,
            schedule.requests,
            schedule.outputs,
            schedule.online,
            compiler_params,
            schedule.aliases,
        )
    return emit_kernel(
        name, schedule.grid, schedule.requests, schedule.outputs, compiler_params, schedule.aliases
    )


def named_operands(kernel: Kernel, names: Sequence[str | None]) -> Kernel:
    """The kernel, whose messages and source call operands as the function does that it is part of."""
    inputs = []
    for number, (operand, name) in enumerate(zip(kernel.inputs, names)):
        if name:  # several blocks of one operand are told apart
            nth = names[: number + 1].count(name)
            called = name if nth == 1 else f"{name}_block{nth}"
            operand = dataclasses.replace(operand, origin=f"{operand.origin} (`{called}`)")
        inputs.append(operand)
    return dataclasses.replace(kernel, inputs=tuple(inputs))


def kept_results(node: Node) -> list:
    """Results of a group's programs that not only its last stage reads."""
    return [var for var, _ in node.own_schedule.outputs if var in node.outputs]


def kernel_stem(node: Node) -> str:
    """A word for the kernel's name: its most expensive operation."""
    eqns = [*node.eqns, *(node.finish.eqns if node.finish else ())]
    names = [eqn.primitive.name for eqn in eqns]
    for known, word in (
        ("conv_general_dilated", "conv"),
        ("dot_general", "dot"),
        ("reduce", "reduce"),
        ("sort", "sort"),
    ):
        if any(name.startswith(known) for name in names):
            return word
    return "map" if len(names) > 1 else names[0]


def build_program(
    name: str,
    nodes: Sequence[Node],
    reads: Sequence,
    makes: Sequence,
    params_for: Callable,
    arguments: Mapping[jex.Var, str],
    read_later: Collection,
) -> HostProgram:
    """The HostProgram that runs `nodes`: `reads` are its inputs and `makes` its outputs, in order.

    read_later: values that are read behind it, among them its outputs.
    """
    builder = HostProgramBuilder(
        identifier(name), params_for, dict(arguments), read_later=read_later
    )
    for n, var in enumerate(reads):
        builder.views[var] = builder.buffer("in", var.aval, BufferKind.INPUT, n)
    for n, var in enumerate(makes):
        builder.views[var] = builder.buffer("out", var.aval, BufferKind.OUTPUT, n)
    share_outputs(builder, nodes)
    steps = builder.steps(nodes)
    return HostProgram(builder.name, assign_slots(builder.buffers, steps), tuple(steps))


def share_outputs(builder: HostProgramBuilder, nodes: Iterable[Node]) -> None:
    """Lets a producer write straight into an output that reshapes its result."""
    computed = {output for maker in nodes for output in maker.outputs}
    for node in reversed([alias for alias in nodes if alias.kind == "alias"]):
        (source, *_), (var,) = node.eqns[0].invars, node.eqns[0].outvars
        if (
            var in builder.views
            and not isinstance(source, jex.Literal)
            and source in computed
            and source not in builder.views
        ):
            builder.views[source] = builder.typed(builder.views[var], source.aval)
