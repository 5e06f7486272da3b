"""The pbkern command and make demo."""
