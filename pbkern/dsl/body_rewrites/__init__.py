"""Bodies -> other bodies: rewrites while a kernel is traced, and one program as a pure function of values."""
