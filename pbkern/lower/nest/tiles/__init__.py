"""Instructions for products, the layouts of their operands, and tiles that are made of many of them."""
