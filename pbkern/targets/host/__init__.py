"""Host side of every target, on this computer's processor: programs around kernels, their code in memory, their runtime.

    program_text.py   HostProgram -> MLIR that runs its steps; what launches and copies are is given by a target's StepHooks
    compile.py        MLIR -> object files -> a program in memory, registered with XLA (objects/, loaded_program.py)
    runtime/          functions that programs call: parallel loops on several kinds of threads, arenas, XLA's handlers
    direct.py         a program called with addresses, on the threads of an OpenMP runtime

The room imports no target. CPUs compile their kernels with it, GPUs the handlers that launch theirs.
"""
