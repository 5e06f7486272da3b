"""ClosedJaxpr -> ClosedJaxpr: rewrites of whole expressions, such as delayed normalisation of softmax."""
