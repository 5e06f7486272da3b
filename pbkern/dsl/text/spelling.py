"""Equation -> Python expression that makes the same equation again: one rule per primitive, beside its name.

Arithmetic is spelled with operators, the rest as calls of jax.lax with every parameter explicit. A
rule that cannot say an equation's parameters exactly returns None, and `bind("name", ...)`, which
binds the primitive as it is, says it instead. Statements (Ref accesses, control flow) and names are
dsl/printer.py's.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.errors import KernelError, UnsupportedOp
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import as_dtype, literal_value
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.core.ops.elementwise_row import kind_of
from pbkern.core.ops.scatter import SCATTERS, scatter_combines
from pbkern.core.rules import RuleTable

# Tightness of an expression, from loose to tight (Python's reference, operator precedence), here of
# bitwise operators and comparisons.
BITS_TIGHTNESS = 0
# Tightness of sums and differences.
SUM_TIGHTNESS = 1
# Tightness of products and quotients.
PRODUCT_TIGHTNESS = 2
# Tightness of an operator with one operand.
UNARY_TIGHTNESS = 3
# Tightness of names, calls and literals.
ATOM_TIGHTNESS = 4


class Spelled(NamedTuple):
    """Python source and how tightly it binds."""

    text: str
    tightness: int = ATOM_TIGHTNESS

    def inside(self, tightness: int) -> str:
        return self.text if self.tightness >= tightness else f"({self.text})"


class SpellingScope:
    """Spelled variables, and the imports that parameters turned out to need.

    `x64`: whether Python numbers are 64-bit where the text will run.
    """

    def __init__(self, names: Mapping[Any, Spelled] | None = None, x64: bool = False):
        self.x64 = x64
        self.names: dict[Any, Spelled] = dict(names or {})
        self.imports: set[str] = set()

    def expr(self, atom) -> Spelled:
        return Spelled(typed_literal(atom)) if isinstance(atom, jex.Literal) else self.names[atom]

    def text(self, atom) -> str:
        return self.expr(atom).text

    def operands(self, eqn) -> list[str]:
        return [self.text(var) for var in eqn.invars]

    def param(self, value) -> str:
        return spell_param(value, self.imports)


Rule = Callable[[SpellingScope, Any], "Spelled | str | None"]
rules: RuleTable[Rule] = RuleTable("spelling")


def spell(scope: SpellingScope, eqn) -> Spelled:
    """The expression for one equation (a tuple, if the primitive has several results)."""
    rule = rules.get(eqn.primitive.name)
    spelled = rule(scope, eqn) if rule is not None else None
    if spelled is None:
        spelled = _spell_bind(scope, eqn)
    return spelled if isinstance(spelled, Spelled) else Spelled(spelled)


# --- literals and parameters
# -------------------------------------------------------------------------------------


def dtype_name(dtype) -> str:
    name = np.dtype(dtype).name
    return "jnp.bool_" if name == "bool" else f"jnp.{name}"


def plain_number(value: np.generic) -> str:
    """A Python number that converts to exactly this value."""
    if value.dtype.kind == "b":
        return str(bool(value))
    if value.dtype.kind in "iu" or jnp.issubdtype(value.dtype, jnp.integer):
        return str(int(value))
    if value.dtype.kind == "c":
        return f"complex({plain_number(value.real)}, {plain_number(value.imag)})"
    x = float(value)
    if math.isnan(x):
        return "jnp.nan"
    if math.isinf(x):
        return "jnp.inf" if x > 0 else "-jnp.inf"
    short = str(value)
    with np.errstate(all="ignore"):
        exact = float(np.asarray(float(short)).astype(value.dtype)) == x and "." in short + "e"
    return short if exact and ("." in short or "e" in short) else repr(x)


def typed_literal(atom: jex.Literal) -> str:
    value = literal_value(atom)
    return f"{dtype_name(value.dtype)}({plain_number(value)})"


def beside(scope: SpellingScope, atom, partner) -> Spelled:
    """An operand as it may stand in an operation with `partner`: a literal takes the partner's type."""
    if (
        isinstance(atom, jex.Literal)
        and not isinstance(partner, jex.Literal)
        and array_aval(atom).dtype.kind in "bifV"
    ):
        return Spelled(plain_number(literal_value(atom)))
    return scope.expr(atom)


