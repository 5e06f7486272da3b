"""Libraries of functions whose sizes the caller says: which programs they hold, and whether rows may be computed apart."""
