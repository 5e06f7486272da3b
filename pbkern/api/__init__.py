"""Just in time: decorated function -> compiled program, and what it shows of itself."""
