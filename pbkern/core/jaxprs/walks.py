"""Questions about jaxprs: their equations at any depth, what equations read, what leads to results."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import jax
import numpy as np
from jax.extend import core as jex

from pbkern._jax import (
    PLAIN_PARAMETERS,
    cached_by_jaxpr,
    cached_by_jaxpr_alone,
    nesting,
    only_reads,
)
from pbkern.core.jax_types import Atom, array_aval


def atoms(eqn) -> list[jex.Var]:
    """An equation's operands that are no literals."""
    return variables(eqn.invars)


def variables(among: Iterable[Atom]) -> list[jex.Var]:
    """Operands or results of a jaxpr that are no literals, which cannot be hashed."""
    return [atom for atom in among if isinstance(atom, jex.Var)]


def leading_to(eqns: Sequence, outputs: Iterable, given: Iterable = ()) -> list:
    """Equations in program order that lead to `outputs`, except through `given` values."""
    given = set(given)
    live, needed = set(outputs) - given, []
    for eqn in reversed(eqns):
        if any(var in live for var in eqn.outvars):
            needed.append(eqn)
            live.update(atom for atom in atoms(eqn) if atom not in given)
    return needed[::-1]


def inner_jaxprs(eqn) -> Iterator[jex.ClosedJaxpr]:
    """Every jaxpr among an equation's parameters; open ones close over nothing that is known here."""
    for value in eqn.params.values():
        if type(value) in PLAIN_PARAMETERS:
            continue
        for inner in value if isinstance(value, (tuple, list)) else (value,):
            if type(inner) in PLAIN_PARAMETERS:
                continue
            if isinstance(inner, jex.ClosedJaxpr):
                yield inner
            elif isinstance(inner, jex.Jaxpr):
                yield jex.ClosedJaxpr(inner, (None,) * len(inner.constvars))


def inner_of(jaxpr: jex.Jaxpr) -> Iterator[jex.ClosedJaxpr]:
    """Every jaxpr among the parameters of a jaxpr's equations."""
    for eqn in nesting(jaxpr):
        yield from inner_jaxprs(eqn)


def equations(jaxpr: jex.Jaxpr) -> Iterable:
    """Every equation, at any depth."""
    return _with_inner(jaxpr) if nesting(jaxpr) else jaxpr.eqns


def _with_inner(jaxpr: jex.Jaxpr) -> Iterator:
    holders = set(map(id, nesting(jaxpr)))
    for eqn in jaxpr.eqns:
        yield eqn
        if id(eqn) in holders:
            for inner in inner_jaxprs(eqn):
                yield from equations(inner.jaxpr)


@cached_by_jaxpr_alone
def types_at_any_depth(jaxpr: jex.Jaxpr) -> tuple:
    """Types of all values, each object once: equations share most of theirs."""
    types = {id(var.aval): var.aval for var in (*jaxpr.invars, *jaxpr.constvars, *jaxpr.outvars)}
    for eqn in jaxpr.eqns:
        for var in eqn.invars:
            types[id(var.aval)] = var.aval
        for var in eqn.outvars:
            types[id(var.aval)] = var.aval
    for inner in inner_of(jaxpr):
        types |= {id(aval): aval for aval in types_at_any_depth(inner.jaxpr)}
    return tuple(types.values())


@cached_by_jaxpr_alone
def primitive_names(closed: jex.ClosedJaxpr) -> frozenset[str]:
    """Names of the primitives of all equations, at any depth."""
    names = {eqn.primitive.name for eqn in closed.jaxpr.eqns}
    names.update(*map(primitive_names, inner_of(closed.jaxpr)))
    return frozenset(names)


