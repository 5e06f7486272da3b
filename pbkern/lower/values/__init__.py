"""Values of a body while nests are built: which are known, pulled, stored."""
