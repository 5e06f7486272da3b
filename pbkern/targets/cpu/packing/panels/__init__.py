"""Products by panels: panels of one operand, strips of rows and copies of the other, far rows, and runs of the depth."""
