"""Names of a library in C: of its function and of its arguments, from those that they have in Python."""

from __future__ import annotations

import ctypes
import errno
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

from pbkern.core.errors import OptionError

# Words that no C or C++ program may use as a name. Sources: ISO C23 6.4.1, ISO C++20 [lex.key],
# [lex.digraph].
KEYWORDS = frozenset(
    """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class co_await
    co_return co_yield compl concept const const_cast consteval constexpr constinit continue decltype default delete do
    double dynamic_cast else enum explicit export extern false float for friend goto if inline int long mutable
    namespace new noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast
    requires restrict return short signed sizeof static static_assert static_cast struct switch template this
    thread_local throw true try typedef typeid typename typeof typeof_unqual union unsigned using virtual
    void volatile wchar_t while xor xor_eq
""".split()
)
# Functions of the C library: a library that defined one would take its place. Source: ISO C17 annex
# B, those in one word that people call functions of arrays, and names that linkers define.
TAKEN = frozenset(
    """
    abort abs acos acosh asin asinh atan atan2 atanh atexit atof atoi bsearch calloc cbrt ceil clock copysign cos cosh
    div erf erfc exit exp exp2 expm1 fabs fdim floor fma fmax fmin fmod fopen fork free frexp fread fwrite getenv hypot
    ilogb index isalpha isdigit isinf isnan kill ldexp lgamma link log log10 log1p log2 logb longjmp lrint lround main
    malloc memchr memcmp memcpy memmove memset mmap modf nan nearbyint nextafter open pow printf putc puts qsort raise
    rand read realloc remainder remove rename rint round scalbn scanf select send setenv setjmp signal sin sinh sleep
    sprintf sqrt srand sscanf strcat strchr strcmp strcpy strlen system tan tanh tgamma time trunc ungetc write y0 y1 yn
    j0 j1 jn _init _fini _start _end _edata _etext end edata etext
""".split()
)


# Types that headers of libraries include. Sources: ISO C17 7.20 (stdint.h), 7.19 (stddef.h), 7.18
# (stdbool.h), 7.21 (stdio.h).
TYPES = frozenset(
    [
        f"{sign}int{kind}{bits}_t"
        for sign in ("", "u")
        for kind in ("", "_least", "_fast")
        for bits in (8, 16, 32, 64)
    ]
    + "intptr_t uintptr_t intmax_t uintmax_t size_t ptrdiff_t max_align_t ssize_t off_t bool FILE fpos_t time_t clock_t".split()
)
# Functions of OpenMP runtimes (GCC's, LLVM's) and of OpenACC's, which libraries call or share a
# process with.
RUNTIMES = re.compile(r"(GOMP|GOACC|omp|ompt|ompx|kmp|kmpc|acc)_\w*", re.ASCII)
# Libraries of a system whose functions programs call without naming them to a linker.
SYSTEM_LIBRARIES = ("libc.so.6", "libm.so.6", "libSystem.dylib")


# What macros of C's headers and of compilers replace. Sources: ISO C17 clause 7, POSIX.1-2017 (limits.h, errno.h, signal.h,
# unistd.h), GCC's predefined macros.
MACROS = frozenset(
    """
    BIG_ENDIAN BUFSIZ BYTE_ORDER EOF I INFINITY LITTLE_ENDIAN MAX_CANON MAX_INPUT MINSIGSTKSZ NAN NFDBITS NGREG NSIG NULL
    PDP_ENDIAN PIPE_BUF TIMER_ABSTIME WCONTINUED WEOF WEXITED WNOHANG WNOWAIT WSTOPPED WUNTRACED assert complex errno
    EHWPOISON imaginary linux math_errhandling noreturn offsetof stderr stdin stdout unix
""".split()
) | {name for name in dir(errno) if name.startswith("E")}
MACRO_FAMILIES = re.compile(
    r"[A-Z0-9_]+_(MAX|MIN|WIDTH|BIT|DIG|EPSILON)|[RWXF]_OK|(L|P)_(ctermid|cuserid|tmpnam|tmpdir)"
    r"|(ATOMIC|BC|BUS|CLD|CLOCK|CLOCKS|DBL|DECIMAL|EXIT|F|FD|FE|FLT|FP|FPE|HUGE|ILL|INT\d*|INTMAX|L|LC|LDBL|LOCK|M|MATH"
    r"|O|ONCE|POLL|PTHREAD|S|SA|SC|SEEK|SEGV|SI|SIG|SIGEV|SS|STDERR|STDIN|STDOUT|SV|TIME|TRAP|TSS|UINT\d*"
    r"|UINTMAX|XATTR)_[A-Z0-9_]+|SIG[A-Z0-9]+|(PRI|SCN)[diouxX][A-Z0-9]+|(sa|si|sigev)_\w+"
)
# Namespaces that a library's C++ header names.
NAMESPACES = frozenset(("std", "pbkern"))
# What a header calls arguments of its own.
OWN = ("main", "stream", "user_device_memory")


