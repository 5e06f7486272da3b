"""Prints and checks in kernels for GPUs: what blocks store is shown after the launch, in the order of the blocks."""

import ctypes
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.api.pipeline import build_kernel
from pbkern.core.options import CompileOptions
from pbkern.dsl.checks import raise_failed
from pbkern.errors import CheckError, TargetError
from pbkern.targets import get_target
from pbkern.targets.simt.emit import reports
from pbkern.targets.simt.launch.driver import NOTED
from pbkern.targets.simt.launch.reports import receive
from tests.dsl import test_checks

from .simulated import gpu, reading

X = np.arange(32, dtype="f4")
ROWS = pbkern.BlockSpec((8,), lambda i: (i,))
CHECKS = [
    f for n, f in vars(test_checks).items() if n.startswith("test_") and inspect.isfunction(f)
]


def made(body, x=X, **options):
    given = {
        "grid": (4,),
        "in_specs": [ROWS],
        "out_specs": ROWS,
        "out_shape": jax.ShapeDtypeStruct(x.shape, x.dtype),
    }
    return pbkern.kernel(body, **(given | options))


@pytest.mark.parametrize(
    "f", [f for f in CHECKS if not inspect.signature(f).parameters], ids=lambda f: f.__name__
)
def test_checks_of_the_cpu(f):
    with gpu():
        f()


@pytest.mark.parametrize("jit", [jax.jit, pbkern.jit])
def test_checks_in_jitted_functions(jit):
    with gpu():
        test_checks.test_a_jitted_function_raises_after_the_call(jit)
        test_checks.test_a_check_among_several_kernels_leaves_a_file_of_its_kernel_and_operands(jit)
        test_checks.test_the_file_has_the_operands_of_the_iteration_that_failed(jit)


def prints(x_ref, o_ref):
    x = x_ref[...]
    o_ref[...] = x + x
    jax.debug.print("{} holds {}, at first {first}", pbkern.program_id(0), x, first=x[0])


@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "uint16", "int32", "uint64", "float16", "bfloat16", "float32", "float64"],
)
def test_prints_are_shown_block_after_block(dtype, capfd):
    with jax.enable_x64(True):
        x = np.asarray(jnp.arange(32).astype(dtype) if dtype != "bool" else jnp.arange(32) % 3 == 0)
        result = pbkern.simulate(made(prints, x), x).results[0]
    np.testing.assert_array_equal(result, x + x)
    rows = x.reshape(4, 8)
    assert capfd.readouterr().out == "".join(
        f"{n} holds {row}, at first {row[0]}\n" for n, row in enumerate(rows)
    )


def test_prints_in_control_flow_and_without_values(capfd):
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...]

        @pbkern.when(pbkern.program_id(0) % 2 == 1)
        def _():
            jax.debug.print("odd")

            @pbkern.loop(0, 3)
            def _(k):
                o_ref[k] += 100
                jax.debug.print("{} {}", k, o_ref[...].reshape(2, 4).sum(0))

    with gpu():
        jax.block_until_ready(pbkern.jit(lambda x: made(body)(x) * 1)(X))
    wanted = []
    for first in (8, 24):
        row = X[first : first + 8].copy()
        wanted.append("odd")
        for k in range(3):
            row[k] += 100
            wanted.append(f"{k} {row.reshape(2, 4).sum(0)}")
    assert capfd.readouterr().out.splitlines() == wanted


def test_steps_inside_a_block_print_in_order(capfd):
    params = pbkern.nvgpu.CompilerParams(dimension_semantics=("sequential",))
    pbkern.simulate(made(prints, compiler_params=params), X)
    assert [line[0] for line in capfd.readouterr().out.splitlines()] == list("0123")


def test_prints_that_do_not_fit_are_counted_and_checks_are_found_all_the_same(capfd, monkeypatch):
    monkeypatch.setattr(reports, "PRINTED_BYTES", 160)  # two prints of 8 words, and half a one

    def body(x_ref, o_ref):
        prints(x_ref, o_ref)
        pbkern.check(x_ref[0] < 20, "{} is too large", x_ref[0])

    with pytest.raises(CheckError, match=r"24.0 is too large"):
        pbkern.simulate(made(body), X)
    shown = capfd.readouterr()
    assert len(shown.out.splitlines()) == 2
    assert all("holds" in line for line in shown.out.splitlines())
    assert "printed 256 bytes in one launch; 160 are kept" in shown.err


def test_a_print_longer_than_the_memory_of_prints_has_room(capfd, monkeypatch):
    monkeypatch.setattr(reports, "PRINTED_BYTES", 8)
    pbkern.simulate(made(prints, grid=(1,), in_specs=None, out_specs=None), X)
    shown = capfd.readouterr()
    assert "at first 0.0" in shown.out
    assert not shown.err


def test_what_cannot_be_shown_is_said(capfd):
    code = compiled(prints)
    stored = np.zeros(code.function.reports.nbytes // 8, np.int64)
    stored[0], stored[code.function.reports.first_print] = 3, 1 << 40  # no such site
    receive(code.function, stored, list)
    assert "a print or check in a kernel failed" in capfd.readouterr().err


def compiled(body, target="nvgpu", **options):
    (program,) = build_kernel(made(body, **options).trace(X)).programs
    (code,) = get_target(target).compile(program, CompileOptions(target=target)).distinct()
    return code


def checked(x_ref, o_ref):
    o_ref[...] = x_ref[...]
    pbkern.check(x_ref[0] < 20, "{} is too large", x_ref[0])


def test_code_that_prints_is_made_anew():
    """Its sites are numbers of this process."""
    first, second, other = (
        compiled(checked),
        compiled(checked),
        compiled(lambda x, o: o.__setitem__(..., x[...])),
    )
    assert not first.function.is_shared
    assert other.function.is_shared
    assert first.function.reports.checks != second.function.reports.checks


@pytest.mark.parametrize("error", [0, 321])
def test_what_a_device_has_stored_is_read_back(error):
    """The driver for a device, with a library in the place of libcuda."""
    code = compiled(checked)
    (at,) = code.function.reports.places.values()
    device = np.zeros(code.function.reports.nbytes // 8, np.int64)
    device[at] = 2
    device[at + 1 :].view(np.float32)[:1] = 24
    cuda, row, calls = reading(code, error)
    operands = (ctypes.c_void_p * 1)(X.ctypes.data)
    assert cuda._callbacks["report"](row, device.ctypes.data, operands, 0xABC) == (
        NOTED if error else 0
    )
    assert not error or f"error {error}" in cuda.described(row, NOTED, 0)
    assert calls == ([0xABC] if error else [0xABC, "waits"] * 2)
    if not error:
        with pytest.raises(CheckError, match=r"24.0 is too large") as raised:
            raise_failed([made(checked).trace(X)])
        np.testing.assert_array_equal(test_checks.repeated(raised, "checked")[0]["ARGS"][0], X)


def test_amd_code_stores_the_same():
    try:
        text = compiled(checked, "amdgpu").assembled.text
    except TargetError as e:
        pytest.skip(str(e))
    assert "atomic_add" in text
