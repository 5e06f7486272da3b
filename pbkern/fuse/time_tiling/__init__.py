"""Loops over stencils -> loops of several steps per kernel: overlapped tiles or wavefronts."""
