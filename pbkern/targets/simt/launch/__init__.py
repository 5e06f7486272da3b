"""Programs of threads under XLA: a handler that launches kernels (handler.py), by a driver's functions (driver.py)."""
