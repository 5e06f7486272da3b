"""Report: an Explanation with the machine and the kernels' code, which the page of HTML shows beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pbkern.core.errors import OptionError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.machine import DEFAULT_MACHINE, Machine
from pbkern.fuse.emit.explain import Explanation

from . import contents, page


@dataclass(frozen=True)
class Report(Explanation):
    """The result of `explain`: its text is the Explanation's, `html()` a page.

    Attributes:
      target: name of the target.
      machine: the device for which times are predicted.
      stages: forms of a kernel that `code` has, in the order of compilation.
      code: (kernel's name, stage) -> text; compiles the kernel where the stage needs that.
    """

    target: str = "cpu"
    machine: Machine = DEFAULT_MACHINE
    stages: tuple[str, ...] = ()
    code: Callable[[str, str], str] | None = None

    @classmethod
    def of(cls, explanation: Explanation, **fields) -> Report:
        """An explanation with the fields that reports have beside its own."""
        return cls(**vars(explanation), **fields)

    def html(self, beside: Report | None = None, stages: Sequence[str] | None = None) -> str:
        """The report as a page of HTML: one file that loads nothing.

        Args:
          beside: a second report, shown beside this one with the ratios of their figures.
          stages: forms of each kernel that the page shows, of `self.stages`; default: all of them,
            for which each distinct kernel is compiled alone.

        Raises:
          OptionError: a stage that the target does not have; `beside` that is no report.
        """
        if not isinstance(beside, Report | None):
            raise OptionError(
                "beside= takes a report",
                why=f"given {type(beside).__name__}",
                hint="what another function's explain returns",
            )
        shown = [self] if beside is None else [self, beside]
        return page.page([report.contents(stages) for report in shown])

    def contents(self, stages: Sequence[str] | None) -> dict:
        """The values that a page shows. Raises OptionError for a stage that the target does not have."""
        self._check(stages)
        wanted, code = self.stages if stages is None else stages, self.code

        def texts_of(kernel: str) -> dict[str, str]:
            return {stage: code(kernel, stage) for stage in wanted} if code else {}

        return contents.contents_of(self, self.target, self.machine, texts_of)

    def _check(self, stages: Sequence[str] | None) -> None:
        for stage in stages or ():
            if stage not in self.stages:
                raise OptionError(
                    f"there is no stage `{stage}`",
                    why=f"target `{self.target}`",
                    hint=f"one of {', '.join(self.stages)}",
                )

    def _repr_html_(self) -> str:
        """The page in a notebook, with the kernels' source and without code, for which they would be compiled."""
        return page.in_frame(self.html(stages=page.SOURCE_ALONE))
