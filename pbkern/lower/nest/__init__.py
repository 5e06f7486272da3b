"""The nest IR and what is asked of it: addresses, lifetimes, index tests."""
