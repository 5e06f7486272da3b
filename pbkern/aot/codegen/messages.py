"""The end of a library's process: @pbk_write(text, length) to stderr, and @pbk_abort().

LLVM IR text.

On x86-64 Linux they call the kernel themselves, so that a library needs nothing of the C library
for it; elsewhere they call `write` and `abort`. System calls: Linux,
arch/x86/entry/syscalls/syscall_64.tbl.
"""

from __future__ import annotations

# The number of the system call that writes to a file, x86-64 Linux
# (arch/x86/entry/syscalls/syscall_64.tbl).
SYS_WRITE = 1
# The number of the system call that gives the process (same table).
SYS_GETPID = 39
# The number of the system call that gives the thread (same table).
SYS_GETTID = 186
# The number of the system call that sends a signal to a thread (same table).
SYS_TGKILL = 234
# The number of the signal that ends a process (man 7 signal, x86-64).
SIGABRT = 6

# Number and arguments, the result, and what a call changes.
_REGISTERS = "={ax},{ax},{di},{si},{dx},~{rcx},~{r11},~{memory},~{dirflag},~{fpsr},~{flags}"
_SYSCALLS = f"""
define internal i64 @pbk_syscall(i64 %number, i64 %a, i64 %b, i64 %c) #0 {{
  %r = call i64 asm sideeffect "syscall", "{_REGISTERS}"(i64 %number, i64 %a, i64 %b, i64 %c)
  ret i64 %r
}}

define internal void @pbk_write(ptr %text, i64 %length) #0 {{
  %address = ptrtoint ptr %text to i64
  %r = call i64 @pbk_syscall(i64 {SYS_WRITE}, i64 2, i64 %address, i64 %length)
  ret void
}}

define internal void @pbk_abort() #1 {{
  %process = call i64 @pbk_syscall(i64 {SYS_GETPID}, i64 0, i64 0, i64 0)
  %thread = call i64 @pbk_syscall(i64 {SYS_GETTID}, i64 0, i64 0, i64 0)
  %r = call i64 @pbk_syscall(i64 {SYS_TGKILL}, i64 %process, i64 %thread, i64 {SIGABRT})
  call void @llvm.trap()
  unreachable
}}

declare void @llvm.trap()
"""

_LIBC = """
declare i64 @write(i32, ptr, i64)
declare void @abort()

define internal void @pbk_write(ptr %text, i64 %length) #0 {
  %r = call i64 @write(i32 2, ptr %text, i64 %length)
  ret void
}

define internal void @pbk_abort() #1 {
  call void @abort()
  unreachable
}
"""


def messages_text(calls_kernel: bool) -> str:
    """Both functions."""
    return _SYSCALLS if calls_kernel else _LIBC