def spell_param(value: Any, imports: set[str]) -> str:
    """Source of an equation parameter or of a CompilerParams field."""
    again = functools.partial(spell_param, imports=imports)
    match value:
        case None | bool() | str():
            return repr(value)
        case _ if as_dtype(value):
            return dtype_name(as_dtype(value))
        case enum.Enum():
            return f"{_qualified(type(value), imports)}.{value.name}"
        case int() | np.integer():
            return str(int(value))
        case np.generic():
            return f"{dtype_name(value.dtype)}({plain_number(value)})"
        case float():
            return plain_number(np.float64(value))
        case tuple() if hasattr(value, "_fields"):
            fields = ", ".join(
                f"{field}={again(entry)}" for field, entry in zip(value._fields, value)
            )
            return f"{_qualified(type(value), imports)}({fields})"
        case tuple():
            return f"({', '.join(map(again, value))}{',' if len(value) == 1 else ''})"
        case list():
            return f"[{', '.join(map(again, value))}]"
        case dict():
            return f"{{{', '.join(f'{again(k)}: {again(entry)}' for k, entry in value.items())}}}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _spell_dataclass(value, imports)
    if isinstance(value, jax.sharding.Sharding) and not _is_placed(value):
        return "None"
    raise UnsupportedOp(
        "a parameter that cannot be printed", why=f"{type(value).__name__}: {value!r}"
    )


def _spell_dataclass(value: Any, imports: set[str]) -> str:
    """Constructor call with the fields that differ from their defaults."""
    given = []
    for field_spec in dataclasses.fields(value):
        if not field_spec.init:
            continue
        default = (
            field_spec.default_factory()
            if field_spec.default_factory is not dataclasses.MISSING
            else field_spec.default
        )
        field = getattr(value, field_spec.name)
        if default is dataclasses.MISSING or field != default:
            given.append(f"{field_spec.name}={spell_param(field, imports)}")
    return f"{_qualified(type(value), imports)}({', '.join(given)})"


def _qualified(cls: type, imports: set[str]) -> str:
    if getattr(lax, cls.__name__, None) is cls:
        return f"lax.{cls.__name__}"
    imports.add(cls.__module__)
    return f"{cls.__module__}.{cls.__qualname__}"


# --- bind: the last resort
# ---------------------------------------------------------------------------------------


@functools.cache
def _primitives() -> dict[str, jex.Primitive]:
    from pbkern.dsl.primitives import grid, in_range

    primitives: dict[str, jex.Primitive] = {}
    for module in (grid, in_range, jex.primitives, lax):
        for name in dir(module):
            primitive = getattr(module, name) if name.endswith("_p") else None
            if isinstance(primitive, jex.Primitive):
                primitives.setdefault(primitive.name, primitive)
    return primitives | _jax.REF_PRIMITIVES


def bind(name: str, *operands, **params) -> Any:
    """Binds a JAX or pbkern primitive by name, with exactly these parameters.

    Printed kernels use it for parameters that the public functions cannot say.

    Args:
      name: the primitive's, as str(jaxpr) shows it.
      *operands: arrays, numbers or Refs.
      **params: all parameters of its equation.
    Returns an array, or a list where the primitive has several results. Raises KernelError for a name that
    no primitive has.

    Examples:
      >>> pbkern.bind("mul", jnp.arange(3.0), jnp.arange(3.0)).tolist()
      [0.0, 1.0, 4.0]
    """
    primitive = _primitives().get(name)
    if primitive is None:
        raise KernelError(
            f"no primitive is called {name!r}", hint="the names that str(jaxpr) shows, e.g. 'sin'"
        )
    return primitive.bind(*map(_value, operands), **params)


def _value(x):
    return x if hasattr(x, "aval") or _jax.is_ref(jax.typeof(x)) else np.asarray(x)[()]


