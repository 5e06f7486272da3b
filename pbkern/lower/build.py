"""Body jaxpr over Refs -> statements of nests (lower/nest/ir/).

Equations are read in order. Elementwise operations and index maps become lazy values; what must be
in memory is decided by who asks for it (`lower/values/materialise.py`); Ref effects, control flow
and loops become statements in program order. Before a statement writes a buffer, values that still
have to be read from it are stored elsewhere (`lower/values/store_hazards.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.affine import Affine
from pbkern.core.errors import UnsupportedOp
from pbkern.core.jax_types import Atom, array_aval
from pbkern.core.jaxprs.calls import called_jaxpr
from pbkern.core.ops.scatter import SCATTERS
from pbkern.dsl.kernel import Kernel
from pbkern.lower.nest.conditions.index_tests import BOOL
from pbkern.lower.nest.context import NestContext, reports
from pbkern.lower.nest.ir import (
    Accumulator,
    Buf,
    Expr,
    Let,
    Load,
    Nest,
    Pool,
    Reduction,
    Stmt,
    Store,
)
from pbkern.lower.rules import control_flow, ref_effects, views
from pbkern.lower.rules.contractions import CONTRACTIONS
from pbkern.lower.rules.debug_callbacks import trace
from pbkern.lower.rules.elementwise import elementwise_value
from pbkern.lower.rules.reshape_views import merged
from pbkern.lower.rules.scatter import scatter
from pbkern.lower.rules.sort import elements_read, sorted_values
from pbkern.lower.values import materialise as decide
from pbkern.lower.values import store_hazards
from pbkern.lower.values.affine_index_arrays import row_steps
from pbkern.lower.values.draft import NestDraft
from pbkern.lower.values.dynamic_strides import Steps
from pbkern.lower.values.items import ControlItem, Item, LetItem, RefView, StoreItem
from pbkern.lower.values.pending_reads import PendingReads
from pbkern.lower.values.scalar_evolution import bounds_of, known, known_bounds, known_index
from pbkern.lower.values.segments import Box, segments
from pbkern.lower.values.values import (
    ZERO,
    Contract,
    Index,
    Joined,
    Lazy,
    Literal,
    Opaque,
    SomeValue,
    Stored,
    Value,
    Windowed,
    dims_index,
)


class BodyBuilder:
    """Builds one body. `stmts` is the list that statements are being appended to."""

    def __init__(self, context: NestContext):
        self.context, self.pool, self.names = context, context.pool, context.names
        self.stmts: list[Stmt] = []
        self.items: list[Item] = []
        self.refs: dict[Any, RefView] = {}  # by variable of the jaxpr
        self.kernel: Kernel | None = None
        self.operands: tuple[Buf, ...] = ()  # the kernel's, as they were when it was launched
        self.grid: tuple[Value, ...] = ()
        self.grid_sizes: tuple[Value, ...] = ()
        self.rows: dict[
            int, Steps
        ] = {}  # id of an index array -> how its rows move (lower/values/affine_index_arrays.py)
        self.unstored: set[int] = set()  # ids of values that are not stored for it
        self.rounded_once: frozenset = frozenset()  # variables of the body that are rounded once
        self._stored: dict[int, Stored] = {}
        self._layouts: dict[int, tuple[int, ...]] = {}
        self._over: dict[int, Value] = {}  # id of a value -> what it may be stored over
        self._in_joined: set[int] = (
            set()
        )  # ids of concatenations that are made where another one is
        self._cut: set[int] = set()  # ids of concatenations that are read in their operands
        self._kept: list = []
        self._order: dict[int, tuple] = {}
        self._named_indices: dict[
            tuple[int, int | None], str
        ] = {}  # (id of a scalar, clamp) -> its name in this region
        self.now: tuple = ()  # the item being built
        self._prefix: tuple = ()  # where the region being built stands in the outer ones
        self.pending_reads = PendingReads(
            self.resolve, lambda value: self._order.get(id(value), ())
        )

    # ---------------------------------------------------------------- small makers used by the
    # rules

    def line(self, eqn) -> str | None:
        return _jax.user_line(eqn)

    @property
    def bounds(self) -> dict[str, tuple[int, int]]:
        """(smallest, largest) value of symbols, where known."""
        return self.context.bounds

    def op(self, primitive: str, dtype, *args: Expr, params=None) -> Expr:
        return self.context.op(primitive, dtype, *args, params=params)

    def const(self, value, dtype) -> Expr:
        return self.context.const(value, dtype)

    def select(self, test: Expr, true: Expr, false: Expr) -> Expr:
        return self.context.select(test, true, false)

    def clamped(self, expr: Expr, limit: int | None) -> Expr:
        return self.context.clamped(expr, limit)

    def cast(self, value: Value, dtype: np.dtype) -> Value:
        if value.dtype == dtype or (
            dtype == np.float32 and value.dtype.name in ("float16", "bfloat16")
        ):
            return value  # half precision is carried in float32 registers

        def combine(pool: Pool, ix: Index, xs: list[Expr]) -> Expr:
            return self._converted(xs[0], dtype)

        return self.new(Lazy(value.shape, dtype, (value,), lambda ix: (ix,), combine, cost=1.0))

    def _converted(self, x: Expr, dtype: np.dtype) -> Expr:
        return self.op("convert_element_type", dtype, x, params={"new_dtype": dtype})

    def rounded(self, value: Value) -> Value:
        """The value as a number of its dtype, which no sum takes unrounded."""

        def combine(pool: Pool, ix: Index, xs: list[Expr]) -> Expr:
            if value.dtype.itemsize == 2:  # keeps subnormal numbers
                return self._converted(self._converted(xs[0], np.dtype(np.float32)), value.dtype)
            info = np.finfo(value.dtype)
            params = {"exponent_bits": info.nexp, "mantissa_bits": info.nmant}
            return self.op("reduce_precision", value.dtype, xs[0], params=params)

        return self.new(Lazy(value.shape, value.dtype, (value,), lambda ix: (ix,), combine))

    def pad(self, value: Value, fill, config) -> Value:
        """lax.pad of a value, through its rule."""
        out = [
            max(size + lo + hi + max(size - 1, 0) * i, 0)
            for size, (lo, hi, i) in zip(value.shape, config)
        ]
        eqn = jax.make_jaxpr(lambda x, fill_value: jax.lax.pad(x, fill_value, config))(
            jax.ShapeDtypeStruct(value.shape, value.dtype), jax.ShapeDtypeStruct((), value.dtype)
        ).jaxpr.eqns[0]
        assert tuple(eqn.outvars[0].aval.shape) == tuple(out)
        return self.new(
            views.RULES.lookup("pad")(self, eqn, [value, Literal((), value.dtype, fill)])
        )

    def new(self, value: SomeValue) -> SomeValue:
        """Notes when a value was defined."""
        if id(value) not in self._order:
            self._order[id(value)] = (*self._prefix, len(self.items))
            self.keep(value)
            self.items.append(value)
        return value

    def index_symbol(self, value: Value, clamp: int | None = None) -> Affine:
        """A scalar as a term of index expressions, kept in [0, clamp]."""
        if clamp == 0:
            return ZERO
        affine = known_index(self, value, clamp)
        if affine is not None:
            return affine
        if (name := self._named_indices.get((id(value), clamp))) is not None:
            return Affine.symbol(name)  # what one place is read and written by is one place
        name = self._named_indices[id(value), clamp] = self.names("%s")
        self.keep(value)
        self.items.append(LetItem(name, value, clamp))
        if clamp is not None:
            self.bounds[name] = known_bounds(self, value, clamp)
        elif (expr := known(self, value)) is not None and (
            bounds := bounds_of(self, expr)
        ) is not None:
            self.bounds[name] = bounds
        return Affine.symbol(name)

    def keep(self, x) -> None:
        """Keeps an object alive: values are known by their ids, which no other may come to."""
        self._kept.append(x)

    def new_buffer(self, shape, dtype, step: int | None = None) -> Stored:
        return self.whole(self.context.new_buffer(shape, dtype, step))

    def append_control(self, item: ControlItem, results: list[Stored]) -> None:
        """Adds control flow; its results are defined after everything inside it."""
        for result in results:
            self._order[id(result)] = (*self._prefix, len(self.items), math.inf)
        self.items.append(item)

    def whole(self, buf: Buf) -> Stored:
        stored = Stored(buf.shape, buf.dtype, buf, lambda ix: ix)
        self._order.setdefault(id(stored), ())
        self.keep(stored)
        return stored

    # ---------------------------------------------------------------- reading a jaxpr

    def read(self, env: dict, atom: Atom) -> Value:
        if isinstance(atom, jex.Literal):
            return Literal((), np.dtype(array_aval(atom).dtype), atom.val)
        return env[atom]

    def scan_equations(self, jaxpr: jex.Jaxpr, env: dict) -> None:
        """Fills self.items with values and effects of the equations, in order."""
        for eqn in jaxpr.eqns:
            inner = called_jaxpr(eqn)
            if inner is not None:
                self._inline_call(inner, eqn, env)
                continue
            name = eqn.primitive.name
            if name in ("get", "swap", "addupdate", "masked_load", "masked_store"):
                ref_effects.access(self, eqn, env)
            elif name in ("debug_print", "check_failed", "breakpoint"):
                trace(self, eqn, env)
            elif name == "in_bounds":
                env[eqn.outvars[0]] = ref_effects.in_bounds(
                    self, self.refs[eqn.invars[0]], eqn.params["axis"]
                )
            elif name in ("scan", "while", "cond"):
                control_flow.RULES.lookup(name)(self, eqn, env)
            elif name == "sort":
                ins = [self.read(env, var) for var in eqn.invars]
                env.update(
                    zip(eqn.outvars, sorted_values(self, eqn, ins, elements_read(jaxpr, eqn)))
                )
            else:
                value = self.value_of(eqn, [self.read(env, var) for var in eqn.invars])
                env[eqn.outvars[0]] = (
                    self.rounded(value) if eqn.outvars[0] in self.rounded_once else value
                )

    def _inline_call(self, inner: jex.ClosedJaxpr, eqn, env: dict) -> None:
        captured = list(map(np.asarray, inner.consts))
        if any(const.ndim for const in captured):
            raise UnsupportedOp(
                "a kernel body captures an array constant",
                at=self.line(eqn),
                hint="pass the array to the kernel as an input",
            )
        local: dict[jex.Var, Value] = {
            constvar: Literal((), np.dtype(const.dtype), const)
            for constvar, const in zip(inner.jaxpr.constvars, captured)
        }
        for var, atom in zip(inner.jaxpr.invars, eqn.invars):
            if not isinstance(atom, jex.Literal) and atom in self.refs:
                self.refs[var] = self.refs[atom]
            else:
                local[var] = self.read(env, atom)
        self.scan_equations(inner.jaxpr, local)
        env.update(
            (outvar, self.read(local, inner_atom))
            for outvar, inner_atom in zip(eqn.outvars, inner.jaxpr.outvars)
        )

    def value_of(self, eqn, ins: list[Value]) -> Value:
        """The result of an equation without effects."""
        name = eqn.primitive.name
        if name == "program_id":
            return self.grid[eqn.params["axis"]]
        if name == "num_programs":
            return self.grid_sizes[eqn.params["axis"]]
        if name in SCATTERS:
            return self.new(scatter(self, eqn, ins))
        for rules in (views.RULES, CONTRACTIONS):
            if name in rules:
                return self.new(rules.lookup(name)(self, eqn, ins))
        return self.new(elementwise_value(self, eqn, ins))

    # ---------------------------------------------------------------- running a region

    def region(
        self, jaxpr: jex.Jaxpr, env: dict, finish: Callable[[dict], None] | None = None
    ) -> list[Stmt]:
        """Statements of a jaxpr whose inputs are in `env`; `finish(env)` may add items after the last equation."""
        outer = self.items, self.stmts, self._prefix, self._named_indices
        self.items, self.stmts, self._prefix, self._named_indices = [], [], self.now, {}
        for value in env.values():
            self._order.setdefault(id(value), ())
        self.keep(env)
        self.scan_equations(jaxpr, env)
        if finish is not None:
            finish(env)
        items = self.items
        decision = decide.decide(items, self)
        plan = decision.stored
        self._layouts |= decision.layouts
        self._over |= decision.over
        self._in_joined |= decision.in_joined
        self._cut |= decision.cut
        self.pending_reads.add(items, self._prefix)
        for k, item in enumerate(items):
            self.now = (*self._prefix, k)
            self._run(item, plan)
        stmts = self.stmts
        self.now = self._prefix
        self.items, self.stmts, self._prefix, self._named_indices = outer
        return stmts

    def _run(self, item: Item, plan) -> None:
        match item:
            case LetItem(name=name, value=value, clamp=clamp):
                self.stmts.append(Let(name, self.clamped(self.pull(value, ()), clamp)))
            case StoreItem():
                store_hazards.protect(self, {item.buf.root}, direct=item)
                self._store(item)
            case ControlItem(stores=stores, run=run):
                store_hazards.protect(self, {buf.root for buf in stores}, captured=item.uses)
                run()
            case Opaque():
                if id(item) in plan:
                    self._make_opaque(item)
            case Value():
                if id(item) in plan:
                    self.materialise(item)

    # ---------------------------------------------------------------- pulling expressions

    def resolve(self, value: Value) -> Value:
        """Finds a value's present place: where it was stored, and where that was copied to before it was overwritten."""
        while (stored := self._stored.get(id(value), value)) is not value:
            value = stored
        return value

    def _note_storage(self, value: Value, stored: Stored) -> None:
        self._stored[id(value)] = stored
        self.keep(value)
        self.pending_reads.record(value)

    def pull(
        self,
        value: Value,
        ix: Index,
        nest: NestDraft | None = None,
        guard: bool = False,
        memo: dict | None = None,
    ) -> Expr:
        """The expression of value at an index; contractions decided to be inlined add their reduction to `nest`."""
        memo = {} if memo is None else memo
        key = (id(value), ix, guard)
        if key not in memo:
            memo[key] = self._pull(value, ix, nest, guard, memo)
        return memo[key]

    def _pull(self, value: Value, ix: Index, nest, guard, memo) -> Expr:
        value = self.resolve(value)
        if isinstance(value, (Stored, Literal)):
            return value.at(self.pool, ix, guard)
        if isinstance(value, Lazy):
            guarded = guard or value.guard
            args = [
                self.pull(operand, tuple(i), nest, guarded, memo)
                for operand, i in zip(value.operands, value.route(ix))
            ]
            return value.combine(self.pool, ix, args)
        if isinstance(value, Joined):
            part = value.part(ix, {} if nest is None else nest.dims)
            if part is not None:
                return self.pull(*part, nest, guard, memo)
        if isinstance(value, Contract) and nest is not None:
            return self._inline_contract(value, ix, nest, guard)
        if isinstance(
            value, (Contract, Opaque)
        ):  # a scalar outside any nest, or decided too late to inline
            return self.force(value).at(self.pool, ix, guard)
        raise AssertionError(type(value))

    def force(self, value: Value) -> Stored:
        if isinstance(value, Opaque):
            self._make_opaque(value)
        else:
            self.materialise(value)
        return self._stored[id(value)]

    def _inline_contract(self, contract: Contract, ix: Index, nest: NestDraft, guard: bool) -> Expr:
        """The accumulator of a contraction in `nest`: one for all that read it, in the padding of a result or outside."""
        key = id(contract), ix
        if key in nest.inlined:
            return nest.inlined[key]
        rename = {}
        for mine, theirs in zip(contract.out, ix):
            if mine.terms:
                rename[mine.terms[0][0]] = theirs
        nest.reduce_over({dim: extent for dim, extent in contract.dims if dim in contract.rdims})
        nest.inlined[key] = self._reduce(contract, nest, rename, guard)
        return nest.inlined[key]

    def _reduce(
        self, contract: Contract, nest: NestDraft, rename: dict, guard: bool = False
    ) -> Accumulator:
        memo: dict = {}
        args = [
            self.pull(operand, tuple(i.substitute(rename.get) for i in route), None, guard, memo)
            for operand, route in zip(contract.operands, contract.routes)
        ]
        if contract.index_arg is not None:
            args.append(self.pool.index(contract.dtype, contract.index_arg.substitute(rename.get)))
        number = nest.add(Reduction(contract.op, tuple(args), contract.acc_dtype))
        return self.pool.accumulator(contract.acc_dtype, number)

    # ---------------------------------------------------------------- statements

    def materialise(self, value: Value, into: Stored | None = None) -> Stored:
        """Appends the nest that stores value, and remembers where."""
        if id(value) in self._stored:
            return self._stored[id(value)]
        target = into or self._buffer_for(value)
        if isinstance(value, Contract):
            nest = NestDraft(value.dims, value.rdims, value.ordered, value.at_line)
            acc = self._reduce(value, nest, {})
            place = target.place(value.out)
            store = Store(target.buf, place, acc, inner=value.ordered, guard=target.guard)
            self.stmts.append(nest.nest(store))
        else:
            self._append_store(
                StoreItem(target.buf, value.shape, target.place, value, guard=target.guard)
            )
        self._note_storage(value, target)
        return target

    def _buffer_for(self, value: Value) -> Stored:
        """Scratch for a value, its axes in the order that its readers walk them."""
        order = self._layouts.get(id(value))
        before = self.resolve(self._over[id(value)]) if id(value) in self._over else None
        steps = row_steps(self, value)
        step = None if steps.choices else steps.step
        if (
            isinstance(before, Stored)
            and before.buf.arena
            and before.buf.shape == value.shape
            and before.dtype == value.dtype
            and before.buf.step in (None, step)
        ):
            return self.whole(before.buf)
        if order is None:
            return self.new_buffer(value.shape, value.dtype, step)
        buf = self.new_buffer(tuple(value.shape[axis] for axis in order), value.dtype).buf
        stored = Stored(value.shape, value.dtype, buf, lambda ix: tuple(ix[axis] for axis in order))
        self.keep(stored)
        return stored

    def _store(self, item: StoreItem) -> None:
        """The nest of a store; contractions and concatenations that only it wants are made in place."""
        value = self.resolve(item.value)
        plain = item.mask is None
        target = Stored(value.shape, value.dtype, item.buf, item.place, item.guard)
        if plain and isinstance(value, Contract):
            self.materialise(value, into=target)
        elif plain and isinstance(value, Opaque) and value.takes_target:
            self._make_opaque(value, target=target)
        elif (
            plain
            and isinstance(value, Windowed)
            and store_hazards.is_stored_in(self, value.operands[0], target)
        ):
            _, window = value.operands
            self.store_value(
                target,
                window,
                lambda ix: tuple(position + at for position, at in zip(ix, value.offsets)),
            )
        else:
            self._append_store(item)

    def _make_opaque(self, opaque: Opaque, **into) -> None:
        if id(opaque) in self._stored:
            return
        operands = [
            self.in_memory(operand) if opaque.needs_buffers else operand
            for operand in opaque.operands
        ]
        self._note_storage(opaque, opaque.make(self, *operands, **into))

    def in_memory(self, value: Value) -> Stored:
        """value as a Stored value: itself, through its index maps, or after a nest."""
        value = self.resolve(value)
        if isinstance(value, Stored):
            return value
        if isinstance(value, Lazy) and value.is_view:
            src = self.resolve(value.operands[0])
            if isinstance(src, (Stored, Lazy)) and (isinstance(src, Stored) or src.is_view):
                inner = self.in_memory(src)
                stored = Stored(
                    value.shape,
                    value.dtype,
                    inner.buf,
                    lambda ix: inner.place(tuple(value.route(ix)[0])),
                    inner.guard or value.guard,
                )
                self.keep(stored)
                return stored
        return self.materialise(value)

    def store_value(
        self, target: Stored, value: Value, place, guard: bool = False, broadcast=None
    ) -> None:
        """Appends a nest that writes value into `target` at place(index of value)."""
        shape = tuple(broadcast) if broadcast is not None else value.shape
        if broadcast is not None and value.shape != shape:
            src = value
            value = Lazy(
                shape,
                value.dtype,
                (src,),
                lambda ix: ((),),
                lambda pool, ix, xs: xs[0],
                is_view=True,
            )
            self.keep(value)

        def placed(ix: Index) -> Index:
            return target.place(place(ix))

        guard = guard or target.guard
        value = self.resolve(value)
        if isinstance(value, Joined) and id(value) in self._in_joined:
            into = Stored(value.shape, value.dtype, target.buf, placed, guard)
            self._make_opaque(value, target=into)
        else:
            self._append_store(StoreItem(target.buf, shape, placed, value, guard=guard))

    def _append_store(self, item: StoreItem) -> None:
        """Appends the nest of a store, or one for each of its parts in which concatenations are one of their operands."""
        boxes: list[Box] = [tuple((0, size) for size in item.shape)]
        if self._cut:
            dims = [(f"@{k}", size) for k, size in enumerate(item.shape)]
            wanted = [(value, dims_index(dims)) for value in decide.uses(item)]
            boxes = segments(wanted, dict(dims), self._cut, self.resolve)
        for box in boxes:
            self.stmts.append(self._store_nest(item, box))

    def _store_nest(self, item: StoreItem, box: Box) -> Nest:
        value = self.resolve(item.value)
        dims = [(self.names("d"), end - start) for start, end in box]
        ix = tuple(at + start for at, (start, _) in zip(dims_index(dims), box))
        nest = NestDraft(dims, at=item.at)
        memo: dict = {}
        expr = self.pull(value, ix, nest, False, memo)
        mask = None if item.mask is None else self.pull(item.mask, ix, nest, False, memo)
        return nest.nest(Store(item.buf, item.place(ix), expr, not nest.rdims, item.guard, mask))

    def reinterpret(self, stored: Stored, shape: tuple[int, ...]) -> Stored:
        """Gives elements another shape, in the same order; copies them unless they are so."""
        alias = merged(stored, shape, self.context.aliases)
        if alias is not None:
            self.keep(alias)
            return alias
        probe = dims_index([(f"@{k}", max(size, 2)) for k, size in enumerate(stored.shape)])
        contiguous = (
            not stored.guard and stored.buf.shape == stored.shape and stored.place(probe) == probe
        )
        if not contiguous:
            target = self.new_buffer(stored.shape, stored.dtype)
            self.store_value(target, stored, lambda ix: ix)
            stored = target
        buf = Buf(self.names("%r"), shape, stored.dtype, stored.buf.root.arena, storage=stored.buf)
        return self.whole(buf)

    def gather_expr(
        self, operand: Stored, axes: list[Affine], starts: dict[int, Expr], sizes, fill
    ) -> Expr:
        """operand[axes + starts], each start clamped so that its window of `sizes` fits, or `fill` outside."""
        inside = None
        tokens, index = {}, list(axes)
        for k, start in starts.items():
            limit = operand.shape[k] - sizes[k]
            if fill is not None:
                test = self.op(
                    "le",
                    BOOL,
                    start,
                    self.const(min(limit, np.iinfo(start.dtype).max), start.dtype),
                )
                if start.dtype.kind == "i":
                    test = self.op(
                        "and", BOOL, test, self.op("ge", BOOL, start, self.const(0, start.dtype))
                    )
                inside = test if inside is None else self.op("and", BOOL, inside, test)
            tokens[f"@{k}"] = self.clamped(start, max(limit, 0))
            index[k] = index[k] + Affine.symbol(f"@{k}")
        placed = operand.place(tuple(index))
        located: list[Affine | None] = []
        args: list[Expr] = []
        for i in placed:
            gathered = [symbol for symbol in i.symbols if symbol in tokens]
            if not gathered:
                located.append(i)
                continue
            args.append(self._gathered_position(i, tokens, operand.buf.index_dtype))
            located.append(None)
        expr: Expr
        if args:
            expr = self.pool.gather(operand.dtype, operand.buf, tuple(located), tuple(args))
        else:  # of what repeats along the dimensions that are looked up
            expr = self.pool.load(operand.dtype, operand.buf, placed, operand.guard)
        read = {symbol for place in placed for symbol in place.symbols}
        for k, start in starts.items():
            # Checks of an index are asked all the same, also those behind its place in scratch.
            if f"@{k}" not in read and (_is_scratch(start) or reports(start)):
                negative = self.op("lt", BOOL, start, self.const(0, start.dtype))
                expr = self.select(negative, expr, expr)
        return (
            expr if inside is None else self.select(inside, expr, self.const(fill, operand.dtype))
        )

    def _gathered_position(self, affine: Affine, tokens: dict[str, Expr], dtype: np.dtype) -> Expr:
        """The value of an index in which `tokens` stand for expressions."""
        total = None
        rest = affine.substitute(lambda name: 0 if name in tokens else None)
        if rest.terms or rest.const:
            total = self.pool.index(dtype, rest)
        for symbol, coefficient in affine.terms:
            if symbol in tokens:
                part = self.op(
                    "convert_element_type", dtype, tokens[symbol], params={"new_dtype": dtype}
                )
                part = (
                    part
                    if coefficient == 1
                    else self.op("mul", dtype, part, self.const(coefficient, dtype))
                )
                total = part if total is None else self.op("add", dtype, total, part)
        assert total is not None, affine
        return total


def _is_scratch(expr: Expr) -> bool:
    return isinstance(expr, Load) and expr.buf.arena
