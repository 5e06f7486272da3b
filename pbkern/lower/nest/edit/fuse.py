"""Two nests over the same points -> one that does both at each of them."""

from __future__ import annotations

from pbkern.lower.nest.effects import apart_from, is_at_its_point
from pbkern.lower.nest.ir import (
    Accumulator,
    Buf,
    Expr,
    Gather,
    Load,
    Nest,
    Pool,
    Store,
    nodes,
)


def fused(first: Nest, second: Nest, pool: Pool) -> Nest:
    """The nest over the dimensions of the first, which the second has under the same names.

        nest [i<8]
          t[i] = x[i] * 2.0                 nest [i<8]
        nest [i<8]                  ->        t[i] = x[i] * 2.0
          y[i] = t[i] + 1.0                   y[i] = x[i] * 2.0 + 1.0

    Legal where `are_independent`, and where both reduce the same dimensions if both reduce; of a nest without
    reductions, stores run at every point of the other's.
    """
    values = {(store.buf, store.index): store.value for store in first.stores}
    base = len(first.reductions)

    def forwarded(expr: Expr) -> Expr | None:
        if isinstance(expr, Load) and expr.access in values:
            return values[expr.access]  # half precision keeps its register value (excess precision)
        if isinstance(expr, Accumulator) and base:
            return pool.accumulator(expr.dtype, expr.number + base)
        return None

    second = second.mapped(pool.rewriter(forwarded))
    rdims = {*first.rdims, *second.rdims}
    merged = Nest(
        first.dims,
        tuple(dim for dim in first.dims if dim in rdims),
        first.reductions + second.reductions,
        first.stores + second.stores,
        at=first.at or second.at,
    )
    if not merged.reductions and all(store.mask is None for store in merged.stores):
        # A nest that grows by many others is walked once.
        merged.note_nodes(nodes((store.value for store in second.stores), before=first.nodes()))
    return merged


def are_independent(first: Nest, second: Nest, may_overwrite: bool = False) -> bool:
    """Whether each point of the second nest may run right after the same point of the first.

    It reads the first's results only at the point that stored them. It overwrites nothing that either reads, but for what
    the first's reductions take at that very point: they come before stores there. With `may_overwrite`, it may as well
    overwrite what the first's stores read at that very point: a point of one nest reads all that it reads before it stores.
    """
    may_overwrite = may_overwrite and not second.reductions
    stored: dict[Buf, list[Store]] = {}
    for store in first.stores:
        stored.setdefault(store.buf.root, []).append(store)
    for access in second.loads():
        if access.buf.root in stored and not _is_forwarded(first, stored[access.buf.root], access):
            return False
    overwritten = {store.buf.root for store in second.stores}
    places: dict[Buf, list[tuple[Buf, tuple]]] = {root: [] for root in overwritten}
    taken = Nest({}, reductions=first.reductions).loads()
    at_stores = Nest({}, stores=first.stores) if first.reductions else first
    read_before: dict[Buf, list[Load | Gather]] = {root: [] for root in overwritten}
    if may_overwrite:
        for load in Nest({}, stores=tuple(each for each in first.stores if each.inner)).loads():
            if load.buf.root in overwritten:
                read_before[load.buf.root].append(load)
        at_stores = Nest({}, stores=tuple(each for each in first.stores if not each.inner))
    for buf, index in [(store.buf, store.index) for store in first.stores] + [
        load.access for load in at_stores.loads()
    ]:
        if buf.root in overwritten:
            places[buf.root].append((buf, index))
    for mine in second.stores:
        if not all(
            apart_from(*load.access, mine) or is_at_its_point(first, load, mine)
            for load in read_before[mine.buf.root]
        ):
            return False
        if not all(apart_from(buf, index, mine) for buf, index in places[mine.buf.root]):
            return False
        for access in taken:
            buf, index = access.access
            if (
                buf.root is mine.buf.root
                and not apart_from(buf, index, mine)
                and not is_at_its_point(first, access, mine)
            ):
                return False
    return True


def _is_forwarded(first: Nest, stores: list[Store], expr: Load | Gather) -> bool:
    """Whether a load gives what the first nest stores at the same point, by one of these to the same root."""
    buf, index = expr.access
    candidates = [store for store in stores if not apart_from(buf, index, store)]
    if len(candidates) != 1 or isinstance(expr, Gather):
        return False
    (writer,) = candidates
    whole = {
        symbol for position in writer.index for symbol in position.symbols
    } >= first.dims.keys()
    return (
        buf is writer.buf
        and index == writer.index
        and writer.inner
        and writer.mask is None
        and not writer.guard
        and whole
    )
