"""Programs that carry sums divided by other sums -> the same with the sums themselves, for reverse mode.

    l' = l + sum(p)                                            l' = l + sum(p)
    a' = a * (l / l') + (p @ v) / l'                  ->       A' = A + p @ v
    last: o = a'                                               last: o = A' / l'

The first paper on FlashAttention (Dao et al. 2022, algorithm 1) writes its accumulator so, and so does JAX's kernel for TPUs.
Here all programs have one maximum (last_maxima.py). With A = a * l the recurrence is a sum, whose derivative reads no state.
The walk follows values as products of a core and powers of sums of rows. Where a state ends as core / l', the core takes the
state's place. Other values stay as the program computes them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.calls import called_jaxpr, rules_kept
from pbkern.core.jaxprs.walks import literal_value, selector
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.views import SHAPE_VIEWS
from pbkern.dsl.body_rewrites.pure_program import PureProgram

from .last_maxima import OnlineSoftmax
from .maximum_types import MaximumProduct, axes_in_product, moved_axes
from .maximum_walk import known_quotient

MOVING = frozenset((*SHAPE_VIEWS, "transpose", "copy"))
COMPARING = frozenset(("eq", "ne", "gt"))
ELEMENTWISE = frozenset(
    "add add_any sub mul div max min neg exp exp2 log select_n convert_element_type".split()
)

# (number of a sum of rows, its power), by rising number.
Powers = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Quotient:
    """A value as a product of a core and powers of sums of rows.

    Attributes:
      core: with the value's shape; None for one.
      powers: of the sums.
      axes: the value's axis along each axis of the sums.
    """

    core: Any
    powers: Powers
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Zeros:
    """A value that is zero."""


@dataclass(frozen=True)
class Constant:
    """A value of equal elements, which are not zero."""


@dataclass(frozen=True)
class IsZero:
    """Whether the sum with a number is zero, or is not if `negated`."""

    sum_: int
    negated: bool


Form = Quotient | Zeros | Constant | IsZero | None


def _sum_of(form: Form) -> int | None:
    """Number of the sum that a value is; None for other values."""
    if not isinstance(form, Quotient) or form.core is not None or len(form.powers) != 1:
        return None
    ((number, power),) = form.powers
    return number if power == 1 else None


def _divisor_of(form: Form) -> int | None:
    """Number of the sum by which a core is divided, for values of the form core / sum; None for others."""
    if not isinstance(form, Quotient) or form.core is None or len(form.powers) != 1:
        return None
    ((number, power),) = form.powers
    return number if power == -1 else None


def _core_of(form: Form, otherwise):
    return form.core if isinstance(form, Quotient) else otherwise


def with_sums(
    program: PureProgram, softmax: OnlineSoftmax, num_scratch: int
) -> tuple[PureProgram, tuple[int, ...]]:
    """The programs with sums in place of sums that are divided by sums of rows, and the numbers of these states.

    Args:
      program: with one maximum for all of its exponentials.
      softmax: whose maxima they are.
      num_scratch: number of its states that are scratch.
    """
    first = len(program.state) - num_scratch
    types = softmax.types[len(softmax.types) - num_scratch :]
    replaced: list[int] = []
    for scratch, divisor in itertools.product(range(num_scratch), softmax.products):
        number, type_, of_sums = first + scratch, types[divisor], program.state[first + divisor]
        state = program.state[number]
        if (
            number in replaced
            or scratch in (softmax.maximum, *softmax.products)
            or not jnp.issubdtype(state.dtype, jnp.floating)
            or not isinstance(type_, MaximumProduct)
            or not _varies_along(of_sums.shape, type_)
        ):
            continue
        sizes = [of_sums.shape[axis] for axis in type_.axes]
        for axes in itertools.permutations(range(len(state.shape)), len(sizes)):
            if [state.shape[axis] for axis in axes] != sizes:
                continue
            new = _with_sum(program, number, first + divisor, axes, type_.axes)
            if new is not None:
                program, replaced = new, [*replaced, number]
                break
    return program, tuple(replaced)


def _varies_along(shape: Sequence[int], type_: MaximumProduct) -> bool:
    """Whether a product varies only along axes of the maxima: along all others its elements are equal."""
    wide = {axis for axis, size in enumerate(shape) if size > 1}
    return wide <= {*type_.axes, *type_.even}


def _with_sum(
    program: PureProgram,
    number: int,
    divisor: int,
    axes: tuple[int, ...],
    axes_of_divisor: tuple[int, ...],
) -> PureProgram | None:
    """The programs with a sum in place of a state, if that is the sum divided by another state.

    Args:
      program: the programs.
      number: of the state.
      divisor: number of the other state.
      axes: of the state, along which the divisor lies.
      axes_of_divisor: along which its elements differ.
    """
    closed, count = program.function, len(program.state)
    first = len(closed.in_avals) - count
    is_sum = []

    def run(*args):
        walk = _QuotientWalk()
        values, forms = list(args), list[Form]([None] * len(args))
        walk.divide(values, forms, (first + number, first + divisor), axes, axes_of_divisor)
        results, after = walk.walk(closed.jaxpr, closed.consts, values, forms)
        by = _divisor_of(after[number])
        is_sum.append(by is not None and by == _sum_of(after[divisor]))
        if is_sum[-1]:
            results[number] = _core_of(after[number], None)
        return results

    with rules_kept():
        function = jax.make_jaxpr(run)(*map(_jax.fresh_aval, closed.in_avals))
    return dataclasses.replace(program, function=function) if is_sum == [True] else None


class _QuotientWalk:
    """Goes through a function's equations with their values and known quotients.

    Attributes:
      numbers: for sums.
      sums: number of a sum -> its value, and the axes that it varies along.
    """

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.sums: dict[int, tuple[Any, tuple[int, ...]]] = {}

    def numbered(self, value, axes: tuple[int, ...]) -> Quotient:
        """Gives a sum of rows a number, and returns its form; `axes`: those along which it varies."""
        number = next(self.numbers)
        self.sums[number] = value, axes
        return Quotient(None, ((number, 1),), axes)

    def divide(self, values, forms, pair: tuple[int, int], axes, axes_of_divisor) -> None:
        """Replaces a core by its quotient, in value and form.

        Args:
          values: of a walk, which change.
          forms: of these values, which change, too.
          pair: number of the core among them, and of its divisor.
          axes: of the core, along which the divisor lies.
          axes_of_divisor: along which the divisor varies.
        """
        number, divisor = pair
        by = _sum_of(forms[divisor])
        if by is None:
            forms[divisor] = self.numbered(values[divisor], axes_of_divisor)
            ((by, _),) = forms[divisor].powers
        forms[number] = Quotient(values[number], ((by, -1),), axes)
        values[number] = self.value(forms[number], values[number])

    def value(self, form: Form, otherwise):
        """The value of a quotient by one sum; `otherwise` where that is not what is known."""
        number = _divisor_of(form)
        if number is None or not isinstance(form, Quotient):
            return otherwise
        return _divided(form.core, form.axes, *self.sums[number])

    def walk(
        self, jaxpr: jex.Jaxpr, consts: Sequence, values: Sequence, forms: Sequence[Form]
    ) -> tuple[list, list[Form]]:
        """(results, their forms)."""
        env = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, values))
        known: dict = dict(zip(jaxpr.invars, forms))
        producers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        varying = _VaryingAxes(producers, known)
        divisors = _divisors(jaxpr, producers)

        def read(atom):
            return literal_value(atom) if isinstance(atom, jex.Literal) else env[atom]

        def form_of(atom) -> Form:
            if isinstance(atom, jex.Literal):
                if array_aval(atom).shape:
                    return None
                return Zeros() if literal_value(atom) == 0 else Constant()
            return known.get(atom)

        def number_sums(variables: Sequence[jex.Var]) -> None:
            """Gives divisors that vary from row to row alone a number, if they have none."""
            for var in variables:
                if var in divisors and known.get(var) is None and (axes := varying.of(var)):
                    known[var] = self.numbered(env[var], axes)

        number_sums(jaxpr.invars)
        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            name = eqn.primitive.name
            given = [form_of(atom) for atom in eqn.invars]
            new: Sequence[Form] = [None] * len(eqn.outvars)
            results = None
            if name == "cond" and any(isinstance(form, Quotient) for form in given):
                kind, choice = selector(eqn, producers)
                results, new = self.conditional(eqn, kind, read(choice), operands[1:], given[1:])
            elif name == "scan" and any(isinstance(form, Quotient) for form in given):
                results, new = self.loop(eqn, operands, given)
            if results is None:
                results, new = _jax.bind_again(eqn, operands), [None] * len(eqn.outvars)
                if len(results) == 1:
                    form = _form(eqn, operands, given)
                    if isinstance(form, Quotient) and not form.powers and form.core is not None:
                        results = [form.core]
                    new = [form]
            env.update(zip(eqn.outvars, results))
            known.update(zip(eqn.outvars, new))
            number_sums(eqn.outvars)
        return list(map(read, jaxpr.outvars)), list(map(form_of, jaxpr.outvars))

    # --- control flow

    def conditional(self, eqn, kind, chosen, operands, forms) -> tuple:
        branches = eqn.params["branches"]

        def run(number: int):
            branch = branches[number]
            # Divisions are inside of the branch that needs them: only the last program may take it.
            inside = list(map(self.value, forms, operands))
            return self.walk(branch.jaxpr, branch.consts, inside, forms)

        after = [_only_forms(functools.partial(run, number)) for number in range(len(branches))]
        pairs = _pairs(after)

        def with_cores(number: int) -> Callable:
            def call():
                results, forms = run(number)
                for n in pairs:
                    results[n] = _core_of(forms[n], results[n])
                return results

            return call

        calls = [with_cores(number) for number in range(len(branches))]
        is_switch = kind != "pred"
        results = lax.switch(chosen, calls) if is_switch else lax.cond(chosen, *calls[::-1])
        new = list[Form]([None] * len(results))
        for n, (divisor, axes, axes_of_divisor) in pairs.items():
            self.divide(results, new, (n, divisor), axes, axes_of_divisor)
        return results, new

    def loop(self, eqn, operands, forms) -> tuple:
        """A scan that carries quotients and their divisors."""
        params = _jax.params_of(eqn)
        inner, num_consts, num_carry = params["jaxpr"], params["num_consts"], params["num_carry"]
        end = num_consts + num_carry
        begun = _pairs([forms[num_consts:end]])
        if not begun:
            return None, ()

        def step(carry, xs):
            values, inside = list(carry), list[Form]([None] * num_carry)
            for n, (divisor, *axes) in begun.items():
                self.divide(values, inside, (n, divisor), *axes)
            given = [*forms[:num_consts], *inside, *[None] * len(xs)]
            results, after = self.walk(
                inner.jaxpr, inner.consts, [*operands[:num_consts], *values, *xs], given
            )
            return results, after[:num_carry]

        init = list(operands[num_consts:end])
        for n in begun:
            init[n] = _core_of(forms[num_consts + n], init[n])
        elements = [_jax.fresh_aval(var.aval) for var in inner.jaxpr.invars[end:]]
        after = _only_forms(step, init, elements)
        if not begun.items() <= _pairs([after]).items():
            return None, ()

        def stepped(carry, xs):
            results, after = step(carry, xs)
            for n in begun:
                results[n] = _core_of(after[n], results[n])
            return tuple(results[:num_carry]), tuple(results[num_carry:])

        out, stacked = lax.scan(
            stepped,
            tuple(init),
            tuple(operands[end:]),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        results, new = [*out, *stacked], list[Form]([None] * len(eqn.outvars))
        for n, (divisor, *axes) in begun.items():
            self.divide(results, new, (n, divisor), *axes)
        return results, new


def _only_forms(function: Callable, *args) -> list[Form]:
    """Forms of a function's results, which are not computed."""
    forms: list[Form] = []

    def run(*values):
        results, after = function(*values)
        forms.extend(after)
        return results

    jax.make_jaxpr(run)(*args)
    return forms


