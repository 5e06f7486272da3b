"""The table of programs, and numbers for them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Program:
    """A function that makes (function of arrays, arguments), the modules that it imports, and whether it has a gradient."""

    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    modules: tuple[str, ...]
    # Loops without a bound, such as a search of a tree, have none.
    gradient: bool


PROGRAMS: dict[str, Program] = {}


def program(*modules: str, gradient: bool = True) -> Callable:
    """Registers the function below under its own name."""

    def register(make):
        PROGRAMS[make.__name__] = Program(make, modules, gradient)
        return make

    return register


def waves(*shape: int, scale: float = 1.0, shift: float = 0.3) -> jax.Array:
    """Numbers without ties and without a pattern that a wrong index could hide in."""
    count = int(np.prod(shape))
    return jnp.asarray(scale * np.sin(1.7 * np.arange(count) + shift).reshape(shape), float)
