"""The pbkern command and its demo."""
