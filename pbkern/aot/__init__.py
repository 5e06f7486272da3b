"""Ahead of time: a function or kernel -> a C library, a header and what goes with them, without Python or XLA."""
