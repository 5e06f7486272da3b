"""Runs of nests -> loops over strips of what they share."""
