"""Scatter equations, read once for fusion and for lowering: how they combine values, and the roles of dimensions."""

from __future__ import annotations

from pbkern.core.lazy_dataclass import dataclass

# Scatter -> how it makes an element of the old one and an update.
SCATTERS = {"scatter": "set"} | {
    f"scatter-{name}": name for name in ("add", "sub", "mul", "min", "max")
}


def scatter_combines(eqn) -> str | None:
    """A value of SCATTERS; None where the equation is no scatter, or applies a function of its own (x.at[i].apply)."""
    combine = SCATTERS.get(eqn.primitive.name)
    if combine != "set":
        return combine
    body = eqn.params["update_jaxpr"]
    return "set" if body is None or body.outvars[0] is body.invars[1] else None


@dataclass(frozen=True)
class ScatterForm:
    """Which dimension of the updates, and which index, goes along each dimension of the operand.

    Attributes:
      loops: dimensions of the updates that choose a window, as those of the indices but for the
        last.
      windows: dimension of the operand -> dimension of the updates; along others a window is one element wide.
      batch: dimension of the operand -> dimension of the indices that it goes with, which is a position in `loops`.
      starts: dimension of the operand -> position in an index vector; along others windows start at 0.
      limits: dimension of the operand -> the largest start whose window is inside.
    """

    loops: tuple[int, ...]
    windows: dict[int, int]
    batch: dict[int, int]
    starts: dict[int, int]
    limits: dict[int, int]

    @staticmethod
    def of(eqn) -> ScatterForm:
        operand, _, updates = (var.aval.shape for var in eqn.invars)
        dn = eqn.params["dimension_numbers"]
        loops = tuple(axis for axis in range(len(updates)) if axis not in dn.update_window_dims)
        absent = (*dn.inserted_window_dims, *dn.operand_batching_dims)
        present = (axis for axis in range(len(operand)) if axis not in absent)
        windows = {dim: int(window_dim) for dim, window_dim in zip(present, dn.update_window_dims)}
        batch = {
            int(dim): int(batch_dim)
            for dim, batch_dim in zip(dn.operand_batching_dims, dn.scatter_indices_batching_dims)
        }
        starts = {int(dim): k for k, dim in enumerate(dn.scatter_dims_to_operand_dims)}
        limits = {
            axis: extent - (updates[windows[axis]] if axis in windows else 1)
            for axis, extent in enumerate(operand)
        }
        return ScatterForm(loops, windows, batch, starts, limits)
