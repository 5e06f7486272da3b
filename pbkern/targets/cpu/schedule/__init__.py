"""Nest -> NestSchedule: vector dimension, register tile, what stays in registers."""
