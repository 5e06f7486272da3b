"""Numbers of a kernel's source that follow from sizes of blocks -> named constants, and expressions of them.

A kernel that can be made with other blocks (BlockSizes) is printed with several sizes. Numbers that
differ between these texts are expressions of the sizes: what stands in the text is right for each
size that was tried, by comparison and not by rules of primitives. A size with which the text
differs in more than numbers is not tried; one that leaves no other to try stays a number.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.kernel import BlockSize, BlockSizes, Kernel

# An integer that is no part of a name or of a number with a point.
INTEGER = re.compile(r"(?<![\w.])\d+(?![\w.])")
# Other sizes of which each constant is tried; two decide an expression, the others check it. They change the
# text that is printed and no code.
OTHER_SIZES = 4
# Characters behind which an expression needs no brackets.
OPEN = "([{,:="
# Characters in front of which an expression needs no brackets.
CLOSED = ")]},:\n"

Sizes = Mapping[str, int]  # name -> size


@dataclass(frozen=True)
class Term:
    """A product of constants: of sizes, and of numbers of blocks, whose factors have an extent."""

    text: str
    factors: tuple[tuple[str, int | None], ...]

    def value(self, sizes: Sizes) -> int:
        return math.prod(
            sizes[name] if extent is None else -(-extent // sizes[name])
            for name, extent in self.factors
        )


@dataclass(frozen=True)
class SizedText:
    """The integers of a kernel's text, as they are printed, with some sizes of its blocks."""

    sizes: Sizes
    integers: list[str]


def constants_and_text(
    kernel: Kernel, text: Callable[[Kernel], str], prefix: str = ""
) -> list[str]:
    """Lines that define the constants of a kernel's source, and the source with them.

    Args:
      kernel: what is printed.
      text: its source with numbers.
      prefix: of the constants' names.
    """
    plain, known = text(kernel), kernel.sizes
    if known is None:
        return [plain]
    between = INTEGER.split(plain)
    base = SizedText(
        {name: size.size for name, size in known.sizes.items()}, INTEGER.findall(plain)
    )

    def printed(changed: Sizes) -> SizedText | None:
        sizes = {**base.sizes, **changed}
        try:
            other = text(known.at(sizes))
        except (
            Exception
        ):  # no kernel has these blocks, which says nothing of the one that is printed
            return None
        return SizedText(sizes, INTEGER.findall(other)) if INTEGER.split(other) == between else None

    alone: dict[str, list[SizedText]] = {}
    for name, size in known.sizes.items():
        tried = (printed({name: other}) for other in _others(size))
        fitting = list(itertools.islice(filter(None, tried), OTHER_SIZES))
        if len(fitting) > 1:
            alone[name] = fitting
    together = printed({name: texts[0].sizes[name] for name, texts in alone.items()})
    ways = [alone] if together is not None else []
    for names in (*ways, *([name] for name in alone if len(alone) > 1)):
        texts = [base, *(text for name in names for text in alone[name])]
        texts += [together] if together is not None and names is alone else []
        written = _written(known, between, texts, list(names), prefix)
        if written is not None:
            return written
    return [plain]


def _others(size: BlockSize) -> Iterator[int]:
    """Sizes near one that leave several blocks, those first that are likely to suit."""
    at = size.size
    candidates = [2 * at, at // 2, at + 1, at - 1, 3 * at, at // 4, 4 * at]
    return (other for other in dict.fromkeys(candidates) if 1 < other < size.extent)


def _written(
    known: BlockSizes,
    between: list[str],
    texts: list[SizedText],
    names: list[str],
    prefix: str,
) -> list[str] | None:
    """Constants and source, given texts with several sizes; None where a number is no expression of them."""
    terms = list(_terms(known, names, prefix))
    body, after = between[0], between[1:]
    for integers, following in zip(zip(*(text.integers for text in texts)), after):
        expression = _expression(integers, [text.sizes for text in texts], terms)
        if expression is None:
            return None
        alone = body.rstrip(" ")[-1:] in OPEN and following[:1] in CLOSED
        body += (f"({expression})" if " " in expression and not alone else expression) + following
    lines = []
    for name in names:
        size = known.sizes[name]
        lines.append(f"{prefix}{name} = {size.size}  # {size.what}, of {size.extent}")
        count = _count(prefix, name)
        if re.search(rf"\b{count}\b", body):
            lines.append(f"{count} = pbkern.cdiv({size.extent}, {prefix}{name})")
    return [*lines, "", body]


def _expression(integers: Sequence[str], sizes: list[Sizes], terms: list[Term]) -> str | None:
    """factor * term + offset with these values for these sizes; None if there is none."""
    if len(set(integers)) == 1:
        return integers[0]
    values = list(map(int, integers))
    for term in terms:
        at = list(map(term.value, sizes))
        other = next((n for n, x in enumerate(at) if x != at[0]), None)
        if other is None:
            continue
        factor, rest = divmod(values[other] - values[0], at[other] - at[0])
        offset = values[0] - factor * at[0]
        if not rest and all(value == factor * x + offset for value, x in zip(values, at)):
            scaled = term.text if factor == 1 else f"{factor} * {term.text}"
            sign = "+" if offset > 0 else "-"
            return f"{scaled} {sign} {abs(offset)}" if offset else scaled
    return None


def constant_names(kernel: Kernel, prefix: str = "") -> list[str]:
    """Names that the constants of a kernel's source may have."""
    names = list(kernel.sizes.sizes) if kernel.sizes is not None else []
    return [*(prefix + name for name in names), *(_count(prefix, name) for name in names)]


def _count(prefix: str, name: str) -> str:
    """The constant that is the number of blocks of one size."""
    return f"{prefix}{name}_GRID"


def _terms(known: BlockSizes, names: list[str], prefix: str) -> Iterator[Term]:
    """Expressions of which numbers in kernels consist, simple ones first."""
    blocks = [Term(prefix + name, ((name, None),)) for name in names]
    counts = [Term(_count(prefix, name), ((name, known.sizes[name].extent),)) for name in names]
    yield from (*blocks, *counts)
    for left, right in itertools.combinations([*blocks, *counts], 2):
        yield Term(f"{left.text} * {right.text}", left.factors + right.factors)
