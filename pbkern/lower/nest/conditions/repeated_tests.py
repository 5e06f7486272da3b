"""Selects under a select of the same test -> the case that the outer one lets through.

    where(t, f(where(t, x, c)), d)    ->    where(t, f(x), d)

All users of the inner select have to be in one case of such an outer one: no value is computed twice.
"""

from __future__ import annotations

from pbkern.lower.nest.ir import Expr, Nest, Pool, Shifted

from .mask_intervals import is_masked

# What is known of tests where a value is used.
KnownTests = dict[Expr, bool]


def without_repeated_tests(nest: Nest, pool: Pool) -> Nest:
    """The nest with tests left out whose outcome its outer selects tell."""
    every = nest.nodes()
    known: dict[Expr, KnownTests] = {expr: {} for expr in nest.expressions()}
    repeated: dict[Expr, bool] = {}
    for node in reversed(every):  # users before operands
        here = known.setdefault(node, {})
        has_test = is_masked(node)
        if has_test and node.args[0] in here:
            repeated[node] = here[node.args[0]]
            _note(known, node.args[1 + repeated[node]], here)
            continue
        if isinstance(
            node, Shifted
        ):  # its operand is taken at another point, where tests come out otherwise
            here = {}
        for number, arg in enumerate(node.args):
            case = {node.args[0]: number == 2} if has_test and number else {}
            _note(known, arg, here | case)
    if not repeated:
        return nest
    memo: dict[Expr, Expr] = {}

    def go(expr: Expr) -> Expr:
        if expr not in memo:
            if expr in repeated:
                memo[expr] = go(expr.args[1 + repeated[expr]])
            else:
                args = tuple(map(go, expr.args))
                is_same = all(arg is before for arg, before in zip(args, expr.args))
                memo[expr] = expr if is_same else expr.with_args(args, pool)
        return memo[expr]

    return nest.mapped(go)


def _note(known: dict[Expr, KnownTests], expr: Expr, here: KnownTests) -> None:
    """Notes one more use of a value: what holds at all of them."""
    before = known.get(expr)
    known[expr] = (
        here
        if before is None
        else {test: truth for test, truth in here.items() if before.get(test) is truth}
    )
