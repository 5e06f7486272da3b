"""Functions of other systems -> ClosedJaxpr; their kernels -> Kernel. What follows does not learn where they came from."""
