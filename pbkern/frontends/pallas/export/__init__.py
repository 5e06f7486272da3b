"""Kernel -> function made by pl.pallas_call."""
