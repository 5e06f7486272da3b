"""Nest + NestSchedule -> scf and vector operations."""
