"""This process around a compilation: files on disk, lines on stderr, failures that are told, the garbage collector."""
