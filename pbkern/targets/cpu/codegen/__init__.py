"""HostProgram -> MLIR -> objects -> code in memory, registered with XLA."""
