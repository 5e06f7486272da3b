"""Program of a child process: LLVM IR on stdin -> object files and texts on stdout, request after request.

LLVM ends its process on some errors, which must not be the user's. The program needs llvmlite alone
and is run by its path, so that neither pbkern nor JAX are imported.

stdin: per request a line of JSON, then the texts of all modules. The JSON has sizes: [[bytes of
  each module's text, of one library variant], ...]; a kernel is one text triple; machine: arguments
  of LLVM's target machine, such as cpu; level: of its passes and of its code generation kinds: of
  "obj", "asm" and "llvm" library: None, or of a library
    scalar: like `sizes`, whether to run LLVM's passes; names: name that @pbk_main has in each
    variant, or null keep: names that stay global

stdout: per request a line of JSON with the size of each kind, then their bytes; or with {"error":
text}.

The process ends with its stdin, or after a minute without a request.
"""

import json
import math
import os
import re
import select
import signal
import sys
from typing import Any, BinaryIO

import llvmlite.binding as llvm

ENTRY = "pbk_main"
# Seconds between requests; after them memory is worth more than the 0.15 s of a new process.
IDLE_SECONDS = 60
# A masked store of integers by a constant mask: indentation, lanes, type, value, attributes of the
# address, address, mask.
MASKED_STORE = re.compile(
    r"^( *)(?:tail )?call void @llvm\.masked\.store\.[^\s(]+\("
    r"<(\d+) x (i\d+)> (%[^\s,]+), ptr ((?:[\w()]+ )*)([%@][^\s,()]+), "
    r"<\d+ x i1> <((?:i1 (?:true|false)(?:, )?)+)>\).*$",
    re.MULTILINE,
)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's interrupt is the parent's affair
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what LLVM prints is no answer
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()
    requests = sys.stdin.buffer
    while select.select([requests], [], [], IDLE_SECONDS)[0] and serve(requests, answers):
        pass


def serve(requests: BinaryIO, answers: BinaryIO) -> bool:
    """Answers one request; False where there is none left."""
    head = requests.readline()
    if not head:
        return False
    request = json.loads(head)
    texts = [[requests.read(size).decode() for size in sizes] for sizes in request["sizes"]]
    results: dict[str, bytes] = {}
    said: dict[str, Any] = {}
    try:
        results = compiled(request, texts)
        said = {kind: len(data) for kind, data in results.items()}
    except RuntimeError as e:  # what LLVM refuses without ending its process
        said = {"error": str(e)}
    answers.write(json.dumps(said).encode() + b"\n")
    for data in results.values():
        answers.write(data)
    answers.flush()
    return True


def compiled(request: dict[str, Any], texts: list[list[str]]) -> dict[str, bytes]:
    """Each kind of what one request asks for. Raises RuntimeError."""
    target = llvm.Target.from_triple(request["triple"])
    machine = target.create_target_machine(opt=request["level"], **request["machine"])
    context = (
        llvm.create_context()
    )  # names of types and metadata are the module's own, whatever came before
    if request["library"] is None:
        module = parsed(texts[0][0], machine, request["triple"], context)
        optimise(module, machine, request["level"])
    else:
        module = library(request, texts, machine, context)
        if request["triple"].startswith("x86_64"):
            module = repaired(module, context)
    makers = {
        "llvm": lambda: str(module).encode(),
        "asm": lambda: machine.emit_assembly(
            module.clone()
        ).encode(),  # code is made of a module once
        "obj": lambda: machine.emit_object(module),
    }
    return {kind: makers[kind]() for kind in makers if kind in request["kinds"]}


def library(request: dict[str, Any], texts: list[list[str]], machine, context):
    """One module of all variants of a library, in which only the names to keep are global."""
    asked = request["library"]
    whole: Any = None
    for variant_texts, scalar, name in zip(texts, asked["scalar"], asked["names"]):
        variant: Any = None
        for text, optimised in zip(variant_texts, scalar):
            module = parsed(text, machine, request["triple"], context)
            if optimised:
                optimise(module, machine, request["level"])
            variant = joined(variant, module)
        for defined in definitions(variant):
            if defined.name == ENTRY:
                defined.name = name
            elif defined.name not in asked["keep"]:
                defined.linkage = "internal"
        whole = joined(whole, variant)
    for defined in definitions(whole):
        if defined.name not in asked["keep"]:
            defined.linkage = "internal"
    whole.verify()
    return whole


def parsed(text: str, machine, triple: str, context):
    module = llvm.parse_assembly(text, context)
    module.triple, module.data_layout = triple, str(machine.target_data)
    module.verify()
    return module


def optimise(module, machine, level: int) -> None:
    builder = llvm.create_pass_builder(
        machine, llvm.create_pipeline_tuning_options(speed_level=level)
    )
    builder.getModulePassManager().run(module, builder)


def repaired(module, context):
    """The module with `scalar_stores`."""
    if not any(function.name.startswith("llvm.masked.store.") for function in module.functions):
        return module
    changed = llvm.parse_assembly(scalar_stores(str(module)), context)
    changed.verify()
    return changed


def scalar_stores(text: str) -> str:
    """LLVM IR in which masked stores of one integer, by a constant mask, are stores of that integer.

    With AVX-512, LLVM 22 makes a masked store of truncated integers one that truncates, and this a
    store of the one integer before truncation, which overwrites what follows (LLVM's bug 179489;
    23 is right). LLVM's passes find more masks that are constant: this comes after them.
    """

    def scalar(masked: re.Match) -> str:
        indentation, lanes, el, value, attributes, address, mask = masked.groups()
        live = [k for k, lane in enumerate(mask.split(", ")) if lane == "i1 true"]
        if len(live) != 1:
            return masked[0]
        said = re.search(r"\balign (\d+)", attributes)
        alignment = math.gcd(int(said[1]) if said else 1, live[0] * int(el[1:]) // 8)
        name = f"%pbk_lane_{masked.start()}"
        lines = (
            f"{name} = extractelement <{lanes} x {el}> {value}, i64 {live[0]}",
            f"{name}_at = getelementptr {el}, ptr {address}, i64 {live[0]}",
            f"store {el} {name}, ptr {name}_at, align {alignment}",
        )
        return "\n".join(indentation + line for line in lines)

    return MASKED_STORE.sub(scalar, text)


def definitions(module) -> list:
    return [
        definition
        for definition in (*module.functions, *module.global_variables)
        if not definition.is_declaration
    ]


def joined(whole, module):
    if whole is None:
        return module
    whole.link_in(module)
    return whole


if __name__ == "__main__":
    main()
