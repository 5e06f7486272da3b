"""Fixtures for all tests: golden texts. No test reads or writes the user's own cache."""

import atexit
import collections
import os
import pathlib
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Container, Iterable

# Before the imports below, and inherited by all processes of tests: Python compiles this tree and rewrites its assertions once,
# not in each of them, also where the environment asks for no bytecode, which is to keep it away from sources.
if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(pathlib.Path(__file__).parent.parent / "build" / "bytecode")
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

import hypothesis
import pytest

# Set before pbkern reads its environment, and inherited by the processes that tests start.
os.environ["PBKERN_CACHE_DIR"] = tempfile.mkdtemp(prefix="pbkern-tests-")
# A failure inside the compiler is an error here, not a fallback.
os.environ["PBKERN_FALLBACK"] = "0"
atexit.register(shutil.rmtree, os.environ["PBKERN_CACHE_DIR"], ignore_errors=True)
# What XLA compiles here, references and single operations, runs once or twice: unoptimised code is made in a fifth of the time.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

# How long a draw takes says how busy the machine is.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

GOLDEN = pathlib.Path(__file__).parent / "golden"


# Seconds of tests, as scripts/record_durations.py wrote them.
DURATIONS = pathlib.Path(__file__).parent / "durations.txt"
# Seconds: a case that takes longer is slow.
LONG_CASE = 0.5
# Seconds: the quickest case of a function runs by default up to this.
LONG_FUNCTION = 1.0
# Seconds: the cases of one function that run by default take no longer together,
LONG_CASES = 1.0
# but for cases that are shorter than this: they all run.
SHORT_CASE = 0.1
# Seconds: a test that draws examples, and takes longer than LONG_FUNCTION with all of them, takes about as long by default.
LONG_DRAWN = 0.9
# What a reader runs first is always tested.
ALWAYS = (
    "tests/test_tutorials.py",
    "tests/test_readme.py",
    "tests/test_architecture.py",
    "tests/frontends/stablehlo/test_document.py",
    "tests/api/test_jit_interface.py::test_import_is_cheap_and_loads_no_compiler",
)


def slow_cases(
    names: Iterable[str], seconds: dict[str, float], apart: Container[str] = ()
) -> set[str]:
    """Those tests, by id, that run with `-m slow` only, of tests that would run by default. Unknown times count as none.

    Of the cases of a function some run, up to a total: the quickest, and others in an order that follows no parameter.
    Where cases are `apart`, they count one by one.
    """
    functions = collections.defaultdict(list)
    for name in names:
        functions[name.partition("[")[0]].append((seconds.get(name, 0.0), name))
    slow: set[str] = set()
    for function, cases in functions.items():
        if function.startswith(ALWAYS):
            continue
        quickest = min(cases)
        together = quickest[0]
        if together >= LONG_FUNCTION:
            slow.add(quickest[1])
        for time, name in sorted(cases, key=lambda case: zlib.crc32(case[1].encode())):
            if name == quickest[1]:
                continue
            counts = time >= SHORT_CASE and name not in apart
            if time >= LONG_CASE or (counts and together + time > LONG_CASES):
                slow.add(name)
            elif counts:
                together += time
    return slow


def draw_fewer(drawn: Callable, seconds: float) -> None:
    """Gives a test of hypothesis, which takes so long with all of its examples, as many as LONG_DRAWN allows."""
    # A second decorator with settings is an error.
    settings = drawn._hypothesis_internal_use_settings
    few = max(1, int(settings.max_examples * LONG_DRAWN / seconds))
    drawn._hypothesis_internal_use_settings = hypothesis.settings(settings, max_examples=few)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks slow tests: of a test's cases those that `sampled(n)`, which runs every n-th, leaves out; then long ones.

    Long tests that draw examples have fewer by default, and all of them as slow tests.
    """
    seen = collections.Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            seen[item.function] += 1
            if seen[item.function] % mark.args[0] != 1:
                item.add_marker(pytest.mark.slow)
    lines = (line.split(" ", 1) for line in DURATIONS.read_text().splitlines())
    seconds = {name: float(time) for time, name in lines}
    short = {item.nodeid: item for item in items if item.get_closest_marker("slow") is None}
    drawn = {
        item.function: seconds[name]
        for name, item in short.items()
        if seconds.get(name, 0.0) >= LONG_FUNCTION
        and getattr(item.function, "is_hypothesis_test", False)
    }
    if "not slow" in config.option.markexpr:
        for function, time in drawn.items():
            draw_fewer(function, time)
        seconds |= {name: LONG_DRAWN for name, item in short.items() if item.function in drawn}
    apart = {name for name, item in short.items() if item.get_closest_marker("apart")}
    for name in slow_cases(short, seconds, apart):
        short[name].add_marker(pytest.mark.slow)


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite the golden texts; review the diff as code",
    )
    parser.addoption(
        "--engine",
        default="native",
        help="what runs kernels in tests/native: native code, the interpreter of nests, library[:DEVICE], tiles",
    )


def pytest_configure(config):
    if (
        config.getoption("--engine") != "native"
    ):  # imported only then: these tests are not all that there is
        from .native import running

        running.engine[0] = config.getoption("--engine")
        if running.engine[0] == "tiles":  # native code, that multiplies tiles where it can
            from .native import amx

            tiles = amx.tiles()
            tiles.__enter__()
            config.add_cleanup(lambda: tiles.__exit__(None, None, None))


@pytest.fixture
def golden(request):
    """Compares a text with tests/golden/<test name>.txt."""
    name = request.node.name.removeprefix("test_").replace("[", "-").replace("]", "")
    path = GOLDEN / f"{name}.txt"

    def check(text: str) -> None:
        text = text.rstrip() + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"no golden text {path}; run pytest --update-golden"
        assert text == path.read_text(), (
            f"differs from {path}; run pytest --update-golden and review the diff"
        )

    return check