def _pairs(alternatives: Sequence[Sequence[Form]]) -> dict[int, tuple[int, tuple, tuple]]:
    """Number of a quotient -> (number of its divisor, its axes, the divisor's), the same in all of the alternatives.

    Zero is a quotient by anything.
    """
    pairs: dict[int, tuple[int, tuple, tuple]] = {}
    for number in range(len(alternatives[0])):
        per_alternative: list[tuple[int, tuple, tuple] | None] = []
        for forms in alternatives:
            if not isinstance(forms[number], Zeros):
                per_alternative.append(_pair(forms, number))
        if per_alternative and None not in per_alternative and len(set(per_alternative)) == 1:
            (pair,) = set(per_alternative)
            assert pair is not None
            pairs[number] = pair
    return pairs


def _pair(forms: Sequence[Form], number: int) -> tuple[int, tuple, tuple] | None:
    """(number of a quotient's divisor, the quotient's axes, the divisor's)."""
    form, by = forms[number], _divisor_of(forms[number])
    for n, other in enumerate(forms):
        is_divisor = by is not None and _sum_of(other) == by
        if is_divisor and isinstance(form, Quotient) and isinstance(other, Quotient):
            return n, form.axes, other.axes
    return None


def _divided(core, axes: tuple[int, ...], total, axes_of_total: tuple[int, ...]):
    """core / total, where the total is along some of the core's axes; zero where the total is."""
    rest = [axis for axis in range(total.ndim) if axis not in axes_of_total]
    limits = [1 if axis in rest else size for axis, size in enumerate(total.shape)]
    rows = lax.squeeze(lax.slice(total, [0] * total.ndim, limits), rest)
    places = [axes[axes_of_total.index(axis)] for axis in sorted(axes_of_total)]
    order = sorted(range(len(places)), key=places.__getitem__)
    divisor = lax.broadcast_in_dim(lax.transpose(rows, order), core.shape, sorted(places))
    divisor = lax.convert_element_type(divisor, core.dtype)
    safe = lax.select(divisor == 0, lax.full_like(divisor, 1), divisor)
    return known_quotient(core, safe, core / safe)