def _spell_bind(scope: SpellingScope, eqn) -> str:
    if eqn.primitive.name not in _primitives():
        raise UnsupportedOp(
            f"no spelling rule for primitive `{eqn.primitive.name}`",
            at=_jax.user_line(eqn),
            why=f"operands ({', '.join(str(var.aval) for var in eqn.invars)})",
        )
    params = [f"{key}={_bound_param(scope, param)}" for key, param in eqn.params.items()]
    return f"pbkern.bind({', '.join([repr(eqn.primitive.name), *scope.operands(eqn), *params])})"


def _bound_param(scope: SpellingScope, value: Any) -> str:
    """jnp.float32 is no dtype, only convertible to one, which `bind` does not do."""
    return f"jnp.dtype({scope.param(value)})" if as_dtype(value) else scope.param(value)


# --- operators
# ---------------------------------------------------------------------------------------------------

# Operators, by how tightly they bind.
TIGHTNESS = {
    **dict.fromkeys(("+", "-"), SUM_TIGHTNESS),
    **dict.fromkeys(("*", "/"), PRODUCT_TIGHTNESS),
    **dict.fromkeys(("&", "|", "^", "<", "<=", ">", ">=", "==", "!="), BITS_TIGHTNESS),
}


@rules.elementwise
def _elementwise(scope, eqn):
    """A row's spelling: its short form where the operands' type allows it, else a call with every parameter."""
    row = ELEMENTWISE[eqn.primitive.name]
    spelling = row.spelling
    unsaid = eqn.params.keys() - set(row.parameters)
    if spelling is None or any(eqn.params[param] is not None for param in unsaid):
        return None
    if spelling.short and kind_of(array_aval(eqn.invars[0]).dtype) in spelling.kinds:
        spelled = _short(scope, eqn, spelling.short)
        if spelled is not None:
            return spelled
    given = [
        f"{param}={scope.param(eqn.params[param])}"
        for param in row.parameters
        if eqn.params.get(param) is not None
    ]
    return f"{spelling.function}({', '.join([*scope.operands(eqn), *given])})"


def _short(scope, eqn, short: str) -> Spelled | str | None:
    """An operator, or a call, that takes Python's numbers beside arrays."""
    if len(eqn.invars) == 1:
        return Spelled(short + scope.expr(eqn.invars[0]).inside(ATOM_TIGHTNESS), UNARY_TIGHTNESS)
    var, other = eqn.invars
    if short not in TIGHTNESS:
        return f"{short}({beside(scope, var, other).text}, {beside(scope, other, var).text})"
    if isinstance(var, jex.Literal) and short[0] in "<>=!":
        return None  # Python turns 3 < x into x > 3
    tightness = TIGHTNESS[short]
    # Comparisons chain and bit operators bind oddly in Python: both sides in brackets unless
    # they are atoms.
    left, right = (
        (UNARY_TIGHTNESS, UNARY_TIGHTNESS)
        if tightness == BITS_TIGHTNESS
        else (tightness, tightness + 1)
    )
    return Spelled(
        f"{beside(scope, var, other).inside(left)} {short} {beside(scope, other, var).inside(right)}",
        tightness,
    )


@rules.register("check_failed")
def _check_failed(scope, eqn):
    values = (
        operand if name is None else f"{name}={operand}"
        for operand, name in zip(scope.operands(eqn), eqn.params["names"])
    )
    return f"pbkern.fail({', '.join([repr(eqn.params['message']), *values])})"


@rules.register("breakpoint")
def _breakpoint(scope, eqn):
    values = (
        operand if isinstance(name, int) else f"{name}={operand}"
        for operand, name in zip(scope.operands(eqn), eqn.params["names"])
    )
    return f"pbkern.breakpoint({', '.join(values)})"


@rules.register("debug_print")
def _debug_print(scope, eqn):
    args, kwargs = _jax.debug_print_arguments(eqn, scope.operands(eqn))
    said = [
        repr(eqn.params["fmt"]),
        *map(str, args),
        *(f"{k}={value}" for k, value in kwargs.items()),
    ]
    return f"jax.debug.print({', '.join(said)})"


# --- calls with their parameters
# ---------------------------------------------------------------------------------


