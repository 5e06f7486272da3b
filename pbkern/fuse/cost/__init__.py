"""Questions that the fuser asks a target about time, and facts of steps whatever they cost.

Prices: targets/costs/.
"""
