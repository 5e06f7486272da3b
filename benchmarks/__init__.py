"""pbkern beside its peers on the same inputs: workloads.py says what is measured, run.py measures it."""
