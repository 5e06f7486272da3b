"""Loops over stencils: several steps in one kernel."""
