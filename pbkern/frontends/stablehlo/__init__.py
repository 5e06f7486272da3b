"""A StableHLO program (text, bytecode, portable artefact, jax.export.Exported) -> ClosedJaxpr of lax operations."""
