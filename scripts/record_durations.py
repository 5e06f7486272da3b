"""Times of tests, from pytest's report -> tests/durations.txt, by which tests/conftest.py knows the slow ones.

    python -m pytest -n 2 -m "slow or not slow" --junitxml=report.xml     on a machine that does nothing else
    python scripts/record_durations.py report.xml

Tests that the report does not know keep their times. Names of parameters are part of a test's id.
"""

from __future__ import annotations

import pathlib
import sys
import xml.etree.ElementTree as ElementTree

DURATIONS = pathlib.Path(__file__).parent.parent / "tests" / "durations.txt"
# Seconds: shorter tests are not listed, unless they are cases of a function with a listed one.
SHORTEST = 0.5


def main(report: str) -> None:
    seconds = {}
    if DURATIONS.exists():
        lines = (line.split(" ", 1) for line in DURATIONS.read_text().splitlines())
        seconds = {name: float(time) for time, name in lines}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}"
        seconds[name] = float(case.get("time"))
    long = {name.partition("[")[0] for name, time in seconds.items() if time >= SHORTEST}
    listed = {name: time for name, time in seconds.items() if name.partition("[")[0] in long}
    quickest = {}
    for name, time in listed.items():
        function = name.partition("[")[0]
        quickest[function] = min(quickest.get(function, (time, name)), (time, name))
    kept = {name for name, time in listed.items() if time >= SHORTEST}
    kept |= {name for _, name in quickest.values()}
    text = "".join(f"{listed[name]:.2f} {name}\n" for name in sorted(kept))
    DURATIONS.write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
