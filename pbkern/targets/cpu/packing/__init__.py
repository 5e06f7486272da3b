"""Contractions -> operands copied into the order that the microkernel reads."""
