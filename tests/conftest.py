"""Fixtures for all tests: golden texts. No test reads or writes the user's own cache."""

import atexit
import collections
import os
import pathlib
import shutil
import tempfile

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
# What a reader runs first is always tested.
ALWAYS = (
    "tests/test_tutorials.py",
    "tests/test_readme.py",
    "tests/test_architecture.py",
    "tests/frontends/stablehlo/test_document.py",
    "tests/api/test_jit_interface.py::test_import_is_cheap_and_loads_no_compiler",
)


def slow_cases(seconds: dict[str, float]) -> set[str]:
    """The tests, by id, that take so long that they run with `-m slow` only."""
    quickest: dict[str, tuple[float, str]] = {}
    for name, time in seconds.items():
        function = name.partition("[")[0]
        quickest[function] = min(quickest.get(function, (time, name)), (time, name))
    return {
        name
        for name, time in seconds.items()
        if time >= LONG_CASE
        and not name.startswith(ALWAYS)
        and (name != quickest[name.partition("[")[0]][1] or time >= LONG_FUNCTION)
    }


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks slow tests: long ones, and of a test's cases those that `sampled(n)`, which runs every n-th, leaves out."""
    lines = (line.split(" ", 1) for line in DURATIONS.read_text().splitlines())
    long = slow_cases({name: float(time) for time, name in lines})
    seen = collections.Counter()
    for item in items:
        if item.nodeid in long:
            item.add_marker(pytest.mark.slow)
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            seen[item.function] += 1
            if seen[item.function] % mark.args[0] != 1:
                item.add_marker(pytest.mark.slow)


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
