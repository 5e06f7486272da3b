"""How the threads of a block share a kernel: points, places of scratch, barriers. Choices, without code."""
