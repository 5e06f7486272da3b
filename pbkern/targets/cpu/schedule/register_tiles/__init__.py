"""Nest -> how to walk it: vector dimension, lanes, unrolling and the register tile.

These are choices only; targets/cpu/emit/nests.py writes code.
"""
