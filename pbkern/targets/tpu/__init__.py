"""TPUs, for which JAX's Pallas compiles: what a kernel's author tells it."""
