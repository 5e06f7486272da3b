"""Layout operations (views, masks, transposes) beside operations that are left to XLA -> left to XLA as well.

    cholesky (XLA); where(lower, L, 0).T (fused); triangular_solve (XLA)  ->  all left to XLA

XLA chooses the layouts of arrays that it hands to LAPACK, which wants columns: many transposes cost
it nothing. Two cores of Zen 4, 64 to 1024 rows, time relative to transposes that are kernels:
solutions of transposed triangular systems .74 to .94, a Cholesky factor and its transpose .67 to
.85. Others save a call. See docs/decisions/032-layouts-beside-lapack.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from jax.extend import core as jex

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.fuse.cost.kinds import DATA_MOVEMENT, is_of_index_tests, nbytes
from pbkern.fuse.graph import Node, Partition

LAPACK = frozenset(
    (
        "cholesky cholesky_update custom_linear_solve eig eigh hessenberg householder_product lu ormqr qr schur svd"
        " triangular_solve tridiagonal"
    ).split()
)
REASON = "it only moves elements, beside operations that are left to XLA"


@dataclass(frozen=True)
class LeaveLayouts:
    """Leaves nodes to XLA that only move elements and have no kernel among operands and readers."""

    most_bytes: int = threshold(
        1 << 18,
        "bytes that layout operations other than transposes beside LAPACK write, at most: kernels write on all cores. Source: "
        "not recorded",
    )

    def __call__(self, parts: Partition, options: object) -> Partition:
        nodes = parts.nodes
        makers = {output: node for node in nodes for output in node.outputs}
        readers: dict = {}
        for member in nodes:
            for read in member.reads():
                readers.setdefault(read, []).append(member)
        beside = {
            node: [makers[operand] for operand in node.reads() if operand in makers]
            + [reader for output in node.outputs for reader in readers.get(output, ())]
            for node in nodes
        }

        movable = {node for node in nodes if self._moves(node, beside[node])}
        while ours := {
            node
            for node in movable
            if any(neighbor.kind != "xla" and neighbor not in movable for neighbor in beside[node])
        }:
            movable -= ours
        left = {
            node for node in movable if any(neighbor.kind == "xla" for neighbor in beside[node])
        }
        while more := {
            node for node in movable - left if any(neighbor in left for neighbor in beside[node])
        }:
            left |= more
        for member in left:
            member.kind, member.schedule, member.reason = "xla", None, REASON
        return parts

    def _moves(self, node: Node, beside: Iterable[Node]) -> bool:
        if node.kind == "alias":
            return all(
                eqn.primitive.name in DATA_MOVEMENT for eqn in node.eqns
            )  # not reals of complex numbers
        if node.kind != "group" or node.finish is not None or not _computes_no_values(node):
            return False
        turns = any(eqn.primitive.name == "transpose" for eqn in node.eqns)
        return (turns and any(_is_lapack(neighbor) for neighbor in beside)) or sum(
            nbytes(output.aval) for output in node.outputs
        ) <= self.most_bytes


def _is_lapack(node: Node) -> bool:
    return node.kind == "xla" and any(eqn.primitive.name in LAPACK for eqn in node.eqns)


def _computes_no_values(node: Node) -> bool:
    """Whether an equation only tells which element goes where."""
    indices: set = set()
    for eqn in node.eqns:
        name = eqn.primitive.name
        if all(isinstance(var, jex.Literal) or var in indices for var in eqn.invars) and (
            is_of_index_tests(name)
        ):
            indices.update(eqn.outvars)
        elif name not in DATA_MOVEMENT and name != "select_n":
            return False
    return True
