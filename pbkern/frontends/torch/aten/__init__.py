"""ATen operator and arguments -> JAX arrays: a table of one function per operator, a file per family."""

from . import (
    attention,
    convolutions,
    creation,
    elementwise,
    indexing,
    linear,
    loops,
    pools,
    randomness,
    reductions,
    shapes,
)
from .table import TABLE, names, rule_of

FAMILIES = (
    elementwise,
    shapes,
    indexing,
    reductions,
    linear,
    convolutions,
    pools,
    attention,
    loops,
    creation,
    randomness,
)


def listed() -> str:
    """The table's operators by family, as docs/torch.md has them: aten:: is left out."""
    lines = ["| family | operators |", "| --- | --- |"]
    for family in FAMILIES:
        mine = [
            name.removeprefix("aten::")
            for name in names()
            if TABLE.lookup(name).__module__ == family.__name__
        ]
        lines.append(
            f"| {family.__name__.rpartition('.')[2]} | {', '.join(f'`{name}`' for name in mine)} |"
        )
    return "\n".join(lines)


__all__ = ["FAMILIES", "TABLE", "listed", "names", "rule_of"]
