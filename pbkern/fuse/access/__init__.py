"""(equation, block of its result) -> blocks of its operands; blocks of a whole group, and its body at them."""
