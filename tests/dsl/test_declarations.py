"""Mistakes in what surrounds a body, and in calls of the language's functions: each is named, with the values and a remedy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core.errors import KernelError, UnsupportedOp
from pbkern.dsl.body_checks.verify import verify

F32 = jnp.float32
X = jax.ShapeDtypeStruct((16, 8), F32)
ROWS = pbkern.BlockSpec((8, 8), lambda i: (i, 0))


def copy(x, o):
    o[...] = x[...]


def error(body=copy, *types, **options) -> str:
    with pytest.raises(KernelError) as e:
        pbkern.kernel(body, **{"out_shape": X} | options).trace(*(types or (X,)))
    return str(e.value)


def spec(*dims):
    return pbkern.BlockSpec(dims, lambda i: (0, 0))


DECLARATIONS = {
    "no spec": ({"in_specs": [(8, 8)]}, "has no BlockSpec", "(8, 8)", "pbkern.BlockSpec((8, 128), ...)"),
    "count": ({"in_specs": [ROWS, ROWS]}, "in_specs has 2 entries for 1 ", "float32[16,8]", "one BlockSpec each"),
    "few dimensions": ({"in_specs": [pbkern.BlockSpec((8,))]}, "has 1-d blocks but is 2-d", "(8,)", "(1, 8)"),
    "many dimensions": ({"in_specs": [pbkern.BlockSpec((1, 8, 8))]}, "has 3-d blocks but is 2-d", "(1, 8, 8)", "(8, 8)"),
    "dimension": ({"in_specs": [spec("8", 8)], "grid": (2,)}, "has a block dimension that is none", "entry '8'",
        "pbkern.Blocked(n)"),
    "shape": ({"out_shape": 3}, "has no shape and dtype", "3", "jax.ShapeDtypeStruct"),
    "grid of text": ({"grid": ("two",)}, "not a non-negative integer", "grid=('two',)", "pbkern.cdiv"),
    "grid of none": ({"grid": 1.5}, "not a non-negative integer", "grid=1.5", "pbkern.cdiv"),
    "small blocks": ({"in_specs": [spec(0, 8)], "grid": (2,)}, "has a block size below 1", "block 0, extent 16",
        "a positive size"),
    "large blocks": ({"in_specs": [spec(8, 9)], "grid": (2,)}, "has blocks larger than the array", "block 9, extent 8",
        "at most 8"),
    "large windows": (
        {"in_specs": [spec(pbkern.Element(20), 8)], "grid": (2,)}, "has blocks larger than the array", "block 20, extent 16",
        "padding=(low, high)"),
    "negative padding": (
        {"in_specs": [spec(pbkern.Element(8, (-1, 0)), 8)], "grid": (2,)}, "has negative padding", "padding (-1, 0)", ""),
    "empty scratch": ({"scratch_shapes": [pbkern.Scratch((0, 3), F32)]}, "scratch 0 of kernel `copy` has a size below 1",
        "shape (0, 3)", ""),
    "a dynamic dimension": ({"grid": (2,), "dynamic_grid": {1: 0}}, "names a dimension or an operand that it lacks",
        "dynamic_grid has 1: 0; grid=(2,), 1 operands", "{grid dimension: number of the operand"),
    "a dynamic operand": ({"grid": (2,), "dynamic_grid": {0: 4}}, "names a dimension or an operand that it lacks",
        "dynamic_grid has 0: 4", "both from 0"),
    "a dynamic size": ({"grid": (2,), "dynamic_grid": {0: 0}}, "is the size of a grid dimension, and no int32", "float32[16,8]",
        "jnp.int32(size)"),
    "targets twice": (
        {"compiler_params": (pbkern.cpu.CompilerParams(), pbkern.cpu.CompilerParams())}, "two compiler_params for target `cpu`",
        "CompilerParams(", "{target name: CompilerParams}"),
}  # fmt: skip


@pytest.mark.parametrize("case", DECLARATIONS)
def test_declarations(case):
    options, *words = DECLARATIONS[case]
    text = error(**options)
    assert all(w in text for w in words), text


def traced(**options):
    return pbkern.kernel(
        copy, **{"grid": (2,), "in_specs": [ROWS], "out_specs": ROWS, "out_shape": X} | options
    ).trace(X)


def maps(k, **changes):
    """The kernel with another first input."""
    return dataclasses.replace(k, inputs=(dataclasses.replace(k.inputs[0], **changes),))


def with_index_map(k, f, *types):
    return maps(k, index_map=jax.make_jaxpr(f)(*types))


ROW = jax.ShapeDtypeStruct((8,), F32)
I32 = jax.ShapeDtypeStruct((), np.int32)
KERNELS = {
    "a negative grid": (lambda k: dataclasses.replace(k, grid=(-2,)), "has a negative size", "grid=(-2,)"),
    "prefetched operands": (
        lambda k: dataclasses.replace(k, num_scalar_prefetch=2), "prefetches more operands than it has",
        "num_scalar_prefetch=2, 1"),
    "a dtype": (
        lambda k: maps(k, array=dataclasses.replace(k.inputs[0].array, dtype=np.dtype("M8[s]"))),
        "dtype that kernels do not take",
        "datetime64[s]"),
    "dimensions": (lambda k: maps(k, dims=k.inputs[0].dims[:1]), "has 1-d blocks but is 2-d", "float32[16,8]"),
    "indices of the grid": (
        lambda k: with_index_map(k, lambda i, j: (i, j), I32, I32), "takes 2 grid indices, the grid has 1 dimensions",
        "grid=(2,)"),
    "results of index maps": (
        lambda k: with_index_map(k, lambda i: (i, 1.0), I32), "does not return one i32 per dimension",
        "returns (int32[], float32[])"),
    "an array that is aliased twice": (
        lambda k: dataclasses.replace(k, aliases=((0, 0), (0, 0))), "aliases one array twice", "((0, 0), (0, 0))"),
    "semantics": (
        lambda k: dataclasses.replace(k, grid=(2, 1), compiler_params=k.compiler_params, inputs=(), outputs=()),
        "`cpu` does not fit the grid", "dimension_semantics=('parallel',), grid=(2, 1)"),
    "a body": (lambda k: dataclasses.replace(k, scratch=(pbkern.Scratch((3,), np.dtype("f4")),)), "does not fit its blocks",
        "0 results"),
    "a last stage of its own name": (
        lambda k: dataclasses.replace(k, finish=traced()), "and its last stage have one name", "name=... of either"),
    "a last stage with a last stage": (
        lambda k: dataclasses.replace(k, finish=dataclasses.replace(traced(name="b"), finish=traced(name="c"))),
        "`copy` has a last stage", "`b` is followed by `c`"),
    "a last stage of other arrays": (
        lambda k: dataclasses.replace(k, finish=pbkern.kernel(copy, out_shape=ROW, name="b").trace(ROW)),
        "does not take what its programs make", "`b` takes (float32[8]), the programs make (float32[16,8])"),
}  # fmt: skip


@pytest.mark.parametrize("case", KERNELS)
def test_kernels_that_are_taken_apart(case):
    """Front ends and rewrites make kernels of parts: what does not fit is found before anything is lowered."""
    change, *words = KERNELS[case]
    kernel = traced(compiler_params=pbkern.cpu.CompilerParams(dimension_semantics=("parallel",)))
    verify(kernel)
    with pytest.raises(KernelError) as e:
        verify(change(kernel))
    assert all(w in str(e.value) for w in words), str(e.value)


def masked(**operands):
    return lambda x, o: o.__setitem__(..., pbkern.load(x, ..., **operands))


CALLS = {
    "axis": (
        lambda x, o: pbkern.program_id("x"),
        "program_id takes the number of a grid dimension",
        "axis='x'",
    ),
    "in_bounds": (
        lambda x, o: pbkern.in_bounds(x, 2),
        "in_bounds takes a dimension of the Ref",
        "axis=2, Ref shape (16, 8)",
    ),
    "other without a mask": (masked(other=1.0), "load has `other` but no `mask`", "drop other"),
    "step": (
        lambda x, o: pbkern.loop(0, 4, step=0)(print),
        "loop takes a positive constant step",
        "step=0",
    ),
    "value of a loop": (
        lambda x, o: pbkern.loop(0, 4)(lambda i: x[i, 0]),
        "under `when` or `loop` returns a value",
        "lax.cond",
    ),
    "multiple": (
        lambda x, o: pbkern.multiple_of(12, (4, 8)),
        "multiple_of does not hold",
        "12 is not a multiple of (4, 8)",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls(case):
    body, *words = CALLS[case]
    text = error(body)
    assert all(w in text for w in words), text


def test_a_mask_that_does_not_fit():
    """The shape of a mask is that of what is accessed, once it is broadcast; the equation itself takes nothing else."""
    assert "`mask` does not fit ref[idx]" in error(
        lambda x, o: _bound(x, jnp.ones((16, 8), bool)[:4], x[...])
    )
    assert "`other` does not fit ref[idx]" in error(
        lambda x, o: _bound(x, jnp.ones((16, 8), bool), x[...].astype(jnp.int32))
    )


def _bound(ref, mask, other):
    from pbkern import _jax
    from pbkern.dsl.primitives.grid import masked_load_p

    base, leaves, tree = _jax.flatten_subscript(ref, ..., True)
    return masked_load_p.bind(base, mask, other, *leaves, tree=tree)


def test_loads_without_a_mask_and_multiples_that_hold():
    @pbkern.kernel(out_shape=X)
    def rows(x, o):
        n = pbkern.multiple_of(8, (4, 8))
        o[...] = pbkern.load(x, ...) * n

    x = np.arange(128, dtype="f4").reshape(16, 8)
    np.testing.assert_array_equal(rows(x), x * 8)


def test_vmap_of_parameters_that_are_no_dataclass():
    class Params:
        target_name = "cpu"
        dimension_semantics = ("parallel",)

        def check(self):
            return None

    k = dataclasses.replace(traced(), compiler_params={"cpu": Params()})
    with pytest.raises(UnsupportedOp, match="compiler_params are no dataclass"):
        jax.eval_shape(
            jax.vmap(lambda x: pbkern.call_kernel(k, x)), jax.ShapeDtypeStruct((3, 16, 8), F32)
        )
