"""Parts of a study in several processes at once: what they leave, their errors, their interruption."""

import multiprocessing as mp
import os
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from banach.paper import Options, marks, table1
from banach.paper.marks import MARKS, take
from banach.paper.records import train
from banach.paper.together import carry_out_together
from banach.provenance import plain
from banach.train import RunError

TINY = replace(table1.DIGITS, epochs=1, seeds=2, subset=64, fast=False)


def options_in(folder: Path, at_once: int = 2) -> Options:
    return Options(quick=True, device="cpu", out=folder / "out", runs=folder / "runs", at_once=at_once)


def leaves_its_span(name: str, options: Options) -> None:
    """Begins, meets the other one if there is one at the same time, ends."""
    options.runs.mkdir(exist_ok=True)
    (options.runs / f"{name}.begun").touch()
    deadline = time.monotonic() + 60
    while len(list(options.runs.glob("*.begun"))) < 2:
        if time.monotonic() > deadline:
            raise TimeoutError(name)
        time.sleep(0.01)
    (options.runs / f"{name}.done").write_text(str(os.getpid()))


def fails(options: Options) -> None:
    raise RunError("this one has no data")


def fails_in_its_own_way(options: Options) -> None:
    class Own(Exception):
        pass

    raise Own("cannot be sent")


def dies(options: Options) -> None:
    os._exit(7)


def waits_for_a_signal(name: str, options: Options) -> None:
    options.runs.mkdir(exist_ok=True)
    (options.runs / f"{name}.begun").write_text(str(os.getpid()))
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        (options.runs / f"{name}.interrupted").touch()
        raise


def test_two_are_at_work_at_once_and_neither_here(tmp_path: Path) -> None:
    heard: list[int] = []
    carry_out_together([partial(leaves_its_span, name) for name in "ab"], options_in(tmp_path), heard.append)
    pids = {path.read_text() for path in (tmp_path / "runs").glob("*.done")}
    assert len(pids) == 2
    assert str(os.getpid()) not in pids
    assert heard[-1] == 2


@pytest.mark.parametrize(
    ("part", "kind", "words"),
    [
        (fails, RunError, "no data"),
        (fails_in_its_own_way, RuntimeError, "Own: cannot be sent"),
        (dies, RuntimeError, "exit code 7"),
    ],
)
def test_an_error_comes_back_and_no_more_begin(part: Any, kind: Any, words: str, tmp_path: Path) -> None:
    later = [partial(waits_for_a_signal, "later")]
    with pytest.raises(kind, match=words):
        carry_out_together([part, *later], options_in(tmp_path, at_once=1))
    assert not (tmp_path / "runs").exists()


def test_an_interrupt_reaches_those_at_work_and_no_more_begin(tmp_path: Path) -> None:
    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("runs/*.begun"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        carry_out_together([partial(waits_for_a_signal, name) for name in "abc"], options_in(tmp_path))
    assert sorted(path.stem for path in (tmp_path / "runs").glob("*.interrupted")) == ["a", "b"]
    assert not (tmp_path / "runs" / "c.begun").exists()


def begin(options: Options) -> None:
    carry_out_together([partial(waits_for_a_signal, "orphan")], options)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes by /proc")
def test_trainings_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = mp.get_context("spawn").Process(target=begin, args=(options_in(tmp_path),))
    parent.start()
    begun = tmp_path / "runs" / "orphan.begun"
    assert soon(lambda: begun.exists() and begun.read_text())
    child = int(begun.read_text())
    parent.kill()
    parent.join()
    assert soon(lambda: is_over(child), seconds=20)  # of itself it would sleep for 60


def is_over(pid: int) -> bool:
    """Gone, or waiting for someone to take note of it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def soon(happens: Any, seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not happens() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(happens())


def test_what_a_training_shared_the_device_with_is_kept_over_a_break(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = TINY.job("shared")

    def stopped(job: Any, options: Options, **more: Any) -> Any:
        train(job, options, **more)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(marks, "train", stopped)
        with pytest.raises(KeyboardInterrupt):
            take(job, options_in(tmp_path, at_once=5))
    assert take(job, options_in(tmp_path, at_once=1)).at_once == 5


def test_table1_is_the_same_with_its_trainings_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = table1.Entry(subject=TINY, method="JFB", tag="jfb")
    monkeypatch.setattr(table1, "QUICK", (entry,))
    together = options_in(tmp_path / "together")
    carry_out_together(table1.parts(together), together)
    kept = sorted((tmp_path / "together" / "runs").glob(f"*/{MARKS}"))
    assert len(kept) == 2
    written = [path.stat().st_mtime_ns for path in kept]
    one, other = table1.run(together), table1.run(options_in(tmp_path / "apart", at_once=1))
    assert [path.stat().st_mtime_ns for path in kept] == written  # read, not made again
    for found in (one, other):
        found.rows[0].pop("seconds per epoch")
    assert (one.rows[0].pop("at once"), other.rows[0].pop("at once")) == (2, 1)
    assert plain(one.rows) == plain(other.rows)
    assert any("2 trainings ran at once" in note for note in one.notes)
    assert not any("at once" in note for note in other.notes)


def test_marks_of_another_job_are_not_read(tmp_path: Path) -> None:
    options = options_in(tmp_path, at_once=1)
    job = TINY.job("marked")
    first = take(job, options)
    assert take(job, options) == first
    with pytest.raises(RunError, match="lr"):
        take(replace(job, settings=replace(job.settings, lr=0.5)), options)
