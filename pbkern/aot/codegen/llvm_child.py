"""Program of a child process: LLVM IR on stdin -> object files and texts on stdout. LLVM ends its process on some errors.

It needs llvmlite alone and is run by its path, so that neither pbkern nor JAX are imported.

stdin: a line of JSON, then the texts of all modules. The JSON has
  sizes: [[bytes of each module's text, of one variant], ...]; scalar: the same with whether to run LLVM's optimiser
  names: [name that @pbk_main has in each variant, or null]; keep: names that stay global
  triple, cpu: of the target machine; functions name their own processors; kinds: of "obj", "asm" and "llvm"

stdout: a line of JSON with the size of each kind, then their bytes.
"""

import json
import sys
from typing import Any

import llvmlite.binding as llvm

LEVEL = 2
ENTRY = "pbk_main"


def main() -> None:
    request = json.loads(sys.stdin.buffer.readline())
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()
    target = llvm.Target.from_triple(request["triple"])
    machine = target.create_target_machine(cpu=request["cpu"], features="", opt=LEVEL, reloc="pic", codemodel="small")
    whole: Any = None
    for sizes, scalar, name in zip(request["sizes"], request["scalar"], request["names"]):
        variant: Any = None
        for size, optimised in zip(sizes, scalar):
            module = llvm.parse_assembly(sys.stdin.buffer.read(size).decode())
            module.triple, module.data_layout = request["triple"], str(machine.target_data)
            module.verify()
            if optimised:
                optimise(module, machine)
            variant = joined(variant, module)
        for defined in definitions(variant):
            if defined.name == ENTRY:
                defined.name = name
            elif defined.name not in request["keep"]:
                defined.linkage = "internal"
        whole = joined(whole, variant)
    for defined in definitions(whole):
        if defined.name not in request["keep"]:
            defined.linkage = "internal"
    whole.verify()
    makers = {
        "llvm": lambda: str(whole).encode(),
        "obj": lambda: machine.emit_object(whole),
        "asm": lambda: machine.emit_assembly(llvm.parse_assembly(str(whole))).encode(),
    }
    results = {kind: makers[kind]() for kind in makers if kind in request["kinds"]}
    sys.stdout.buffer.write(json.dumps({kind: len(data) for kind, data in results.items()}).encode() + b"\n")
    for data in results.values():
        sys.stdout.buffer.write(data)


def optimise(module, machine) -> None:
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=LEVEL))
    builder.getModulePassManager().run(module, builder)


def definitions(module) -> list:
    return [d for d in (*module.functions, *module.global_variables) if not d.is_declaration]


def joined(whole, module):
    if whole is None:
        return module
    whole.link_in(module)
    return whole


if __name__ == "__main__":
    main()