def register_call(name: str, callee: str, arguments: Mapping[str, str] = {}) -> None:
    """callee(*operands, argument=parameter, ...). `arguments`: parameter name -> argument name; others must be None."""

    @rules.register(name)
    def rule(scope, eqn):
        if any(param is not None for key, param in eqn.params.items() if key not in arguments):
            return None
        given = [
            f"{argument}={scope.param(eqn.params[param])}"
            for param, argument in arguments.items()
            if eqn.params.get(param) is not None
        ]
        return f"{callee}({', '.join([*scope.operands(eqn), *given])})"


register_call("complex", "lax.complex")

for _name in ("sum", "max", "min", "prod", "and", "or", "xor"):
    register_call(f"reduce_{_name}", f"lax.reduce_{_name}", {"axes": "axes"})

for _name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
    register_call(_name, f"lax.{_name}", {"axis": "axis", "reverse": "reverse"})

register_call("reshape", "lax.reshape", {"new_sizes": "new_sizes", "dimensions": "dimensions"})
register_call("squeeze", "lax.squeeze", {"dimensions": "dimensions"})
register_call("transpose", "lax.transpose", {"permutation": "permutation"})
register_call("rev", "lax.rev", {"dimensions": "dimensions"})
register_call(
    "slice",
    "lax.slice",
    {"start_indices": "start_indices", "limit_indices": "limit_indices", "strides": "strides"},
)
register_call("pad", "lax.pad", {"padding_config": "padding_config"})
register_call("split", "lax.split", {"sizes": "sizes", "axis": "axis"})
register_call(
    "gather",
    "lax.gather",
    {
        "dimension_numbers": "dimension_numbers",
        "slice_sizes": "slice_sizes",
        "indices_are_sorted": "indices_are_sorted",
        "unique_indices": "unique_indices",
        "mode": "mode",
        "fill_value": "fill_value",
    },
)
register_call(
    "conv_general_dilated",
    "lax.conv_general_dilated",
    {
        "window_strides": "window_strides",
        "padding": "padding",
        "lhs_dilation": "lhs_dilation",
        "rhs_dilation": "rhs_dilation",
        "dimension_numbers": "dimension_numbers",
        "feature_group_count": "feature_group_count",
        "batch_group_count": "batch_group_count",
        "precision": "precision",
        "preferred_element_type": "preferred_element_type",
    },
)


@rules.register("program_id", "num_programs", "in_bounds")
def _grid_primitive(scope, eqn):
    return (
        f"pbkern.{eqn.primitive.name}({', '.join([*scope.operands(eqn), str(eqn.params['axis'])])})"
    )


# --- shapes, casts, contractions and the rest
# --------------------------------------------------------------------


def _is_placed(sharding: Any) -> bool:
    """Whether a sharding names devices: derivatives of JAX give equations shardings over empty meshes."""
    return sharding is not None and not getattr(getattr(sharding, "mesh", None), "empty", False)


@rules.register("convert_element_type")
def _convert(scope, eqn):
    x, new = eqn.invars[0], np.dtype(eqn.params["new_dtype"])
    if _is_placed(eqn.params.get("sharding")):
        return None
    if isinstance(x, jex.Literal) or new.kind in "bc" or x.aval.dtype.kind == "c":
        return f"lax.convert_element_type({scope.text(x)}, {dtype_name(new)})"
    return f"{scope.expr(x).inside(ATOM_TIGHTNESS)}.astype({dtype_name(new)})"


@rules.register("broadcast_in_dim")
def _broadcast_in_dim(scope, eqn):
    x, params = eqn.invars[0], eqn.params
    if _is_placed(params.get("sharding")) or len(eqn.invars) != 1:
        return None
    if isinstance(x, jex.Literal):
        number = plain_number(literal_value(x))
        return f"lax.full({scope.param(params['shape'])}, {number}, {dtype_name(x.aval.dtype)})"
    dims = scope.param(tuple(params["broadcast_dimensions"]))
    return f"lax.broadcast_in_dim({scope.text(x)}, {scope.param(params['shape'])}, {dims})"


