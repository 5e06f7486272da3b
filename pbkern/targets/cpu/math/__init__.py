"""Functions such as exp as this target has them: a table of versions for AVX-512, and what operations cost in vectors."""
