"""Which of the instruction sets that a library uses the processor has: @pbk_features() -> i64, a bit for each. LLVM IR text.

It asks the processor once, and Linux for the tile registers of AMX, which it may refuse. The
functions are compiled for any processor of the kind. x86-64: cpuid and the state that the system
saves (Intel's manual volume 2, CPUID and XGETBV). AArch64 Linux: AT_HWCAP
(arch/arm64/include/uapi/asm/hwcap.h).
"""

from __future__ import annotations

from collections.abc import Sequence

from pbkern.targets.host.processor import ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, TILE_DATA

# Instruction set -> (leaf, subleaf, register of cpuid's results in the order eax ebx ecx edx, bit, whether it needs the
# state of AVX, AVX-512 or AMX).
CPUID = {
    "avx2": (7, 0, 1, 5, "avx"),
    "fma": (1, 0, 2, 12, "avx"),
    "f16c": (1, 0, 2, 29, "avx"),
    "bmi": (7, 0, 1, 3, ""),
    "bmi2": (7, 0, 1, 8, ""),
    "lzcnt": (0x80000001, 0, 2, 5, ""),
    "movbe": (1, 0, 2, 22, ""),
    "avx512f": (7, 0, 1, 16, "avx512"),
    "avx512bw": (7, 0, 1, 30, "avx512"),
    "avx512cd": (7, 0, 1, 28, "avx512"),
    "avx512dq": (7, 0, 1, 17, "avx512"),
    "avx512vl": (7, 0, 1, 31, "avx512"),
    "avx512ifma": (7, 0, 1, 21, "avx512"),
    "avx512vbmi": (7, 0, 2, 1, "avx512"),
    "avx512vbmi2": (7, 0, 2, 6, "avx512"),
    "avx512vnni": (7, 0, 2, 11, "avx512"),
    "avx512bitalg": (7, 0, 2, 12, "avx512"),
    "avx512vpopcntdq": (7, 0, 2, 14, "avx512"),
    "avx512bf16": (7, 1, 0, 5, "avx512"),
    "avx512fp16": (7, 0, 3, 23, "avx512"),
    "gfni": (7, 0, 2, 8, "avx"),
    "avxvnni": (7, 1, 0, 4, "avx"),
    "amx-tile": (7, 0, 3, 24, "amx"),
    "amx-bf16": (7, 0, 3, 22, "amx"),
    "amx-int8": (7, 0, 3, 25, "amx"),
}
# Bits of XCR0 that say what the system saves.
STATE = {"avx": 0x6, "avx512": 0xE6, "amx": 0x60000}
HWCAP = {"lse": 8, "fullfp16": 10, "dotprod": 20}
# The type of the entry of the auxiliary vector that holds HWCAP (Linux, linux/auxvec.h).
AT_HWCAP = 16
OSXSAVE = 27  # of leaf 1, ecx
# Bit of @pbk_known: the processor has been asked. No instruction set has this bit.
ASKED_BIT = 1 << 62

_CACHED = """
@pbk_known = internal global i64 0, align 8

define internal i64 @pbk_features() #0 {
  %before = load atomic i64, ptr @pbk_known monotonic, align 8
  %asked = icmp ne i64 %before, 0
  br i1 %asked, label %known, label %ask
known:
  ret i64 %before
ask:
  %found = call i64 @pbk_ask()
  %marked = or i64 %found, ASKED_BIT
  store atomic i64 %marked, ptr @pbk_known monotonic, align 8
  ret i64 %marked
}
""".replace("ASKED_BIT", str(ASKED_BIT))

_LEAF = """
define internal { i32, i32, i32, i32 } @pbk_cpuid(i32 %leaf, i32 %sub) #0 {
  %base = and i32 %leaf, -2147483648
  %last = call { i32, i32, i32, i32 } asm sideeffect "cpuid", "REGISTERS"(i32 %base, i32 0)
  %most = extractvalue { i32, i32, i32, i32 } %last, 0
  %there = icmp uge i32 %most, %leaf
  br i1 %there, label %ask, label %none
ask:
  %found = call { i32, i32, i32, i32 } asm sideeffect "cpuid", "REGISTERS"(i32 %leaf, i32 %sub)
  ret { i32, i32, i32, i32 } %found
none:
  ret { i32, i32, i32, i32 } zeroinitializer
}

define internal i64 @pbk_saved() #0 {
  %one = call { i32, i32, i32, i32 } @pbk_cpuid(i32 1, i32 0)
  %flags = extractvalue { i32, i32, i32, i32 } %one, 2
  %bit = and i32 %flags, OSXSAVE
  %has = icmp ne i32 %bit, 0
  br i1 %has, label %ask, label %none
ask:
  %pair = call { i32, i32 } asm sideeffect "xgetbv", "={ax},={dx},{cx},~{dirflag},~{fpsr},~{flags}"(i32 0)
  %low = extractvalue { i32, i32 } %pair, 0
  %wide = zext i32 %low to i64
  ret i64 %wide
none:
  ret i64 0
}
""".replace("OSXSAVE", str(1 << OSXSAVE)).replace(
    "REGISTERS", "={ax},={bx},={cx},={dx},0,2,~{dirflag},~{fpsr},~{flags}"
)


