"""PTX instructions as functions of a gang of lanes."""
