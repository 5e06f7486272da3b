"""ClosedJaxpr -> ClosedJaxpr: rewrites of whole expressions, such as divisions moved behind products."""
