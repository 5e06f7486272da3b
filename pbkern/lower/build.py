"""Body jaxpr over Refs -> statements of nests (lower/nest/ir.py).

Equations are read in order. Elementwise operations and index maps become lazy values; what must be
in memory is decided by who asks for it (`lower/values/materialise.py`); Ref effects, control flow
and loops become statements in program order. Before a statement writes a buffer, values that still
have to be read from it are stored elsewhere (`lower/values/store_hazards.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core import jaxprs
from pbkern.core.affine import Affine
from pbkern.core.errors import UnsupportedOp
from pbkern.core.ops.scatter import SCATTERS
from pbkern.dsl.kernel import Kernel
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.index_tests import BOOL
from pbkern.lower.nest.ir import Buf, Expr, Let, Nest, Pool, Reduction, Stmt, Write
from pbkern.lower.rules import control_flow, ref_effects
from pbkern.lower.rules.contractions import CONTRACTIONS
from pbkern.lower.rules.debug_callbacks import trace
from pbkern.lower.rules.elementwise import elementwise_value
from pbkern.lower.rules.reshape_views import merged
from pbkern.lower.rules.scatter import scatter
from pbkern.lower.rules.sort import elements_read, sorted_values
from pbkern.lower.rules.views import VIEWS
from pbkern.lower.values import materialise as decide
from pbkern.lower.values import store_hazards
from pbkern.lower.values.affine_index_arrays import row_steps
from pbkern.lower.values.dynamic_strides import Steps
from pbkern.lower.values.items import ControlItem, Item, LetItem, StoreItem
from pbkern.lower.values.pending_reads import PendingReads
from pbkern.lower.values.scalar_evolution import bounds_of, known, known_bounds, known_index
from pbkern.lower.values.values import (
    ZERO,
    Contract,
    Index,
    Joined,
    Lazy,
    Literal,
    Opaque,
    Stored,
    Value,
    dims_index,
)


class BodyBuilder:
    """Builds one body. `stmts` is the list that statements are being appended to."""

    def __init__(self, context: NestContext):
        self.context, self.pool, self.names = context, context.pool, context.names
        self.stmts: list[Stmt] = []
        self.items: list[Item] = []
        self.refs: dict = {}
        self.kernel: Kernel | None = None
        self.operands: tuple[Buf, ...] = ()  # the kernel's, as they were when it was launched
        self.grid: tuple[Value, ...] = ()
        self.grid_sizes: tuple[Value, ...] = ()
        self.rows: dict[
            int, Steps
        ] = {}  # id of an index array -> how its rows move (lower/values/affine_index_arrays.py)
        self.unstored: set[int] = set()  # ids of values that are not stored for it
        self.shared_products: frozenset = frozenset()  # variables of the body that are rounded once
        self._stored: dict[int, Stored] = {}
        self._layouts: dict[int, tuple[int, ...]] = {}
        self._over: dict[int, Value] = {}  # id of a value -> what it may be stored over
        self._kept: list = []
        self._order: dict[int, tuple] = {}
        self._named_indices: dict[
            tuple[int, int | None], str
        ] = {}  # (id of a scalar, clamp) -> its name in this region
        self.now: tuple = ()  # the item being built
        self._prefix: tuple = ()  # where the region being built stands in the outer ones
        self.pending_reads = PendingReads(self.resolve, lambda v: self._order.get(id(v), ()))

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
            return self.op("convert_element_type", dtype, xs[0], params={"new_dtype": dtype})

        return self.new(Lazy(value.shape, dtype, (value,), lambda ix: (ix,), combine, cost=1.0))

    def rounded(self, value: Value) -> Value:
        """The value as a number of its dtype, which no sum takes unrounded."""
        info = np.finfo(value.dtype)
        params = {"exponent_bits": info.nexp, "mantissa_bits": info.nmant}

        def combine(pool: Pool, ix: Index, xs: list[Expr]) -> Expr:
            return self.op("reduce_precision", value.dtype, xs[0], params=params)

        return self.new(Lazy(value.shape, value.dtype, (value,), lambda ix: (ix,), combine))

    def pad(self, value: Value, fill, config) -> Value:
        """lax.pad of a value, through its rule."""
        out = [
            max(size + lo + hi + max(size - 1, 0) * i, 0)
            for size, (lo, hi, i) in zip(value.shape, config)
        ]
        eqn = jax.make_jaxpr(lambda x, f: jax.lax.pad(x, f, config))(
            jax.ShapeDtypeStruct(value.shape, value.dtype), jax.ShapeDtypeStruct((), value.dtype)
        ).jaxpr.eqns[0]
        assert tuple(eqn.outvars[0].aval.shape) == tuple(out)
        return self.new(VIEWS.lookup("pad")(self, eqn, [value, Literal((), value.dtype, fill)]))

    def new(self, value: Value) -> Value:
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
        elif (e := known(self, value)) is not None and (found := bounds_of(self, e)) is not None:
            self.bounds[name] = found
        return Affine.symbol(name)

    def keep(self, x) -> None:
        """Keeps an object alive: values are known by their ids, which no other may come to."""
        self._kept.append(x)

    def new_buffer(self, shape, dtype) -> Stored:
        return self.whole(self.context.new_buffer(shape, dtype))

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

    def read(self, env: dict, atom) -> Value:
        if isinstance(atom, jex.Literal):
            return Literal((), np.dtype(atom.aval.dtype), atom.val)
        return env[atom]

    def scan_equations(self, jaxpr: jex.Jaxpr, env: dict) -> None:
        """Fills self.items with values and effects of the equations, in order."""
        for eqn in jaxpr.eqns:
            inner = jaxprs.called_jaxpr(eqn)
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
                    self.rounded(value) if eqn.outvars[0] in self.shared_products else value
                )

    def _inline_call(self, inner: jex.ClosedJaxpr, eqn, env: dict) -> None:
        local = {
            v: Literal((), np.dtype(c.dtype), c) if np.ndim(c) == 0 else None
            for v, c in zip(inner.jaxpr.constvars, map(np.asarray, inner.consts))
        }
        if any(v is None for v in local.values()):
            raise UnsupportedOp(
                "a kernel body captures an array constant",
                at=self.line(eqn),
                hint="pass the array to the kernel as an input",
            )
        for var, a in zip(inner.jaxpr.invars, eqn.invars):
            if not isinstance(a, jex.Literal) and a in self.refs:
                self.refs[var] = self.refs[a]
            else:
                local[var] = self.read(env, a)
        self.scan_equations(inner.jaxpr, local)
        env.update((o, self.read(local, a)) for o, a in zip(eqn.outvars, inner.jaxpr.outvars))

    def value_of(self, eqn, ins: list[Value]) -> Value:
        """The result of an equation without effects."""
        name = eqn.primitive.name
        if name == "program_id":
            return self.grid[eqn.params["axis"]]
        if name == "num_programs":
            return self.grid_sizes[eqn.params["axis"]]
        if name in SCATTERS:
            return self.new(scatter(self, eqn, ins))
        for rules in (VIEWS, CONTRACTIONS):
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
        for v in env.values():
            self._order.setdefault(id(v), ())
        self.keep(env)
        self.scan_equations(jaxpr, env)
        if finish is not None:
            finish(env)
        items = self.items
        plan, layouts, over = decide.decide(items, self)
        self._layouts |= layouts
        self._over |= over
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
            case ControlItem(writes=writes, run=run):
                store_hazards.protect(self, {write.root for write in writes}, captured=item.uses)
                run()
            case Opaque():
                if id(item) in plan:
                    self._make_opaque(item)
            case Value():
                if id(item) in plan:
                    self.materialise(item)

    # ---------------------------------------------------------------- pulling expressions

    def resolve(self, v: Value) -> Value:
        """Finds a value's present place: where it was stored, and where that was copied to before it was overwritten."""
        while (stored := self._stored.get(id(v), v)) is not v:
            v = stored
        return v

    def _note_storage(self, v: Value, stored: Stored) -> None:
        self._stored[id(v)] = stored
        self.keep(v)
        self.pending_reads.record(v)

    def pull(
        self,
        v: Value,
        ix: Index,
        nest: Nest | None = None,
        guard: bool = False,
        memo: dict | None = None,
    ) -> Expr:
        """The expression of v at an index; contractions decided to be inlined add their reduction to `nest`."""
        memo = {} if memo is None else memo
        key = (id(v), ix, guard)
        if key not in memo:
            memo[key] = self._pull(v, ix, nest, guard, memo)
        return memo[key]

    def _pull(self, v: Value, ix: Index, nest, guard, memo) -> Expr:
        v = self.resolve(v)
        if isinstance(v, (Stored, Literal)):
            return v.at(self.pool, ix, guard)
        if isinstance(v, Lazy):
            g = guard or v.guard
            args = [
                self.pull(operand, tuple(i), nest, g, memo)
                for operand, i in zip(v.operands, v.route(ix))
            ]
            return v.combine(self.pool, ix, args)
        if isinstance(v, Joined) and (part := v.part(ix)) is not None:
            return self.pull(*part, nest, guard, memo)
        if isinstance(v, Contract) and nest is not None:
            return self._inline_contract(v, ix, nest, guard)
        if isinstance(
            v, (Contract, Opaque)
        ):  # a scalar outside any nest, or decided too late to inline
            return self.force(v).at(self.pool, ix, guard)
        raise AssertionError(type(v))

    def force(self, v: Value) -> Stored | Lazy | Value:
        if isinstance(v, Opaque):
            self._make_opaque(v)
        else:
            self.materialise(v)
        return self._stored[id(v)]

    def _inline_contract(self, v: Contract, ix: Index, nest: Nest, guard: bool) -> Expr:
        rename = {}
        for mine, theirs in zip(v.out, ix):
            if mine.terms:
                rename[mine.terms[0][0]] = theirs
        for dim, n in v.dims:
            if dim in v.rdims:
                nest.dims[dim] = n
        nest.rdims = v.rdims
        return self._reduce(v, nest, rename, guard)

    def _reduce(self, v: Contract, nest: Nest, rename: dict, guard: bool = False) -> Expr:
        memo: dict = {}
        args = [
            self.pull(operand, tuple(i.substitute(rename.get) for i in route), None, guard, memo)
            for operand, route in zip(v.operands, v.routes)
        ]
        if v.op in ("argmax", "argmin"):
            args.append(self.pool.make("index", v.dtype, v.index_arg.substitute(rename.get)))
        nest.reductions.append(Reduction(v.op, tuple(args), v.acc_dtype))
        return self.pool.make("acc", v.acc_dtype, len(nest.reductions) - 1)

    # ---------------------------------------------------------------- statements

    def materialise(self, v: Value, into: Stored | None = None) -> Stored:
        """Appends the nest that stores v, and remembers where."""
        if id(v) in self._stored:
            return self._stored[id(v)]
        target = into or self._buffer_for(v)
        if (
            into is None
            and target.buf.shape == v.shape
            and not (steps := row_steps(self, v)).choices
        ):
            target.buf.step = steps.step
        if isinstance(v, Contract):
            dims = dict(v.dims)
            nest = Nest(dims, v.rdims, ordered=v.ordered, at=v.at_line)
            acc = self._reduce(v, nest, {})
            nest.writes.append(
                Write(target.buf, target.place(v.out), acc, inner=v.ordered, guard=target.guard)
            )
            self.stmts.append(nest)
        else:
            self.stmts.append(
                self._store_nest(
                    StoreItem(target.buf, v.shape, target.place, v, guard=target.guard)
                )
            )
        self._note_storage(v, target)
        return target

    def _buffer_for(self, v: Value) -> Stored:
        """Scratch for a value, its axes in the order that its readers walk them."""
        order = self._layouts.get(id(v))
        before = self.resolve(self._over[id(v)]) if id(v) in self._over else None
        if (
            isinstance(before, Stored)
            and before.buf.arena
            and before.buf.shape == v.shape
            and before.dtype == v.dtype
        ):
            return self.whole(before.buf)
        if order is None:
            return self.new_buffer(v.shape, v.dtype)
        buf = self.new_buffer(tuple(v.shape[a] for a in order), v.dtype).buf
        stored = Stored(v.shape, v.dtype, buf, lambda ix: tuple(ix[a] for a in order))
        self.keep(stored)
        return stored

    def _store(self, item: StoreItem) -> None:
        """The nest of a store; contractions and concatenations that only it wants are made in place."""
        v = self.resolve(item.value)
        plain = item.mask is None
        target = Stored(v.shape, v.dtype, item.buf, item.place, item.guard)
        if plain and isinstance(v, Contract):
            self.materialise(v, into=target)
        elif plain and isinstance(v, Opaque) and v.takes_target:
            self._make_opaque(v, target=target)
        else:
            self.stmts.append(self._store_nest(item))

    def _make_opaque(self, v: Opaque, **into) -> None:
        if id(v) in self._stored:
            return
        operands = [
            self.in_memory(operand) if v.needs_buffers else operand for operand in v.operands
        ]
        self._note_storage(v, v.make(self, *operands, **into))

    def in_memory(self, v: Value) -> Stored:
        """v as a Stored value: itself, through its index maps, or after a nest."""
        v = self.resolve(v)
        if isinstance(v, Stored):
            return v
        if isinstance(v, Lazy) and v.is_view:
            src = self.resolve(v.operands[0])
            if isinstance(src, (Stored, Lazy)) and (isinstance(src, Stored) or src.is_view):
                inner = self.in_memory(src)
                stored = Stored(
                    v.shape,
                    v.dtype,
                    inner.buf,
                    lambda ix: inner.place(tuple(v.route(ix)[0])),
                    inner.guard or v.guard,
                )
                self.keep(stored)
                return stored
        return self.materialise(v)

    def store_value(
        self, target: Stored, v: Value, place, guard: bool = False, broadcast=None
    ) -> None:
        """Appends a nest that writes v into `target` at place(index of v)."""
        shape = tuple(broadcast) if broadcast is not None else v.shape
        if broadcast is not None and v.shape != shape:
            src = v
            v = Lazy(
                shape, v.dtype, (src,), lambda ix: ((),), lambda pool, ix, xs: xs[0], is_view=True
            )
            self.keep(v)
        self.stmts.append(
            self._store_nest(
                StoreItem(
                    target.buf,
                    shape,
                    lambda ix: target.place(place(ix)),
                    v,
                    guard=guard or target.guard,
                )
            )
        )

    def _store_nest(self, item: StoreItem) -> Nest:
        value = self.resolve(item.value)
        dims = [(self.names("d"), size) for size in item.shape]
        ix = dims_index(dims)
        nest = Nest(dict(dims), at=item.at)
        memo: dict = {}
        e = self.pull(value, ix, nest, False, memo)
        mask = None if item.mask is None else self.pull(item.mask, ix, nest, False, memo)
        nest.writes.append(Write(item.buf, item.place(ix), e, not nest.rdims, item.guard, mask))
        return nest

    def reinterpret(self, stored: Stored, shape: tuple[int, ...]) -> Stored:
        """Gives elements another shape, in the same order; copies them unless they are so."""
        found = merged(stored, shape, self.context.aliases)
        if found is not None:
            self.keep(found)
            return found
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
        located, args = [], []
        for i in placed:
            found = [symbol for symbol in i.symbols if symbol in tokens]
            if not found:
                located.append(i)
                continue
            args.append(self._gathered_position(i, tokens, operand.buf.index_dtype))
            located.append(None)
        if args:
            e = self.pool.make("gather", operand.dtype, (operand.buf, tuple(located)), tuple(args))
        else:  # of what repeats along the dimensions that are looked up
            e = self.pool.make("load", operand.dtype, (operand.buf, placed, operand.guard))
        return e if inside is None else self.select(inside, e, self.const(fill, operand.dtype))

    def _gathered_position(self, affine: Affine, tokens: dict[str, Expr], dtype: np.dtype) -> Expr:
        """The value of an index in which `tokens` stand for expressions."""
        total = None
        rest = affine.substitute(lambda s: 0 if s in tokens else None)
        if rest.terms or rest.const:
            total = self.pool.make("index", dtype, rest)
        for s, c in affine.terms:
            if s in tokens:
                part = self.op(
                    "convert_element_type", dtype, tokens[s], params={"new_dtype": dtype}
                )
                part = part if c == 1 else self.op("mul", dtype, part, self.const(c, dtype))
                total = part if total is None else self.op("add", dtype, total, part)
        assert total is not None, affine
        return total
