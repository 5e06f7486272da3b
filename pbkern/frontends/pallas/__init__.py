"""pl.pallas_call -> Kernel."""
