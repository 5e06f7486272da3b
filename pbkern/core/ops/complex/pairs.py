"""Equations on complex numbers as equations on pairs of real ones: a rule per primitive.

    c = mul a b          ->      re = a.re b.re - a.im b.im;  im = a.re b.im + a.im b.re

Fusion (fuse/complex) and bodies of kernels (dsl/body_rewrites/complex_refs.py) have these rules. In memory re and im lie side
by side, along a last dimension of 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import lax

from pbkern._jax import bind_again

from . import arithmetic
from .arithmetic import Complex
from .contractions import contract
from .interleaved import deinterleave, part_type

# The primitive of contractions, whose rule a threshold decides.
CONTRACTION = "dot_general"
# Terms of each sum of a contraction, over the rows of its smaller operand, from which these are doubled: their products
# are small beside the larger operand. Source: not recorded.
TERMS_PER_ROW = 4

Rule = Callable  # (equation, operands: Complex or real) -> results


def is_complex(aval) -> bool:
    return jax.dtypes.issubdtype(getattr(aval, "dtype", None), np.complexfloating)


def touches(eqn) -> bool:
    """Whether an equation reads or computes complex numbers."""
    return any(is_complex(var.aval) for var in (*eqn.invars, *eqn.outvars))


def constant(x):
    """Literals and constants: a complex one as two real constants; a part that is +0 everywhere is None."""
    if isinstance(x, jax.core.Tracer) or not is_complex(x):
        return x
    re, im = (np.ascontiguousarray(part).reshape(np.shape(x)) for part in (np.real(x), np.imag(x)))
    if not np.shape(x):
        re, im = re[()], im[()]
    vanishes = [not np.any(part) and not np.any(np.signbit(part)) for part in (re, im)]
    return Complex(
        None if vanishes[0] and not vanishes[1] else re, None if vanishes[1] else im, whole=x
    )


def has_rule(eqn) -> bool:
    """Whether an equation on complex numbers has a rule."""
    return eqn.primitive.name in RULES or eqn.primitive.name == CONTRACTION


def results_of(eqn, operands: Sequence, terms_per_row: float = TERMS_PER_ROW) -> list:
    """Results of an equation that has a rule, from operands that are Complex or real."""
    if eqn.primitive.name == CONTRACTION:
        lhs, rhs = operands
        result = _contracted(eqn, lhs, rhs, terms_per_row)
    else:
        result = RULES[eqn.primitive.name](eqn, *operands)
    results = result if isinstance(result, list) else [result]
    return [_of_shape(result, var.aval.shape) for result, var in zip(results, eqn.outvars)]


def _contracted(eqn, x, y, terms_per_row: float) -> Complex:
    params = eqn.params | {"preferred_element_type": part_type(eqn.outvars[0].aval.dtype)}

    def real_contract(lhs, rhs, dimension_numbers):
        return eqn.primitive.bind(lhs, rhs, **(params | {"dimension_numbers": dimension_numbers}))

    return contract(
        _number(x), _number(y), eqn.params["dimension_numbers"], real_contract, terms_per_row
    )


def _of_shape(x, shape: Sequence[int]):
    """The result with smaller parts repeated: an operand without the other part was smaller."""

    def spread(part):
        if part is None or np.shape(part) == tuple(shape):
            return part
        return lax.broadcast_in_dim(part, shape, range(len(shape) - np.ndim(part), len(shape)))

    if not isinstance(x, Complex):
        return spread(x)
    re, im = spread(x.re), spread(x.im)
    return x if re is x.re and im is x.im else Complex(re, im)


# ---- rules

RULES: dict[str, Rule] = {}


def rule(*names: str):
    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = function
        return function

    return register


def _number(x) -> Complex:
    """An operand that may be real."""
    return x if isinstance(x, Complex) else Complex(x, None)


def _wide(x: Complex, shape: Sequence[int]) -> Complex:
    """An operand with dimensions of size 1 repeated; scalars stay scalars."""
    return _of_shape(x, shape) if np.ndim(x.some) else x


for _name, _function in {
    "add": arithmetic.add,
    "add_any": arithmetic.add,
    "sub": arithmetic.sub,
    "mul": arithmetic.mul,
    "div": arithmetic.div,
    "neg": arithmetic.neg,
    "conj": arithmetic.conj,
    "sign": arithmetic.sign,
    "exp": arithmetic.exp,
    "exp2": arithmetic.exp2,
    "expm1": arithmetic.expm1,
    "log": arithmetic.log,
    "log1p": arithmetic.log1p,
    "sqrt": arithmetic.sqrt,
    "rsqrt": arithmetic.rsqrt,
    "logistic": arithmetic.logistic,
    "sin": arithmetic.sin,
    "cos": arithmetic.cos,
    "tan": arithmetic.tan,
    "sinh": arithmetic.sinh,
    "cosh": arithmetic.cosh,
    "tanh": arithmetic.tanh,
    "abs": arithmetic.modulus,
    "square": arithmetic.square,
}.items():
    rule(_name)(
        lambda eqn, *operands, function=_function: function(
            *(_wide(_number(operand), eqn.outvars[0].aval.shape) for operand in operands)
        )
    )

rule("integer_pow")(lambda eqn, x: arithmetic.integer_pow(x, eqn.params["y"]))
rule("real")(lambda eqn, x: x.parts[0])
rule("imag")(lambda eqn, x: x.parts[1])
rule("copy", "stop_gradient")(lambda eqn, x: x)
rule("eq")(lambda eqn, x, y: _both_equal(x, y))
rule("ne")(lambda eqn, x, y: lax.bitwise_not(_both_equal(x, y)))


def _both_equal(x: Complex, y: Complex):
    return lax.bitwise_and(*(part == other for part, other in zip(x.parts, y.parts)))


@rule("pow")
def _pow(eqn, x, y):
    if not isinstance(y, Complex):
        y = Complex(lax.convert_element_type(y, part_type(eqn.outvars[0].aval.dtype)), None)
    return arithmetic.power(*(_of_shape(z, eqn.outvars[0].aval.shape) for z in (x, y)))


@rule("complex")
def _complex(eqn, re, im):
    return Complex(
        re, None if isinstance(im, np.generic) and im == 0 and not np.signbit(im) else im
    )


@rule("convert_element_type")
def _convert(eqn, x):
    """To a complex type, without an imaginary part from a real one; to a real type, the real part."""
    new = eqn.params["new_dtype"]
    x = _number(x)
    if not jax.dtypes.issubdtype(new, np.complexfloating):
        return lax.convert_element_type(x.parts[0], new)
    to = part_type(new)
    return Complex(
        *(None if part is None else lax.convert_element_type(part, to) for part in (x.re, x.im))
    )


@rule("iota")
def _iota(eqn):
    params = eqn.params
    return Complex(
        lax.broadcasted_iota(part_type(params["dtype"]), params["shape"], params["dimension"]), None
    )


# -- equations that move numbers, or sum them: the same on each part


def _by_part(bind: Callable, operands: Sequence) -> list[Complex]:
    """`bind(re or im, *operands)` -> results, per part; operands that are not complex go to both.

    A part that all operands lack is None.
    """
    pairs = [operand for operand in operands if isinstance(operand, Complex)]
    by_part = []
    for n in range(2):
        lacking = all((pair.im if n else pair.re) is None for pair in pairs)
        by_part.append(
            None
            if lacking
            else bind(
                n,
                *(
                    operand.parts[n] if isinstance(operand, Complex) else operand
                    for operand in operands
                ),
            )
        )
    count = len(next(result for result in by_part if result is not None))
    return [
        Complex(*(None if result is None else result[k] for result in by_part))
        for k in range(count)
    ]


@rule(
    "broadcast_in_dim",
    "transpose",
    "slice",
    "rev",
    "concatenate",
    "select_n",
    "pad",
    "split",
    "dynamic_slice",
    "dynamic_update_slice",
    "reduce_sum",
    "cumsum",
    "optimization_barrier",
    "stack",
    "unstack",
    "tile",
    "reduce_window_sum",
)
def _alike(eqn, *operands):
    return _by_part(lambda which, *given: bind_again(eqn, given), operands)


@rule("reshape", "squeeze")
def _reshape(eqn, x):
    """Interleaved parts stay interleaved: nothing moves."""
    if x.mirror is not None:
        return arithmetic.conj(_reshape(eqn, x.mirror))
    if x.interleaved is None or (
        eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None
    ):
        return _alike(eqn, x)[0]
    return deinterleave(lax.reshape(x.interleaved, (*eqn.outvars[0].aval.shape, 2)))


@rule("gather")
def _gather(eqn, x, indices):
    """Gathers interleaved parts, both at once.

    Out of bounds is the fill value, NaN by default, which is real.
    """
    params, fill = eqn.params, eqn.params["fill_value"]
    if x.interleaved is not None and params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        dn = params["dimension_numbers"]
        both = dn._replace(offset_dims=(*dn.offset_dims, len(eqn.outvars[0].aval.shape)))
        wider = params | {"dimension_numbers": both, "slice_sizes": (*params["slice_sizes"], 2)}
        return deinterleave(bind_again(eqn, [x.interleaved, indices], wider)[0])

    def bind(which: int, part, indices):
        value = (None, 0.0)[which] if fill is None else float((np.real, np.imag)[which](fill))
        return bind_again(eqn, [part, indices], params | {"fill_value": value})

    return _by_part(bind, [Complex(*x.parts), indices])


@rule("scatter", "scatter-add")
def _scatter(eqn, *operands):
    params, add = (
        eqn.params,
        {"scatter": lax.scatter, "scatter-add": lax.scatter_add}[eqn.primitive.name],
    )
    options = {key: params[key] for key in ("indices_are_sorted", "unique_indices", "mode")}
    return _by_part(
        lambda which, *given: [add(*given, params["dimension_numbers"], **options)], operands
    )


# -- products along a dimension


@rule("reduce_prod")
def _reduce_prod(eqn, x):
    """Halves are multiplied by each other until one number is left."""
    axes, rank = eqn.params["axes"], np.ndim(x.some)
    rest = [axis for axis in range(rank) if axis not in axes]
    count = math.prod(x.some.shape[axis] for axis in axes)
    shape = tuple(x.some.shape[dim] for dim in rest)
    x = _each(lambda part: lax.reshape(lax.transpose(part, (*axes, *rest)), (count, *shape)), x)
    if count == 0:
        return Complex(lax.full(shape, 1, x.some.dtype), None)
    while count > 1:
        half = count // 2
        product = arithmetic.mul(_rows(x, 0, half), _rows(x, half, 2 * half))
        if count % 2:
            product = arithmetic.mul(product, _pad_ones(_rows(x, 2 * half, count), half))
        x, count = product, half
    return _each(lambda part: lax.squeeze(part, (0,)), x)


def _each(function: Callable, x: Complex) -> Complex:
    return Complex(*(None if part is None else function(part) for part in (x.re, x.im)))


def _rows(x: Complex, start: int, stop: int) -> Complex:
    return _each(lambda part: lax.slice_in_dim(part, start, stop), x)


def _pad_ones(x: Complex, count: int) -> Complex:
    """x followed by ones, `count` rows."""
    config = [(0, count - 1, 0), *((0, 0, 0) for _ in np.shape(x.some)[1:])]
    re, im = x.parts
    return Complex(
        lax.pad(re, np.ones((), re.dtype), config), lax.pad(im, np.zeros((), im.dtype), config)
    )


@rule("cumprod")
def _cumprod(eqn, x):
    return lax.associative_scan(
        arithmetic.mul, Complex(*x.parts), reverse=eqn.params["reverse"], axis=eqn.params["axis"]
    )
