"""Python function over Refs -> Kernel.

`kernel` is the decorator that people write. `trace_kernel` makes the Kernel, for it and for front ends. call.py calls
a Kernel.

Types in a body never depend on jax_enable_x64: it is traced in 64-bit mode if a block or scratch
has a 64-bit dtype (or x64=True says so), in 32-bit mode otherwise. Weak types are erased.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import jax
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.errors import KernelError, UnsupportedOp
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.calls import rules_kept
from pbkern.core.jaxprs.retracing import retrace, retrace_into
from pbkern.core.jaxprs.walks import inner_jaxprs
from pbkern.core.process.pickle_by_name import PickledByName
from pbkern.core.process.public_names import PublicNames
from pbkern.dsl.body_checks import explain
from pbkern.dsl.body_checks.definitions import (
    array_labels,
    checked_grid,
    checked_specs,
    params_by_target,
)
from pbkern.dsl.body_checks.static_indices import check_indices
from pbkern.dsl.body_checks.undefined_reads import check_reads
from pbkern.dsl.body_checks.unwritten_results import check_written
from pbkern.dsl.body_rewrites import bounded_slices, value_primitives
from pbkern.dsl.body_rewrites.byte_refs import held, held_as, over_bytes
from pbkern.dsl.body_rewrites.copied_inputs import with_private_inputs
from pbkern.dsl.body_rewrites.inner_kernels import inlined
from pbkern.dsl.body_rewrites.narrow_floats import in_body
from pbkern.dsl.primitives import atomics, prng_keys
from pbkern.dsl.primitives import grid as primitives
from pbkern.dsl.primitives import ref_access as refs
from pbkern.dsl.text import identifiers
from pbkern.dsl.text.identifiers import RESERVED

from . import checks
from .body_checks.verify import verify, verify_blocks
from .call import call_kernel, checked_arrays, kernel_p
from .kernel import ArrayType, Kernel
from .specs import (
    BlockSpec,
    GridSpec,
    array_type,
    block_mapping,
    definition_line,
    own_grid_spec,
    scratch,
)

# --- the decorator
# -----------------------------------------------------------------------------------------------


@overload
def kernel(body: Callable[..., None], *, out_shape: Any, **options: Any) -> KernelFunction: ...


@overload
def kernel(
    body: None = None, *, out_shape: Any, **options: Any
) -> Callable[[Callable[..., None]], KernelFunction]: ...


@_jax.hides_own_frames  # type: ignore[misc]  # the overloads abbreviate the options
def kernel(
    body: Callable | None = None,
    *,
    out_shape: Any,
    grid: int | Sequence[int] = (),
    in_specs: Sequence[BlockSpec] | None = None,
    out_specs: Any = None,
    grid_spec: GridSpec | None = None,
    scratch_shapes: Sequence = (),
    input_output_aliases: Mapping[int, int] | None = None,
    compiler_params: Any = None,
    name: str | None = None,
    interpret: bool = False,
    num_scalar_prefetch: int = 0,
    dynamic_grid: Mapping[int, int] | None = None,
    in_types: Sequence | None = None,
    x64: bool | None = None,
    finish: KernelFunction | None = None,
) -> Any:
    """Makes a kernel of a function over Refs; a decorator, or a call `kernel(body, ...)`.

    The body is called as body(*in_refs, *out_refs, *scratch_refs) once per point of `grid`, in
    row-major order unless CompilerParams declare a dimension parallel. The result takes arrays and
    returns `out_shape`'s pytree.

    Args:
      body: a function of Refs.
      out_shape: pytree of jax.ShapeDtypeStruct.
      grid: size of each grid dimension; () runs one program.
      in_specs: one BlockSpec per operand after the prefetched ones; None: whole arrays.
      out_specs: BlockSpecs in the structure of out_shape; None: whole arrays.
      grid_spec: a GridSpec in place of grid, in_specs, out_specs, scratch_shapes and
        num_scalar_prefetch.
      scratch_shapes: pbkern.Scratch(shape, dtype), jax.ShapeDtypeStruct or (shape, dtype) each.
      input_output_aliases: {operand number: result number} that share memory. In compiled functions the operand is written
        over if nobody reads it later: a loop's carry, a donated argument, what another kernel made. Otherwise it is copied.
      compiler_params: a target's CompilerParams, a sequence of them, or {target name:
        CompilerParams}.
      name: identifier for messages and generated code; default: the body's.
      interpret: run in the NumPy interpreter, with bounds and races checked.
      num_scalar_prefetch: how many leading operands index maps read, see GridSpec.
      dynamic_grid: {grid dimension: number of the i32[] operand that is its size}; a size above
        that in `grid` counts as that.
      in_types: operand types, so that .trace() needs no arrays.
      x64: whether Python and index arithmetic in the body is 64-bit; None: if any block is.
      finish: the last stage, another kernel, usually of one program, that runs once all programs
        are done, e.g. to add up what they found. `out_shape` are then the programs' results, which
        are its first operands; a call takes the operands of the programs, then the further ones of
        the last stage, and returns what that makes. To return a result of the programs as well, the
        last stage gives it one of its results to share (input_output_aliases), and need not touch
        it.

    Results that values at run time decide to store are zero where nothing is stored: under
    conditions and masks of loaded values, at indices that are loaded (o[rows[0]] = ..., pl.ds of a
    loaded start, atomics at loaded places), in grids of dynamic size, in blocks that prefetched
    operands choose. What the place in the grid and counters of loops decide is not filled: elements
    that no program stores to are what was in memory.

    Raises KernelError, at the body's line, when called or traced.

    Examples:
      >>> rows = pbkern.BlockSpec((16, 128), lambda i: (i, 0))
      >>> @pbkern.kernel(
      ...     grid=(4,), in_specs=[rows, pbkern.BlockSpec()], out_specs=rows,
      ...     out_shape=jax.ShapeDtypeStruct((60, 128), "float32"),
      ... )
      ... def scaled(x, scale, o):
      ...     o[...] = x[...] * scale[...]
      >>> scaled(jnp.ones((60, 128)), jnp.full((1, 128), 3.0))[59, 127].tolist()
      3.0
    """
    spec = grid_spec or GridSpec(grid, in_specs, out_specs, scratch_shapes, num_scalar_prefetch)

    @_jax.hides_own_frames
    def decorate(function: Callable) -> KernelFunction:
        if isinstance(function, type) or not callable(function):
            hint = "@pbkern.kernel(out_shape=...)"
            raise KernelError(
                "a kernel's body is a function over Refs", why=f"given {function!r}", hint=hint
            )
        return KernelFunction(
            function,
            out_shape=out_shape,
            grid_spec=own_grid_spec(spec, definition_line(function)),
            aliases=input_output_aliases or {},
            compiler_params=compiler_params,
            name=name,
            interpret=interpret,
            in_types=in_types,
            x64=x64,
            dynamic_grid=dynamic_grid or {},
            finish=finish,
        )

    return decorate if body is None else decorate(body)


class KernelFunction(PublicNames, PickledByName):
    """A kernel as `pbkern.kernel` returns it: traces to a Kernel per operand types, and runs it.

    The arguments of its constructor are those of `kernel`.
    """

    INTERNAL = frozenset(("remade",))

    def __init__(
        self,
        body: Callable,
        *,
        out_shape: Any,
        grid_spec: GridSpec,
        aliases: Mapping[int, int],
        compiler_params: Any,
        name: str | None,
        interpret: bool,
        in_types: Sequence | None,
        x64: bool | None,
        dynamic_grid: Mapping[int, int],
        finish: KernelFunction | None,
    ) -> None:
        self.__name__, self.__doc__ = getattr(body, "__name__", "kernel"), body.__doc__
        self.__module__, self.__qualname__ = (
            body.__module__,
            getattr(body, "__qualname__", self.__name__),
        )
        self.body, self.grid_spec, self.interpret = body, grid_spec, interpret
        self._at = definition_line(body)
        leaves, self._out_tree = jax.tree.flatten(out_shape)
        self._out_types = [
            array_type(leaf, f"out_shape {n}", self._at) for n, leaf in enumerate(leaves)
        ]
        if not isinstance(finish, KernelFunction | None):
            why = f"finish={finish!r}"
            raise KernelError(
                "the last stage is not a kernel",
                at=self._at,
                why=why,
                hint="a function that pbkern.kernel made",
            )
        self._finish = finish
        self._in_types = (
            None
            if in_types is None
            else [array_type(type_, "in_types", self._at) for type_ in in_types]
        )
        self._options: dict[str, Any] = {
            "aliases": tuple(sorted(aliases.items())),
            "compiler_params": compiler_params,
            "name": name,
            "x64": x64,
            "dynamic_grid": tuple(sorted(dynamic_grid.items())),
        }
        self._interprets: bool = interpret or (finish is not None and finish._interprets)
        self._traced: dict[tuple[ArrayType, ...], Kernel] = {}
        self._compiled: Callable | None = None  # for eager calls

    @property
    def in_types(self) -> list[ArrayType] | None:
        """Types of the operands, where the decorator was given them."""
        return self._in_types

    def remade(self) -> tuple:
        """(function, its arguments) that make this object again, without its traced and compiled kernels."""
        return _remade, (vars(self) | {"_traced": {}, "_compiled": None},)

    @_jax.hides_own_frames
    def trace(self, *args) -> Kernel:
        """The Kernel for operands of these types (arrays, or anything with shape and dtype); cached.

        Without arguments: for the `in_types` that the decorator was given.
        """
        types = tuple(array_type(arg, f"operand {n}", self._at) for n, arg in enumerate(args))
        if not types and self._in_types is not None:
            types = tuple(self._in_types)
        if types not in self._traced:
            finish, types_of_programs = None, types
            if self._finish is not None:
                num_operands = self._num_operands()
                types_of_programs, further = types[:num_operands], types[num_operands:]
                finish = self._finish.trace(*self._out_types, *further)
            self._traced[types] = trace_kernel(
                self.body,
                grid=self.grid_spec.grid,
                in_types=types_of_programs,
                out_types=self._out_types,
                in_specs=self.grid_spec.in_specs,
                out_specs=self._flat_out_specs(),
                scratch_shapes=self.grid_spec.scratch_shapes,
                num_scalar_prefetch=self.grid_spec.num_scalar_prefetch,
                finish=finish,
                **self._options,
            )
            check_reads(self._traced[types])
        return self._traced[types]

    def _num_operands(self) -> int:
        """Number of the programs' operands, without those of the last stage.

        Raises KernelError where neither in_specs nor the body's parameters give it.
        """
        specs = self.grid_spec.in_specs
        if specs is not None:
            num_specs = 1 if isinstance(specs, BlockSpec) else len(specs)
            return self.grid_spec.num_scalar_prefetch + num_specs
        parameters = inspect.signature(self.body).parameters.values()
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
            raise KernelError(
                f"kernel `{self.__name__}` does not say how many operands its programs have",
                at=self._at,
                why="its body takes any number of Refs, and its last stage may have operands of its own",
                hint="in_specs=[...]",
            )
        return len(parameters) - len(self._out_types) - len(self.grid_spec.scratch_shapes)

    @property
    def _result_tree(self) -> Any:
        """The pytree that a call returns."""
        return self._out_tree if self._finish is None else self._finish._result_tree

    @property
    def _result_types(self) -> list[ArrayType]:
        """Types of the leaves that a call returns."""
        return self._out_types if self._finish is None else self._finish._result_types

    def _flat_out_specs(self) -> list[BlockSpec] | None:
        if self.grid_spec.out_specs is None:
            return None
        return jax.tree.leaves(
            self.grid_spec.out_specs,
            is_leaf=lambda spec: spec is None or isinstance(spec, BlockSpec),
        )

    @_jax.hides_own_frames
    def __call__(self, *args) -> Any:
        if self._interprets or not all(map(_jax.is_array_of_numbers, args)):
            return self._bound(*args)
        if _jax.eager_context() is None:  # inside a transformation, or JAX checks each result
            return self._bound(*args)
        if self._compiled is None:
            self._compiled = compile_eager_calls[0](self._without_checks())
        try:
            return self._compiled(*args)
        except _HasChecks:
            return self._bound(*args)

    def _bound(self, *args) -> Any:
        """Binds the primitive to arguments of any kind."""
        return self._applied(
            args, lambda kernel: functools.partial(call_kernel, kernel, interpret=self._interprets)
        )

    def _applied(self, args: Sequence, function_of: Callable[[Kernel], Callable]) -> Any:
        """Results of function_of(Kernel for these arguments), in the structure of out_shape."""
        arrays = checked_arrays(args, self._at)
        kernel = self.trace(*arrays)
        operands = [held(array, type_.dtype) for array, type_ in zip(arrays, kernel.in_types)]
        results = function_of(kernel)(*operands)
        return self._result_tree.unflatten(
            [held(result, type_.dtype) for result, type_ in zip(results, self._result_types)]
        )

    def to_pallas(self, *, target: str | None = None, interpret: Any = False) -> Callable:
        """A function, made by pl.pallas_call for operands of any types, that returns `out_shape`'s pytree.

        Arguments as of Kernel.to_pallas.

        Examples:
          >>> @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((8, 128), "float32"))
          ... def doubled(x, o):
          ...     o[...] = 2 * x[...]
          >>> on_tpu = jax.jit(doubled.to_pallas(target="tpu"))
          >>> exported = jax.export.export(on_tpu, platforms=["tpu"])(jnp.ones((8, 128)))
          >>> "tpu_custom_call" in exported.mlir_module()
          True
        """

        @_jax.hides_own_frames
        def call(*args) -> Any:
            return self._applied(
                args, lambda kernel: kernel.to_pallas(target=target, interpret=interpret)
            )

        call.__name__ = call.__qualname__ = self._options["name"] or self.__name__
        return call

    def _without_checks(self) -> Callable:
        """A function of arrays that binds the primitive. Raises _HasChecks for a kernel with checks."""

        def call(*arrays) -> Any:
            if checks.can_fail(self.trace(*arrays)):
                raise _HasChecks
            return self._bound(*arrays)

        call.__name__ = call.__qualname__ = self._options["name"] or self.__name__
        return call

    def __repr__(self) -> str:
        return f"<pbkern kernel {self._options['name'] or self.__name__}>"


class _HasChecks(Exception):
    """Ends tracing: an eager call of this kernel has to wait for its checks."""


# Set by api/decorators.py, which knows of compilation: a function of arrays -> the function, compiled.
compile_eager_calls: list[Callable[[Callable], Callable]] = []


def _remade(state: dict) -> KernelFunction:
    """A KernelFunction with these attributes, for pickle."""
    function = object.__new__(KernelFunction)
    vars(function).update(state)
    return function


# --- tracing
# -----------------------------------------------------------------------------------------------------


def trace_kernel(
    body: Callable,
    *,
    in_types: Sequence,
    out_types: Sequence,
    grid: int | Sequence[int] = (),
    in_specs: Sequence[BlockSpec | None] | None = None,
    out_specs: Sequence[BlockSpec | None] | None = None,
    scratch_shapes: Sequence = (),
    aliases: Sequence[tuple[int, int]] = (),
    compiler_params: Any = None,
    name: str | None = None,
    num_scalar_prefetch: int = 0,
    x64: bool | None = None,
    dynamic_grid: Sequence[tuple[int, int]] = (),
    source: str | None = None,
    finish: Kernel | None = None,
) -> Kernel:
    """Traces `body` over Refs of block shapes.

    Arguments as for `kernel`, with flat lists; raises KernelError.
    """
    at = source if source is not None else definition_line(body)
    grid = checked_grid(grid, at)
    num_inputs = len(in_types)
    # Types that the body sees. Arrays and scratch in memory may have wider elements.
    types = [array_type(type_, f"operand {n}", at) for n, type_ in enumerate(in_types)]
    types += [array_type(type_, f"result {n}", at) for n, type_ in enumerate(out_types)]
    buffers = [scratch(shape, n, at) for n, shape in enumerate(scratch_shapes)]
    arrays = list(map(_in_memory, types))
    inputs, outputs = arrays[:num_inputs], arrays[num_inputs:]
    prefetched, blocked = inputs[:num_scalar_prefetch], inputs[num_scalar_prefetch:]
    specs = [
        *[BlockSpec()] * num_scalar_prefetch,
        *checked_specs("in_specs", in_specs, blocked, "operands", at),
        *checked_specs("out_specs", out_specs, outputs, "results", at),
    ]
    labels = array_labels(body, num_inputs, len(outputs))
    specs, size_maps = _without_slices(specs, labels, at)
    known_grid = [None if axis in dict(dynamic_grid) else size for axis, size in enumerate(grid)]
    mappings = tuple(
        block_mapping(spec, array, label, known_grid, prefetched, at)
        for spec, array, label in zip(specs, arrays, labels)
    )
    unfinished = Kernel(
        name=identifier(name if name else getattr(body, "__name__", "kernel")),
        grid=grid,
        inputs=mappings[:num_inputs],
        outputs=mappings[num_inputs:],
        scratch=tuple(map(_in_memory, buffers)),
        body=_no_body(),
        aliases=tuple(aliases),
        compiler_params=params_by_target(compiler_params, at),
        num_scalar_prefetch=num_scalar_prefetch,
        dynamic_grid=tuple(dynamic_grid),
        defined_at=at or "",
        finish=finish,
    )
    verify_blocks(unfinished)
    dtypes = [type_.dtype for type_ in types] + [buffer.dtype for buffer in buffers]
    closed = over_bytes(_trace_body(body, unfinished, dtypes, x64))
    traced_kernel = _with_body(unfinished, closed, size_maps)
    verify(traced_kernel)
    check_written(traced_kernel, {number - num_inputs for number in size_maps})
    return traced_kernel


def _with_body(
    unfinished: Kernel, closed: jex.ClosedJaxpr, size_maps: Mapping[int, Callable]
) -> Kernel:
    """A kernel with its traced body in canonical form.

    Args:
      unfinished: the kernel with any body.
      closed: the body over Refs.
      size_maps: number of a Ref with BoundedSlice dimensions -> index map for their sizes.
    """
    check_indices(closed, unfinished.name, unfinished.defined_at)
    if atomics.is_used(closed.jaxpr):
        unfinished = atomics.in_order(unfinished)

    def complete(body: jex.ClosedJaxpr) -> Kernel:
        body = atomics.expand(body)
        if size_maps:
            body = bounded_slices.bound(body, lambda refs: limits_of(unfinished, size_maps, refs))
        body = canonical_body(body, unfinished.name)
        return with_private_inputs(dataclasses.replace(unfinished, body=body))

    return with_both_bodies(complete, closed)


def with_both_bodies(
    complete: Callable[[jex.ClosedJaxpr], Kernel], closed: jex.ClosedJaxpr
) -> Kernel:
    """The Kernel that `complete` makes of a body, with Kernel.with_rules where the body calls custom derivatives."""
    kernel = complete(closed)
    if not value_primitives.needs_rules(closed.jaxpr):
        return kernel
    with rules_kept():
        return dataclasses.replace(kernel, with_rules=complete(closed).body)


@functools.cache
def _no_body() -> jex.ClosedJaxpr:
    """The body of a kernel whose body is not traced yet."""
    return jax.make_jaxpr(lambda: ())()


def _without_slices(
    specs: list, labels: Sequence[str], at: str | None
) -> tuple[list, dict[int, Callable]]:
    """(specs without BoundedSlice dimensions, number of each spec that had some -> its index map for their sizes)."""
    plain: list = list(specs)
    size_maps: dict[int, Callable] = {}
    for n, (spec, label) in enumerate(zip(specs, labels)):
        if (
            isinstance(spec, BlockSpec)
            and spec.block_shape
            and bounded_slices.is_bounded(spec.block_shape)
        ):
            starts, size_maps[n] = bounded_slices.split_index_map(
                spec.index_map, spec.block_shape, label, at
            )
            shape = [
                bounded_slices.element_of(size)
                if isinstance(size, bounded_slices.BoundedSlice)
                else size
                for size in spec.block_shape
            ]
            plain[n] = BlockSpec(shape, starts, memory_space=spec.memory_space)
    return plain, size_maps


def limits_of(
    traced_kernel: Kernel, size_maps: Mapping[int, Callable], refs: Sequence
) -> bounded_slices.Limits:
    """This program's sizes of BoundedSlice dimensions; `size_maps`: number of a Ref -> index map for its sizes."""
    args = [primitives.program_id(axis) for axis in range(len(traced_kernel.grid))] + list(
        refs[: traced_kernel.num_scalar_prefetch]
    )
    return {id(refs[n]): size(*args) for n, size in size_maps.items()}


