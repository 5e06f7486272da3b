"""Just in time: decorated function -> compiled program, with reports and texts of its stages."""
