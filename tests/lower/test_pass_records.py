"""Passes are records of their thresholds: shown, and changed by name in the text of a stage."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import pbkern
from pbkern.core.errors import OptionError
from pbkern.core.passes import Pass, parsed, run_passes, threshold, with_settings
from pbkern.fuse.partition.passes import KERNEL_PASSES, PARTITION_PASSES, WHOLE_PASSES
from pbkern.fuse.pipeline import FUSE_PASSES
from pbkern.lower.passes.dead_points import DROP_DEAD_POINTS
from pbkern.lower.passes.shared import SHARED_PASSES
from pbkern.lower.passes.unswitching import Unswitch
from pbkern.targets.cpu.passes import CPU_PASSES
from pbkern.targets.simt.passes import THREAD_PASSES

RECORDS = [
    step
    for step in (
        *FUSE_PASSES,
        *PARTITION_PASSES,
        *WHOLE_PASSES,
        *KERNEL_PASSES,
        DROP_DEAD_POINTS,
        *SHARED_PASSES,
        *CPU_PASSES,
        *THREAD_PASSES,
    )
    if step.thresholds
]
SCALAR, LONG = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((200_000,), jnp.float32)


@dataclasses.dataclass(frozen=True)
class AddTwice:
    """Adds numbers to a number."""

    step: int = threshold(3, "what is added")
    factor: float = threshold(2.0, "how often")

    def __call__(self, value, context):
        return value + self.step * self.factor + context


def choice(flag, x, y):
    return jnp.where(flag > 0, x, y)


@pytest.mark.parametrize("step", RECORDS, ids=lambda step: step.name)
def test_thresholds_say_what_they_count(step):
    for field in dataclasses.fields(step.function):
        assert field.metadata["meaning"], field.name
        assert isinstance(field.default, int | float), field.name
    assert step.why
    assert parsed(str(step)) == (step.name, step.thresholds)


def test_a_pass_runs_with_other_thresholds():
    passes = (Pass("add twice", AddTwice(), "a pass for this test"),)
    assert run_passes("numbers", passes, 1, 10) == 17
    with with_settings("add twice", {"step": 5}):
        assert run_passes("numbers", passes, 1, 10) == 21
        with with_settings("add twice", {"factor": 0}):
            assert run_passes("numbers", passes, 1, 10) == 11
    assert run_passes("numbers", passes, 1, 10) == 17


def test_stages_are_shown_with_other_thresholds():
    f = pbkern.jit(choice)
    usual = f.as_text(SCALAR, LONG, LONG, stage="nests:unswitch")
    other = f.as_text(SCALAR, LONG, LONG, stage="nests:unswitch{most_copies=1}")
    assert "case" in usual
    assert "case" not in other
    assert "select_n" in other


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("nests:unswitch{most=1}", r"no threshold `most`(.|\n)*most_nodes=120(.|\n)*most_copies"),
        ("nests:unswitch{most_copies='a'}", r"`most_copies` of pass `unswitch` is a number"),
        ("nests:unswitch{most_copies", r"names no pass(.|\n)*unswitch\{most_copies=2\}"),
        ("nests:unswitch{most_copies=}", r"names no pass"),
        ("nests:store in place{most=1}", r"has no threshold `most`(.|\n)*it has none"),
        ("nests:unknown{most_copies=2}", r"no pass `unknown` ran"),
    ],
)
def test_what_is_no_threshold_is_refused(stage, message):
    with pytest.raises(OptionError, match=message) as raised:
        pbkern.jit(choice).as_text(SCALAR, LONG, LONG, stage=stage)
    assert "pbkern_repro" not in str(raised.value), "the kernel is not at fault"


def test_a_pass_is_turned_off():
    f = pbkern.jit(choice)
    before = f.as_text(SCALAR, LONG, LONG, stage="nests:version masks")
    assert f.as_text(SCALAR, LONG, LONG, stage="nests:unswitch{off}") == before
    assert f.as_text(SCALAR, LONG, LONG, stage="nests:unswitch") != before
    passes = (Pass("add one", lambda value, context: value + 1, "a pass for this test"),)
    with with_settings("add one", {"off": True}):
        assert run_passes("numbers", passes, 1, None) == 1


def test_records_are_compared_by_their_thresholds():
    assert Unswitch() == Unswitch(most_nodes=120)
    assert Unswitch() != Unswitch(most_nodes=119)
    step = Pass("unswitch", Unswitch(most_copies=3), "a pass for this test")
    assert str(step) == (
        "unswitch{fewest_points=512, fewest_row_points=512, most_nodes=120, most_copies=3}"
    )
