"""Rewrites of bodies while a kernel is traced: body jaxpr -> body jaxpr."""
