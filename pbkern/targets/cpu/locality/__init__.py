"""Statements -> statements that use the caches better."""
