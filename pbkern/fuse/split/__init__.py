"""Reductions, contractions and scatters of little parallelism -> two stages."""
