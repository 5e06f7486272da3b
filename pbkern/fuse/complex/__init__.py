"""Complex arrays -> pairs of real ones."""
