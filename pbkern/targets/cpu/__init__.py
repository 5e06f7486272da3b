"""The CPU: HostProgram of Kernels -> nests for caches and vectors -> MLIR -> object code, called on XLA's threads.

Stages in order: passes.py (locality/, packing/), schedule/, emit/, codegen/. target.py joins them
to the Target interface. What is not the CPU's own is in targets/host.
"""
