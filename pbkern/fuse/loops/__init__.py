"""ClosedJaxpr -> ClosedJaxpr: loops: induction variables, invariants, dead carries, unrolling."""
