"""Mistakes in bodies: a KernelError with the kernel, the user's line, the reason and the remedy, when the kernel is traced."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core.errors import KernelError, OptionError

F32 = jnp.float32
X = jax.ShapeDtypeStruct((16, 8), F32)
ROWS = pbkern.BlockSpec((8, 8), lambda i: (i, 0))


def error(body, *types, **options) -> KernelError:
    with pytest.raises(KernelError) as e:
        pbkern.kernel(body, **{"out_shape": X} | options).trace(*(types or (X,)))
    return e.value


# ---- lines of bodies: each has the mistake in its second line -------------------------------------------------------


def wrong_shape(x, o):
    o[...] = x[0:4]


def wrong_dtype(x, o):
    o[...] = x[...].astype(jnp.int32)


def arithmetic_on_a_ref(x, o):
    o[...] = x * 2 + 1


def function_of_a_ref(x, o):
    o[...] = jnp.exp(x)


def numpy_of_a_ref(x, o):
    o[...] = np.exp(x)


def numpy_of_a_value(x, o):
    o[...] = np.tanh(x[...])


def python_if(x, o):
    o[...] = x[...] if x[0, 0] > 0 else -x[...]


def python_and(x, o):
    o[...] = jnp.where((x[...] > 0) and (x[...] < 1), 1.0, 0.0)


def python_float(x, o):
    o[...] = jnp.full((16, 8), float(x[0, 0]))


def python_range(x, o):
    o[...] = sum(x[i] for i in range(x[0, 0].astype(int)))


def too_many_indices(x, o):
    o[...] = x[0, 0, 0]


def index_beyond(x, o):
    o[16, 0] = x[0, 0]


def index_before(x, o):
    o[...] = x[...] + x[-17]


def index_in_an_array(x, o):
    o[...] = x[...] + x[np.array([0, 99])][:1]


def index_of_a_part(x, o):
    o[...] = x[...] + x.at[4:8][6]


def index_in_a_loop(x, o):
    o[...] = jax.lax.fori_loop(0, 2, lambda i, c: c + x[i, 8], jnp.zeros((16, 8), F32))


def slice_beyond(x, o):
    o[...] = x[pbkern.ds(12, 8)]


def fractional_index(x, o):
    o[...] = x[...] + x[1.5, 0]


LINES = {
    wrong_shape: (
        r"a store of a value whose shape .*`wrong_shape`",
        r"\(16, 8\).*\(4, 8\)",
        "broadcast_to",
    ),
    wrong_dtype: ("a store of a value of another dtype", "float32.*int32", "astype"),
    arithmetic_on_a_ref: (
        "arithmetic on a Ref, in kernel `arithmetic_on_a_ref`",
        "AbstractRef",
        r"x_ref\[...\]",
    ),
    function_of_a_ref: ("a Ref, or what is no array", "exp", r"x_ref\[...\]"),
    numpy_of_a_ref: ("a NumPy function on a Ref", "Ref{float32", "jax.numpy"),
    numpy_of_a_value: ("a NumPy function on a value", r"float32\[16,8\]", "jax.numpy"),
    python_if: ("Python control flow", "bool", "pbkern.when"),
    python_and: ("Python control flow", "truth value", "& and |"),
    python_float: ("a Python number", r"float32\[\]", "astype"),
    python_range: ("a Python integer", r"int32\[\]", "pbkern.loop"),
    too_many_indices: (
        "more indices than the Ref has dimensions",
        r"\(0, 0, 0\)",
        "one index per dimension",
    ),
    index_beyond: ("lies outside it", "index 16 along axis 0, which has 16 elements", "-16 to 15"),
    index_before: ("lies outside it", "index -17 along axis 0", "-16 to 15"),
    index_in_an_array: ("lies outside it", "index 99 along axis 0", "-16 to 15"),
    index_of_a_part: ("lies outside it", "index 6 along axis 0, which has 4 elements", "-4 to 3"),
    index_in_a_loop: ("lies outside it", "index 8 along axis 1, which has 8 elements", "-8 to 7"),
    slice_beyond: ("a constant index outside its Ref", "start=12, size=8", "masked"),
    fractional_index: ("is no integer", "1.5 along axis 0", "integers"),
}


@pytest.mark.parametrize("body", LINES, ids=lambda f: f.__name__)
def test_a_mistake_is_named_at_its_line(body):
    what, why, hint = LINES[body]
    found = error(body)
    assert found.at.startswith(f"{__file__}:{body.__code__.co_firstlineno + 1}:"), found.at
    assert f"`{body.__name__}`" in found.what
    for text, pattern in ((found.what, what), (found.why, why), (found.hint, hint)):
        assert re.search(pattern, text), found


def test_the_users_own_errors_stay():
    def body(x, o):
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        pbkern.kernel(body, out_shape=X).trace(X)


def test_errors_of_the_language_get_a_line():
    def body(x, o):
        pbkern.load(x, ..., mask=x[...])

    assert error(body).at.startswith(f"{__file__}:{body.__code__.co_firstlineno + 1}:")


def test_branches_that_constants_rule_out_may_index_anything():
    def body(x, o):
        o[...] = jax.lax.cond(False, lambda: x[99, 0], lambda: x[0, 0]) + x[...]

    pbkern.kernel(body, out_shape=X).trace(X)


# ---- results that nobody writes -------------------------------------------------------------------------------------


def copy(x, o):
    o[...] = x[...]


def nothing(x, o):
    x[...]


def a_row(x, o):
    o[0] = x[0]


def by_program(x, o):
    o[pbkern.program_id(0)] = x[0]


def under_a_condition(x, o):
    @pbkern.when(x[0, 0] > 0)
    def _():
        o[...] = x[...]


WHOLE = pbkern.BlockSpec()
HALF = pbkern.BlockSpec((8, 8), lambda i: (i % 2, 0))
UNWRITTEN = {
    "never": (nothing, {}, r"output 0 \(`o`\) of kernel `nothing` is never stored to"),
    "a short grid": (
        copy,
        {"grid": (1,), "in_specs": [ROWS], "out_specs": ROWS},
        "none has element 8",
    ),
    "a late start": (
        copy,
        {
            "grid": (1,),
            "in_specs": [ROWS],
            "out_specs": pbkern.BlockSpec((8, 8), lambda i: (i + 1, 0)),
        },
        "none has element 0",
    ),
    "every second block": (
        copy,
        {
            "grid": (2,),
            "in_specs": [pbkern.BlockSpec((4, 8))],
            "out_specs": pbkern.BlockSpec((4, 8), lambda i: (2 * i, 0)),
        },
        "none has element 4",
    ),
    "a diagonal": (
        copy,
        {
            "grid": (2,),
            "in_specs": [pbkern.BlockSpec((8, 4))],
            "out_specs": pbkern.BlockSpec((8, 4), lambda i: (i, i)),
        },
        "2 programs write a block each, the array has 4",
    ),
    "a diagonal walked twice": (
        copy,
        {
            "grid": (2, 2),
            "in_specs": [pbkern.BlockSpec((8, 4))],
            "out_specs": pbkern.BlockSpec((8, 4), lambda i, j: (i, i)),
        },
        r"no block has element \(0, 4\)",
    ),
    "blocks by the remainder": (
        copy,
        {
            "grid": (4,),
            "in_specs": [pbkern.BlockSpec((4, 8))],
            "out_specs": pbkern.BlockSpec((4, 8), lambda i: (i % 2, 0)),
        },
        r"no block has element \(8, 0\)",
    ),
    "no program": (copy, {"grid": (0,), "in_specs": [ROWS], "out_specs": ROWS}, "no program runs"),
    "a part of the block": (
        a_row,
        {},
        r"120 of 128 elements of a block of shape \(16, 8\), the first at \(1, 0\)",
    ),
}


@pytest.mark.parametrize("case", UNWRITTEN)
def test_a_result_that_is_left_unwritten(case):
    body, options, text = UNWRITTEN[case]
    found = error(body, **options)
    assert re.search(text, str(found)), found
    assert found.at.startswith(f"{__file__}:{body.__code__.co_firstlineno}:")
    assert "input_output_aliases" in found.hint
    options |= {"input_output_aliases": {0: 0}}
    pbkern.kernel(body, out_shape=X, **options).trace(
        X
    )  # a result that shares an operand's memory may stay as it was


@pytest.mark.parametrize(
    ("body", "options"),
    [
        (by_program, {"grid": (16,), "in_specs": [WHOLE], "out_specs": WHOLE}),
        (under_a_condition, {}),
        (copy, {"grid": (2, 3), "in_specs": [pbkern.BlockSpec((8, 8), lambda i, j: (i, 0))],
                    "out_specs": pbkern.BlockSpec((8, 8), lambda i, j: (i, 0))}),
        (copy, {"grid": (4, 4), "in_specs": [pbkern.BlockSpec((1, 8), lambda i, j: (4 * i + j, 0))],
                    "out_specs": pbkern.BlockSpec((1, 8), lambda i, j: (i + 4 * j, 0))}),
        (copy, {"grid": (2,), "in_specs": [ROWS], "out_specs": pbkern.BlockSpec((8, 8), lambda i: (1 - i, 0))}),
        (copy, {"grid": (4,), "in_specs": [HALF], "out_specs": HALF}),
        (copy, {"grid": (3,), "in_specs": [pbkern.BlockSpec((7, 8), lambda i: (i, 0))],
                    "out_specs": pbkern.BlockSpec((7, 8), lambda i: (i, 0))}),
    ],
    ids=["by program", "conditional", "revisited", "two axes", "backwards", "by remainder", "ragged"],
)  # fmt: skip
def test_results_that_are_written_or_may_be(body, options):
    pbkern.kernel(body, out_shape=X, **options).trace(X)


# ---- parameters -----------------------------------------------------------------------------------------------------


def test_unknown_fields_of_compiler_params():
    line = inspect.currentframe().f_lineno + 2
    with pytest.raises(OptionError, match="no field `dimension_semantic`") as e:
        pbkern.cpu.CompilerParams(dimension_semantic=("parallel",))
    assert e.value.at.startswith(f"{__file__}:{line}:")
    assert "did you mean `dimension_semantics`?" in e.value.hint


def test_bad_values_of_compiler_params_have_a_line():
    with pytest.raises(OptionError) as e:
        pbkern.cpu.CompilerParams(num_threads=0)
    assert e.value.at.startswith(f"{__file__}:")


def test_targets_of_compiler_params():
    params = pbkern.cpu.CompilerParams()
    found = error(copy, compiler_params={"gpu": params})
    assert "a target that there is not, `gpu`" in found.what
    assert "cpu, nvgpu, amdgpu" in found.why
    assert found.at.startswith(f"{__file__}:{copy.__code__.co_firstlineno}:")
    assert "did you mean `nvgpu`?" in found.hint
    for wrong in ({"approx_math": True}, 5, None):
        assert (
            "are not that target's CompilerParams"
            in error(copy, compiler_params={"cpu": wrong}).what
        )
    assert (
        "are not that target's CompilerParams"
        in error(copy, compiler_params={"nvgpu": params}).what
    )


def test_the_number_of_dimension_semantics():
    params = pbkern.cpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"))
    found = error(copy, grid=(2,), in_specs=[ROWS], out_specs=ROWS, compiler_params=params)
    assert "`copy`" in found.what
    assert "grid=(2,)" in found.why
    assert "one entry per grid dimension" in found.hint


# ---- where kernels are called ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call", [lambda f: f, jax.jit, pbkern.jit, jax.vmap], ids=["eager", "jit", "pbkern.jit", "vmap"]
)
@pytest.mark.parametrize("function", [pbkern.program_id, pbkern.num_programs])
def test_grid_functions_outside_of_kernels(call, function):
    def f(x):
        return x * function(0)

    with pytest.raises(KernelError, match=rf"{function.__name__}\(0\) outside of a kernel") as e:
        call(f)(np.ones(4, "f4"))
    assert e.value.at.startswith(f"{__file__}:{f.__code__.co_firstlineno + 1}:"), e.value.at


def test_tracer_errors_name_the_users_function():
    def branching(rows, limit, *, factor):
        return rows * factor if rows[0] > limit else rows

    for jit in (jax.jit, pbkern.jit):
        with pytest.raises(jax.errors.TracerBoolConversionError) as e:
            jit(branching)(jnp.ones(3), 2.0, factor=3.0)
        assert f"function branching at {__file__}:{branching.__code__.co_firstlineno}" in str(
            e.value
        )
        assert "the arguments rows and limit" in str(e.value) or "argument rows" in str(e.value), (
            str(e.value)
        )

    kept = []
    pbkern.jit(lambda x: kept.append(x * 2) or x)(1.0)
    with pytest.raises(jax.errors.UnexpectedTracerError, match=rf"<lambda> at {__file__}"):
        kept[0] + 1
