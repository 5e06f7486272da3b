"""PTX -> NumPy: kernels for NVIDIA GPUs run on any machine, a lane per thread, and are checked while they run.

parse.py: text -> Program        ops.py: instruction -> function of lanes        memory.py: arrays, bounds, races
machine.py: runs a Program       counts.py: what the run has cost a GPU
"""
