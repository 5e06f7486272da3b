"""Equations on complex arrays -> equations on pairs of real arrays, so that kernels can contain them.

    c:c64[n] = mul a b          p:f32[n,2] = complex_as_reals a     q:f32[n,2] = complex_as_reals b
    d:f32[n] = abs c      ->    re = p[:, 0] q[:, 0] - p[:, 1] q[:, 1]      im = ...      d = sqrt(re^2 + im^2)

A function's arguments and results, and what XLA keeps, stay complex arrays; kernels see them with
re and im interleaved (views.py). Between fused equations a number is two arrays, also in carries of
loops. What a scan reads and stacks is interleaved, as in memory, so that neither is copied.
Equations without a rule, and loops and branches that contain one, stay as they are, on complex
arrays.

Arithmetic is arithmetic.py, contractions are contractions.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern._jax import bind_again, params_of
from pbkern.core import jaxprs
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.fuse.simplify.driver import CONTROL

from . import arithmetic
from .arithmetic import Complex
from .contractions import contract
from .views import as_complex_p, as_reals_p, deinterleave, interleave, part_type

# The primitive whose rule a threshold of the pass decides.
CONTRACTION = "dot_general"

Rule = Callable  # (equation, operands: Complex or real) -> results


# ---- complex arrays and pairs


def is_complex(aval) -> bool:
    return jax.dtypes.issubdtype(getattr(aval, "dtype", None), np.complexfloating)


def _mentions_complex(jaxpr: jex.Jaxpr) -> bool:
    eqns = jaxprs.equations(jaxpr)
    return any(is_complex(var.aval) for var in (*jaxpr.invars, *jaxpr.outvars)) or any(
        map(_touches, eqns)
    )


def _touches(eqn) -> bool:
    return any(is_complex(var.aval) for var in (*eqn.invars, *eqn.outvars))


def _constant(x):
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


def _from_array(x):
    """An array from outside: a complex one with its parts as views."""
    return deinterleave(as_reals_p.bind(x), x) if is_complex(x) else x


def _to_array(x):
    if not isinstance(x, Complex):
        return x
    return as_complex_p.bind(interleave(x)) if x.whole is None else x.whole


# ---- equations


def _has_rule(eqn) -> bool:
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    if name == "convert_element_type":  # to real types; lax.real comes first
        return is_complex(out)
    return name in RULES or name == CONTRACTION


def _stays(eqn) -> bool:
    """Whether a loop or branch contains an equation on complex arrays without a rule."""
    inner = [
        inner_eqn
        for jaxpr in jaxprs.inner_jaxprs(eqn)
        for inner_eqn in jaxprs.equations(jaxpr.jaxpr)
        if _touches(inner_eqn)
    ]
    return any(
        inner_eqn.primitive.name not in CONTROL
        and not jaxprs.called_jaxpr(inner_eqn)
        and not _has_rule(inner_eqn)
        for inner_eqn in inner
    )


def _keep(eqn, operands: Sequence) -> list:
    """The equation as it is, on complex arrays."""
    return list(map(_from_array, bind_again(eqn, list(map(_to_array, operands)))))


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


def _stored(x):
    return interleave(x) if isinstance(x, Complex) else x


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
    """From a real type (imaginary part zero) or another complex type."""
    to = part_type(eqn.params["new_dtype"])
    x = _number(x)
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


# ---- the pass


@dataclass(frozen=True)
class ComplexAsPairs:
    """Rewrites a function by rules for all equations on complex arrays that have one."""

    terms_per_row: float = threshold(
        4,
        "times more terms of each sum of a contraction than rows of its smaller operand, where these are doubled: their "
        "products are small beside the larger operand. Source: not recorded",
    )

    def __call__(self, closed: jex.ClosedJaxpr, options: object) -> jex.ClosedJaxpr:
        if not _mentions_complex(closed.jaxpr):
            return closed

        def run(*args):
            results = jaxprs.retrace_into(
                closed.jaxpr, closed.consts, list(map(_from_array, args)), self._rewrite, _constant
            )
            return [_to_array(result) for result in results]

        return jax.make_jaxpr(run)(
            *[jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in closed.jaxpr.invars]
        )

    def _rewrite(self, eqn, *operands) -> list | None:
        """Results of an equation on complex arrays; None for any other."""
        name = eqn.primitive.name
        if name in CONTROL and _stays(eqn):
            return _keep(eqn, operands)
        if name == "scan":
            return self._scan(eqn, operands)
        if name in CONTROL or not _touches(eqn):
            return None
        if not _has_rule(eqn):
            return _keep(eqn, operands)
        rule = self._contracted if name == CONTRACTION else RULES[name]
        results = rule(eqn, *operands)
        results = results if isinstance(results, list) else [results]
        return [_of_shape(result, var.aval.shape) for result, var in zip(results, eqn.outvars)]

    def _scan(self, eqn, operands: Sequence) -> list:
        """A scan whose xs and ys have their parts interleaved."""
        params, body = params_of(eqn), eqn.params["jaxpr"]
        first_x = params["num_consts"] + params["num_carry"]
        consts, init, xs = (
            operands[: params["num_consts"]],
            operands[params["num_consts"] : first_x],
            operands[first_x:],
        )
        is_pair = [is_complex(var.aval) for var in body.jaxpr.invars[first_x:]]

        def step(carry, x):
            x = [
                deinterleave(operand) if paired else operand for operand, paired in zip(x, is_pair)
            ]
            out = jaxprs.retrace_into(
                body.jaxpr, body.consts, [*consts, *carry, *x], self._rewrite, _constant
            )
            return tuple(out[: params["num_carry"]]), tuple(
                _stored(y) for y in out[params["num_carry"] :]
            )

        walked = tuple(map(_stored, xs))
        carry, ys = lax.scan(
            step,
            tuple(init),
            walked,
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        stacked = [
            deinterleave(y) if is_complex(var.aval) else y
            for y, var in zip(ys, eqn.outvars[params["num_carry"] :])
        ]
        return [*carry, *stacked]

    def _contracted(self, eqn, x, y) -> Complex:
        params = eqn.params | {"preferred_element_type": part_type(eqn.outvars[0].aval.dtype)}

        def real_contract(lhs, rhs, dimension_numbers):
            return eqn.primitive.bind(
                lhs, rhs, **(params | {"dimension_numbers": dimension_numbers})
            )

        return contract(
            _number(x),
            _number(y),
            eqn.params["dimension_numbers"],
            real_contract,
            self.terms_per_row,
        )
