"""Kernel -> loop nests, for every target; typed SSA values and elementwise functions from which targets emit MLIR.

In: a `dsl.Kernel`. Out: statements of `lower/nest/ir/`, before anything is decided about threads,
vectors or memories.
"""
