"""Ref + transforms (index, reshape, transpose, bitcast) -> accesses with one index per dimension."""