def bits_of(needs: Sequence[str], all_needs: Sequence[str]) -> int:
    """Bits that @pbk_features() has set where all of `needs` are there; `all_needs` gives instruction sets their bits."""
    return sum(1 << all_needs.index(need) for need in needs)


def features_text(needs: Sequence[str], is_x86: bool) -> str:
    """Text of @pbk_features() and the functions that it calls; bit n of its result: the n-th of `needs`."""
    return _CACHED + (_LEAF + _asked_of_x86(needs) if is_x86 else _asked_of_arm(needs))


def _asked_of_x86(needs: Sequence[str]) -> str:
    lines = ["%saved = call i64 @pbk_saved()"]
    for state, mask in STATE.items():
        lines += [
            f"%{state}.part = and i64 %saved, {mask}",
            f"%{state}.ok = icmp eq i64 %{state}.part, {mask}",
        ]
    if "amx-tile" in needs:
        lines += [
            f'%answer = call i64 asm sideeffect "syscall", "={{ax}},{{ax}},{{di}},{{si}},~{{rcx}},~{{r11}},~{{memory}}"'
            f"(i64 {ARCH_PRCTL}, i64 {ARCH_REQ_XCOMP_PERM}, i64 {TILE_DATA})",
            "%granted = icmp eq i64 %answer, 0",
            "%amx.granted = and i1 %amx.ok, %granted",
        ]
    leaves = dict.fromkeys(CPUID[need][:2] for need in needs)
    for k, (leaf, sub) in enumerate(leaves):
        signed = leaf - (1 << 32) if leaf >> 31 else leaf
        lines.append(
            f"%leaf{k} = call {{ i32, i32, i32, i32 }} @pbk_cpuid(i32 {signed}, i32 {sub})"
        )
    total = "0"
    for n, name in enumerate(needs):
        leaf, sub, register, bit, state = CPUID[name]
        k = list(leaves).index((leaf, sub))
        lines += [
            f"%r{n} = extractvalue {{ i32, i32, i32, i32 }} %leaf{k}, {register}",
            f"%s{n} = lshr i32 %r{n}, {bit}",
            f"%t{n} = trunc i32 %s{n} to i1",
        ]
        lines.append(f"%u{n} = and i1 %t{n}, {_condition(state)}")
        total = _added(lines, n, total)
    return _function("pbk_ask", lines, total)


def _condition(state: str) -> str:
    """The value that says whether the system saves a state, and lets the process use it."""
    return {"": "true", "amx": "%amx.granted"}.get(state, f"%{state}.ok")


def _asked_of_arm(needs: Sequence[str]) -> str:
    lines = [f"%caps = call i64 @getauxval(i64 {AT_HWCAP})"]
    total = "0"
    for n, name in enumerate(needs):
        lines += [f"%s{n} = lshr i64 %caps, {HWCAP[name]}", f"%u{n} = trunc i64 %s{n} to i1"]
        total = _added(lines, n, total)
    return "declare i64 @getauxval(i64)\n" + _function("pbk_ask", lines, total)


def _added(lines: list[str], bit: int, total: str) -> str:
    lines += [
        f"%w{bit} = zext i1 %u{bit} to i64",
        f"%x{bit} = shl i64 %w{bit}, {bit}",
        f"%y{bit} = or i64 {total}, %x{bit}",
    ]
    return f"%y{bit}"


def _function(name: str, lines: list[str], result: str) -> str:
    return "\n".join(
        [
            f"define internal i64 @{name}() #0 {{",
            *(f"  {line}" for line in lines),
            f"  ret i64 {result}",
            "}",
            "",
        ]
    )
