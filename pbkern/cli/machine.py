"""pbkern machine and calibrate: the figures of the CPU that code is made for, and measuring its bandwidths."""

from __future__ import annotations

import argparse
import json


def add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def machine(parsed: argparse.Namespace) -> None:
    from pbkern.cpu import machine as current
    from pbkern.targets.cpu.machines.figures import figures

    described = current()
    rows = figures(described)
    if parsed.json:
        listed = [row._asdict() for row in rows]
        print(json.dumps({"source": described.source, "note": described.note, "figures": listed}))
        return
    print(described.source)
    if described.note:
        print(described.note)
    for row in rows:
        print(f"  {row.name:45} {row.value:10.4g} {row.unit:16} {row.source}")


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--forget", action="store_true", help="remove what an earlier calibration has measured"
    )


def calibrate(parsed: argparse.Namespace) -> None:
    from pbkern.targets.cpu.machines import calibration, detect

    if parsed.forget:
        calibration.forget()
    note = (detect.detected_machine() if parsed.forget else detect.calibrate()).note
    print(note or "not calibrated: classes by the kind of processor")
