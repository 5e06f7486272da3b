"""Plans on disk, so that a process can call a function that an earlier process has planned and compiled.

    key     the jaxpr, name, options, donated operands, tuned choices, settings; pbkern's sources,
            versions of JAX and MLIR, the processor
    entry   values and segments of the plan, signatures of its programs, the keys of their code

Entries are JSON, with the bytes of constants behind it. With a hit nothing is planned or lowered,
and MLIR is not imported. Kernels are not in an entry: whoever asks for them has the function
planned again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.export
import jaxlib
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core import config
from pbkern.core.jaxprs.walks import equations, inner_jaxprs, literal_value
from pbkern.core.options import CompileOptions
from pbkern.core.process import disk_cache, fallback
from pbkern.core.process.disk_cache import DiskStore
from pbkern.dsl import checks
from pbkern.dsl.call import kernel_p
from pbkern.dsl.host_program import HostProgram, ProgramSignature
from pbkern.dsl.kernel import ArrayType
from pbkern.frontends.jax import call
from pbkern.targets import get_target
from pbkern.targets.host.objects.cache_key import PACKAGE, sources
from pbkern.targets.target import Target

from .measured.tuned_choices import content, fusion_sources

if TYPE_CHECKING:
    from pbkern.fuse import Plan

KIND = "plan"
# Kernels that are called from what XLA runs: their code belongs to the process.
KERNEL_CALLS = (call.call_p.name, kernel_p.name, "pallas_call")
# Settings that change neither plans nor code.
WITHOUT_EFFECT = ("cache", "cache_dir", "cache_shared", "cache_megabytes", "pool_megabytes")


def key(
    jaxpr: jex.ClosedJaxpr,
    name: str,
    options: CompileOptions,
    choices: tuple,
    donated: tuple[bool, ...],
) -> str | None:
    """The key of a function's plan; None where plans are not kept.

    That is so without a store, for functions with effects or that call functions of Python, and
    where the stages of compilation are shown.
    """
    settings = config.current()
    shown = options.debug or settings.dump is not None
    if disk_cache.current() is None or shown or fallback.is_failing() or obstacle(jaxpr):
        return None
    acting = dataclasses.asdict(settings)
    for setting in WITHOUT_EFFECT:
        del acting[setting]
    tracing = _jax.tracing_settings()
    target = get_target(options.target, options.device)
    device = target.machine(), target.identity()
    return disk_cache.digest(
        (
            content(jaxpr).digest,
            name,
            options,
            choices,
            donated,
            acting,
            tracing,
            device,
            environment(),
        )
    )


def obstacle(jaxpr: jex.ClosedJaxpr) -> str:
    """Why each process plans a function anew; "" where its plan may be kept."""
    unnamed = content(jaxpr).unnamed
    if unnamed:
        return f"nothing tells whether {', '.join(unnamed)} in another process does the same"
    axes = _axes_of_surroundings(jaxpr)
    if axes:
        return f"it communicates along {', '.join(sorted(axes))}, which its surroundings define"
    return "it has effects" if jaxpr.effects else ""


def reason_against(jaxpr: jex.ClosedJaxpr) -> str:
    """Why a store that is in use does not keep a function's plan; "" where it does, and without a store.

    A call with a store has asked before: only then is the function's content known already.
    """
    return "" if disk_cache.current() is None else obstacle(jaxpr)


@_jax.cached_by_jaxpr_alone
def _axes_of_surroundings(closed: jex.ClosedJaxpr) -> frozenset[str]:
    """Names of axes along which equations communicate, without those that an equation around them defines.

    JAX's effects name most of them, but not those of ppermute.
    """
    axes: set[str] = set()
    for eqn in closed.jaxpr.eqns:
        names = eqn.params.get("axis_name", eqn.params.get("axes", ()))
        names = names if isinstance(names, tuple | list) else (names,)
        named = {name for name in names if isinstance(name, str)}
        bodies = list(inner_jaxprs(eqn))
        if bodies:  # shard_map and pmap define what they name
            defined = named.union(getattr(eqn.params.get("mesh"), "axis_names", ()))
            axes |= set().union(*map(_axes_of_surroundings, bodies)) - defined
        else:
            axes |= named
    return frozenset(axes)


@functools.cache
def environment() -> tuple:
    """Facts that plans depend on beside their functions and targets."""
    return sources(PACKAGE, ("api",)), fusion_sources(), jax.__version__, jaxlib.__version__


def put(
    store: DiskStore, key: str, plan: Plan, compiled: Mapping[str, Any], target: Target
) -> None:
    """Stores a plan whose programs are compiled, if a later process can call it.

    It cannot where XLA runs something that JAX cannot export, and where kernels check or print.
    """
    packed = _packed(store, plan, compiled, target)
    if packed is not None:
        store.put(KIND, key, packed)


def get(
    store: DiskStore, key: str, name: str, given: jex.ClosedJaxpr, target: Target
) -> tuple[Plan, dict[str, Any]] | None:
    """The plan under `key` and its programs, loaded.

    Args:
      store: where entries are.
      key: what `key` has made.
      name: the function's.
      given: the function.
      target: which loads the programs.
    """
    payload = store.get(KIND, key)
    if payload is None:
        return None
    try:
        return _unpacked(payload, store, name, given, target)
    except (ValueError, KeyError, TypeError, IndexError):  # not an entry of ours
        store.remove(KIND, key)
        return None


def _packed(
    store: DiskStore, plan: Plan, compiled: Mapping[str, Any], target: Target
) -> bytes | None:
    if plan.whole is not None or any(map(checks.can_fail, plan.kernels())):
        return None
    jaxpr, segments = plan.jaxpr, plan.segments
    literals = [literal_value(var) for var in jaxpr.outvars if isinstance(var, jex.Literal)]
    arrays = [np.asarray(array) for array in (*plan.consts, *literals)]
    makes = itertools.chain.from_iterable(segment.makes for segment in segments)
    numbers = {var: n for n, var in enumerate((*jaxpr.invars, *jaxpr.constvars, *makes))}
    steps = []
    for segment in segments:
        if isinstance(segment.body, jex.ClosedJaxpr):
            module = _exported(segment.body, target.platform)
            step = None if module is None else {"xla": len(arrays)}
            arrays.append(np.frombuffer(module or b"", np.uint8))
        else:
            step = _program_step(store, segment.program, compiled[segment.program.name], target)
        if step is None:
            return None
        steps.append(
            {
                **step,
                "reads": [numbers[read] for read in segment.reads],
                "makes": _types(make.aval for make in segment.makes),
            }
        )
    head = {
        "inputs": _types(var.aval for var in jaxpr.invars),
        "arrays": _types(arrays),
        "constants": len(plan.consts),
        "results": [
            None if isinstance(var, jex.Literal) else numbers[var] for var in jaxpr.outvars
        ],
        "segments": steps,
    }
    return b"".join([json.dumps(head).encode(), b"\n", *(array.tobytes() for array in arrays)])


def _program_step(
    store: DiskStore, program: HostProgram | ProgramSignature, compiled: Any, target: Target
) -> dict[str, Any] | None:
    """A program and its code, which equal programs of other names share, as JSON; None where later processes cannot have it."""
    reference = target.reference(store, compiled)
    if reference is None:
        return None
    signature = compiled.signature
    return {
        "name": program.name,
        "inputs": _types(signature.inputs),
        "outputs": _types(signature.outputs),
        "shared": signature.shared,
        "in_place": signature.in_place,
        "label": program.label,
        "reference": reference,
    }


def _exported(body: jex.ClosedJaxpr, platform: str) -> bytes | None:
    """A part that XLA runs, as StableHLO; None where that cannot leave the process, as kernels cannot."""
    if any(eqn.primitive.name in KERNEL_CALLS for eqn in equations(body.jaxpr)):
        return None
    function = jax.jit(jex.jaxpr_as_fun(body))
    try:
        exported = jax.export.export(function, platforms=[platform])(*body.in_avals)
        return bytes(exported.serialize())
    except (ImportError, NotImplementedError, ValueError, KeyError):
        return None  # for JAX's reasons; KeyError: a dtype that a library defines


def _unpacked(
    payload: bytes, store: DiskStore, name: str, given: jex.ClosedJaxpr, target: Target
) -> tuple[Plan, dict[str, Any]] | None:
    from pbkern.fuse.emit.plan import Plan, Segment  # a part of the fuser, without the rest

    first, _, rest = payload.partition(b"\n")
    head = json.loads(first)
    arrays, start = [], 0
    for array_type in _array_types(head["arrays"]):
        count = math.prod(array_type.shape)
        array = np.array(np.frombuffer(rest, array_type.dtype, count, start))
        arrays.append(array.reshape(array_type.shape))
        start += array.nbytes
    constants, literals = arrays[: head["constants"]], iter(arrays[head["constants"] :])
    invars, constvars = _variables(head["inputs"]), _variables(head["arrays"][: len(constants)])
    values, segments, compiled = [*invars, *constvars], [], {}
    for step in head["segments"]:
        reads, makes = tuple(values[n] for n in step["reads"]), tuple(_variables(step["makes"]))
        body: ProgramSignature | jex.ClosedJaxpr
        if "xla" in step:
            exported = jax.export.deserialize(bytearray(arrays[step["xla"]].tobytes()))
            body = jax.make_jaxpr(exported.call)(*[read.aval for read in reads])
        else:
            inputs, outputs = _array_types(step["inputs"]), _array_types(step["outputs"])
            shared = tuple((operand, result) for operand, result in step["shared"])
            facts = step["in_place"], step["label"]
            body = ProgramSignature(step["name"], inputs, outputs, shared, *facts)
            compiled[body.name] = target.load(store, body, step["reference"])
            if compiled[body.name] is None:
                return None
        segments.append(Segment(body, reads, makes))
        values += makes
    outvars = [
        _literal(next(literals)) if number is None else values[number] for number in head["results"]
    ]
    jaxpr = given.jaxpr.replace(constvars=constvars, invars=invars, outvars=outvars, eqns=[])
    return Plan(name, jaxpr, tuple(constants), tuple(segments), given.out_avals), compiled


def _types(arrays: Iterable[Any]) -> list:
    """Types of arrays, as JSON."""
    return [[list(array.shape), str(np.dtype(array.dtype))] for array in arrays]


def _array_types(types: list) -> tuple[ArrayType, ...]:
    return tuple(ArrayType(tuple(shape), np.dtype(dtype)) for shape, dtype in types)


def _literal(value: np.ndarray) -> jex.Literal:
    return jex.Literal(value[()], jax.core.ShapedArray((), value.dtype))


def _variables(types: list) -> list[jex.Var]:
    return [
        jex.Var(jax.core.ShapedArray(entry.shape, entry.dtype)) for entry in _array_types(types)
    ]
