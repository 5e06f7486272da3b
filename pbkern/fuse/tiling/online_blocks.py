"""OnlineBlocks: online reductions at the blocks of one program, with what each chunk reads and computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from jax.extend import core as jex

from pbkern.core.affine import Affine
from pbkern.core.jaxprs.walks import atoms
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.fuse.access.blocks import BlockRequests, Step, Unfusable, request, step_of, volume
from pbkern.fuse.access.dimension_map import Places
from pbkern.fuse.access.rules import Access, NeedsWhole, Pull, Span, is_whole
from pbkern.fuse.cost.kinds import DATA_MOVEMENT, itemsize

from .online_analysis import Online

# The chunk's number: a symbol beside the grid axes that spans count in.
CHUNK_NUMBER = 1 << 16
# The element of the dimension beside that is summed as well.
OUTER_NUMBER = CHUNK_NUMBER + 1


@dataclass(frozen=True)
class OnlineChunk:
    """Reads and computations of one chunk. Spans may count in CHUNK_NUMBER and OUTER_NUMBER.

    Attributes:
      requests: of the equations that the reductions' operands need.
      products: steps of the reductions on a chunk's columns; in the first pass, the maximum comes
        first.
    """

    requests: BlockRequests
    products: tuple[Step, ...]

    def steps(self) -> list[Step]:
        return [*self.requests.steps, *self.products]


@dataclass(frozen=True)
class ChunkPass:
    """One walk over all columns, chunk by chunk.

    Attributes:
      full: a chunk of Online.chunk_columns.
      count: how many there are of these.
      rest: the last chunk, of fewer columns; None where none is left over.
    """

    full: OnlineChunk
    count: int
    rest: OnlineChunk | None

    @property
    def results(self) -> list[Access]:
        """The block of each reduction's result."""
        return [product.out for product in self.full.products]


@dataclass(frozen=True)
class OnlineBlocks:
    """Online reductions at the blocks of one program.

    Attributes:
      online: the reductions.
      first: the pass that makes the maximum and its sums; None where there is none.
      second: the pass that makes the totals; None where there is none.
      after: requests of the equations that follow the passes.
    """

    online: Online
    first: ChunkPass | None
    second: ChunkPass | None
    after: BlockRequests

    def parts(self) -> dict:
        """Value -> the part of its block that a chunk holds."""
        steps = [
            step
            for chunk_pass in (self.first, self.second)
            if chunk_pass
            for step in chunk_pass.full.steps()
        ]
        read = (
            (var, access)
            for step in steps
            for var, access in zip(step.eqn.invars, step.pull.inputs)
            if not isinstance(var, jex.Literal)
        )
        return dict.fromkeys(
            (value for value, access in read if access and moves(access)),
            self.online.chunk_columns / (self.online.columns * self.online.outer_extent),
        )

    def are_matrices(self) -> bool:
        """Whether the scores of each chunk have rows along one dimension, as tiles of products in registers have."""
        return all(
            sum(span.size > 1 for span in step.out) <= 2
            for chunk_pass in (self.first, self.second)
            if chunk_pass
            for step in chunk_pass.full.steps()
            if step.eqn.primitive.name == "dot_general" and moves(step.out)
        )

    def repeated(self) -> set:
        """ids of equations that both passes compute."""
        if self.first is None or self.second is None:
            return set()
        both = [
            {id(step.eqn) for step in chunk_pass.full.requests.steps if moves(step.out)}
            for chunk_pass in (self.first, self.second)
        ]
        return both[0] & both[1]


def moves(access: Access) -> bool:
    """Whether another chunk has another block."""
    return any(is_of_chunk(span) for span in access)


def is_of_chunk(span: Span) -> bool:
    """Whether a span is another part of a dimension in every chunk."""
    return CHUNK_NUMBER in span.start.symbols or OUTER_NUMBER in span.start.symbols


