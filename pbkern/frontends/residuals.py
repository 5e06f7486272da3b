"""Split of a jaxpr by what is known -> Residuals: what the known half hands to the other."""

from __future__ import annotations

from typing import NamedTuple

from jax.extend import core as jex

from .._jax import Split


class Residuals(NamedTuple):
    """known: known operands -> known results, then saved values. unknown: kept operands, kept results, unknown operands -> results.

    kept_operands, kept_results: positions among the known half's operands and results.
    """

    known: jex.ClosedJaxpr
    unknown: jex.ClosedJaxpr
    unknown_results: tuple[bool, ...]
    kept_operands: tuple[int, ...]
    kept_results: tuple[int, ...]


def choose_residuals(split: Split) -> Residuals:
    count = len(split.known.out_avals)
    kept = tuple(range(count - split.residuals, count))
    return Residuals(split.known, split.unknown, split.unknown_results, (), kept)