def _in_memory(type_: Any) -> Any:
    """The type of an array or scratch in memory, where narrow types are bytes (body_rewrites/byte_refs.py)."""
    return dataclasses.replace(type_, dtype=held_as(type_.dtype))


def _trace_body(
    body: Callable, traced_kernel: Kernel, dtypes: Sequence[np.dtype], x64: bool | None
) -> jex.ClosedJaxpr:
    """The body as traced over Refs of these dtypes, not yet canonical."""
    shapes = [operand.ref_shape for operand in traced_kernel.inputs + traced_kernel.outputs]
    shapes += [buf.shape for buf in traced_kernel.scratch]
    types = list(zip(shapes, dtypes))
    try:
        inspect.signature(body).bind(*types)
    except TypeError:
        raise KernelError(
            f"body of kernel `{traced_kernel.name}` does not take its {len(types)} Refs",
            at=traced_kernel.defined_at,
            why=f"{len(traced_kernel.inputs)} operands, {len(traced_kernel.outputs)} "
            f"results, {len(traced_kernel.scratch)} scratch; "
            f"signature {inspect.signature(body)}",
            hint="body(*in_refs, *out_refs, *scratch_refs)",
        ) from None

    @functools.wraps(body)  # JAX's own messages name the body
    def run(*ref_args):
        result = explain.explained(body, ref_args, traced_kernel.name, traced_kernel.defined_at)
        if result is not None:
            raise KernelError(
                f"body of kernel `{traced_kernel.name}` returns a value",
                at=traced_kernel.defined_at,
                why=f"returned {result!r}; results are what is stored to Refs",
                hint="store results: out_ref[...] = value",
            )

    is_wide = needs_x64(dtype for _, dtype in types) if x64 is None else x64
    with jax.enable_x64(is_wide), _jax.pallas_grid(traced_kernel.grid), _jax.computed_in_the_body():
        return jax.make_jaxpr(run)(*[_jax.ref_aval(*type_) for type_ in types])


