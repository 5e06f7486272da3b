"""What printing is made of: equation -> Python expression; a failed kernel -> a file that fails the same way."""
