"""ClosedJaxpr -> the same with slices that a scan updates in few places as windows of a carry, which are updated in place.

    def step(x, slices):                                 def step(carry, slices):
        cache, w = slices                                    (x, caches), (i, w) = carry, slices
        cache = update(cache, f(x, w), starts)       ->      caches = update(caches, f(x, w), (i, *starts))
        return g(x, cache), cache                            return (g(x, caches[i]), caches), None

    x, caches = scan(step, x, (caches, w))                   (x, caches), _ = scan(step, (x, caches), (numbers, w))

Layers of a model that decodes in a scan are so: each has a cache, to which it adds a row. As slices, all of each cache is
copied in each step. An array that somebody reads later is copied once, before the loop (fuse/partition/in_place_updates.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax import lax
from jax.extend import core as jex

from pbkern._jax import bind_again, params_of, source_context
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import equations, literal_value
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.scatter import SCATTERS
from pbkern.core.passes import threshold
from pbkern.fuse.cost.kinds import nbytes
from pbkern.fuse.cost.small_updates import SmallUpdates
from pbkern.fuse.simplify.driver import retrace

# Types of indices that hold the number of a step too.
INDEX_TYPES = ("int32", "uint32", "int64", "uint64")


@dataclass(frozen=True)
class SlicesToCarries(SmallUpdates):
    """Makes carries of slices that are updated in few places, in nested scans too."""

    fewest_slice_bytes: int = threshold(
        1 << 14,
        "bytes of a slice that becomes a part of a carry: smaller ones cost little to copy, and loops over little data are one "
        "kernel. Source: an assumption",
    )

    def __call__(self, closed: jex.ClosedJaxpr, options: object) -> jex.ClosedJaxpr:
        scans = [eqn for eqn in equations(closed.jaxpr) if eqn.primitive.name == "scan"]
        if not any(self.chains(eqn.params["jaxpr"].jaxpr, eqn) for eqn in scans):
            return closed

        def rewrite(eqn, operands):
            body = eqn.params["jaxpr"]
            inner = self(body, options)
            chains = self.chains(inner.jaxpr, eqn)
            if chains:
                return _with_carries(eqn, inner, chains, operands)
            changed = {**params_of(eqn), "jaxpr": inner}
            return None if inner is body else bind_again(eqn, operands, changed)

        return retrace(closed, {"scan": rewrite})

    def chains(self, body: jex.Jaxpr, eqn) -> dict[int, tuple[int, tuple]]:
        """Number of a stacked result -> (number of the slice that becomes it, the updates that make it of that slice)."""
        params = params_of(eqn)
        first = params["num_consts"] + params["num_carry"]
        slices = {var: k for k, var in enumerate(body.invars[first:])}
        makers = {
            eqn.outvars[0]: eqn for eqn in body.eqns if self.has(eqn) and _has_place_for_number(eqn)
        }
        chains: dict[int, tuple[int, tuple]] = {}
        for number, result in enumerate(body.outvars[params["num_carry"] :]):
            chain: list = []
            var = result
            while not isinstance(var, jex.Literal) and var in makers:
                chain.insert(0, makers[var])
                var = makers[var].invars[0]
            taken = {number for number, _ in chains.values()}
            if not chain or var not in slices or slices[var] in taken:
                continue
            # The slice and what the updates before the last one make have no other readers.
            old = [update.invars[0] for update in chain]
            if (
                all(_uses(body, var) == 1 for var in old)
                and nbytes(var.aval) >= self.fewest_slice_bytes
            ):
                chains[number] = slices[var], tuple(chain)
        return chains


def _has_place_for_number(eqn) -> bool:
    """Whether an update's indices can hold the number of a step too."""
    is_scatter = eqn.primitive.name in SCATTERS
    return not is_scatter or str(array_aval(eqn.invars[1]).dtype) in INDEX_TYPES


def _uses(jaxpr: jex.Jaxpr, var) -> int:
    """Times that equations and results read a value."""
    atoms = [*jaxpr.outvars, *(atom for eqn in jaxpr.eqns for atom in eqn.invars)]
    return sum(atom is var for atom in atoms)


