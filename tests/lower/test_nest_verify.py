"""What breaks the rules of nests is found, and said with the nest."""

import numpy as np
import pytest

from pbkern.core.affine import Affine
from pbkern.core.errors import InternalError
from pbkern.lower.nest.ir import For, If, Let, Nest, Prefetch, Reduction, While
from pbkern.lower.nest.verify import verify

from .test_interpret import BOOL, F32, I, J, K, Small

S = Small(x=np.zeros((4, 6), "f"), y=np.zeros(4, "f"), t=np.zeros((), "i4"))
P, ZERO = Affine.symbol("p"), Affine((), 0)
SUM = Reduction("sum", (S.load("x", I, K),), F32)


def copy(row=I, rows=4, **others) -> Nest:
    """Each row's first element."""
    return Nest({"i": rows}, stores=(S.write("y", (I,), S.load("x", row, ZERO), **others),))


BROKEN = {
    "a bound": (copy(I + 1), "load of .*x.* outside 0..3"),
    "a store": (copy(I * 0, 5), "store to .*y.* outside 0..3"),
    "a dimension": (copy(J), r"unknown symbols \['j'\]"),
    "indices": (Nest({"i": 4}, stores=(S.write("y", (I, I), S.const(1.0)),)), "store to .*y.* with 2 indices"),
    "no reduced dimension": (
        Nest({"i": 4, "k": 6}, (), (SUM,), (S.write("y", (I,), S.acc()),)), "reductions without a reduced dimension"),
    "an unfinished sum": (
        Nest({"i": 4, "k": 6}, ("k",), (SUM,), (S.write("x", (I, K), S.acc()),)),
        "an inner write uses an unfinished accumulator"),
    "a let": (Let("q", S.index(P)), r"unknown symbols \['p'\] in let q"),
    "a fetch": (Prefetch(S.bufs["y"], (P,), 1), "unknown symbols in .*fetch"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_statements(case):
    statement, message = BROKEN[case]
    more = Let("more", S.const(False, BOOL))
    for stmts in ([statement], [For("n", 2, (statement,))], [Let("t", S.load("t")), If("t", ((), (statement,)))],
                  [While((more,), "more", (statement,))], [While((statement, more), "more", ())]):  # fmt: skip
        with pytest.raises(InternalError, match=f"(?s)nest: {message}"):
            verify(stmts)


def test_statements_that_are_right():
    verify([copy(), copy(I + 9, 0), Let("p", S.index(ZERO + 3)), copy(P)])
    verify([Nest({"i": 4, "k": 6}, ("k",), (SUM,), (S.write("y", (I,), S.acc(), inner=False),))])
    verify([Nest({"i": 4, "k": 6}, ("k",), (SUM,), (S.write("x", (I, K), S.acc()),), ordered=True)])
    verify([Nest({"i": 4}, stores=(S.write("y", (I + 2,), S.const(1.0), guard=True),))])
