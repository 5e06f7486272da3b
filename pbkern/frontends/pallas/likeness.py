"""Answers to libraries that ask the device before they choose a kernel: `installed(like="tpu v6e")`.

A library that has kernels of Pallas for one device asks `jax.default_backend()`, `device.platform`,
`device.device_kind` and the like, and takes plain JAX on any other. Within `answers`, callers outside
of JAX are told what the device named would say. JAX itself, which compiles for the device that there
is, and pbkern are told the truth.
"""

from __future__ import annotations

from collections.abc import Callable

from pbkern import _jax
from pbkern.core.errors import OptionError
from pbkern.targets.nvgpu.devices import device_kind
from pbkern.targets.nvgpu.machine import FIGURES

PRODUCTS = {
    "sm_80": "NVIDIA A100-SXM4-80GB",
    "sm_86": "NVIDIA GeForce RTX 3090",
    "sm_89": "NVIDIA GeForce RTX 4090",
    "sm_90a": "NVIDIA H100 80GB HBM3",
    "sm_100": "NVIDIA B200",
    "sm_120": "NVIDIA GeForce RTX 5090",
}


def answers(like: str) -> Callable[[], None]:
    """Answers callers outside of JAX as the device would; returns a function that undoes it.

    Args:
      like: "tpu" and a generation that Pallas knows, such as "tpu v6e", or "gpu" and a device of the
        target nvgpu, such as "gpu sm_90".
    Raises OptionError for another device.
    """
    platform, _, name = like.lower().partition(" ")
    if platform == "gpu" and name:
        kind = device_kind("sm_90a" if name == "sm_90" else name)
        major, minor = kind.capability
        return _jax.answer_as(
            "gpu",
            device_kind=PRODUCTS[kind.architecture],
            core_count=FIGURES[kind.architecture].multiprocessors,
            compute_capability=f"{major}.{minor}",
        )
    kinds = _jax.tpu_kinds()
    if platform == "tpu" and name in kinds:
        return _jax.answer_as("tpu", device_kind=kinds[name], core_count=1, num_cores=1)
    raise OptionError(
        f"there are no answers like `{like}`",
        why=f"TPUs are {', '.join(f'tpu {kind}' for kind in kinds)}",
        hint='"tpu v6e", or "gpu sm_90"',
    )