def online_blocks(online: Online, outputs: Sequence[tuple[jex.Var, Access]]) -> OnlineBlocks | None:
    """The chunks of a program that makes these blocks of the results; None if chunks cannot make them."""
    try:
        after = request(online.final_eqns, outputs)
        asked = [after]
        second = _pass(
            online,
            online.totals,
            online.second_eqns,
            [_only(asked, var) for var in online.second_results],
        )
        first = None
        if second is not None:
            asked.append(second.full.requests)
        sums = [eqn for eqn, _ in online.sums]
        blocks_of_first = [_only(asked, var) for var in online.first_results]
        if online.maximum is None:
            first = _pass(online, sums, online.first_eqns, blocks_of_first)
        else:
            first = _pass(
                online,
                sums,
                online.first_eqns,
                blocks_of_first[1:],
                online.maximum,
                blocks_of_first[0],
            )
            if first is not None:
                maximum, *accesses = first.results
                for access, (_, places) in zip(accesses, online.sums):
                    _check_aligned(maximum, online.places_of_maximum(), access, places)
    except (NeedsWhole, Unfusable):
        return None
    left = _summed(online.final_eqns)
    if any(
        id(step.eqn) in left and _has_rows(step.out, online.chunk_columns)
        for chunk_pass in (first, second)
        if chunk_pass
        for step in chunk_pass.full.requests.steps
    ):
        return None
    return OnlineBlocks(online, first, second, after)


def _summed(eqns: Sequence) -> set[int]:
    """ids of reductions, of contractions, and of equations that depend on one. Others may be computed chunk by chunk."""
    ids: set[int] = set()
    values: set = set()
    for eqn in eqns:
        name = eqn.primitive.name
        reads = any(atom in values for atom in atoms(eqn))
        if reads or not (name in ELEMENTWISE or name in DATA_MOVEMENT):
            ids.add(id(eqn))
            values.update(eqn.outvars)
    return ids


def overflow(blocks: OnlineBlocks, most_words: int, most_bytes: int) -> bool:
    """Whether a chunk needs more words than registers hold, or its operands more bytes than memory beside a core has."""
    passes = [chunk_pass for chunk_pass in (blocks.first, blocks.second) if chunk_pass is not None]
    return any(
        _words(chunk_pass) > most_words or _operand_bytes(chunk_pass) > most_bytes
        for chunk_pass in passes
    )


def _words(chunk_pass: ChunkPass) -> int:
    """Words of the sums of a pass and of a chunk's scores.

    Scores are there twice, as sums and as operands of half their size. Masks are tests of each score, one of each kind.
    """
    sums = sum(volume(access) for access in chunk_pass.results)
    steps = chunk_pass.full.requests.steps
    scores = [
        volume(x.out) for x in steps if x.eqn.primitive.name == "dot_general" and moves(x.out)
    ]
    masks = {
        x.eqn.invars[0]: volume(x.out)
        for x in steps
        if x.eqn.primitive.name == "select_n" and moves(x.out)
    }
    return sums + 3 * sum(scores) // 2 + sum(masks.values()) // 2


def _operand_bytes(chunk_pass: ChunkPass) -> int:
    """Bytes of a chunk's operands of products, without scores; those of the next chunk are on their way meanwhile.

    Tiles of matrix instructions have powers of two of elements along each dimension.
    """
    steps = chunk_pass.full.steps()
    summed = _summed([step.eqn for step in steps])
    scores = {var for step in steps if id(step.eqn) in summed for var in step.eqn.outvars}
    operands = {
        (var, access)
        for step in steps
        if step.eqn.primitive.name == "dot_general"
        for var, access in zip(step.eqn.invars, step.pull.inputs)
        if access is not None and var not in scores
    }

    def elements(access: Access) -> int:
        return math.prod(1 << (span.size - 1).bit_length() for span in access)

    return sum((1 + moves(access)) * elements(access) * itemsize(var) for var, access in operands)


def _has_rows(access: Access, columns: int) -> bool:
    """Whether a chunk's block is more than a vector along its columns. Results need vectors alone, such as positions."""
    return moves(access) and volume(access) > columns


def _only(asked: Sequence[BlockRequests], var) -> Access | None:
    """The block that is asked for of a value; None if nothing asks for it.

    Raises Unfusable for several blocks.
    """
    hulls = list(dict.fromkeys(hull for requests in asked for hull in requests.hulls.get(var, ())))
    if len(hulls) > 1:
        raise Unfusable("a reduction in chunks is needed at several places")
    return hulls[0] if hulls else None


