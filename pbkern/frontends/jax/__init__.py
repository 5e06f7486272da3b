"""JAX functions -> pbkern_call, a primitive that carries its jaxpr through JAX's transformations."""
