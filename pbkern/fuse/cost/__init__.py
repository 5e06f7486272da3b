"""What the fuser asks a target about time, and what it knows of steps whatever they cost. Prices: targets/cpu/costs/."""
