"""A Function -> LLVM IR of a program per processor and of the C entry -> object file, in a child process."""