@rules.register("iota")
def _iota(scope, eqn):
    params = eqn.params
    if _is_placed(params.get("sharding")) or eqn.invars:
        return None
    if len(params["shape"]) == 1:
        return f"lax.iota({dtype_name(params['dtype'])}, {params['shape'][0]})"
    return f"lax.broadcasted_iota({dtype_name(params['dtype'])}, {scope.param(params['shape'])}, {params['dimension']})"


@rules.register("concatenate")
def _concatenate(scope, eqn):
    if len(eqn.invars) < 2:
        return None
    return f"lax.concatenate([{', '.join(scope.operands(eqn))}], {eqn.params['dimension']})"


@rules.register("argmax", "argmin")
def _arg_extremum(scope, eqn):
    params = eqn.params
    if len(params["axes"]) != 1:
        return None
    return f"lax.{eqn.primitive.name}({scope.text(eqn.invars[0])}, {params['axes'][0]}, {dtype_name(params['index_dtype'])})"


@rules.register("dot_general")
def _dot_general(scope, eqn):
    (var, other), params = eqn.invars, eqn.params
    if _is_placed(params.get("out_sharding")):
        return None
    given = [
        f"{key}={scope.param(params[key])}"
        for key in ("precision", "preferred_element_type")
        if params[key] is not None
    ]
    if isinstance(var, jex.Literal) or isinstance(other, jex.Literal):
        return None
    if len(var.aval.shape) == len(other.aval.shape) == 2 and params["dimension_numbers"] == (
        ((1,), (0,)),
        ((), ()),
    ):
        natural = (
            var.aval.dtype
            == other.aval.dtype
            == eqn.outvars[0].aval.dtype
            == params["preferred_element_type"]
        )
        if natural and params["precision"] is None and var.aval.dtype.kind == "f":
            return f"jnp.dot({scope.text(var)}, {scope.text(other)})"
    dims = scope.param(
        tuple(tuple(tuple(map(int, dim)) for dim in pair) for pair in params["dimension_numbers"])
    )
    return f"lax.dot_general({', '.join([scope.text(var), scope.text(other), dims, *given])})"


@rules.register("dynamic_slice")
def _dynamic_slice(scope, eqn):
    x, *starts = scope.operands(eqn)
    if len(starts) != len(eqn.invars[0].aval.shape):
        return None
    sizes = scope.param(tuple(eqn.params["slice_sizes"]))
    return f"lax.dynamic_slice({x}, [{', '.join(starts)}], {sizes}, allow_negative_indices=False)"


@rules.register("dynamic_update_slice")
def _dynamic_update_slice(scope, eqn):
    x, update, *starts = scope.operands(eqn)
    return f"lax.dynamic_update_slice({x}, {update}, [{', '.join(starts)}], allow_negative_indices=False)"


@rules.register("sort")
def _sort(scope, eqn):
    given = ", ".join(
        f"{key}={scope.param(eqn.params[key])}" for key in ("dimension", "is_stable", "num_keys")
    )
    return f"lax.sort(({', '.join(scope.operands(eqn))},), {given})"


@rules.register("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _reduce_window(scope, eqn):
    dtype, params = eqn.invars[0].aval.dtype, eqn.params
    name = eqn.primitive.name.removeprefix("reduce_window_")
    computation = {"sum": "lax.add", "max": "lax.max", "min": "lax.min"}[name]
    inits = {
        "float32": {"sum": "0.0", "max": "-jnp.inf", "min": "jnp.inf"},
        "int32": {"sum": "0", "max": "jnp.iinfo(jnp.int32).min", "min": "jnp.iinfo(jnp.int32).max"},
    }
    if (
        dtype.name not in inits or scope.x64
    ):  # lax sees the reduction's kind only in a number of the default type
        return None
    keys = ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")
    given = ", ".join(f"{key}={scope.param(params[key])}" for key in keys)
    return f"lax.reduce_window({scope.text(eqn.invars[0])}, {inits[dtype.name][name]}, {computation}, {given})"


@rules.register(*SCATTERS)
def _scatter(scope, eqn):
    if scatter_combines(eqn) is None:
        return None
    keys = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    given = [f"{key}={scope.param(eqn.params[key])}" for key in keys]
    return (
        f"lax.{eqn.primitive.name.replace('-', '_')}({', '.join([*scope.operands(eqn), *given])})"
    )