def _pass(
    online: Online,
    sums: Sequence,
    eqns: Sequence,
    blocks: Sequence[Access | None],
    maximum=None,
    of_maximum: Access | None = None,
) -> ChunkPass | None:
    """The chunks that make these sums, and the maximum. None without sums. Raises Unfusable."""
    if not sums:
        return None
    needed = [access for access in blocks if access is not None]
    if len(needed) < len(blocks):
        raise Unfusable("a reduction in chunks is not needed")
    count, rest = divmod(online.columns, online.chunk_columns)

    def chunk(columns: Span) -> OnlineChunk:
        return _chunk(online, sums, eqns, needed, columns, maximum, of_maximum)

    full = chunk(Span(Affine.symbol(CHUNK_NUMBER, online.chunk_columns), online.chunk_columns))
    last = chunk(Span(Affine((), count * online.chunk_columns), rest)) if rest else None
    return ChunkPass(full, count, last)


def _chunk(
    online: Online,
    sums: Sequence,
    eqns: Sequence,
    blocks: Sequence[Access],
    columns: Span,
    maximum,
    of_maximum: Access | None,
) -> OnlineChunk:
    """Reads and computations of one chunk."""
    products = [
        _narrowed(sum_, access, columns, online.columns, online.outer_extent)
        for sum_, access in zip(sums, blocks)
    ]
    wanted = [
        (var, access)
        for product in products
        for var, access in zip(product.eqn.invars, product.pull.inputs)
        if not isinstance(var, jex.Literal)
    ]
    requests = request(eqns, wanted)
    if maximum is not None:
        inner = _only([requests], maximum.outvars[0])
        if inner is None or of_maximum not in (None, inner):
            raise Unfusable("a maximum in chunks is needed at several places")
        products.insert(0, _narrowed(maximum, inner, columns, online.columns))
        requests = request(eqns, [*wanted, (maximum.invars[0], products[0].pull.inputs[0])])
        _only([requests], maximum.outvars[0])
    computed = {var for step in requests.steps for var in step.eqn.outvars}
    read = [
        (source, hull)
        for source, hulls in requests.hulls.items()
        if source not in computed
        for hull in hulls
    ]  # also by the reductions themselves
    return OnlineChunk(replace(requests, inputs=read), tuple(products))


def _narrowed(eqn, out: Access, columns: Span, total: int, outer_extent: int = 1) -> Step:
    """A reduction's step on some of `total` columns, and one element of an outer dimension, if there is one.

    Raises Unfusable if it does more than bind its operation.
    """
    step = step_of(eqn, out)
    pulled = step.pull
    if pulled.compute is not None or step.out != out:
        raise Unfusable("a reduction in chunks would be computed otherwise")
    name, params = eqn.primitive.name, eqn.params
    over = params["dimension_numbers"][0] if name == "dot_general" else (params["axes"],)
    extents = [eqn.invars[0].aval.shape[dim] for dim in over[0]]
    if total not in extents:
        raise Unfusable("a reduction in chunks is over other dimensions")
    long = extents.index(total)
    places = {long: columns}
    if outer_extent > 1:
        one = Span(Affine.symbol(OUTER_NUMBER), 1)
        places |= {n: one for n, extent in enumerate(extents) if n != long and extent > 1}
    inputs = []
    for dims, access, var in zip(over, pulled.inputs, eqn.invars):
        if not all(is_whole(access[dim], var.aval.shape[dim]) for dim in dims):
            raise Unfusable("a reduction in chunks is in parts")
        narrow = {dims[n]: span for n, span in places.items()}
        inputs.append(tuple(narrow.get(axis, span) for axis, span in enumerate(access)))
    return Step(eqn, out, Pull(tuple(inputs), pulled.params))


def _check_aligned(maximum: Access, of_maximum: Places, access: Access, places: Places) -> None:
    """Raises Unfusable unless each row of a block of sums belongs to one row of the maximum's block."""
    spans = dict(zip(of_maximum, maximum))
    alike = all(
        place is None or spans[place] == span or span.size == 1 == spans[place].size
        for place, span in zip(places, access)
    )
    if not alike or not all(place in places or spans[place].size == 1 for place in of_maximum):
        raise Unfusable("sums in chunks have other blocks than their maximum")
