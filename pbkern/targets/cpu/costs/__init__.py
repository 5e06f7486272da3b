"""The CPU's CostModel: predicted seconds of steps and kernels.

Formulas only; numbers are the Machine's.
"""