@cached_by_jaxpr_alone
def neighbours(closed: jex.ClosedJaxpr) -> frozenset[tuple[str, str]]:
    """Pairs of names at any depth: an equation's primitive, and the primitive that makes one of its operands."""
    pairs: set[tuple[str, str]] = set()
    makers: dict[jex.Var, str] = {}
    for eqn in closed.jaxpr.eqns:
        name = eqn.primitive.name
        pairs.update((name, makers[atom]) for atom in atoms(eqn) if atom in makers)
        makers.update(dict.fromkeys(eqn.outvars, name))
    pairs.update(*map(neighbours, inner_of(closed.jaxpr)))
    return frozenset(pairs)


def literal_value(atom: jex.Literal) -> np.generic:
    """A literal's value as a NumPy scalar of the literal's exact type."""
    return cast(
        np.generic, np.asarray(atom.val).astype(array_aval(atom).dtype)[()]
    )  # NumPy's hint says array


def selector(eqn, producers: dict) -> tuple[str, Atom]:
    """Finds what a `cond` equation selects by: ("pred", bool atom) for lax.cond, ("index", int atom) for lax.switch.

    lax.cond converts its predicate and lax.switch clamps its index first; seen through here, so
    that both print as written.
    """
    made_by = producers.get(eqn.invars[0]) if isinstance(eqn.invars[0], jex.Var) else None
    if (
        (
            made_by is not None
            and made_by.primitive.name == "convert_element_type"
            and len(eqn.params["branches"]) == 2
        )
        and made_by.invars[0].aval.dtype == bool
        and not made_by.invars[0].aval.shape
    ):
        return "pred", made_by.invars[0]
    if made_by is not None and made_by.primitive.name == "clamp":
        low, index, high = made_by.invars
        bounds = [
            int(literal_value(atom)) if isinstance(atom, jex.Literal) else None
            for atom in (low, high)
        ]
        if bounds == [0, len(eqn.params["branches"]) - 1]:
            return "index", index
    return "index", eqn.invars[0]


def live_equations(jaxpr: jex.Jaxpr) -> list[bool]:
    """Per equation, whether a result or an effect needs it. A cond needs its predicate, not the index converted from it."""
    producers = {var: producer for producer in jaxpr.eqns for var in producer.outvars}
    needed = {var for var in jaxpr.outvars if isinstance(var, jex.Var)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        used = any(var in needed for var in eqn.outvars) or _acts(eqn)
        live.append(used)
        if used:
            atoms = eqn.invars
            if eqn.primitive.name == "cond":
                atoms = [selector(eqn, producers)[1], *eqn.invars[1:]]
            needed.update(atom for atom in atoms if isinstance(atom, jex.Var))
    return live[::-1]


def read_variables(jaxpr: jex.Jaxpr, live: Sequence[bool]) -> set:
    """Variables that live equations or the results read."""
    atoms = [var for eqn, used in zip(jaxpr.eqns, live) if used for var in eqn.invars]
    return {atom for atom in (*atoms, *jaxpr.outvars) if isinstance(atom, jex.Var)}


def _acts(eqn) -> bool:
    """Whether an equation does more than to give results.

    Some of Pallas's primitives do not tell what their jaxprs do.
    """
    return not only_reads(eqn) or any(
        _acts(inner_eqn) for inner in inner_jaxprs(eqn) for inner_eqn in inner.jaxpr.eqns
    )


@cached_by_jaxpr
def variables_read(jaxpr: jex.Jaxpr) -> frozenset[jex.Var]:
    """Variables that an equation or the caller reads; equations inside equations aside."""
    atoms = itertools.chain(jaxpr.outvars, *(eqn.invars for eqn in jaxpr.eqns))
    return frozenset(atom for atom in atoms if not isinstance(atom, jex.Literal))


def as_dtype(param) -> np.dtype | None:
    """The dtype that an equation parameter is, if it is one: parameters hold dtypes, NumPy's and JAX's scalar types."""
    if isinstance(param, np.dtype):
        return param
    is_scalar_type = isinstance(param, type) and (
        issubclass(param, np.generic) or isinstance(param, type(jax.numpy.float32))
    )
    return np.dtype(param) if is_scalar_type else None
