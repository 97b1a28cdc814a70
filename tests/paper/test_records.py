"""Records of trainings: what was heard is counted over breaks, and they are read where the weights are gone."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from banach import Implicit, NormalCG, Tolerance
from banach.paper import Options, records
from banach.paper.common import Subject
from banach.paper.jobs import carry_out
from banach.paper.records import HEARD, RECORD, Adjoints, Record, record_of, train
from banach.train.run import RunError

TINY = Subject(data="digits", model="digits", epochs=1, subset=96, fast=False)


def options_in(folder: Path) -> Options:
    return Options(quick=True, device="cpu", out=folder / "out", runs=folder / "runs")


def test_failures_of_cg_are_counted_and_kept_for_a_second_reading(tmp_path: Path) -> None:
    """No step of CG is allowed, so every equation fails: 96 images, 2 batches, 2 warnings."""
    options = options_in(tmp_path)
    hopeless = Implicit(NormalCG(), Tolerance(atol=0, rtol=1e-9, max_steps=0), report=Adjoints())
    job = TINY.job("hopeless", backward=hopeless, batch_norm=False)
    one = train(job, options).record
    assert one.adjoints_met == 0
    assert one.heard["adjoint MAX_STEPS"] == 96
    assert one.warnings_of("adjoint equation missed") == 2
    again = train(TINY.job("hopeless", backward=hopeless, batch_norm=False), options).record
    assert again.heard == one.heard
    assert json.loads((options.runs / job.name / HEARD).read_text()) == one.heard


def test_what_is_heard_is_kept_after_every_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a run that is killed has the counts of the epochs it has."""
    options, seen = options_in(tmp_path), []
    hopeless = Implicit(NormalCG(), Tolerance(atol=0, rtol=1e-9, max_steps=0), report=Adjoints())
    job = replace(TINY, epochs=2).job("slow", backward=hopeless, batch_norm=False)

    def spied(job: Any, options: Options, keep: Any, **more: Any) -> Any:
        def after(*told: Any) -> None:
            keep(*told)
            seen.append(json.loads((options.runs / job.name / HEARD).read_text())["adjoint MAX_STEPS"])

        return carry_out(job, options, after, **more)

    monkeypatch.setattr(records, "carry_out", spied)
    train(job, options)
    assert seen == [96, 192]


def test_what_was_heard_before_an_interruption_still_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_in(tmp_path)
    report = Adjoints()
    job = TINY.job("stopped", backward=Implicit(NormalCG(), report=report))

    def stopped(*_: Any, **__: Any) -> Any:
        (options.runs / job.name).mkdir(parents=True)
        (options.runs / job.name / "settings.json").write_text("{}")
        report["adjoint CONVERGED"] += 5
        raise KeyboardInterrupt

    monkeypatch.setattr(records, "carry_out", stopped)
    with pytest.raises(KeyboardInterrupt):
        train(job, options)
    assert json.loads((options.runs / job.name / HEARD).read_text()) == {"adjoint CONVERGED": 5}


def test_a_run_that_never_began_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise ValueError("no data")

    monkeypatch.setattr(records, "carry_out", refused)
    with pytest.raises(ValueError, match="no data"):
        train(TINY.job("never"), options_in(tmp_path))
    assert not (tmp_path / "runs").exists()


def test_an_epoch_that_warms_up_is_left_out_of_the_time() -> None:
    def seconds(*epochs: tuple[float, bool]) -> float:
        parts: Any = [type("Epoch", (), {"seconds": s, "warm_up": cold})() for s, cold in epochs]
        return Record(TINY.job("warm"), "", tuple(parts), [], Adjoints()).seconds

    assert seconds((9.0, True), (2.0, False), (4.0, False)) == 3
    assert seconds((9.0, True), (2.0, False), (7.0, True), (4.0, False)) == 3  # resumed at the third
    assert seconds((9.0, True)) == 9
    assert seconds((9.0, True), (7.0, True)) == 7


def test_a_record_is_read_without_weights_and_without_data(tmp_path: Path) -> None:
    options = options_in(tmp_path)
    job = replace(TINY, epochs=2).job("kept", backward=Implicit(report=Adjoints()), batch_norm=False)
    made = record_of(job, options)
    assert made.accuracy == train(job, options).outcome.clean.accuracy
    shutil.rmtree(options.runs / job.name / "checkpoints")
    read = record_of(job, replace(options, data_dir=Path("/nowhere")))
    assert (read.title, read.epochs, read.curve, read.heard) == (made.title, made.epochs, made.curve, made.heard)
    assert read.adjoints_met == 1
    assert made.heard["adjoint CONVERGED"] == 2 * 96


