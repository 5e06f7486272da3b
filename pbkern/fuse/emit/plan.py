"""Partition -> Plan: an ordered list of segments, each a HostProgram or a ClosedJaxpr left to XLA.

Nodes are sorted so that there are few segments. Within a HostProgram, values are buffers and
reshapes are views. Array constants become inputs. The Plan itself forwards outputs that are inputs,
literals or repeats.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from pbkern._jax import bind_again, source_context, user_line
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.host_program import HostProgram, ProgramSignature
from pbkern.fuse.access.blocks import literal
from pbkern.fuse.algebra.prng_keys import keys_of_words, words_of_keys
from pbkern.fuse.graph import Node, other_readers


@dataclass(frozen=True)
class LeftToXla:
    """An equation left to XLA: the op, the user's line, and why."""

    op: str
    at: str | None
    why: str


@dataclass(frozen=True)
class Segment:
    """One step of a Plan: `reads` values of the plan's jaxpr, `makes` others.

    body: a program, or its signature in a plan that an earlier process has made; a jaxpr for XLA.
    run: what a HostProgram was made of.
    """

    body: HostProgram | ProgramSignature | jex.ClosedJaxpr
    reads: tuple
    makes: tuple
    left: tuple[LeftToXla, ...] = ()
    run: tuple[Node, ...] = ()

    @property
    def is_ours(self) -> bool:
        return not isinstance(self.body, jex.ClosedJaxpr)

    @property
    def program(self) -> HostProgram | ProgramSignature:
        """The program of a step that is not XLA's."""
        assert not isinstance(self.body, jex.ClosedJaxpr)
        return self.body


@dataclass
class Plan:
    """The segments of a function in the order in which they run.

    `jaxpr` names the values (PRNG keys: their words), `consts` its array constants, `results` the
    types that the function returns. whole: the function as it was given, if XLA runs all of it. explained: makes the
    explanation, which first calls do not need.
    """

    name: str
    jaxpr: jex.Jaxpr
    consts: tuple
    segments: tuple[Segment, ...]
    results: Sequence
    explained: Callable[[], Any] = lambda: None
    whole: jex.ClosedJaxpr | None = None
    nodes: list[Node] = field(default_factory=list)

    @functools.cached_property
    def explanation(self) -> Any:
        """The report of what was fused and why (explain.py), also of programs that are left to XLA later."""
        return self.explained()

    def evaluate(self, args, run_program: Callable) -> list:
        """Runs the plan: `run_program(host_program, inputs) -> outputs` for HostPrograms, JAX for the others. Traceable."""
        if self.whole is not None:
            return jex.jaxpr_as_fun(self.whole)(*args)
        env = dict(zip(self.jaxpr.invars, words_of_keys(args))) | dict(
            zip(self.jaxpr.constvars, self.consts)
        )
        for segment in self.segments:
            inputs = [env[read] for read in segment.reads]
            results = (
                run_program(segment.body, inputs)
                if segment.is_ours
                else jex.jaxpr_as_fun(segment.body)(*inputs)
            )
            env.update(zip(segment.makes, results))
        arrays = [
            literal(var) if isinstance(var, jex.Literal) else env[var] for var in self.jaxpr.outvars
        ]
        return keys_of_words(arrays, self.results)

    def leave(self, program: HostProgram) -> None:
        """Leaves the operations of one of the programs to XLA."""
        _ = self.explanation  # made while the program is still one of the plan's
        self.segments = tuple(
            xla_segment(list(segment.run), set(segment.makes))
            if segment.body is program
            else segment
            for segment in self.segments
        )

    def programs(self) -> list[HostProgram]:
        return [segment.body for segment in self.segments if isinstance(segment.body, HostProgram)]

    def kernels(self) -> list:
        return [kernel for program in self.programs() for kernel in program.kernels()]

    def left_to_xla(self) -> list[LeftToXla]:
        if self.whole is not None:
            return [
                LeftToXla(eqn.primitive.name, user_line(eqn), "planning failed")
                for eqn in self.whole.jaxpr.eqns
            ]
        return [x for segment in self.segments for x in segment.left]


def order_nodes(nodes: list[Node], available: set, results: set) -> list[list[Node]]:
    """Topological order in runs of one owner: as many fused nodes as are ready, then XLA's, and so on."""
    waiting = nodes[::-1]
    known, runs, ours = set(available), [], True
    readers: dict = {}
    for node in nodes:
        for read in node.reads():
            readers.setdefault(read, []).append(node)
    rivals = other_readers(nodes)
    while waiting:
        run: dict[Node, None] = {}
        reached = set(known)
        progress = patient = True  # patient: what overwrites an operand lets its readers go first
        while progress:
            before = len(run)
            for node in waiting:
                if node in run or (node.kind != "xla") != ours or not node.reads() <= reached:
                    continue
                if not patient or not any(
                    reader in waiting and reader not in run for reader in rivals.get(node, ())
                ):
                    run[node] = None
                    reached.update(node.outputs)
                    patient = True
            progress = len(run) > before or (patient and bool(rivals))
            patient = len(run) > before
        ready = without_early_views(run, readers, results)
        if ready:
            runs.append(list(ready))
            known.update(output for member in ready for output in member.outputs)
            waiting = [member for member in waiting if member not in ready]
        ours = not ours
        if not ready and not any(waiting_node.reads() <= known for waiting_node in waiting):
            raise AssertionError("groups depend on each other in a circle")
    return runs


def without_early_views(run: dict[Node, None], readers: dict, results: set) -> dict[Node, None]:
    """The run without views that only later fused runs read: here they would be copies."""
    needed: set[Node] = set()
    for node in reversed(run):
        read_by = [reader for output in node.outputs for reader in readers.get(output, ())]
        early = (
            read_by
            and not results & set(node.outputs)
            and not any(reader.kind == "xla" or reader in needed for reader in read_by)
        )
        if node.kind != "alias" or not early:
            needed.add(node)
    return {member: None for member in run if member in needed}


def xla_segment(run: list[Node], needed: set) -> Segment:
    """The equations of a run as one jaxpr, traced again."""
    eqns = [eqn for node in run for eqn in node.eqns]
    outputs = [var for eqn in eqns for var in eqn.outvars]
    reads = list(
        dict.fromkeys(
            var
            for eqn in eqns
            for var in eqn.invars
            if not isinstance(var, jex.Literal) and var not in outputs
        )
    )
    makes = [var for var in outputs if var in needed]

    def body(*args):
        env = dict(zip(reads, args))
        for eqn in eqns:
            operands = [
                atom.val if isinstance(atom, jex.Literal) else env[atom] for atom in eqn.invars
            ]
            with source_context(eqn):
                env.update(zip(eqn.outvars, bind_again(eqn, operands)))
        return [env[make] for make in makes]

    closed = jax.make_jaxpr(body)(
        *[jax.ShapeDtypeStruct(read.aval.shape, read.aval.dtype) for read in reads]
    )
    left = tuple(
        LeftToXla(eqn.primitive.name, user_line(eqn), node.reason or "not supported")
        for node in run
        for eqn in node.eqns
    )
    return Segment(closed, tuple(reads), tuple(makes), left)


def read_later(runs: list[list[Node]], at: int, results: set) -> set:
    """Values that later runs or the plan's results read."""
    return results | {read for run in runs[at + 1 :] for node in run for read in node.reads()}


def as_arrays(consts) -> tuple:
    return tuple(const if isinstance(const, jax.Array) else np.asarray(const) for const in consts)
