"""OnlineBlocks -> dsl.Kernel: loops over chunks of columns, with the maximum and the sums so far in scratch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern._jax import ref_aval
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import atoms, leading_to
from pbkern.dsl.kernel import Kernel, Scratch
from pbkern.dsl.primitives.grid import ds, loop, when
from pbkern.dsl.trace import canonical_body
from pbkern.fuse.access.blocks import BlockRequests, BodyContext, Step, literal, run_steps
from pbkern.fuse.access.dimension_map import Places
from pbkern.fuse.access.rules import Access, block_shape
from pbkern.fuse.tiling.guarded_maximum import Guard
from pbkern.fuse.tiling.hidden_chunks import ChunkMask, chunk_mask
from pbkern.fuse.tiling.online_blocks import (
    CHUNK_NUMBER,
    OUTER_NUMBER,
    ChunkPass,
    OnlineBlocks,
    OnlineChunk,
    is_of_chunk,
    moves,
)

from .group_kernel import emit_kernel


def emit_online(
    name: str,
    grid: tuple[int, ...],
    requests: BlockRequests,
    outputs: Sequence[tuple[jex.Var, Access]],
    blocks: OnlineBlocks,
    compiler_params: dict,
    aliases: tuple[tuple[int, int], ...],
) -> Kernel:
    """Emits an online kernel, with the operands and results of `emit_kernel`."""
    buffers = [
        Scratch(block_shape(access), _carried_type(var), scoped=True)
        for var, access in _reduced(blocks)
    ]
    types = [
        ref_aval(block_shape(access), array_aval(var).dtype)
        for var, access in (*requests.inputs, *outputs)
    ]
    shared = frozenset(result for _, result in aliases)
    body = _OnlineBody(requests, outputs, blocks, shared)
    traced = jax.make_jaxpr(body)(
        *types, *(ref_aval(scratch.shape, scratch.dtype) for scratch in buffers)
    )
    return emit_kernel(
        name,
        grid,
        requests,
        outputs,
        compiler_params,
        aliases,
        body=canonical_body(traced, name),
        scratch=tuple(buffers),
    )


def _reduced(blocks: OnlineBlocks) -> list[tuple[jex.Var, Access]]:
    """Results of online reductions, with their blocks."""
    first, second = (
        chunk_pass.results if chunk_pass else [] for chunk_pass in (blocks.first, blocks.second)
    )
    return [*zip(blocks.online.first_results, first), *zip(blocks.online.second_results, second)]


def _carried_type(var) -> np.dtype:
    """The type in which a sum is carried: 32 bits for 16-bit floats, which each chunk would round."""
    narrow = jnp.issubdtype(var.aval.dtype, jnp.floating) and var.aval.dtype.itemsize <= 2
    return np.dtype(np.float32 if narrow else var.aval.dtype)


class _OnlineBody:
    """The body over Refs (*inputs, *outputs, *reductions), as methods that trace its parts.

    `shared`: numbers of results that share an array with an operand, which later parts may read.
    """

    def __init__(
        self,
        requests: BlockRequests,
        outputs: Sequence[tuple[jex.Var, Access]],
        blocks: OnlineBlocks,
        shared: frozenset[int],
    ):
        self.requests, self.outputs, self.blocks, self.online = (
            requests,
            outputs,
            blocks,
            blocks.online,
        )
        self.reduced = {var for var, _ in _reduced(blocks)}
        self.shared = shared

    def __call__(self, *refs) -> None:
        inputs, outputs = len(self.requests.inputs), len(self.outputs)
        self.refs, self.results = refs[:inputs], refs[inputs : inputs + outputs]
        buffers = refs[inputs + outputs :]
        of_maximum = 0 if self.online.maximum is None else 1
        self.maximum, self.sums = (
            buffers[:of_maximum],
            buffers[of_maximum : len(self.online.first_results)],
        )
        self.totals = buffers[len(self.online.first_results) :]
        values: dict = {}
        early = self.early()
        if self.blocks.first is not None:
            for maximum in self.maximum:
                maximum[...] = lax.full(maximum.shape, -np.inf, maximum.dtype)
            self.clear(self.sums)
            self.trace_pass(self.blocks.first, values, self.rise if self.maximum else self.add)
            values |= self.first(self.blocks.first)
            values |= self.store(early, values)
        if self.blocks.second is not None:
            self.clear(self.totals)
            self.trace_pass(self.blocks.second, values, self.add)
            values |= {
                (var, place): _as(ref[...], var.aval.dtype)
                for var, place, ref in zip(
                    self.online.second_results, self.blocks.second.results, self.totals
                )
            }
        self.store([n for n in range(outputs) if n not in early], values)

    def early(self) -> list[int]:
        """Numbers of results that the first pass suffices for. Behind it, the second one has room for other values."""
        if self.blocks.first is None or self.blocks.second is None:
            return []
        eqns, second = (
            [step.eqn for step in self.blocks.after.steps],
            set(self.online.second_results),
        )

        def waits(output) -> bool:
            read = {atom for eqn in leading_to(eqns, [output]) for atom in atoms(eqn)}
            return not second.isdisjoint(read | {output})

        return [
            number
            for number, (output, _) in enumerate(self.outputs)
            if number not in self.shared and not waits(output)
        ]

    def store(self, numbers: Sequence[int], values: dict) -> dict:
        """Traces the stores of some results, and what makes them of known values, which it returns."""
        given = {var for var, _ in self.requests.inputs}
        wanted = [number for number in numbers if self.outputs[number][0] not in given]
        after = self.blocks.after
        needed = leading_to(
            [step.eqn for step in after.steps], [self.outputs[number][0] for number in wanted]
        )
        ids = set(map(id, needed))
        read = {atom for eqn in needed for atom in atoms(eqn)}
        part = dataclasses.replace(
            after,
            steps=[step for step in after.steps if id(step.eqn) in ids],
            inputs=[(var, access) for var, access in after.inputs if var in read],
        )
        get = run_steps(part, values | self.read(part, values, {}), BodyContext())
        for number in wanted:
            output, access = self.outputs[number]
            self.results[number][...] = get(output, access)
        return {
            (var, step.out): get(var, step.out) for step in part.steps for var in step.eqn.outvars
        }

    def clear(self, refs: Sequence) -> None:
        for ref in refs:
            ref[...] = lax.full(ref.shape, 0, ref.dtype)

    def trace_pass(self, over: ChunkPass, values: dict, trace_chunk: Callable) -> None:
        """Traces a loop over all chunks of a pass. Values that are the same for all chunks are computed before it."""
        requests = over.full.requests
        maximum = self.online.maximum if trace_chunk == self.rise else None
        late = [] if maximum is None else maximum.outvars[:1]
        changing, moving = set(late), []
        for step in requests.steps:
            if _moves(step) or any(atom in changing for atom in atoms(step.eqn)):
                changing.update(step.eqn.outvars)
                moving.append(step)
        fixed = [
            fixed_step
            for fixed_step in requests.steps
            if fixed_step not in moving
            and any((var, fixed_step.out) not in values for var in fixed_step.eqn.outvars)
        ]
        before = self.computed(requests, fixed, values | self.read(requests, values, None), {})

        def chunks(ids: dict) -> None:
            @loop(0, over.count)
            def _(chunk):
                inner = ids | {CHUNK_NUMBER: _as(chunk, np.int32)}
                trace_chunk(over.full, moving, before, inner)

            if over.rest is not None:
                rest = over.rest.requests
                left = [
                    rest_step
                    for rest_step in rest.steps
                    if (rest_step.eqn.outvars[0], rest_step.out) not in before
                ]
                trace_chunk(over.rest, left, before, ids)

        if self.online.outer_extent == 1:
            chunks({})
            return

        @loop(0, self.online.outer_extent)
        def _(place):
            chunks({OUTER_NUMBER: _as(place, np.int32)})

    def rise(self, chunk: OnlineChunk, steps: Sequence[Step], values: dict, ids: dict) -> None:
        """Traces a chunk of the first pass: the running maximum rises, and the sums so far are rescaled to it.

        A chunk that its mask hides is left out as the kernel runs, where the target can.
        """
        mask = chunk_mask(chunk) if self.online.leaves_out_hidden else None
        if mask is None:
            self.rise_by(chunk, steps, values, ids)
        else:
            when(self.counts(chunk, mask, values, ids))(
                lambda: self.rise_by(chunk, steps, values, ids)
            )

    def counts(self, chunk: OnlineChunk, mask: ChunkMask, values: dict, ids: dict):
        """Whether a chunk changes maximum or sums: a score is shown, or exp(fill - maximum) is not 0 in some row."""
        requests = dataclasses.replace(
            chunk.requests,
            inputs=[(var, access) for var, access in chunk.requests.inputs if var in mask.reads()],
        )
        values = values | self.read(requests, values, ids)
        unknown = [step for step in mask.steps if (step.eqn.outvars[0], step.out) not in values]
        shown = _value(
            requests, self.computed(requests, unknown, values, ids), mask.var, mask.block
        )
        fill = mask.fill
        for eqn in mask.changes:
            operands = [literal(x) if isinstance(x, jex.Literal) else fill for x in eqn.invars]
            fill = eqn.primitive.bind(*operands, **eqn.params)
        maximum = self.maximum[0][...]
        # Hidden scores of -inf add nothing to a row that is all -inf so far, but larger ones raise its maximum.
        base = _finite(maximum) if mask.hides_all else maximum
        left = getattr(lax, self.online.function)(_as(fill, base.dtype) - base)
        return lax.bitwise_or(
            _any(mask.shown(shown)),
            _any(lax.ne(left, lax.full_like(left, 0))),
        )

    def rise_by(self, chunk: OnlineChunk, steps: Sequence[Step], values: dict, ids: dict) -> None:
        requests, (maximum, *sums) = chunk.requests, chunk.products
        values = values | self.read(requests, values, ids)
        (peak, access), (x, of_x) = (
            (maximum.eqn.outvars[0], maximum.out),
            (maximum.eqn.invars[0], maximum.pull.inputs[0]),
        )
        makers = set(map(id, leading_to([chunk_step.eqn for chunk_step in steps], {x})))
        makes_x = [chunk_step for chunk_step in steps if id(chunk_step.eqn) in makers]
        values = self.computed(requests, makes_x, values, ids)
        old = self.maximum[0][...]
        highest = lax.reduce_max_p.bind(_value(requests, values, x, of_x), **maximum.pull.params)
        new = lax.max(old, _as(highest, old.dtype))
        base = _finite(new)
        values[peak, access] = _as(base, peak.aval.dtype)
        values = self.computed(
            requests,
            [chunk_step for chunk_step in steps if id(chunk_step.eqn) not in makers],
            values,
            ids,
        )
        share = getattr(lax, self.online.function)(old - base)
        for step, ref, (_, places) in zip(sums, self.sums, self.online.sums):
            ref[...] = ref[...] * self.spread(_as(share, ref.dtype), places, ref.shape) + _sum(
                requests, values, step, ref.dtype
            )
        self.maximum[0][...] = new

    def add(self, chunk: OnlineChunk, steps: Sequence[Step], values: dict, ids: dict) -> None:
        """Traces a chunk of a pass without a maximum."""
        values = values | self.read(chunk.requests, values, ids)
        values = self.computed(chunk.requests, steps, values, ids)
        is_first = self.blocks.first is not None and chunk in (
            self.blocks.first.full,
            self.blocks.first.rest,
        )
        for step, ref in zip(chunk.products, self.sums if is_first else self.totals):
            ref[...] = ref[...] + _sum(chunk.requests, values, step, ref.dtype)

    def first(self, over: ChunkPass) -> dict:
        """Maximum and sums at the end, which get a factor for what the scores of a row have subtracted."""
        if not self.maximum:
            return {
                (sum_, place): _as(ref[...], sum_.aval.dtype)
                for sum_, place, ref in zip(self.online.first_results, over.results, self.sums)
            }
        maximum, (access, *accesses) = self.maximum[0][...], over.results
        peak, *sums = self.online.first_results
        values = {(peak, access): _as(maximum, peak.aval.dtype)}
        for sum_, guard, place, ref, (_, places) in zip(
            sums, self.online.guards, accesses, self.sums, self.online.sums
        ):
            total = ref[...]
            if guard is None:
                infinite = self.spread(_is_infinite(maximum), places, ref.shape)
                total = lax.select(infinite, lax.full_like(total, np.nan), total)
            else:
                share = self.guard_share(guard, maximum, peak.aval.dtype)
                total = total * self.spread(_as(share, ref.dtype), places, ref.shape)
            values[sum_, place] = _as(total, sum_.aval.dtype)
        return values

    def guard_share(self, guard: Guard, maximum, dtype):
        """The factor that makes sums of exp(x - _finite(maximum)) sums of exp(x - guard(maximum)).

        It is exp(-inf - guard) in rows that are all -inf, whose sums are 0: they stay 0, or become NaN if the guard is -inf. In
        rows with inf it is NaN if the guard is inf, and never 0, which would make sums of inf NaN.
        """
        level = _as(guard(_as(maximum, dtype)), maximum.dtype)
        share = getattr(lax, self.online.function)(lax.min(maximum, _finite(maximum)) - level)
        least, nan = jnp.finfo(share.dtype).tiny, lax.full_like(share, np.nan)
        of_inf = lax.select(_is_infinite(level), nan, lax.max(share, lax.full_like(share, least)))
        return lax.select(lax.eq(maximum, lax.full_like(maximum, np.inf)), of_inf, share)

    def spread(self, x, places: Places, shape: tuple[int, ...]):
        """One number per row of the maximum -> one per element of a sum."""
        rows = self.online.places_of_maximum()
        x = lax.squeeze(x, [axis for axis, row in enumerate(rows) if row not in places])
        left = [row for row in rows if row in places]
        order = [place for place in places if place in left]
        x = lax.transpose(x, [left.index(place) for place in order])
        return lax.broadcast_in_dim(x, shape, [places.index(place) for place in order])

    # ---------------------------------------------------------------- values

    def read(self, requests: BlockRequests, values: dict, ids: dict | None) -> dict:
        """Loads the blocks of operands that are not in `values`.

        Args:
          requests: blocks that are needed.
          values: (value, block) -> array, of those that are known.
          ids: number of the chunk, by symbol; None: only blocks that are the same for all chunks are loaded.
        """
        wanted = [
            (var, access)
            for var, access in requests.inputs
            if (var, access) not in values and var not in self.reduced
        ]
        return {
            (var, access): self.block(var, access, ids or {})
            for var, access in wanted
            if ids is not None or not moves(access)
        }

    def block(self, var, access: Access, ids: dict) -> jax.Array:
        """Loads one block of an operand."""
        holds = [
            (n, held)
            for n, (operand, held) in enumerate(self.requests.inputs)
            if operand is var and _covers(held, access)
        ]
        assert holds, "a chunk reads elements that no block of its operand holds"
        number, hull = holds[0]
        ctx = BodyContext(ids)
        starts = [
            span.start.const - outer.start.const
            if not is_of_chunk(span)
            else ctx.affine(span.start - outer.start, np.int32)
            for span, outer in zip(access, hull)
        ]
        if access == hull:
            return self.refs[number][...]
        return self.refs[number][tuple(ds(start, span.size) for start, span in zip(starts, access))]

    def computed(
        self, requests: BlockRequests, steps: Sequence[Step], values: dict, ids: dict
    ) -> dict:
        """`values` with the results of some steps."""
        get = run_steps(dataclasses.replace(requests, steps=list(steps)), values, BodyContext(ids))
        return values | {
            (var, step.out): get(var, step.out) for step in steps for var in step.eqn.outvars
        }


def _moves(step: Step) -> bool:
    return any(moves(operand) for operand in (step.out, *step.pull.inputs) if operand is not None)


def _covers(hull: Access, access: Access) -> bool:
    """Whether a block of an operand holds every element of `access`."""

    def covers(outer, span) -> bool:
        if is_of_chunk(span):
            return outer.is_const and outer.start.const == 0
        low = span.start.const - outer.start.const
        return outer.start.terms == span.start.terms and low >= 0 and low + span.size <= outer.size

    return all(map(covers, hull, access))


def _value(requests: BlockRequests, values: dict, atom, access: Access):
    if isinstance(atom, jex.Literal):
        return literal(atom)
    return run_steps(dataclasses.replace(requests, steps=[]), values, BodyContext())(atom, access)


def _sum(requests: BlockRequests, values: dict, step: Step, dtype):
    """The part of a sum that one chunk adds."""
    operands = [
        _value(requests, values, var, access)
        for var, access in zip(step.eqn.invars, step.pull.inputs)
    ]
    if step.eqn.primitive.name == "reduce_sum":
        return step.eqn.primitive.bind(_as(operands[0], dtype), **step.pull.params)
    return step.eqn.primitive.bind(
        *operands, **{**step.pull.params, "preferred_element_type": dtype}
    )


def _as(x, dtype):
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)


def _finite(maximum):
    """The number that scores have subtracted while the maximum may still rise: 0 if it is infinite, as inf - inf is NaN."""
    return lax.select(_is_infinite(maximum), lax.full_like(maximum, 0), maximum)


def _any(x):
    return lax.reduce_or(x, tuple(range(x.ndim)))


def _is_infinite(x):
    return lax.eq(lax.abs(x), lax.full_like(x, np.inf))
