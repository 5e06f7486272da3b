"""Grid and blocks -> which programs are parallel, and which reach over the ends of arrays."""
