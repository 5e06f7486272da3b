"""Functions that are watched while they run: on a simulated GPU, and with times of their launches."""
