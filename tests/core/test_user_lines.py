"""Places in a user's code: their texts, and frames that tracebacks show."""

import traceback

import pytest

from pbkern._user_lines import UserLine, line_of_frame, raise_at


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (UserLine("/a b/c.py", 7, 4, "f.<locals>.g"), "/a b/c.py:7:4 (f.<locals>.g)"),
        (UserLine("c.py", 7, 0, "<module>"), "c.py:7 (<module>)"),
    ],
)
def test_text(line, text):
    assert str(line) == text


def test_place_of_an_instruction():
    try:
        raise ValueError
    except ValueError as e:
        entry = e.__traceback__
        line = line_of_frame(entry.tb_frame.f_code, entry.tb_lineno, entry.tb_lasti)
    assert line == UserLine(__file__, entry.tb_lineno, 8, "test_place_of_an_instruction")


@pytest.mark.parametrize("column", [0, 3])
@pytest.mark.parametrize("function", ["f", "f.<locals>.<lambda>"])
def test_errors_are_raised_at_a_line(column, function):
    line = UserLine(__file__, 3, column, function)
    with pytest.raises(ValueError, match="why") as raised:
        raise_at(ValueError("why"), line)
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert (__file__, 3, "import traceback") in [(f.filename, f.lineno, f.line) for f in frames]


def test_errors_are_raised_without_a_line():
    with pytest.raises(ValueError, match="why"):
        raise_at(ValueError("why"), None)
