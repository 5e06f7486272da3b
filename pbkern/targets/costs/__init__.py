"""Prices that targets share: a Machine as the fuser asks it (fuse/cost/model.py). Formulas for steps and traffic, and figures.

The formulas are those of CPUs, where their figures were measured. A target subclasses MachineCosts
for what differs on its devices: cpu/costs.py, simt/costs.py.
"""