def canonical_body(closed: jex.ClosedJaxpr, name: str = "kernel") -> jex.ClosedJaxpr:
    """A Ref jaxpr in the form that Kernel.body promises (core.jaxprs.retracing.retrace).

    Raises KernelError if it has constants.
    """
    # Every type is explicit by now; 64-bit mode keeps 64-bit ones.
    with jax.enable_x64(True), _jax.computed_in_the_body():
        closed = retrace(closed, _rewrite, in_body)
    if closed.jaxpr.constvars:
        var = closed.jaxpr.constvars[0]
        use = next((eqn for eqn in closed.jaxpr.eqns if var in eqn.invars), None)
        raise KernelError(
            f"body of kernel `{name}` uses an array constant",
            at=_jax.user_line(use) if use is not None else None,
            why=f"constant {var.aval.str_short()}",
            hint="pass the array as an operand with its own BlockSpec, or compute it in the body (jnp.arange, ...)",
        )
    return closed


GRID_PRIMITIVES = {p.name: p for p in (primitives.program_id_p, primitives.num_programs_p)}
# Primitives of Pallas that take masks; the names are JAX's.
MASKED_IN_PALLAS = ("masked_swap", "atomic_rmw", "atomic_cas")


def _rewrite(eqn, *operands) -> list | None:
    """Replaces an equation by primitives that Kernel.body may hold; None where it is one already.

    Raises UnsupportedOp.
    """
    if eqn.primitive.name == "new_ref":
        raise UnsupportedOp(
            "a Ref made in a body",
            at=_jax.user_line(eqn),
            why=f"{eqn.outvars[0].aval}",
            hint="scratch_shapes=[pbkern.Scratch(shape, dtype)] gives the body one",
        )
    if eqn.primitive.name in GRID_PRIMITIVES:  # Pallas's become ours
        return [GRID_PRIMITIVES[eqn.primitive.name].bind(**eqn.params)]
    if eqn.primitive.name == kernel_p.name:
        return inlined(eqn.params["kernel"], operands, _jax.user_line(eqn))
    if eqn.primitive.name in MASKED_IN_PALLAS:
        raise UnsupportedOp(
            "a masked access of Pallas's in a body",
            at=_jax.user_line(eqn),
            why=f"primitive `{eqn.primitive.name}`",
            hint="pbkern.load(ref, index, mask=...) and pbkern.store(ref, index, value, mask=...)",
        )
    results = refs.rewrite(eqn, *operands)
    if results is None:
        results = prng_keys.rewrite(eqn, operands, _retraced, functools.partial(_bind, eqn))
    return value_primitives.rewrite(eqn, *operands) if results is None else results


