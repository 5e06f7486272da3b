"""Predicted seconds of equations and kernels. Formulas only; numbers are the Machine's."""