class _VaryingAxes:
    """Finds the axes along which elements of a value differ, from the equations that compute it."""

    def __init__(self, producers: dict, forms: dict) -> None:
        self.producers, self.forms = producers, forms
        self.known: dict[Any, tuple[int, ...]] = {}

    def of(self, atom) -> tuple[int, ...]:
        if isinstance(atom, jex.Literal):
            return ()
        form = self.forms.get(atom)
        if isinstance(form, Quotient) and form.core is None:
            return form.axes
        if atom not in self.known:
            self.known[atom] = self.computed(atom)
        return self.known[atom]

    def computed(self, var) -> tuple[int, ...]:
        shape = array_aval(var).shape
        wide = tuple(axis for axis, size in enumerate(shape) if size > 1)
        eqn = self.producers.get(var)
        if eqn is None or len(eqn.outvars) > 1:
            return wide
        name = eqn.primitive.name
        if name in MOVING:
            axes, places = self.of(eqn.invars[0]), moved_axes(eqn)
            return tuple(sorted(places[n] for n in axes)) if set(axes) <= set(places) else wide
        if name in ELEMENTWISE:
            of_operands = [self.of(x) for x in eqn.invars if array_aval(x).shape]
            return tuple(sorted(set(itertools.chain(*of_operands))))
        return wide


