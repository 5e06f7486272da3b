"""What index maps may ask of the grid."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core.errors import KernelError, UnsupportedOp

X = np.arange(32, dtype="f4")
STRUCT = jax.ShapeDtypeStruct((32,), jnp.float32)


def copy(index_map):
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    block = pbkern.BlockSpec((8,), lambda i: (i,))
    specs = {"in_specs": [pbkern.BlockSpec((8,), index_map)], "out_specs": block}
    return pbkern.kernel(body, grid=(4,), out_shape=STRUCT, **specs)


def test_the_size_of_the_grid_is_a_number_there():
    f = copy(lambda i: (pbkern.num_programs(0) - 1 - i,))
    np.testing.assert_array_equal(f(X), X.reshape(4, 8)[::-1].ravel())
    np.testing.assert_array_equal(pbkern.interpret(f.trace(X), X)[0], f(X))


@pytest.mark.parametrize(
    "index_map", [lambda i: (pbkern.program_id(0),), lambda i: (pbkern.num_programs(1),)]
)
def test_what_is_not_known_there_is_named_with_its_line(index_map):
    with pytest.raises(KernelError, match=r"in an index map[\s\S]*test_index_maps.py"):
        copy(index_map)(X)


def test_a_ref_made_in_a_body_is_refused_with_advice():
    def body(x_ref, o_ref):
        total = jax.new_ref(x_ref[...])
        o_ref[...] = total[...]

    with pytest.raises(
        UnsupportedOp, match=r"a Ref made in a body[\s\S]*test_index_maps.py[\s\S]*scratch_shapes"
    ):
        pbkern.kernel(body, out_shape=STRUCT)(X)
