"""Nest + NestSchedule -> scf and vector text."""
