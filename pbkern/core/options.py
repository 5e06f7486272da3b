"""CompileOptions: every option of the `compile_options` dictionary, typed, documented and validated.

An option either does what its entry says or is refused with a reason; none is ignored.
core/option_uses.py has the table of which decorator takes which.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from .errors import OptionError

Target = Literal["cpu", "nvgpu", "amdgpu"]
TARGETS: tuple[Target, ...] = get_args(Target)
PrecisionMode = Literal["fp16", "fp32", "int32", "mixed_fp16_fp32", "mixed_int8_int32"]
PRECISION_MODES: tuple[PrecisionMode, ...] = get_args(PrecisionMode)
Backend = Literal["std", "xla", "polyblocks"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
WeightsPlace = Literal["arguments", "embed", "file"]
WEIGHTS_PLACES: tuple[WeightsPlace, ...] = get_args(WeightsPlace)


@dataclass(frozen=True, repr=False)
class CompileOptions:
    """Options of one decorated function. All are keywords of the `compile_options` dictionary.

    Attributes:
      target: "cpu" | "nvgpu" | "amdgpu", default "cpu". The hardware to compile for.
      mm_conv_precision_mode: None | "fp16" | "fp32" | "int32" | "mixed_fp16_fp32" | "mixed_int8_int32", default None. None:
        the precision that operand and result types dictate; on GPUs, unless polyblocks_gpu_no_tensor_core is set,
        "mixed_fp16_fp32" for products of float32, and of complex64, whose own `precision` does not ask for more; with
        bfloat16 in place of float16 where an operand has that type, or was widened from it. Otherwise
        operands of every matmul and convolution are converted to the first type, sums are of the last, and the result is
        converted back to the type it had: with
        "fp16", a sum beyond 65504 is infinite and others have 11 bits. The CPU, which has no sums of float16, adds in
        float32 and rounds once at the end; never is a sum less exact than its type. Integer modes take integer operands.
        Bodies of hand-written kernels keep the types that they name.
      mlir_disable_fast_math: bool, default False. Multiply-adds are not contracted, and functions
        such as exp are never approximated. NaN, infinities and signed zeros are right either way.
      emulate_precision_casts: bool, default False. Every operation on float16 and bfloat16 rounds
        its result to that type, as it does where it runs by itself: fused kernels otherwise keep
        float32 precision and range until a value is stored. Rewrites that may change rounding are
        left out. In functions of PyTorch an operation is an operator of Torch.
      num_iters: int, default 1. Each call runs the compiled kernels this many times on the same
        inputs, for timing; what XLA keeps runs once.
      polyblocks_disable_affine_fusion: bool, default False. Every operation becomes a kernel of its
        own.
      polyblocks_disable_reduce_reduce_fusion: bool, default False. Chains of reductions (matmul,
        softmax, matmul) are not made one kernel.
      polyblocks_disable_unsafe_math_canonicalizations: bool, default False. Omits rewrites that may
        change rounding, such as x / c to x * (1 / c), or take a product with a mask as a choice.
      strict_target: bool, default False. Operations that no kernel can contain raise UnsupportedOp
        in place of being left to XLA.
      debug: bool, default False. Writes the plan and the time of each compilation stage to stderr.
      static_argnums, static_argnames: arguments that are compile-time constants, as for jax.jit.
      donate_argnums, donate_argnames: arguments whose memory may be reused for results, as for
        jax.jit.
      execution_backend: "std" | "xla" | "polyblocks", default "polyblocks". For polymage_jit_* only:
        run op by op, under jax.jit, or compiled by pbkern.
      polyblocks_gpu_no_tensor_core: bool, default False. GPU targets: no tensor cores. Products of
        float16, bfloat16, int8 and uint8 use them on NVIDIA GPUs otherwise, and those of float32, rounded to float16, unless
        mm_conv_precision_mode says another thing; on AMD GPUs float16, bfloat16 and float32 do.
      device_one_time_load: bool, default True. GPU targets: a kernel is loaded once however often
        it is launched. False is refused: programs have no code that loads a kernel again.
      on_gpu_tensors: bool, default False. AOT for GPUs: inputs and outputs are on the GPU.
      user_device_memory: bool, default False. AOT: the caller provides the memory of a call, and a
        stream, as the last two arguments. On CPUs it is memory of the process, and the stream is
        not used.
      aot: bool, default False. AOT: make a library.
      aot_name: str, default "polyblocks_mlir_artifact". AOT: name of its function and prefix of its
        files. At the default, the function has the name that it has in Python.
      device: str or None, default None. AOT: the device to cross-compile for, such as "x86-64-v3",
        "neoverse-n1" or "apple-m1/macos"; several with commas make one library. None: the processor
        at hand ("native"). GPU targets: the device to compile for.
      openmp: bool, default True. AOT for CPUs: kernels run on OpenMP's threads; False: on the
        caller's alone.
      num_threads: int or None, default None. AOT for CPUs: the most threads of a call; memory is
        reserved for each. None: 256. The caller says how many there are.
      weights: "arguments" | "embed" | "file", default "arguments". AOT: where weights are, parameters and buffers of a
        module, variables of a TensorFlow function, or what weights_argnums names: arguments of the C function, and fields of
        a struct; arrays in the object; or a file beside the library, which it maps into memory.
      weights_argnums, weights_argnames: arguments that are weights, of functions of JAX arrays, default ().
        AOT.
      torch_polyblocks_select_graphs, torch_polyblocks_filter_graphs: tuples of graph numbers,
        default (). PyTorch: numbers of the graphs that are compiled, and of those that are not.

    Examples:
      >>> pbkern.CompileOptions(strict_target=True).strict_target
      True
      >>> f = pbkern.jit(lambda x: x + 1, compile_options={"strict_target": True})
      >>> f.options.target
      'cpu'
    """

    target: Target = "cpu"
    mm_conv_precision_mode: PrecisionMode | None = None
    mlir_disable_fast_math: bool = False
    emulate_precision_casts: bool = False
    num_iters: int = 1
    polyblocks_disable_affine_fusion: bool = False
    polyblocks_disable_reduce_reduce_fusion: bool = False
    polyblocks_disable_unsafe_math_canonicalizations: bool = False
    strict_target: bool = False
    debug: bool = False
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    execution_backend: Backend = "polyblocks"
    polyblocks_gpu_no_tensor_core: bool = False
    device_one_time_load: bool = True
    on_gpu_tensors: bool = False
    user_device_memory: bool = False
    aot: bool = False
    aot_name: str = "polyblocks_mlir_artifact"
    device: str | None = None
    openmp: bool = True
    num_threads: int | None = None
    weights: WeightsPlace = "arguments"
    weights_argnums: tuple[int, ...] = ()
    weights_argnames: tuple[str, ...] = ()
    torch_polyblocks_select_graphs: tuple[int, ...] = ()
    torch_polyblocks_filter_graphs: tuple[int, ...] = ()

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            check = CHECKS.get(field.name) or BY_TYPE[field.type]
            object.__setattr__(self, field.name, check(field.name, value))

    @classmethod
    def from_dict(cls, given: Mapping[str, Any] | CompileOptions | None) -> CompileOptions:
        """Options from the user's dictionary. Raises OptionError for unknown names and bad values."""
        if isinstance(given, CompileOptions):
            return given
        if not isinstance(given or {}, Mapping):
            raise OptionError(
                "compile_options is not a dictionary", why=f"{given!r}", hint="{'target': 'cpu'}"
            )
        names = [field.name for field in dataclasses.fields(cls)]
        for name in given or {}:
            if name not in names:
                raise OptionError(
                    f"unknown compile option `{name}`",
                    why=f"the options are {', '.join(sorted(names))}",
                    hint=nearest(str(name), names),
                )
        return cls(**(given or {}))

    # What fusion reads.

    @property
    def disable_affine_fusion(self) -> bool:
        return self.polyblocks_disable_affine_fusion

    @property
    def disable_reduce_reduce_fusion(self) -> bool:
        return self.polyblocks_disable_reduce_reduce_fusion

    @property
    def disable_unsafe_math_canonicalizations(self) -> bool:
        return self.polyblocks_disable_unsafe_math_canonicalizations or self.emulate_precision_casts

    def __repr__(self) -> str:
        return f"CompileOptions({', '.join(f'{k}={value!r}' for k, value in self.differing().items())})"

    def differing(self) -> dict[str, Any]:
        """The options that are not at their defaults."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }


def nearest(name: str, names) -> str:
    """A hint: the name that was probably meant, or all of them.

    Another dtype than was asked for was not meant.
    """
    types = _dtypes_in(name)
    names = list(names)
    alike = [option for option in names if not types or _dtypes_in(option) == types]
    close = difflib.get_close_matches(name.replace("-", "_"), alike, n=1, cutoff=0.5)
    return (
        f"did you mean `{close[0]}`?" if close else f"one of {', '.join(map(str, sorted(names)))}"
    )


def _dtypes_in(name: str) -> list[tuple[str, str]]:
    """(kind, bits) of each dtype in a word such as `mixed_fp16_fp32`, `bfloat16` or `i8`."""
    return re.findall(r"(bf|f|u|i)[a-z]*?_?(\d+)", name.lower())


# --- values
# ---------------------------------------------------------------------------------------------------------


def _bad(name: str, value: Any, allowed: str, hint: str | None = None):
    what = f"compile option `{name}` has a bad value"
    raise OptionError(what, why=f"{name}={value!r}; it takes {allowed}", hint=hint)


def _bool(name: str, value: Any) -> bool:
    return value if isinstance(value, bool) else _bad(name, value, "True or False")


def _str(name: str, value: Any) -> str:
    return (
        value
        if isinstance(value, str) and value.isidentifier()
        else _bad(name, value, "an identifier")
    )


def _choice(*choices: str | None, hints: Mapping[Any, str] = MappingProxyType({})) -> Callable:
    """A check for one of these; `hints`: what to do in place of other values."""

    def check(name: str, value: Any):
        if value not in choices:
            shown = ", ".join(repr(choice) for choice in choices)
            near = nearest(str(value), [choice for choice in choices if choice])
            _bad(name, value, shown, hints.get(str(value), near))
        return value

    return check


def _optional_str(name: str, value: Any) -> str | None:
    return (
        value
        if value is None or isinstance(value, str)
        else _bad(name, value, "a device name or None")
    )


def _count(name: str, value: Any) -> int:
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    return value if good else _bad(name, value, "an integer of at least 1")


def _tuple_of(kind: type, words: str) -> Callable:
    def check(name: str, value: Any) -> tuple:
        value = (value,) if isinstance(value, kind) else value
        good = isinstance(value, (tuple, list)) and all(
            isinstance(element, kind) and not isinstance(element, bool) for element in value
        )
        return tuple(value) if good else _bad(name, value, f"{words} or a sequence of them")

    return check


BY_TYPE: Mapping[str, Callable] = {
    "bool": _bool,
    "str": _str,
    "str | None": _optional_str,
    "int": _count,
    "int | None": lambda name, value: None if value is None else _count(name, value),
    "tuple[int, ...]": _tuple_of(int, "an integer"),
    "tuple[str, ...]": _tuple_of(str, "a name"),
}
TPU_HINT = "Pallas kernels written for TPUs run with target 'cpu', after pbkern.pallas.install()"

CHECKS: Mapping[str, Callable] = {
    "target": _choice(*TARGETS, hints={"tpu": TPU_HINT}),
    "mm_conv_precision_mode": _choice(None, *PRECISION_MODES),
    "execution_backend": _choice(*BACKENDS),
    "weights": _choice(*WEIGHTS_PLACES),
}
