"""What an equation of a few large primitives says, read once for fusion and for lowering."""
