"""CPUs: their figures (machine.py), this computer's (detect.py), and those that have names (devices.py)."""
