"""Times of tests, from pytest's report -> tests/durations.txt, by which tests/conftest.py knows the slow ones.

    python -m pytest -n 2 -m "slow or not slow" --junitxml=report.xml     on a machine that does nothing else
    python scripts/record_durations.py report.xml

Tests that the report does not know keep their times. Names of parameters are part of a test's id.
"""

from __future__ import annotations

import collections
import pathlib
import sys
import xml.etree.ElementTree as ElementTree

DURATIONS = pathlib.Path(__file__).parent.parent / "tests" / "durations.txt"
# Seconds: shorter cases are not listed,
SHORTEST = 0.1
# nor those of functions whose longest case is shorter than LONGEST, and all that are listed together than TOGETHER.
LONGEST = 0.5
TOGETHER = 1.0


def main(report: str) -> None:
    seconds = {}
    if DURATIONS.exists():
        lines = (line.split(" ", 1) for line in DURATIONS.read_text().splitlines())
        seconds = {name: float(time) for time, name in lines}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}"
        seconds[name] = float(case.get("time"))
    functions = collections.defaultdict(list)
    for name, time in seconds.items():
        if time >= SHORTEST:
            functions[name.partition("[")[0]].append((name, time))
    listed = sorted(
        case
        for cases in functions.values()
        if max(time for _, time in cases) >= LONGEST or sum(time for _, time in cases) >= TOGETHER
        for case in cases
    )
    text = "".join(f"{time:.2f} {name}\n" for name, time in listed)
    DURATIONS.write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
