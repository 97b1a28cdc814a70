"""Training as it is seen: a line per epoch in a log, a bar on a terminal, and next to no cost."""

import io
import math
import re
from typing import Any

import pytest
from rich.console import Console

from banach.cli.progress import HEADER, Progress, line
from banach.train import Position
from train.parts_train import NO_FIXED_POINT, epoch


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on(file: io.StringIO, **options: Any) -> Console:
    # Whatever TERM or FORCE_COLOR say where the tests run.
    plain: dict[str, Any] = {"width": 100, "color_system": None, "markup": False, "highlight": False}
    return Console(file=file, _environ={"TERM": "xterm"}, **{**plain, **options})


def visible(text: str) -> list[str]:
    """What was drawn, one entry per drawn line, without the control sequences."""
    return [part.rstrip() for part in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\r", text)) if part]


class Clock:
    """A clock that the test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    "changes", [{}, NO_FIXED_POINT, {"loss": math.nan, "residual": math.inf, "number": 1000, "depth": 9.5}]
)
def test_columns_stand_under_their_names(changes: dict[str, Any]) -> None:
    drawn, (first, second) = line(epoch(**{"number": 3, **changes}), 1000), HEADER.split("\n")
    ends = [match.end() for match in re.finditer(r"\S+", second)]
    assert [match.end() for match in re.finditer(r"\S+", drawn)] == ends
    assert [match.end() for match in re.finditer(r"\S+", first)] == ends[1:-2]
    assert max(len(first), len(second)) <= 79
    if not changes:
        figures = ["3/1000", "0.6667", "83.33%", "79.17%", "13.5", "3.3e-06", "98.0%", "0.457", "4.50"]
        assert drawn.split() == figures


@pytest.mark.parametrize("options", [{}, {"force_terminal": True}, {"width": 20}])
def test_a_log_has_one_line_per_epoch_and_no_control_characters(options: dict[str, Any]) -> None:
    file = io.StringIO()
    epochs = [epoch(number) for number in range(1, 16)]
    with Progress(15, 10, console=on(file, **options)) as shown:
        for number, one in enumerate(epochs):
            for step in range(1, 11):
                shown.step(Position(number, step))
            shown.epoch(one)
    assert file.getvalue().split("\n") == [*HEADER.split("\n"), *(line(one, 15) for one in epochs), ""]


def test_a_terminal_has_a_bar_and_keeps_the_lines() -> None:
    file, clock = Terminal(), Clock()
    first = epoch(1)
    with Progress(3, 40, console=on(file, get_time=clock)) as shown:
        shown.step(Position(0, 1))
        clock.now += 30.0
        shown.step(Position(0, 11))
        shown.refresh()
        assert "epoch 1/3" in visible(file.getvalue())[-1]
        # 10 steps in 30 s, and 109 of the 120 are to come.
        assert visible(file.getvalue())[-1].endswith("11/40 0:00:30 elapsed, 0:05:27 left")
        shown.epoch(first)
        shown.refresh()
        assert "epoch 2/3" in visible(file.getvalue())[-1]
        assert " 0/40 " in visible(file.getvalue())[-1]
    drawn = visible(file.getvalue())
    assert drawn.count(HEADER.split("\n")[1]) == 1
    assert drawn.count(line(first, 3)) == 1
    assert "\x1b[?25h" in file.getvalue(), "the cursor is shown again"


def test_a_resumed_run_does_not_count_what_was_done_before() -> None:
    file, clock = Terminal(), Clock()
    with Progress(10, 100, console=on(file, get_time=clock)) as shown:
        shown.step(Position(5, 51))  # the checkpoint was in the middle of the epoch
        clock.now += 10.0
        shown.step(Position(5, 61))
        shown.refresh()
        # One second a step: 39 of this epoch and 400 after it are left.
        assert visible(file.getvalue())[-1].endswith("0:00:10 elapsed, 0:07:19 left")
