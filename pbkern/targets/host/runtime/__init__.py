"""Functions that running programs call: parallel loops on one of several kinds of threads, arenas, XLA's handler.

MLIR text.
"""