def _divisors(jaxpr: jex.Jaxpr, producers: dict) -> set:
    """Variables that divide others, or that are compared with something, before they are spread over more axes."""
    divisors = set()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name != "div" and name not in COMPARING:
            continue
        atom = eqn.invars[1 if name == "div" else 0]
        while isinstance(atom, jex.Var):
            divisors.add(atom)
            source = producers.get(atom)
            if source is None or source.primitive.name not in MOVING:
                break
            divisors.remove(atom)
            atom = source.invars[0]
    return {atom for atom in divisors if jnp.issubdtype(array_aval(atom).dtype, jnp.floating)}


# --- rules
# ------------------------------------------------------------------------------------------------


def _form(eqn, operands: Sequence, forms: Sequence[Form]) -> Form:
    """The form of the result of an equation that is no control flow, and has one."""
    name = eqn.primitive.name
    if name in MOVING or name == "convert_element_type":
        return _moved(eqn, operands, forms[0])
    if any(isinstance(form, Quotient) for form in forms):
        passed = _passed_on(eqn)
        if passed is not None:
            return forms[passed]
    if name in COMPARING and isinstance(forms[1], Zeros):
        of = _sum_of(forms[0])
        return None if of is None else IsZero(of, negated=name != "eq")
    if name == "select_n":
        return _select(forms)
    forms = [None if isinstance(form, Constant) else form for form in forms]
    if name == "dot_general":
        return _dot_general(eqn, operands, forms)
    if name in ("mul", "div"):
        return _product(eqn, operands, forms, 1 if name == "mul" else -1)
    if name in ("add", "add_any", "sub"):
        return _sum(eqn, operands, forms)
    return None


def _select(forms: Sequence[Form]) -> Form:
    """A power of a sum, with a constant in its place where the sum is zero."""
    which, *cases = forms
    if not isinstance(which, IsZero) or len(cases) != 2:
        return None
    other, chosen = cases if which.negated else cases[::-1]
    if not isinstance(chosen, Quotient) or not isinstance(other, Constant):
        return None
    # Types have proved that the constant is only taken where the sum is zero, and all that it would divide.
    is_power = chosen.core is None and len(chosen.powers) == 1
    return chosen if is_power and chosen.powers[0][0] == which.sum_ else None