def check_function_name(name: str, given: bool) -> str:
    """The name, if a C library may have a function of that name. Raises OptionError.

    given: whether the option aot_name says it; else it is that of the Python function.
    """
    whose = "aot_name" if given else "the function's own name"
    hint = "aot_name: letters, digits and underscores, such as unsharp_mask"
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise OptionError(
            f"`{name}` is no name of a function in C", why=f"it is {whose}", hint=hint
        )
    if name in KEYWORDS:
        raise OptionError(
            f"`{name}` is a keyword of C or C++",
            why=f"it is {whose}",
            hint=f"aot_name: {name}_kernel",
        )
    if name in NAMESPACES:
        why = f"it is {whose}; the library's header uses the namespace"
        raise OptionError(
            f"`{name}` is a namespace of C++", why=why, hint=f"aot_name: {name}_kernel"
        )
    if name in TYPES:
        why = f"it is {whose}; the library's header, and others, use the type"
        raise OptionError(f"`{name}` is a type of C", why=why, hint=f"aot_name: {name}_kernel")
    if RUNTIMES.fullmatch(name):
        why = f"it is {whose}; the library itself, or others of its process, may call that"
        raise OptionError(f"`{name}` is a name of the OpenMP runtime", why=why, hint=hint)
    if name in TAKEN or is_macro(name) or _is_exported(name):
        why = f"it is {whose}; programs that link the library would call it in place of their own"
        raise OptionError(
            f"`{name}` is a name of the C library", why=why, hint=f"aot_name: {name}_kernel"
        )
    if name.startswith("__") or re.match(r"_[A-Z]", name):
        raise OptionError(f"`{name}` is reserved to C compilers", why=f"it is {whose}", hint=hint)
    return name


@functools.cache
def _system_libraries() -> list[ctypes.CDLL]:
    libraries = []
    for library in SYSTEM_LIBRARIES:
        try:
            libraries.append(ctypes.CDLL(library))
        except OSError:  # of another system
            continue
    return libraries


def _is_exported(name: str) -> bool:
    """Whether this system's C library has a function of the name, such as pipe or gamma."""
    return any(hasattr(library, name) for library in _system_libraries())


def identifier(text: str) -> str:
    """Makes a name in C of a text: `params['w'][0]` becomes params_w_0."""
    name = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_") or "argument"
    name = f"_{name}" if name[0].isdigit() else name
    return f"{name}_" if name in KEYWORDS or is_macro(name) or name in OWN else name


def is_macro(name: str) -> bool:
    """Whether a header of C may replace the name by something else."""
    return name in MACROS or MACRO_FAMILIES.fullmatch(name) is not None


def distinct(names: Iterable[str]) -> list[str]:
    """Identifiers of texts, each with a number behind it where another one has the same."""
    names_so_far: list[str] = []
    for name in map(identifier, names):
        other, suffix = name, 1
        while other in names_so_far:
            suffix += 1
            other = f"{name}_{suffix}"
        names_so_far.append(other)
    return names_so_far


def argument_paths(
    fn: Callable, args: tuple, kwargs: dict, static: Callable[[int | str], bool]
) -> list[str]:
    """Names of the arrays among the arguments in Python, flattened as by jax.tree: "img", "params['w']"."""
    import jax  # which `pbkern --help` does without

    names = parameter_names(fn, len(args))
    dynamic = [(names[n], arg) for n, arg in enumerate(args) if not static(n)]
    dynamic += [(value, kwargs[value]) for value in sorted(kwargs) if not static(value)]
    return [
        name + jax.tree_util.keystr(path)
        for name, value in dynamic
        for path, _ in jax.tree_util.tree_flatten_with_path(value)[0]
    ]


def parameter_names(fn: Callable, count: int) -> list[str]:
    """Names of the first `count` positional parameters."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    several = next(
        (parameter.name for parameter in parameters if parameter.kind is parameter.VAR_POSITIONAL),
        "in",
    )
    return [*names, *(f"{several}{n}" for n in range(max(count - len(names), 0)))][:count]


def result_paths(results: Any) -> list[str]:
    """Names of the results: "out", or for several "out0", "out1", "out_logits" of a dictionary."""
    import jax

    paths_of_results = jax.tree_util.tree_flatten_with_path(results)[0]
    if len(paths_of_results) == 1 and not paths_of_results[0][0]:
        return ["out"]
    return [_result_name(path) for path, _ in paths_of_results]


def _result_name(path: tuple) -> str:
    import jax

    text = jax.tree_util.keystr(path)
    return "out" + (text[1:-1].replace("][", "_") if re.fullmatch(r"(\[\d+\])+", text) else text)
