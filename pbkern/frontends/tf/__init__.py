"""A TensorFlow function, by way of XLA's StableHLO -> ClosedJaxpr, with the variables that it reads and assigns."""
