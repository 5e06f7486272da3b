"""A dtype of a library's own, each element two words, as JAX lets libraries define them: `make` of words, `words` of it."""

import jax
from jax._src import core, dtypes
from jax._src.interpreters import pxla
from jax.extend import core as jex
from jax.interpreters import mlir


class Rules:
    allow_conversion = False

    @staticmethod
    def physical_element_aval(dtype):
        return core.ShapedArray((2,), jax.numpy.dtype("uint32"))

    @staticmethod
    def result_handler(sticky_device, aval):
        return lambda _, buffer: Array(aval.shape, buffer)

    @staticmethod
    def global_sharded_result_handler(aval, out_sharding, committed):
        physical = core.physical_aval(aval)
        handler = pxla.global_aval_to_result_handler(physical, out_sharding, committed)
        return lambda buffers: Array(aval.shape, handler(buffers))


class pair(dtypes.extended):
    pass


class Pair(dtypes.ExtendedDType):
    """It has no `itemsize`, which such dtypes need not have."""

    type, name, _rules, ndim = pair, "pair", Rules, 0

    def __hash__(self):
        return hash(Pair)

    def __eq__(self, other):
        return type(other) is Pair

    def __repr__(self):
        return "pair"


class Array:
    def __init__(self, shape, data):
        self.shape, self.data, self.dtype = shape, data, Pair()


dtypes.canonicalize_value_handlers[Array] = lambda x: x
core.pytype_aval_mappings[Array] = lambda x: core.ShapedArray(x.shape, x.dtype)
pxla.shard_arg_handlers[Array] = lambda xs, *places: pxla.shard_args(*places, [x.data for x in xs])

make_p, words_p = jex.Primitive("make_pairs"), jex.Primitive("words_of_pairs")
make_p.def_abstract_eval(lambda x: core.ShapedArray(x.shape[:-1], Pair()))
words_p.def_abstract_eval(lambda x: core.ShapedArray((*x.shape, 2), jax.numpy.dtype("uint32")))
for p in (make_p, words_p):
    mlir.register_lowering(p, lambda ctx, x: [x])
make, words = make_p.bind, words_p.bind
