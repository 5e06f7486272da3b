"""Questions that programs ask of devices."""


def cuda_synchronize() -> None:
    """Waits until all NVIDIA devices have done what they were given.

    Raises TargetError without a driver.

    Examples:
      >>> try:
      ...     pbkern.device_helpers.cuda_synchronize()
      ... except pbkern.errors.TargetError:  # no NVIDIA device here
      ...     pass
    """
    from pbkern.targets.nvgpu.driver import (
        synchronize,
    )  # imports lowering, which `import pbkern` does not need

    synchronize()


__all__ = ["cuda_synchronize"]
