"""What programs call while they run: parallel loops on one of several kinds of threads, arenas, XLA's handler. MLIR text."""
