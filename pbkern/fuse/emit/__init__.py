"""Groups with Schedules -> Kernels in HostPrograms, and the Plan."""
