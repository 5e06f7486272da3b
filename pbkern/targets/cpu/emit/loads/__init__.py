"""Loads of a nest: vectors, words of several elements, squares, strided accesses, gathers."""
