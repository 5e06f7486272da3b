"""Transformations of JAX on calls of kernels: each makes a kernel of a kernel.

`rules.py` tells JAX of them. `batched.py` is vmap, `tangent.py` forward mode, `backward.py` reverse mode.
"""

from . import rules  # noqa: F401  (registers them)
