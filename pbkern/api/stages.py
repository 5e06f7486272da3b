"""Named stages of one compilation: run, verified, timed, and written as numbered files on request.

A Record collects the stages of one decorated function. Texts are made when somebody looks, because
printing costs more than many stages. PBKERN_DUMP=<folder> writes every record to a folder of its
own there, with a script that rebuilds the kernels and compares each, compiled, with the
interpreter, and, in `passes/`, what each pass (core/passes.py) has made. MemoryAnalysis is what a
compiled function needs to run.
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import re
import sys
import time
from collections.abc import Callable
from dataclasses import field
from typing import Any, cast

import jax

from pbkern.core.errors import OptionError, TargetError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import Ran, parsed, watched, with_settings
from pbkern.core.process import progress
from pbkern.dsl.kernel import Kernel

# In the order of compilation, with the suffix of a dumped file.
STAGES = {
    "jaxpr": "txt",
    "plan": "txt",
    "kernels": "py",
    "nests": "txt",
    "schedule": "txt",
    "mlir": "mlir",
    "llvm": "mlir",
    "asm": "s",
}


@dataclass
class Record:
    """Stages of one compilation.

    Attributes:
      texts: stage -> function that makes its text.
      again: stage that consists of passes -> function that runs it once more.
      milliseconds: what was run -> time.
    """

    name: str
    texts: dict[str, Callable[[], str]] = field(default_factory=dict)
    again: dict[str, Callable[[], Any]] = field(default_factory=dict)
    milliseconds: dict[str, float] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)

    def run(
        self, what: str, make: Callable, *args, verify: Callable[[Any], None] | None = None
    ) -> Any:
        """make(*args), timed; then `verify` of the result, which raises where it is not well-formed."""
        progress.step(what)
        start = time.perf_counter()
        result = make(*args)
        self.milliseconds[what] = (time.perf_counter() - start) * 1e3
        if verify is not None:
            verify(result)
        return result

    def show_kernels(self, kernels: list[Kernel]) -> None:
        self.kernels = kernels
        self.texts["kernels"] = lambda: "\n\n".join(kernel.source() for kernel in kernels)

    def text(self, stage: str) -> str:
        """One stage's text.

        "nests:merge nests" is that of a stage after one of its passes, "nests:unswitch{most_copies=2}" that with other
        thresholds. Raises OptionError for a stage, a pass or a threshold that there is not.
        """
        of, _, name = stage.partition(":")
        if name and of in self.again:
            name, settings = parsed(name)
            with with_settings(name, settings) if settings else contextlib.nullcontext():
                runs = self.passes(of)
            texts = [
                f"{pass_run.of}:\n{pass_run.text}" for pass_run in runs if pass_run.name == name
            ]
            if texts:
                return "\n\n".join(texts)
            hint = f"one of {', '.join(dict.fromkeys(pass_run.name for pass_run in runs))}"
            raise OptionError(
                f"no pass `{name}` ran in stage `{of}`", why=f"of `{self.name}`", hint=hint
            )
        if stage not in self.texts:
            hint = f"one of {', '.join(self.texts)}"
            raise OptionError(f"there is no stage `{stage}`", why=f"of `{self.name}`", hint=hint)
        return self.texts[stage]()

    def passes(self, stage: str) -> list[Ran]:
        """The passes of a stage, which runs again for it: each with its time and its verified result."""
        with watched() as runs:
            self.again[stage]()
        return [pass_run for pass_run in runs if pass_run.stage == stage]

    def times(self) -> str:
        return "\n".join(f"{ms:10.2f} ms  {what}" for what, ms in self.milliseconds.items())


@dataclass(frozen=True)
class MemoryAnalysis:
    """Memory of one call, in bytes. Names are those of XLA's memory_analysis() where it has them.

    Attributes:
      argument_size_in_bytes, output_size_in_bytes: arrays that the caller holds before and after.
      alias_size_in_bytes: the part of the results that is in donated arguments.
      arena_size_in_bytes: what compiled programs hold for temporaries between kernels and for
        scratch of all threads; calls that run at the same time have one each. Programs keep their
        arenas from call to call.
      temp_size_in_bytes: the arenas, and what XLA allocates between programs and for operations
        left to it.
      peak_memory_in_bytes: arguments, results and temporaries together; what is aliased counts
        once.
      generated_code_size_in_bytes: object files of the compiled programs.
    """

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    arena_size_in_bytes: int
    temp_size_in_bytes: int
    generated_code_size_in_bytes: int

    @classmethod
    def of(cls, xla: Any, arenas: int, code: int) -> MemoryAnalysis:
        """From the statistics of XLA's executable, which knows nothing of arenas."""
        return cls(
            xla.argument_size_in_bytes,
            xla.output_size_in_bytes,
            xla.alias_size_in_bytes,
            arenas,
            xla.temp_size_in_bytes + arenas,
            xla.generated_code_size_in_bytes + code,
        )

    @property
    def peak_memory_in_bytes(self) -> int:
        held = self.argument_size_in_bytes + self.output_size_in_bytes - self.alias_size_in_bytes
        return held + self.temp_size_in_bytes

    def __str__(self) -> str:
        rows = {
            "arguments": self.argument_size_in_bytes,
            "results": self.output_size_in_bytes,
            "of them aliased": self.alias_size_in_bytes,
            "temporaries": self.temp_size_in_bytes,
            "of them arenas": self.arena_size_in_bytes,
            "peak": self.peak_memory_in_bytes,
            "code": self.generated_code_size_in_bytes,
        }
        return "\n".join(f"{name:16} {row / 2**20:10.3f} MB" for name, row in rows.items())


