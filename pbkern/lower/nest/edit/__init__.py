"""Edits: changes of nests that keep what they mean. None decides anything; a pass is a decision and a few edits.

Each says what it looks like before and after, and when it is legal. tests/lower/test_edits.py interprets both sides.
"""