def _retraced(jaxpr: jex.Jaxpr, consts: Sequence, args: Sequence) -> list:
    return retrace_into(jaxpr, consts, args, _rewrite, in_body)


def _bind(eqn, *operands) -> Sequence:
    results = value_primitives.rewrite(eqn, *operands)
    if results is not None:
        return results
    return _jax.bind_again(eqn, operands)


def needs_x64(dtypes: Iterable) -> bool:
    """Whether some dtype has 64 bits per number, so that a body with it is traced in 64-bit mode."""
    return any(
        np.dtype(dtype).name in ("int64", "uint64", "float64", "complex128") for dtype in dtypes
    )


def body_dtypes(jaxpr: jex.Jaxpr) -> set[np.dtype]:
    """Dtypes of every value in a body, control flow included."""
    dtypes = {np.dtype(array_aval(var).dtype) for eqn in jaxpr.eqns for var in eqn.outvars}
    dtypes |= {np.dtype(array_aval(var).dtype) for var in jaxpr.invars}
    return dtypes.union(*(body_dtypes(j.jaxpr) for eqn in jaxpr.eqns for j in inner_jaxprs(eqn)))


def identifier(name: str) -> str:
    """A kernel's name as an identifier that is not reserved."""
    name = identifiers.identifier(name, "kernel").strip("_") or "kernel"
    return name if name.isidentifier() and name not in RESERVED else f"kernel_{name}"
