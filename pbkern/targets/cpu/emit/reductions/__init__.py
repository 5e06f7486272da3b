"""Reductions of a nest: accumulators in registers, running results, sums across the lanes of a vector."""
