"""Functions of other systems -> ClosedJaxpr; their kernels -> Kernel. Later stages do not learn the source."""