def _with_carries(
    eqn, body: jex.ClosedJaxpr, chains: Mapping[int, tuple[int, tuple]], operands: Sequence
) -> list:
    """The scan's results, with the arrays of the slices in `chains` as further carries, and numbers of steps as an operand."""
    params = params_of(eqn)
    n_consts, n_carry = params["num_consts"], params["num_carry"]
    consts, carry, xs = (
        operands[:n_consts],
        operands[n_consts : n_consts + n_carry],
        operands[n_consts + n_carry :],
    )
    updated = [k for k, _ in chains.values()]
    rest = [k for k in range(len(xs)) if k not in updated]
    remaining = [k for k in range(len(body.jaxpr.outvars) - n_carry) if k not in chains]
    numbers = lax.iota("int32", params["length"])

    def step(state, given):
        (carry, wholes), (number, *slices) = state, given
        arguments = consts, carry, dict(zip(rest, slices))
        results, wholes = _one_step(body, arguments, chains, dict(zip(updated, wholes)), number)
        stacked = results[n_carry:]
        state = results[:n_carry], [wholes[k] for k in updated]
        return state, [stacked[k] for k in remaining]

    (carry, wholes), stacked = lax.scan(
        step, (list(carry), [xs[k] for k in updated]), [numbers, *(xs[k] for k in rest)],
        length=params["length"], reverse=params["reverse"], unroll=params["unroll"],
    )  # fmt: skip
    ends = dict(zip(chains, wholes)) | dict(zip(remaining, stacked))
    return [*carry, *(ends[k] for k in range(len(ends)))]


def _one_step(body: jex.ClosedJaxpr, arguments, chains, wholes: dict, number) -> tuple[list, dict]:
    """(results of the body, None for those in `chains`; the whole arrays after the step `number`)."""
    jaxpr, (consts, carry, slices) = body.jaxpr, arguments
    slice_vars = jaxpr.invars[len(consts) + len(carry) :]
    env = dict(zip(jaxpr.constvars, body.consts)) | dict(zip(jaxpr.invars, [*consts, *carry]))
    env |= {slice_vars[k]: value for k, value in slices.items()}
    updates = {id(update): k for k, chain in chains.values() for update in chain}
    last = {id(chain[-1]) for _, chain in chains.values()}
    wholes = dict(wholes)

    def read(atom):
        return literal_value(atom) if isinstance(atom, jex.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        with source_context(eqn):
            if id(eqn) not in updates:
                env.update(zip(eqn.outvars, bind_again(eqn, [read(var) for var in eqn.invars])))
                continue
            k = updates[id(eqn)]
            wholes[k] = _in_whole(eqn, wholes[k], number, [read(var) for var in eqn.invars[1:]])
            if id(eqn) in last and _uses(jaxpr, eqn.outvars[0]) > 1:
                env[eqn.outvars[0]] = _slice_of(wholes[k], number)
    results = [atom if isinstance(atom, jex.Literal) else env.get(atom) for atom in jaxpr.outvars]
    return [literal_value(x) if isinstance(x, jex.Literal) else x for x in results], wholes


def _slice_of(whole, number):
    """Element `number` along the first dimension, which is one."""
    places, sizes = (number, *[0] * (whole.ndim - 1)), (1, *whole.shape[1:])
    window = lax.dynamic_slice(whole, places, sizes, allow_negative_indices=[False] * whole.ndim)
    return lax.squeeze(window, (0,))


def _in_whole(eqn, whole, number, operands: Sequence):
    """The update of a slice, as one of the array of all slices."""
    if eqn.primitive.name == "dynamic_update_slice":
        window, *starts = operands
        places = number, *starts
        return lax.dynamic_update_slice(
            whole, window[None], places, allow_negative_indices=[False] * len(places)
        )
    indices, updates = operands
    numbers = eqn.params["dimension_numbers"]
    moved = {
        name: tuple(dim + 1 for dim in getattr(numbers, name))
        for name in (
            "inserted_window_dims", "scatter_dims_to_operand_dims", "operand_batching_dims"
        )
    }  # fmt: skip
    numbers = numbers._replace(
        inserted_window_dims=(0, *moved["inserted_window_dims"]),
        scatter_dims_to_operand_dims=(0, *moved["scatter_dims_to_operand_dims"]),
        operand_batching_dims=moved["operand_batching_dims"],
    )
    column = lax.broadcast(
        lax.convert_element_type(number, indices.dtype), (*indices.shape[:-1], 1)
    )
    indices = lax.concatenate([column, indices], indices.ndim - 1)
    (result,) = bind_again(
        eqn, [whole, indices, updates], {**eqn.params, "dimension_numbers": numbers}
    )
    return result
