"""Runs HostPrograms on NumPy, block by block: what tests compare fused plans with."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from pbkern.core.jaxprs.retracing import retrace
from pbkern.core.jaxprs.walks import equations, inner_jaxprs
from pbkern.dsl.build_programs import in_stages
from pbkern.dsl.host_program import BufferKind, Cond, Copy, HostWhile, Launch, Loop
from pbkern.dsl.interpret import interpret
from pbkern.dsl.kernel import Element

from . import numpy_rules


def garbage(dtype):
    return (
        np.nan
        if jax.numpy.issubdtype(dtype, np.floating)
        else np.asarray(1, bool)
        if np.dtype(dtype).kind == "b"
        else 77
    )


def starts(mapping, ids):
    indices = jex.jaxpr_as_fun(mapping.index_map)(*map(np.int32, ids))
    return [
        int(i) * (1 if isinstance(d, Element) else d.size) for i, d in zip(indices, mapping.dims)
    ]


def window(mapping, start):
    """(slices of the array, slices of the block) that overlap."""
    inside, block = [], []
    for s, d, n in zip(start, mapping.dims, mapping.array.shape):
        if isinstance(d, Element):
            assert -d.padding[0] <= s, (s, d, n)
            assert s + d.size <= n + d.padding[1], (s, d, n)
        else:
            assert 0 <= s < max(n, 1), (s, d, n)
        lo, hi = min(max(s, 0), n), max(min(s + d.size, n), min(max(s, 0), n))
        inside.append(slice(lo, hi))
        block.append(slice(lo - s, hi - s))
    return tuple(inside), tuple(block)


def of_program(body, ids):
    """A body whose loops and branches know the program's numbers."""
    if not any(
        eqn.primitive.name == "program_id"
        for outer in body.jaxpr.eqns
        for inner in inner_jaxprs(outer)
        for eqn in equations(inner.jaxpr)
    ):
        return body
    return retrace(
        body,
        lambda eqn, *_: (
            [jnp.int32(ids[eqn.params["axis"]])] if eqn.primitive.name == "program_id" else None
        ),
    )


def run_body(kernel, ids, blocks, cells):
    jaxpr = of_program(kernel.body, ids).jaxpr
    env = dict(zip(jaxpr.invars[len(blocks) :], cells))
    refs = dict(zip(jaxpr.invars, blocks))
    read = lambda a: np.asarray(a.val, a.aval.dtype) if isinstance(a, jex.Literal) else env[a]
    for e in jaxpr.eqns:
        name = e.primitive.name
        if name == "get":
            assert len(e.invars) == 1 or all(isinstance(a, jex.Literal) for a in e.invars[1:])
            env[e.outvars[0]] = refs[e.invars[0]]
        elif name == "swap":
            env[e.invars[0]][...] = np.asarray(read(e.invars[1]))
        elif "program_id" in name:
            env[e.outvars[0]] = np.int32(ids[e.params["axis"]])
        else:
            operands = [np.asarray(read(a)) for a in e.invars]
            found = numpy_rules.result(e, operands)
            if found is None:
                r = e.primitive.bind(*operands, **e.params)
                env.update(zip(e.outvars, r if e.primitive.multiple_results else [r]))
            else:
                env[e.outvars[0]] = found


def run_kernel(kernel, *arrays):
    if kernel.scratch:  # a front of rows: its body is that of a hand-written kernel
        return interpret(kernel, *arrays)
    arrays = [np.asarray(a) for a in arrays]
    outs = [np.full(t.shape, garbage(t.dtype), t.dtype) for t in kernel.out_types]
    writes = [np.zeros(t.shape, np.int32) for t in kernel.out_types]
    for m, a in zip(kernel.inputs, arrays):
        assert m.array.shape == a.shape, (m.array, a.shape, a.dtype)
        assert m.array.dtype == a.dtype, (m.array, a.shape, a.dtype)
    for ids in itertools.product(*map(range, kernel.grid)):
        blocks = []
        for m, a in zip(kernel.inputs, arrays):
            b = np.full([d.size for d in m.dims], garbage(a.dtype), a.dtype)
            inside, block = window(m, starts(m, ids))
            b[block] = a[inside]
            blocks.append(b.reshape(m.ref_shape))
        cells = [
            np.full(m.ref_shape, garbage(m.array.dtype), m.array.dtype) for m in kernel.outputs
        ]
        for i, o in kernel.aliases:
            cells[o][...] = blocks[i]
        run_body(kernel, ids, blocks, cells)
        for m, o, w, c in zip(kernel.outputs, outs, writes, cells):
            inside, block = window(m, starts(m, ids))
            o[inside] = c.reshape([d.size for d in m.dims])[block]
            w[inside] += 1
    assert all((w == 1).all() for w in writes), "every element is written once"
    return outs


def run_program(program, inputs):
    program = in_stages(program)
    memory = {}
    for b in program.buffers:
        memory[b.name] = np.full(int(np.prod(b.type.shape)), garbage(b.type.dtype), b.type.dtype)
        if b.kind is BufferKind.INPUT:
            memory[b.name][:] = np.asarray(inputs[b.position]).reshape(-1)
    slots = {}
    for b in program.buffers:
        if b.kind is BufferKind.TEMP:
            assert b.slot >= 0
    counters = {}

    def at(v):
        start = v.offset.evaluate(counters)
        size = int(np.prod(v.type.shape))
        held = memory[v.buffer].view(v.type.dtype)
        assert start >= 0
        assert start + size <= held.size
        assert memory[v.buffer].dtype in (
            v.type.dtype,
            np.result_type(v.type.dtype, np.complex64),
        )  # or parts of numbers
        return held[start : start + size].reshape(v.type.shape)

    def scribble(written):
        """A write destroys the other buffers of its slot."""
        b = next(b for b in program.buffers if b.name == written)
        if b.slot >= 0:
            old = slots.get(b.slot)
            if old not in (None, written):
                memory[old][:] = garbage(memory[old].dtype)
            slots[b.slot] = written

    def run(steps):
        for s in steps:
            match s:
                case Launch(kernel=k, operands=o, results=r):
                    for v, x in zip(r, run_kernel(k, *map(at, o))):
                        scribble(v.buffer)
                        at(v)[...] = x
                case Copy(source=a, destination=b):
                    scribble(b.buffer)
                    at(b)[...] = at(a)
                case Loop(counter=c, trip_count=n, steps=inner):
                    for i in range(n):
                        counters[c] = i
                        run(inner)
                case HostWhile(condition=c, predicate=p, steps=inner):
                    run(c)
                    while bool(at(p)):
                        run(inner)
                        run(c)
                case Cond(index=i, branches=b):
                    run(b[min(max(int(at(i)), 0), len(b) - 1)])

    run(program.steps)
    return [memory[b.name].reshape(b.type.shape) for b in program.outputs]
