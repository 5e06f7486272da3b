"""Typical programs of twelve libraries that are built on JAX, each a function of arrays with its first arguments.

A program imports its library when it is asked for. Its first argument, a tree of arrays, is what gradients are taken of.
"""

from . import networks, physics, probability, solvers  # noqa: F401, each adds its programs to the table
from .registry import PROGRAMS as PROGRAMS
