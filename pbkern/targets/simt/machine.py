"""What the cost model takes of all GPUs alike."""

# Of a launch in a stream, and of one block of threads. Source: order of magnitude in NVIDIA's developer blog "Getting
# Started with CUDA Graphs" (2019), 2.2 us per launch with a graph and up to 9 without; not measured here.
LAUNCH_SECONDS, BLOCK_SECONDS = 3e-6, 5e-8
# More than one block shares a multiprocessor: what fusion may keep in scratch is a part of its memory.
SCRATCH_SHARE = 4
