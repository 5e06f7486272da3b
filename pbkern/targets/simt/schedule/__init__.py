"""Shares of a block's threads in a kernel: points, places of scratch, barriers.

Choices, without code.
"""
