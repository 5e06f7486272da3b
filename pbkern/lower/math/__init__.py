"""Elementwise equations and functions such as exp on SSA values."""
