"""ClosedJaxpr -> ClosedJaxpr: gathers, scatters, sorts and transposes that fuse better in another form."""
