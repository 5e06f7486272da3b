"""Nests that are spread over threads by layouts -> code: copies to swizzled tiles, products, and what is made of their sums.

Let x be what the bits of a thread's number add to a place, c what registers and steps add. Both are linear over bits, so that
swizzle(x + c) = swizzle(x) ^ swizzle(c): the first is computed once, before all loops, the second is a constant.
"""
