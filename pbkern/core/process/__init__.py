"""This process around a compilation: files on disk, lines on stderr, the garbage collector."""
