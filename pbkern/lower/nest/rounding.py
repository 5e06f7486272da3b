"""Which sums and differences of a nest's expressions keep the rounding of their products."""

from __future__ import annotations

from .ir import Expr


def may_cancel(e: Expr) -> bool:
    """A difference of scaled numbers, such as pixels / 255: equal ones cancel only if both products are rounded."""
    return e.info.primitive == "sub" and all(map(_is_scaled, e.args))


def _is_scaled(e: Expr) -> bool:
    """A product with a constant, or of several numbers, some of them constants."""
    waiting, seen = [e], {e}
    while waiting:
        e = waiting.pop()
        name = e.info.primitive if e.kind == "op" else None
        if name == "mul" and any(a.kind == "const" for a in e.args):
            return True
        if name in ("max", "min"):
            waiting += [a for a in e.args if a not in seen]
            seen.update(e.args)
    return False
