"""Group, Machine -> Schedule: blocks and grid."""
