"""Conditions: what is known of tests of indices, at all points of a nest or at some of them."""
