"""Statements -> statements, for every target."""
