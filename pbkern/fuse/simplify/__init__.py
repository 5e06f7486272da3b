"""ClosedJaxpr -> simpler ClosedJaxpr: equation by equation, by a table of rewrites."""
