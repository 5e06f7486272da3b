"""Dimensions of a nest, symbols of statements -> affine places in others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pbkern.core.affine import Affine
from pbkern.lower.nest.ir import Let, Nest, Pool, Prefetch, Stmt, with_bodies


def renamed(nest: Nest, places: Mapping[str, Affine], dims: Mapping[str, int], pool: Pool) -> Nest:
    """The nest over other dimensions; `places` says where the old ones are in them.

        nest [i<8]            places {i: 2*o + j}            nest [o<4, j<2]
          y[i] = x[i + 1]     dims {o: 4, j: 2}       ->       y[2*o + j] = x[2*o + j + 1]

    Legal where `places` takes the points of the new dimensions to those of the old ones, each once. Which dimensions are
    reduced stays as it is: a place of a reduced dimension may name no dimension that is not.
    """
    expression = pool.renamer(dict(places))
    return replace(
        nest,
        dims=dims,
        reductions=tuple(reduction.mapped(expression) for reduction in nest.reductions),
        stores=tuple(store.moved(places, expression) for store in nest.stores),
    )


def moved(stmts: Sequence[Stmt], places: Mapping[str, Affine], pool: Pool) -> list[Stmt]:
    """The statements where symbols that they do not define have places: `%i` is `%first + %i`, or 0."""

    def one(stmt: Stmt) -> Stmt:
        match stmt:
            case Nest():
                return renamed(stmt, places, stmt.dims, pool)
            case Let(name=name, value=value):
                return Let(name, pool.rename(value, dict(places)))
            case Prefetch(index=index):
                return replace(stmt, index=tuple(at.substitute(places.get) for at in index))
        return with_bodies(stmt, lambda block: [one(inner) for inner in block])

    return [one(stmt) for stmt in stmts]
