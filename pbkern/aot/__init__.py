"""Ahead of time: a function or kernel -> a C library, a header and files that use them, without Python or XLA."""
