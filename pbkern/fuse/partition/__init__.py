"""Simplified jaxpr -> groups of equations that become one kernel each."""