@dataclass(frozen=True)
class Costs:
    """Knowledge of a function's plan that XLA lacks, about one call.

    Attributes:
      programs: custom calls; XLA counts each as -1.
      flops, nbytes, seconds: operations, compulsory bytes, predicted time of all fused kernels;
        None where it depends on values how often one runs.
    """

    programs: int
    flops: float | None
    nbytes: float | None
    seconds: float | None

    @classmethod
    def of(cls, explanation: Any, programs: int) -> Costs:
        if any(kernel.launches is None for kernel in explanation.kernels):
            return cls(programs, None, None, None)
        totals = [
            sum(kernel.launches * figure(kernel.cost) for kernel in explanation.kernels)
            for figure in (
                lambda cost: cost.flops,
                lambda cost: cost.bytes_moved,
                lambda cost: cost.seconds,
            )
        ]
        return cls(programs, *map(float, totals))

    def added_to(self, xla: dict[str, float] | None) -> dict[str, float] | None:
        """XLA's cost analysis with these costs; figures that nobody knows are left out."""
        if not isinstance(xla, dict):
            return xla
        costs = dict(xla)
        for key, figure in (
            ("flops", self.flops),
            ("bytes accessed", self.nbytes),
            ("optimal_seconds", self.seconds),
        ):
            if self.programs and key in xla:
                without_programs = xla[key] + self.programs  # -1 again where XLA calls libraries
                if figure is None:
                    del costs[key]
                else:
                    costs[key] = max(without_programs, 0.0) + figure
        return costs


class Lowered(jax.stages.Lowered):
    """A lowered function of jax.jit, with the costs of kernels."""

    costs: Callable[[], Costs]

    @classmethod
    def of(cls, lowered: jax.stages.Lowered, costs: Callable[[], Costs]) -> Lowered:
        """Makes an object one of this class."""
        lowered.__class__ = cls
        result = cast(Lowered, lowered)
        result.costs = costs
        return result

    def compile(self, *args: Any, **kwargs: Any) -> Compiled:
        compiled = super().compile(*args, **kwargs)
        compiled.__class__ = Compiled
        result = cast(Compiled, compiled)
        result.costs = self.costs
        return result

    def cost_analysis(self) -> dict[str, float] | None:
        return self.costs().added_to(super().cost_analysis())


class Compiled(jax.stages.Compiled):
    """A compiled function of jax.jit, with the costs of kernels."""

    costs: Callable[[], Costs]

    def cost_analysis(self) -> dict[str, float] | None:
        return self.costs().added_to(super().cost_analysis())


_serial = itertools.count()


def dump(record: Record, folder: pathlib.Path) -> pathlib.Path:
    """Writes the numbered stages, their times, every kernel and the repro script; returns the folder."""
    stem = re.sub(r"\W+", "_", record.name).strip("_") or "function"
    at = folder / f"{next(_serial):03d}_{stem}"
    while at.exists():  # of an earlier process
        at = folder / f"{next(_serial):03d}_{stem}"
    try:
        (at / "kernels").mkdir(parents=True)
    except OSError as e:
        hint = "PBKERN_DUMP names a folder that can be made or written to"
        raise OptionError(f"no folder {at} can be made", why=str(e), hint=hint) from e
    for number, (stage, make) in enumerate(record.texts.items(), 1):
        try:
            text = make()
        except TargetError as e:  # a tool that only this stage needs
            text = str(e)
        (at / f"{number}_{stage}.{STAGES[stage]}").write_text(text + "\n")
    (at / "passes").mkdir()
    for stage in record.again:
        runs = record.passes(stage)
        for of in dict.fromkeys(run.of for run in runs):
            name = re.sub(r"\W+", "_", of).strip("_")
            (at / "passes" / f"{stage}_{name}.txt").write_text(
                shown([run for run in runs if run.of == of])
            )
        for name in dict.fromkeys(run.name for run in runs):
            record.milliseconds[f"  {stage}: {name}"] = sum(
                run.milliseconds for run in runs if run.name == name
            )
    (at / "times.txt").write_text(record.times() + "\n")
    for number, kernel in enumerate(record.kernels):
        (at / "kernels" / f"{number}_{kernel.name}.py").write_text(kernel.source())
    (at / "repro.py").write_text(REPRO.format(name=record.name))
    return at


def shown(runs: list[Ran]) -> str:
    """Text of one function or kernel after each of several passes."""
    parts, before = [], None
    for run in runs:
        parts.append(
            f"--- {run.name} ({run.milliseconds:.2f} ms)\n{'unchanged' if run.text == before else run.text}\n"
        )
        before = run.text
    return "\n".join(parts)


REPRO = '''"""Rebuilds the kernels of `{name}`, runs each on random inputs and compares with the interpreter."""

import pathlib

import jax
import numpy as np

import pbkern

jax.config.update("jax_enable_x64", True)
for path in sorted(pathlib.Path(__file__).with_name("kernels").glob("*.py")):
    kernel = pbkern.rebuild(path.read_text())
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=t.shape).astype(t.dtype) for t in kernel.in_types]
    for got, want in zip(pbkern.call_kernel(kernel, *inputs), pbkern.interpret(kernel, *inputs)):
        far = np.max(np.abs(np.asarray(got).astype(complex) - want.astype(complex)), initial=0.0)
        print(f"{{kernel.name}}: largest difference {{far:.3g}}")
'''


def report(record: Record) -> None:
    """The plan and the times, on stderr (option debug)."""
    print(record.text("plan"), record.times(), sep="\n", file=sys.stderr)