def test_the_record_of_another_job_is_neither_read_nor_written_over(tmp_path: Path) -> None:
    """Of the same name, with or without its weights: refused, by the name of what differs."""
    options, mode = options_in(tmp_path), Implicit(NormalCG(), Tolerance(rtol=1e-3))
    job = TINY.job("same", backward=mode)
    record_of(job, options)
    kept = (options.runs / job.name / RECORD).read_text()
    for gone in (False, True):
        with pytest.raises(RunError, match="of a job with epochs=1, got epochs=2; choose another directory"):
            record_of(replace(TINY, epochs=2).job("same", backward=mode), options)
        with pytest.raises(RunError, match=r"of a job with rtol=0\.001, got rtol=0\.01;"):
            record_of(TINY.job("same", backward=replace(mode, tolerance=Tolerance(rtol=1e-2))), options)
        if not gone:
            shutil.rmtree(options.runs / job.name / "checkpoints")
    assert (options.runs / job.name / RECORD).read_text() == kept


def test_what_was_heard_is_not_counted_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error in the second epoch, which is trained again. Without weights what is kept stays."""
    options, whole = options_in(tmp_path), 2 * 96
    job = replace(TINY, epochs=2).job("twice", backward=Implicit(report=Adjoints()), batch_norm=False)
    tell, told = Adjoints.__call__, []

    def breaks(self: Adjoints, *args: Any) -> None:
        tell(self, *args)
        told.append(1)
        if len(told) == 3:  # the first batch of the second epoch
            raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(Adjoints, "__call__", breaks)
        with pytest.raises(RuntimeError, match="broken"):
            record_of(job, options)
    assert record_of(job, options).heard["adjoint CONVERGED"] == whole
    (options.runs / job.name / RECORD).unlink()
    shutil.rmtree(options.runs / job.name / "checkpoints")
    kept = {path.name: path.read_bytes() for path in (options.runs / job.name).iterdir()}
    with pytest.raises(RunError, match="twice-seed0 is of a training without its weights; choose another folder"):
        record_of(job, options)
    assert kept == {path.name: path.read_bytes() for path in (options.runs / job.name).iterdir()}
    shutil.rmtree(options.runs / job.name)
    assert record_of(job, options).heard["adjoint CONVERGED"] == whole


DAMAGES: dict[str, Any] = {
    "cut off": lambda text: text[: len(text) // 2],
    "empty": lambda text: "{}",
    "a list": lambda text: "[1]",
    "nothing of its epochs": lambda text: json.dumps(json.loads(text) | {"marks": {"epochs": []}}),
    "an epoch too few": lambda text: _changed(text, lambda marks: marks["epochs"].pop()),
    "a point too few": lambda text: _changed(text, lambda marks: marks["curve"].pop()),
    "an epoch of another kind": lambda text: _changed(text, lambda marks: marks["epochs"][0].update(more=1)),
}


def _changed(text: str, change: Any) -> str:
    content = json.loads(text)
    change(content["marks"])
    return json.dumps(content)


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_record_is_named(kind: str, tmp_path: Path) -> None:
    options, job = options_in(tmp_path), TINY.job("damaged")
    record_of(job, options)
    path = options.runs / job.name / RECORD
    path.write_text(DAMAGES[kind](path.read_text()))
    with pytest.raises(RunError, match=r"record.json cannot be read \(.*\); delete it, and run the command again"):
        record_of(job, options)


@pytest.mark.parametrize(
    ("name", "text"), [("heard.json", "[1]"), ("heard.json", "{"), ("test-curve.json", "null")]
)
def test_damaged_files_beside_a_run_are_named(name: str, text: str, tmp_path: Path) -> None:
    options, job = options_in(tmp_path), TINY.job("damaged")
    train(job, options)
    (options.runs / job.name / name).write_text(text)
    with pytest.raises(RunError, match=f"{name} cannot be read"):
        train(job, options)


def test_a_training_whose_curve_has_gaps_is_refused(tmp_path: Path) -> None:
    """As after `banach train --resume`, which watches no test images."""
    options, job = options_in(tmp_path), TINY.job("gaps")
    train(job, options)
    (options.runs / job.name / "test-curve.json").unlink()
    said = r"test-curve\.json lacks epochs of this training; delete .*gaps-seed0 to train it anew"
    with pytest.raises(RunError, match=said):
        record_of(job, options)
    assert not (options.runs / job.name / RECORD).exists()


def test_a_signal_after_the_last_step_stops_a_study_too(tmp_path: Path) -> None:
    options, job = options_in(tmp_path), TINY.job("late")
    with pytest.raises(KeyboardInterrupt):
        carry_out(job, options, lambda epoch, net: os.kill(os.getpid(), signal.SIGINT))
    assert len(record_of(job, options).epochs) == 1  # what was trained is there
