"""Plain JAX as reference: a function as one program, instead of a compilation for each operation and shape."""

import jax

# XLA's algebraic simplification knows no rounding and no infinity: it makes x of log(exp(x)).
AS_WRITTEN = {"xla_disable_hlo_passes": "algsimp"}


def as_written(f, *args):
    """f(*args) by XLA, each operation as it is written. Long sums of products are less accurate than one by one."""
    return jax.jit(f, compiler_options=AS_WRITTEN)(*args)


def one_by_one(f, *args):
    """f(*args), a program for each operation and shape."""
    return f(*args)