def _passed_on(eqn) -> int | None:
    """The operand that a call, such as `known_quotient`, passes on as its result."""
    inner = called_jaxpr(eqn)
    if inner is None or inner.jaxpr.outvars[0] not in inner.jaxpr.invars:
        return None
    return inner.jaxpr.invars.index(inner.jaxpr.outvars[0])


def _moved(eqn, operands, form: Form) -> Form:
    """Operations that give elements other places, or another type."""
    if isinstance(form, (Zeros, Constant)):
        return form
    if not isinstance(form, Quotient):
        return None
    if eqn.primitive.name == "convert_element_type":
        is_same = array_aval(eqn.outvars[0]).dtype == array_aval(eqn.invars[0]).dtype
        return form if is_same else None
    places = moved_axes(eqn)
    if not set(form.axes) <= set(places):
        return None
    core = None if form.core is None else _jax.bind_again(eqn, [form.core, *operands[1:]])[0]
    return Quotient(core, form.powers, tuple(places[axis] for axis in form.axes))


def _dot_general(eqn, operands, forms) -> Form:
    """A product of matrices, of which one is divided row by row."""
    number = 0 if isinstance(forms[0], Quotient) else 1
    of, order = forms[number], axes_in_product(eqn, number)
    if not isinstance(of, Quotient) or forms[1 - number] is not None:
        return None
    if of.core is None or not set(of.axes) <= set(order):
        return None
    core = _jax.bind_again(eqn, [of.core, operands[1]] if number == 0 else [operands[0], of.core])
    return Quotient(core[0], of.powers, tuple(map(order.index, of.axes)))


def _product(eqn, operands, forms, power: int) -> Form:
    """a * b, or a / b."""
    a, b = forms
    if isinstance(a, Zeros) or (isinstance(b, Zeros) and power > 0):
        return Zeros()
    quotients = [form for form in forms if isinstance(form, Quotient)]
    if not quotients or len({form.axes for form in quotients}) > 1:
        return None
    of_a, of_b = (form.powers if isinstance(form, Quotient) else () for form in forms)
    powers = _multiplied(of_a, of_b, power)
    cores = [
        form.core if isinstance(form, Quotient) else _unless_one(atom, x)
        for atom, x, form in zip(eqn.invars, operands, forms)
    ]
    if power < 0 and cores[1] is not None and (cores[0] is None or b is not None):
        return None
    given = [core for core in cores if core is not None]
    core = _jax.bind_again(eqn, given)[0] if len(given) == 2 else given[0] if given else None
    if core is not None:
        core = jnp.broadcast_to(core, array_aval(eqn.outvars[0]).shape)
    return Quotient(core, powers, quotients[0].axes)


def _unless_one(atom, value):
    is_one = isinstance(atom, jex.Literal) and not atom.aval.shape and literal_value(atom) == 1
    return None if is_one else value


def _multiplied(a: Powers, b: Powers, power: int) -> Powers:
    total = dict(a)
    for number, exponent in b:
        total[number] = total.get(number, 0) + power * exponent
    return tuple((number, exponent) for number, exponent in sorted(total.items()) if exponent)


def _sum(eqn, operands, forms) -> Form:
    """a + b, or a - b, of two quotients by the same, or of values without divisors."""
    a, b = forms
    if isinstance(a, Zeros) and isinstance(b, Zeros):
        return b
    if isinstance(b, Zeros) and isinstance(a, Quotient):
        return a
    if isinstance(a, Zeros) and isinstance(b, Quotient) and eqn.primitive.name != "sub":
        return b
    quotients = [form for form in forms if isinstance(form, Quotient)]
    plain = [form for form in forms if form is None]
    if len(quotients) + len(plain) < 2 or not quotients:
        return None
    if len({(form.powers, form.axes) for form in quotients}) > 1:
        return None
    if any(form.core is None for form in quotients) or (plain and quotients[0].powers):
        return None
    cores = [form.core if isinstance(form, Quotient) else x for form, x in zip(forms, operands)]
    core = _jax.bind_again(eqn, cores)[0]
    return Quotient(core, quotients[0].powers, quotients[0].axes)
