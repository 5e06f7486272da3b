"""Convolutions that become cheaper ones: other operands, no zeros between elements, or arithmetic."""
