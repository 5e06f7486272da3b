"""Identifiers for printed source, from the names of users' functions, arguments and kernels.

Such a name is an identifier of Python, and hides nothing that printed source refers to: no keyword,
no builtin, no module that the source imports, no other name of the same source.
"""

from __future__ import annotations

import builtins
import itertools
import keyword
import re
import unicodedata
from collections.abc import Container

# What printed modules import or define themselves; `_` is what bodies of pbkern.when and pbkern.loop are called.
USED = frozenset(
    "jax jnp lax np pl pbkern _ base64 zlib RNG ARGS example_args numbers drawn slice".split()
)
# Names that operands, kernels and functions of printed source do not have. Soft keywords (match, case, type) are
# names like others wherever source is printed.
RESERVED = USED | frozenset(keyword.kwlist) | frozenset(dir(builtins))


def identifier(text: str, otherwise: str) -> str:
    """An identifier of a text: params['w'] becomes params_w; identifiers stay as they are.

    Args:
      text: what a user wrote.
      otherwise: the name where nothing of the text can be part of one.
    """
    text = unicodedata.normalize("NFKC", text)  # as Python reads names
    if text.isidentifier():
        return text
    plain = "".join(letter if f"a{letter}".isidentifier() else " " for letter in text)
    name = re.sub(r"\W+", "_", plain.strip()) or otherwise
    return name if name.isidentifier() else f"_{name}"


def unused(name: str, taken: Container[str]) -> str:
    """The first of name, name_, name_2, name_3 ... that is not taken."""
    numbered = (f"{name}_{number}" for number in itertools.count(2))
    return next(
        other for other in itertools.chain((name, f"{name}_"), numbered) if other not in taken
    )
