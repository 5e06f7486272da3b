"""Group, CostModel -> Schedule: blocks and grid."""
